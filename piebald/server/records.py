"""What the controller writes down: rows of the run folder's tables (`report.schema`), and plain forms of its state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from piebald.contracts import CENTRE, Arrival, Assignment, Update
from piebald.server.cluster_models import Counted

Row = dict[str, Any]


def arrival_row(
    arrival: Arrival, version: int, status: str, reason: str | None = None, counted: Counted | None = None
) -> Row:
    """One assignment that has ended; `version` counts the commit that it belongs to."""
    assignment, update = arrival.assignment, arrival.update
    return {
        "id": assignment.id,
        "version": version,
        "client": assignment.client,
        "kind": "train" if assignment.query is None else assignment.query.kind,
        "sent_version": assignment.version,
        "staleness": version - 1 - assignment.version,
        "sent": arrival.sent,
        "time": arrival.time,
        "examples": update.examples if update else 0,
        "steps": update.steps if update else 0,
        "loss": update.metrics.get("loss") if update else None,
        "norm": update.norm if update else None,
        "weight": counted.share if counted else 0.0,
        "raw_weight": counted.weight if counted else None,
        "grp": counted.group if counted else None,
        "bytes_down": arrival.bytes_down,
        "bytes_up": arrival.bytes_up,
        "status": status,
        "reason": reason,
    }


def step_row(rows: Sequence[Mapping[str, Any]], version: int, time: float, norm: float) -> Row:
    """One commit, from the rows of its arrivals; without its wall time, which the loop tells when all is done."""
    arrived = failed = down = up = counted = 0
    total, groups = 0.0, set()
    for row in rows:
        down += row["bytes_down"]
        up += row["bytes_up"]
        if row["status"] != "ok":
            failed += 1
        elif row["kind"] == "train":
            arrived += 1
            groups.add(row["grp"])
            if row["loss"] is not None and row["examples"]:
                counted += row["examples"]
                total += row["examples"] * row["loss"]
    return {
        "version": version,
        "time": time,
        "arrived": arrived,
        "failed": failed,
        "groups": len(groups),
        "bytes_down": down,
        "bytes_up": up,
        "loss": total / counted if counted else None,
        "norm": norm,
    }


def score_rows(arrival: Arrival, version: int) -> list[Row]:
    """One row for each metric of an answered evaluation."""
    client, update = arrival.assignment.client, arrival.update
    split = "common" if client == CENTRE else getattr(arrival.assignment.query, "split", "test")
    if update is None or not update.examples:
        return []
    rows = []
    for name, value in update.metrics.items():
        model, _, metric = name.partition("/")
        rows.append(
            {
                "version": version,
                "client": None if client == CENTRE else client,
                "model": model,
                "split": split,
                "metric": metric,
                "value": value,
                "examples": update.examples,
            }
        )
    return rows


def mean_scores(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Means over clients by "model/metric"."""
    found: dict[str, list[float]] = {}
    for row in rows:
        if row["client"] is not None:
            found.setdefault(f"{row['model']}/{row['metric']}", []).append(row["value"])
    return {name: sum(values) / len(values) for name, values in found.items()}


# ------------------------------------------------------------------------------------------------- plain forms of state


def plain_assignments(assignments: Sequence[Assignment]) -> tuple[list[Row], dict[str, Tensor]]:
    """Assignments as JSON values and the vectors they carry, each once."""
    places: dict[int, str] = {}
    rows: list[Row] = []
    tensors: dict[str, Tensor] = {}
    for assignment in assignments:
        for part in assignment.parts.values():
            if id(part) not in places:
                places[id(part)] = f"sent/{len(places)}"
                tensors[places[id(part)]] = part
        fields = {name: getattr(assignment, name) for name in ("id", "client", "version", "turn", "committed")}
        rows.append({**fields, "parts": {name: places[id(part)] for name, part in assignment.parts.items()}})
    return rows, tensors


def whole_assignment(row: Row, tensors: Mapping[str, Tensor]) -> Assignment:
    """An assignment again."""
    parts = {name: tensors[place] for name, place in row["parts"].items()}
    return Assignment(row["id"], row["client"], row["version"], parts, turn=row["turn"], committed=row["committed"])


def plain_arrivals(arrivals: Sequence[Arrival]) -> tuple[list[Row], dict[str, Tensor]]:
    """Arrivals that wait to be taken as JSON values, and their vectors."""
    names = ("examples", "steps", "metrics", "norm", "nbytes")
    rows: list[Row] = []
    tensors: dict[str, Tensor] = {}
    for arrival in arrivals:
        update, own = arrival.update, arrival.assignment.id
        tensors |= {f"queued/{own}/{n}": part for n, part in (update.parts if update else {}).items()}
        row = {name: getattr(arrival, name) for name in ("sent", "time", "bytes_down", "bytes_up", "failure")}
        answer = None if update is None else {name: getattr(update, name) for name in names}
        rows.append({"id": own, "update": answer, "arrival": row})
    return rows, tensors


def whole_arrival(row: Row, tensors: Mapping[str, Tensor], assignments: Mapping[int, Assignment]) -> Arrival:
    """An arrival again."""
    prefix = f"queued/{row['id']}/"
    parts = {name.removeprefix(prefix): part for name, part in tensors.items() if name.startswith(prefix)}
    update = None if row["update"] is None else Update(parts, **row["update"])
    return Arrival(assignments[row["id"]], update, **row["arrival"])
