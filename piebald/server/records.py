"""Records of the server: rows of the run folder's tables, its state as plain values, and when they are written."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from torch import Tensor

from piebald.contracts import SERVER_ID, WEIGHT, Checkpoint, Query, Result, RunRecorder, Split, Task, Update
from piebald.core.tensor_store import under
from piebald.methods.queries.scores import Evaluate, Validate
from piebald.server.cluster_state import Counted

TableRow = dict[str, Any]
SAVING = 0.02  # the largest share of a run's time spent on saving its state, by default
_RESULT = ("sent", "time", "bytes_down", "bytes_up", "failure", "refused")  # fields of a result that a checkpoint keeps


def result_row(
    result: Result, version: int, status: str, reason: str | None = None, counted: Counted | None = None
) -> TableRow:
    """The row of a task that has ended; `version` is the server step that it belongs to."""
    task, update = result.task, result.update
    return {
        "id": task.id,
        "version": version,
        "client": task.client,
        "kind": task.kind,
        "sent_version": task.version,
        "staleness": counted.staleness if counted else version - 1 - task.version,
        "sent": result.sent,
        "time": result.time,
        "examples": update.examples if update else 0,
        "steps": update.steps if update else 0,
        "loss": _finite(update.metrics.get("loss")) if update else None,
        "norm": update.norm if update else None,
        "weight": counted.share if counted else 0.0,
        "raw_weight": counted.weight if counted else None,
        "cluster": counted.cluster if counted else None,
        "bytes_down": result.bytes_down,
        "bytes_up": result.bytes_up,
        "status": status,
        "reason": reason,
    }


def _finite(value: float | None) -> float | None:
    """Return a number, None for one that is not finite: training can fail, and no report can show it."""
    return value if value is not None and math.isfinite(value) else None


def refusal(result: Result, reason: str) -> TableRow:
    """Return what is noted of a result that was refused."""
    return {"client": result.task.client, "task": result.task.id, "kind": result.task.kind, "reason": reason}


def refusal_notes(refusals: Sequence[TableRow]) -> list[TableRow]:
    """The note of a step's refused results, none where all was well."""
    return [{"axis": "check", "cluster": 0, "name": "refused", "value": list(refusals)}] if refusals else []


def step_row(rows: Sequence[Mapping[str, Any]], version: int, time: float, norm: float) -> TableRow:
    """The row of a server step, from the rows of its results; the loop adds the wall time at the end."""
    arrived = failed = down = up = counted = 0
    total, clusters = 0.0, set()
    for row in rows:
        down += row["bytes_down"]
        up += row["bytes_up"]
        if row["status"] != "ok":
            failed += 1
        elif row["kind"] == "train":
            arrived += 1
            clusters.add(row["cluster"])
            if row["loss"] is not None and row["examples"]:
                counted += row["examples"]
                total += row["examples"] * row["loss"]
    return {
        "version": version,
        "time": time,
        "arrived": arrived,
        "failed": failed,
        "clusters": len(clusters),
        "bytes_down": down,
        "bytes_up": up,
        "loss": total / counted if counted else None,
        "norm": norm,
    }


def split_of(query: Query | None) -> Split:
    """Return which of a client's rows an evaluation is about."""
    return query.split if isinstance(query, Evaluate | Validate) else "test"


def score_rows(result: Result, version: int) -> list[TableRow]:
    """The rows of an evaluation, one for each metric; its examples are how much the client counts in a mean."""
    client, update = result.task.client, result.update
    split = "common" if client == SERVER_ID else split_of(result.task.query)
    if update is None or not update.counts:
        return []
    rows = []
    for name, value in update.metrics.items():
        if name == WEIGHT:
            continue
        model, _, metric = name.partition("/")
        rows.append(
            {
                "version": version,
                "client": None if client == SERVER_ID else client,
                "model": model,
                "split": split,
                "metric": metric,
                "value": value,
                "examples": update.counts,
            }
        )
    return rows


def failure_row(result: Result, reason: str, version: int) -> TableRow:
    """The row of the table `failure` of a query that a client did not answer."""
    return {"version": version, "client": result.task.client, "kind": result.task.kind, "reason": reason}


def uncounted_rows(results: Sequence[Result], version: int) -> list[TableRow]:
    """The rows of the table `failure` of clients none of whose rows counts, such as lives without an event."""
    silent = [result for result in results if result.update and result.update.metrics and not result.update.counts]
    return [
        failure_row(result, f"none of its {split_of(result.task.query)} rows counts in the loss", version)
        for result in silent
    ]


def undefined_rows(scores: Sequence[TableRow], metrics: Collection[str]) -> list[TableRow]:
    """The rows of the table `failure` of metrics that have no value for a client which has other scores."""
    found: dict[tuple[int, int, str], set[str]] = {}
    for row in scores:
        if row["client"] is not None:
            found.setdefault((row["version"], row["client"], row["split"]), set()).add(row["metric"])
    lacking = [(key, metric) for key, held in found.items() for metric in metrics if metric not in held]
    return [
        {"version": v, "client": client, "kind": "evaluate", "reason": f"{metric} has no value on its {split} rows"}
        for (v, client, split), metric in lacking
    ]


def mean_scores(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Means over clients by "model/metric"."""
    values_by_name: dict[str, list[float]] = {}
    for row in rows:
        if row["client"] is not None:
            values_by_name.setdefault(f"{row['model']}/{row['metric']}", []).append(row["value"])
    return {name: sum(values) / len(values) for name, values in values_by_name.items()}


# ------------------------------------------------------------------------------------------------ state as plain values


def plain_tasks(tasks: Sequence[Task]) -> tuple[list[TableRow], dict[str, Tensor]]:
    """Tasks as JSON values, and the vectors that they carry, each once."""
    places: dict[int, str] = {}
    rows: list[TableRow] = []
    tensors: dict[str, Tensor] = {}
    for task in tasks:
        for vector in task.vectors.values():
            # all tasks of a step carry the same model, which is stored once
            if id(vector) not in places:
                places[id(vector)] = f"sent/{len(places)}"
                tensors[places[id(vector)]] = vector
        fields = {name: getattr(task, name) for name in ("id", "client", "version", "attempt", "committed")}
        rows.append({**fields, "vectors": {name: places[id(vector)] for name, vector in task.vectors.items()}})
    return rows, tensors


def whole_task(row: TableRow, tensors: Mapping[str, Tensor]) -> Task:
    """Restore a task that `plain_tasks` wrote."""
    vectors = {name: tensors[index] for name, index in row["vectors"].items()}
    return Task(row["id"], row["client"], row["version"], vectors, attempt=row["attempt"], committed=row["committed"])


def plain_results(results: Sequence[Result]) -> tuple[list[TableRow], dict[str, Tensor]]:
    """Results that wait to be used, as JSON values, and their vectors."""
    names = ("examples", "steps", "metrics", "norm", "nbytes")  # of the update
    rows: list[TableRow] = []
    tensors: dict[str, Tensor] = {}
    for result in results:
        update, number = result.update, result.task.id
        tensors |= {f"queued/{number}/{n}": vector for n, vector in (update.vectors if update else {}).items()}
        row = {name: getattr(result, name) for name in _RESULT}
        answer = None if update is None else {name: getattr(update, name) for name in names}
        rows.append({"id": number, "update": answer, "result": row})
    return rows, tensors


def whole_result(row: TableRow, tensors: Mapping[str, Tensor], tasks: Mapping[int, Task]) -> Result:
    """Restore a result that `plain_results` wrote."""
    vectors = under(tensors, f"queued/{row['id']}/")
    update = None if row["update"] is None else Update(vectors, **row["update"])
    return Result(tasks[row["id"]], update, **row["result"])


class StepWriter:
    """Writes one step at a time.

    Args:
        recorder: where steps are kept.
        every: server steps between checkpoints; None saves as often as takes no more than `SAVING` of the run's time.
    """

    def __init__(self, recorder: RunRecorder, every: int | None) -> None:
        self._recorder, self._every = recorder, every
        self._saving = 0.0  # seconds that saving has taken
        self._pending: tuple[TableRow, list[TableRow], list[TableRow]] | None = None

    def due(self, version: int, elapsed: float) -> bool:
        """Return whether a checkpoint belongs to the step to `version`, after `elapsed` seconds of the run."""
        return self._saving <= SAVING * elapsed if self._every is None else version % self._every == 0

    def write(
        self, step: TableRow, rows: list[TableRow], notes: list[TableRow], state: Callable[[], Checkpoint] | None
    ) -> None:
        """Write a step with its results and notes; with the checkpoint that `state` makes, unless none is due.

        No checkpoint is made where the recorder keeps none.
        """
        began = time.perf_counter()
        checkpoint = state() if state is not None and self._recorder.lasts else None
        self._recorder.commit(step, rows, checkpoint, notes)
        if checkpoint is not None:
            self._saving += time.perf_counter() - began
        self._pending = (step, rows, notes) if checkpoint is None else None

    def finish(self, state: Callable[[], Checkpoint]) -> None:
        """Write the last step again with a checkpoint, if it has none: a score may have ended the run after it."""
        if self._pending is not None and self._recorder.lasts:
            step, rows, notes = self._pending
            self._recorder.commit(step, rows, state(), notes)
