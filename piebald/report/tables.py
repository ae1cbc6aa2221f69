"""The history of one run: its tables, its learning curve and its final figures, read from the run folder alone.

A client is judged by the model that it has chosen where it has (`keep = "best_for_each"`), else by its personal model
where it has one, else by the global model, on its test rows (validation rows where there are no test rows).  The mean
over clients weighs all clients equally, however many rows they have.
"""

from __future__ import annotations

import math
import zlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from piebald.contracts import MOST_REMEMBERED, SERVER_ID
from piebald.core.arguments import PathLike, checked, checked_class
from piebald.core.errors import RunFolderError, SettingError, unknown
from piebald.core.metrics import METRICS as METRICS_AT_THRESHOLDS
from piebald.core.metrics import SHARES
from piebald.core.objective import METRICS
from piebald.core.result_table import ResultTable, Tabular
from piebald.report.chart import Over, Point, plot
from piebald.report.class_rows import ClassRow, Counts, class_rows, matrices
from piebald.report.page import wording
from piebald.report.paired import RowMoments
from piebald.storage.run_folder import recorded_choices
from piebald.storage.schema import COLUMNS, DATABASE, unpacked_values
from piebald.storage.store import RunStore

if TYPE_CHECKING:
    import pandas

_NO_LIMIT = 2**62  # server steps

_TABLES = {
    "rounds": "step", "clients": "client", "scores": "score", "results": "result", "measures": "measure",
    "confusion": "confusion", "row_scores": "row_score",
}  # fmt: skip

# one value for each client and version: that of the chosen model, or of the personal one, where there is one
_JUDGED = """
    SELECT version, client, coalesce(max(CASE model WHEN 'chosen' THEN value END),
                                     max(CASE model WHEN 'personal' THEN value END),
                                     max(CASE model WHEN 'global' THEN value END)) AS value
    FROM score WHERE metric = ? AND split = ? AND client IS NOT NULL AND value IS NOT NULL GROUP BY version, client
"""


class Score(NamedTuple):
    """A metric's name and its mean over clients, None where no client was evaluated."""

    name: str
    value: float | None

    def __str__(self) -> str:
        """The name and the number, in words."""
        return f"{self.name} {'not evaluated' if self.value is None else f'{self.value:.4g}'}"


@checked_class
class History(Tabular):
    """One run, for reading.  Each table is read once, when it is first used.

    Args:
        source: a run folder, or an open store, which stays open.

    Attributes:
        name: the run folder's name, or "run".
        meta: values that describe the run, see `RunStore.create`.

    Examples:
        A `Run` is a `History`; one of a folder is opened with `History("runs/fedavg")`.

        >>> import piebald
        >>> clients = piebald.partition.Iid(clients=3, test=0.2, limit=60).split(piebald.data.digits())
        >>> model = piebald.models.build_model("mlp", (1, 8, 8), 10, hidden=(4,))
        >>> run = piebald.run("fedavg", clients, model, rounds=2)
        >>> [(point["version"], point["bytes"]) for point in run.curve]
        [(0, 0), (1, 7440), (2, 14880)]
        >>> run.frame("clients")[["name", "train", "test"]].values.tolist()
        [['0', 16, 4], ['1', 16, 4], ['2', 16, 4]]
        >>> run.final["rounds"], len(run.per_client), run.split
        (2, 3, 'test')
    """

    def __init__(self, source: RunStore | PathLike) -> None:
        self._store = source if isinstance(source, RunStore) else RunStore.open_read_only(source)
        self._owned = self._store is not source
        self.path = self._store.path
        self.name = self.path.resolve().name if self.path else "run"
        self.meta = self._store.meta

    def close(self) -> None:
        """Close the run folder, if this history opened it.  Tables that were not read yet cannot be read afterwards."""
        if self._owned:
            self._store.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---------------------------------------------------------------------------------------------------- the tables

    @cached_property
    def rounds(self) -> list[dict[str, Any]]:
        """One row for each server step."""
        return self._store.rows("step")

    @cached_property
    def clients(self) -> list[dict[str, Any]]:
        """One row for each client: its name, rows and device."""
        return self._store.rows("client")

    @cached_property
    def scores(self) -> list[dict[str, Any]]:
        """One row for each metric of a model on a client's rows."""
        return self._store.rows("score")

    @cached_property
    def notes(self) -> list[dict[str, Any]]:
        """Values that components of the server recorded with `contracts.ServerContext.note`, by step, axis and name."""
        return self._store.rows("note")

    @property
    def spent(self) -> list[dict[str, Any]]:
        """What the run has spent of privacy budgets after each round: rows of version, unit, epsilon and delta.

        Of all runs that it goes on from together; an epsilon of None promises nothing.  Of later rounds than the
        hundredth not each has rows.  Empty without noise.
        """
        spent = [row for row in self.notes if (row["axis"], row["name"]) == ("privacy", "spent")]
        return [{"version": row["version"], **budget} for row in spent for budget in row["value"]]

    @cached_property
    def results(self) -> list[dict[str, Any]]:
        """One row for each task that ended."""
        return self._store.rows("result")

    @cached_property
    def confusion(self) -> list[dict[str, Any]]:
        """One row for each client, class and class that its rows are taken for, see `class_errors`."""
        return self._store.rows("confusion")

    @cached_property
    def row_scores(self) -> list[dict[str, Any]]:
        """One row for each client and answer that needs no model ("naive", "naive_of_all") by each metric, for the
        single rows that its own model scored ("rows"), and for its scores at thresholds ("at_threshold", "at_half");
        `row_values` is read by `storage.schema.unpacked_values`.
        """
        return self._store.rows("row_score")

    @cached_property
    def measures(self) -> list[dict[str, Any]]:
        """Heterogeneity before training: one row for each measure of a client, or of the federation (client None).

        `meta["units"]` has their units.  Empty where nothing was measured.
        """
        return self._store.rows("measure")

    @checked
    def frame(self, name: str) -> pandas.DataFrame:
        """A table as a pandas data frame: "rounds", "clients", "scores", "results", "measures", "confusion" or
        "row_scores".
        """
        if name not in _TABLES:
            raise unknown("table of a history called", name, _TABLES)
        import pandas

        return pandas.DataFrame(getattr(self, name), columns=list(COLUMNS[_TABLES[name]]))

    # ------------------------------------------------------------------------------------------- description of the run

    @property
    def metric(self) -> str:
        """The main metric, e.g. "accuracy"."""
        return str(self.meta.get("metric", "accuracy"))

    @property
    def higher_is_better(self) -> bool:
        """True if a larger value of the metric is better."""
        return bool(self.meta.get("higher_is_better", True))

    @property
    def recipe(self) -> str:
        """The name of the recipe."""
        recipe = self.meta.get("recipe")
        return str(recipe.get("name", "custom")) if isinstance(recipe, dict) else str(recipe or "custom")

    @property
    def components(self) -> Mapping[str, Any]:
        """The settings of the recipe's components by axis; empty where the run folder has none."""
        recipe = self.meta.get("recipe")
        table = recipe.get("table") if isinstance(recipe, dict) else None
        return table if isinstance(table, dict) else {}

    @property
    def label(self) -> str:
        """The run's name in tables; runs with the same label differ only in their seeds."""
        return str(self.meta.get("label") or self.recipe)

    @property
    def seed(self) -> int | None:
        """The seed of the run."""
        seed = self.meta.get("seed")
        return int(seed) if seed is not None else None

    def __repr__(self) -> str:
        """Return a description of the run in one line."""
        final = self.final
        score = "not evaluated" if final["mean"] is None else f"{self.metric} {final['mean']:.4g}"
        place = "in memory" if self.path is None else f"in {self.path}"
        kind, rounds = type(self).__name__, f"{final['rounds']} round{'' if final['rounds'] == 1 else 's'}"
        return f"<{kind} {self.label!r}: {rounds}, seed {self.seed}, {score}, {final['status']}, {place}>"

    @checked
    def plot(self, metric: str | None = None, *, over: Over = "rounds", ax: Any = None) -> Any:
        """Draw the run's curve, see `Comparison.plot`."""
        return plot([self], metric, over, ax)

    def facts(self) -> dict[str, Any]:
        """Return the figures of a run; the metric has its own name, e.g. "accuracy"."""
        final = self.final
        facts = {name: final[name] for name in ("recipe", "label", "rounds", "seed", "status")}
        facts[self.metric] = final["mean"]
        spread = ("sd", "worst_decile", "q10", "median", "q90")
        names = (*spread, "common", "best", "unseen", "chosen", "bytes_up", "bytes_down", "seconds", "wall")
        if final["untrained"]:  # both numbers: `accuracy` counts every client
            facts |= {"untrained": final["untrained"], "trained_mean": self.figures(untrained=False)["mean"]}
            facts["why_untrained"] = self.reasons(self.untrained, "train")
        if self.held_out:  # the metric is of these clients alone
            facts["held_out"] = self.held_out
        if self.unscored:
            facts["unscored"] = self.unscored
            facts["why_unscored"] = self.reasons(self.unscored, "evaluate")
        failed = {row["name"]: row for row in self.failures if row["kind"] == "train"}
        failed = {name: row for name, row in failed.items() if name not in facts.get("why_untrained", {})}
        if failed:
            facts["failed"] = {
                name: f"{row['reason']} ({wording.rounds(row['rounds'])})" for name, row in failed.items()
            }
        if self.absences:
            facts["absent"] = self.absences
        if budgets := self.meta.get("privacy"):
            facts["epsilon"] = {budget["unit"]: budget["epsilon_pld"] for budget in budgets}
        if lineage := self.meta.get("lineage"):
            facts["from"] = lineage["folder"]
        return facts | {name: final[name] for name in names} | {"run": str(self.path)}

    def table(self) -> ResultTable:
        """Return the facts that there are, as `piebald run` prints them."""
        cells = {name: cell for name, cell in self.facts().items() if cell is not None or name == self.metric}
        if isinstance(counts := cells.get("chosen"), dict):
            cells["chosen"] = ", ".join(f"{count} {name}" for name, count in counts.items())
        if "absent" in cells:
            cells["absent"] = "; ".join(self.absence_sentences)
        for name in {"unscored", "held_out"} & cells.keys():
            cells[name] = wording.names(cells[name])
        for name in ("why_untrained", "why_unscored", "failed"):
            if name in cells:
                reasons = {client: reason for client, reason in cells[name].items() if reason}
                cells[name] = _listed(reasons) if reasons else None
        return ResultTable.of_facts(cells)

    # -------------------------------------------------------------------------------------------------------- results

    @cached_property
    def split(self) -> str:
        """The rows that models are judged by: those that the run states, or else "test", "validation" or "train"."""
        splits = {
            row["split"] for row in self._store.query("SELECT DISTINCT split FROM score WHERE client IS NOT NULL")
        }
        *_, stated = self.meta.get("evaluate") or ("test",)
        return next((split for split in (stated, "test", "validation", "train") if split in splits), "test")

    @cached_property
    def curve(self) -> list[Point]:
        """The mean over clients at each evaluation, and the cost up to then."""
        return self._curve_of(self.metric)

    @cached_property
    def metrics(self) -> list[str]:
        """The names of all metrics by which clients were evaluated."""
        rows = self._store.query("SELECT DISTINCT metric FROM score WHERE client IS NOT NULL ORDER BY metric")
        return [row["metric"] for row in rows]

    @checked
    def curve_of(self, metric: str) -> list[Point]:
        """The mean over clients by any of `metrics` at each evaluation, and the cost up to then.

        Raises:
            SettingError: no client was evaluated by this metric.
        """
        if metric == self.metric:
            return self.curve
        if metric not in self.metrics:
            raise unknown("metric of this run called", metric, self.metrics)
        return self._curve_of(metric)

    def _curve_of(self, metric: str) -> list[Point]:
        # version 0 is the evaluation before the first step, which costs nothing
        costs: dict[int, tuple[int, float, float]] = {0: (0, 0.0, 0.0)}
        # where rows are gathered they are sent once, before the first step
        total = self.gathered_bytes or 0
        for row in self.rounds:
            total += 0 if self.gathered_bytes else (row["bytes_down"] or 0) + (row["bytes_up"] or 0)
            costs[row["version"]] = (total, row["time"] or 0.0, row["wall"] or 0.0)
        counted = f"WHERE client IN ({', '.join(map(str, sorted(self.judged)))})" if self.held_out else ""
        means = f"SELECT version, avg(value) AS mean FROM ({_JUDGED}) {counted} GROUP BY version ORDER BY version"
        return [
            Point(version=row["version"], bytes=spent, seconds=seconds, wall=wall, mean=row["mean"])
            for row in self._store.query(means, metric, self.split)
            # an evaluation whose server step was lost in a crash has no cost to be drawn over
            if row["version"] in costs
            for spent, seconds, wall in [costs[row["version"]]]
        ]

    @property
    def best(self) -> int | None:
        """The version with the lowest validation loss, None where the run keeps the last version."""
        best = self.meta.get("best")
        return int(best) if best is not None else None

    @cached_property
    def per_client(self) -> dict[int, float]:
        """The metric of each client at its last evaluation (up to the best version where that one is kept)."""
        return self.values_at(None)

    @checked
    def values_at(self, version: int | None) -> dict[int, float]:
        """The metric of each client that was evaluated at a version, None for the last evaluation of each."""
        first, last = (0, self._final_version) if version is None else (version, version)
        # SQLite returns the other columns of the row that has the maximum
        rows = self._store.query(
            f"SELECT client, value, max(version) FROM ({_JUDGED}) WHERE version BETWEEN ? AND ? GROUP BY client"
            " ORDER BY client",
            *(self.metric, self.split, first, last),
        )
        return {row["client"]: row["value"] for row in rows}

    @cached_property
    def common(self) -> float | None:
        """The metric of the global model on the common test set at the last evaluation, None where there is none."""
        rows = self._store.query(
            "SELECT value FROM score WHERE metric = ? AND client IS NULL AND model = 'global' AND value IS NOT NULL"
            " AND version <= ? ORDER BY version DESC LIMIT 1",
            self.metric,
            self._final_version,
        )
        return rows[0]["value"] if rows else None

    @cached_property
    def judged_rows(self) -> dict[int, int]:
        """The number of rows behind each client's metric; as a site told it with the scores where rows are at sites."""
        counted = {row["client"]: row[self.split] for row in self.clients if row[self.split] is not None}
        if len(counted) == len(self.clients):
            return counted
        scored = self._store.query(
            "SELECT client, max(version), examples FROM score WHERE split = ? AND client IS NOT NULL AND version <= ?"
            " AND examples IS NOT NULL GROUP BY client",
            self.split,
            self._final_version,
        )
        return {row["client"]: max(1, int(row["examples"])) for row in scored} | counted  # of weighted rows no count

    @property
    def _final_version(self) -> int:
        """The version that the run ended with; later evaluations do not count."""
        return _NO_LIMIT if self.best is None else self.best

    @property
    def newcomers(self) -> list[dict[str, Any]]:
        """The adaptation to each client that was unseen until the end, see `adaptation.Adaptation.table`."""
        return list(self.meta.get("newcomers") or ())

    @cached_property
    def choices(self) -> list[dict[str, Any]]:
        """The model that each client has chosen, with `keep = "best_for_each"`; one row for each client, by number.

        `client` and `name` say who; `choice.record` documents the rest.  Empty where clients did not choose, and in a
        federation, whose sites tell nobody.
        """
        names = {row["client"]: row["name"] for row in self.clients}
        chosen = recorded_choices(self.notes)
        return [
            {"client": client, "name": names.get(client, str(client)), **choice} for client, choice in chosen.items()
        ]

    @cached_property
    def class_counts(self) -> dict[int, Counts]:
        """Rows by true and by predicted class [C, C], for each client that was asked when the run ended.

        They are about the client's own model where it has one, on the rows that models are judged by.  Empty where
        nothing was counted (`per_class` of `run`).
        """
        return matrices(self.confusion, self._ended, len(self.meta.get("classes") or ()))

    @checked
    def naive(self, answer: str, metric: str | None = None, version: int | None = None) -> dict[int, float]:
        """The value of each client by an answer that needs no model: "naive", from its own training rows, or
        "naive_of_all"; by the main metric, at the version that the run ended with, unless others are named.
        """
        rows = self._single(answer, metric or self.metric, version)
        return {row["client"]: row["value"] for row in rows if row["value"] is not None}

    @checked
    def values_of_rows(self, answer: str = "rows", version: int | None = None) -> dict[int, NDArray[np.float64]]:
        """The main metric of each judged row [n] of each client, by its own model or by an answer that needs none."""
        rows = self._single(answer, self.metric, version)
        return {row["client"]: unpacked_values(row["row_values"]) for row in rows if row["row_values"] is not None}

    @checked
    def moments_of_rows(self, answer: str | None = None) -> dict[int, RowMoments]:
        """The moments of the values of each site's rows, by its own model or by an answer that needs none."""
        told: dict[int, dict[str, float]] = {}
        for row in self.row_scores:
            if row["model"] == (answer or "rows") and (row["version"], row["split"]) == (self._ended, self.split):
                told.setdefault(row["client"], {})[row["metric"]] = row["value"]
        return {
            client: RowMoments(
                int(values["number"]), int(values["values"]), values["standard_error"] ** 2,
                {int(values[f"earlier/{index}"]): values[f"covariance/{index}"] for index in range(MOST_REMEMBERED)
                 if {f"earlier/{index}", f"covariance/{index}"} <= values.keys()},
            )
            for client, values in told.items() if {"number", "values", "standard_error"} <= values.keys()
        }  # fmt: skip

    @cached_property
    def threshold_scores(self) -> dict[str, dict[str, float]]:
        """The scores of each client's model, by the client's name, at its threshold, as "f1", and at a half, as "f1 at
        0.5".  Clients without validation rows of both classes are missing; empty without `threshold` of `run`.
        """
        scores: dict[str, dict[str, float]] = {}
        for model, suffix in (("at_threshold", ""), ("at_half", " at 0.5")):
            for metric in METRICS_AT_THRESHOLDS:
                for client, value in self.naive(model, metric).items():
                    scores.setdefault(self.names[client], {})[f"{metric}{suffix}"] = value
        return scores

    def _single(self, *about: Any) -> list[dict[str, Any]]:
        """The rows of `row_scores` about a model, a metric and a version, None for the last one."""
        model, metric, version = about
        wanted = (model, metric, self._ended if version is None else version, self.split)
        columns = ("model", "metric", "version", "split")
        return [row for row in self.row_scores if tuple(row[name] for name in columns) == wanted]

    @property
    def _ended(self) -> int:
        """The version that the run ended with: a run that keeps its best version was asked there."""
        return self.best or (self.rounds[-1]["version"] if self.rounds else 0)

    @checked
    def class_errors(self, client: int | str | None = None) -> list[ClassRow]:
        """Right and wrong answers by class, of one client by number or name or of all, see `class_rows.class_rows`.

        Raises:
            SettingError: there is no such client, or it was not asked.
        """
        number_of = {self.names[number]: number for number in self.class_counts}
        # names come first: a client may be called "7" and have another number
        number = number_of.get(str(client), int(str(client)) if str(client).isdecimal() else -1)
        if client is not None and number not in self.class_counts:
            raise unknown("client whose answers were counted called", client, number_of)
        matrices = [
            counts for asked_client, counts in self.class_counts.items() if client is None or asked_client == number
        ]
        return class_rows(sum(matrices[1:], matrices[0]), self.meta["classes"]) if matrices else []

    @property
    def score(self) -> Score:
        """The final mean of the main metric over clients, with its name."""
        return Score(self.metric, mean(list(self.per_client.values())))

    @property
    def accuracy(self) -> float | None:
        """The final mean accuracy over clients, None where no client was evaluated.

        It is "accuracy" where clients were evaluated by that, else the main metric where it is a share.

        Raises:
            SettingError: nothing that was measured is an accuracy.
        """
        if self.metric != "accuracy" and "accuracy" in self.metrics:
            last = self.curve_of("accuracy")
            return last[-1]["mean"] if last else None
        value = self.score.value
        is_unbounded = self.metric == "loss" or (self.metric in METRICS and self.metric not in SHARES)
        if is_unbounded or not self.higher_is_better or (value is not None and not 0 <= value <= 1):
            raise SettingError(f"this run measures {self.metric}, which is no accuracy: use score, {self.score}")
        return value

    @cached_property
    def names(self) -> dict[int, str]:
        """The name of each client, with its number where several share it; "client 7" where the data have no names."""
        return client_names(self.clients, self.per_client)

    @cached_property
    def trained(self) -> set[int]:
        """The clients that trained at least once up to the version that the run ended with.

        All evaluated clients where the run folder does not say.
        """
        # "excluded" updates were trained and sent, though the server left them out
        done = self._store.query(
            "SELECT DISTINCT client FROM result WHERE kind = 'train' AND status IN ('ok', 'excluded') AND version <= ?",
            self._final_version,
        )
        return {row["client"] for row in done} or set(self.per_client)

    @cached_property
    def held_out(self) -> list[str]:
        """The names of the clients that did not train, and whose scores alone count; see `SplitSettings.hold_out`."""
        return list((self.meta.get("split") or {}).get("hold_out") or ())

    @cached_property
    def judged(self) -> set[int]:
        """The clients whose scores count: those that are held out, else those that trained or are only for testing."""
        only_tested = (self.meta.get("split") or {}).get("test_only") or ()
        if self.gathered_bytes is not None:  # all clients' rows are in one place
            return set(self.per_client)
        named = {row["client"] for row in self.clients if row["name"] in (self.held_out or only_tested)}
        return named if self.held_out else self.trained | named

    @property
    def gathered_bytes(self) -> int | None:
        """The bytes of all training rows, compressed, where these were sent to one place; else None."""
        return self.meta.get("gathered_bytes")

    @property
    def division(self) -> str:
        """The division of the rows in words, like "fold 1 of 5", "" where there is one alone."""
        return str(self.meta.get("division") or "")

    @property
    def repetition(self) -> int | None:
        """A number of the seed and the division of the rows, equal for runs that can be compared client by client."""
        divided = self.seed is not None and self.division
        # a whole number, as seeds are, by which runs are paired; `hash` would differ in each process
        return zlib.crc32(f"{self.seed} {self.division}".encode()) if divided else self.seed

    @cached_property
    def unscored(self) -> list[str]:
        """The names of clients that have no score, for want of test rows or because the metric has no value for them.

        Means leave them out.  Empty where only some clients were to be evaluated, or none was.
        """
        # where only some clients are evaluated, the others have no score by design
        sampled = (self.meta.get("evaluate") or [None, None])[1] is not None
        clients = sorted(self.judged) if self.held_out else [row["client"] for row in self.clients]
        missing = () if sampled or self.metric not in self.metrics else clients
        return [self.names[client] for client in missing if client not in self.per_client]

    @cached_property
    def failures(self) -> list[dict[str, Any]]:
        """What clients could not do: one row for each client, kind of work and reason.

        `name` says who, `kind` what ("train", or that of a query), `reason` why, and `rounds` in which ones, which for
        queries are the numbers of server steps made before.
        """
        failures = self._store.query(
            "SELECT version, client, kind, reason FROM result "
            "WHERE status IN ('lost', 'refused', 'absent') AND kind = 'train'"
        )
        failures += self._store.rows("failure")
        rounds: dict[tuple[int, str, str], list[int]] = {}
        for row in failures:
            rounds.setdefault((row["client"], row["kind"], row["reason"] or ""), []).append(row["version"])
        return [
            {
                "client": client,
                "name": self._name_of(client),
                "kind": kind,
                "reason": reason,
                "rounds": sorted({*versions}),
            }
            for (client, kind, reason), versions in sorted(rounds.items())
        ]

    @cached_property
    def absences(self) -> dict[str, int]:
        """The number of rounds in which each client was absent, by name, of those that were at all."""
        rows = self._store.query(
            "SELECT client, count(DISTINCT version) AS rounds FROM result WHERE status = 'absent' GROUP BY client"
        )
        return {self._name_of(row["client"]): row["rounds"] for row in rows}

    @property
    def absence_sentences(self) -> list[str]:
        """A sentence about each client that was absent: "north was absent in 3 of 12 rounds"."""
        total = len(self.rounds)
        return [f"{name} was absent in {count:,} of {total:,} rounds" for name, count in self.absences.items()]

    def _name_of(self, client: int) -> str:
        return "the common test set" if client == SERVER_ID else self.names[client]

    @checked
    def reasons(self, names: Sequence[str], kind: Literal["train", "evaluate"]) -> dict[str, str]:
        """Return the last reason why each of some clients did not train or has no score, "" where none was given.

        Args:
            names: of the clients.
            kind: "train" or "evaluate".
        """
        last: dict[str, tuple[int, bool, str]] = {}
        split = "train" if kind == "train" else self.split
        for row in self.failures:
            if row["kind"] == kind:
                reason = f"{row['reason']} (round {row['rounds'][-1]})"
                of_split = f"its {split} rows" in row["reason"]  # where other rows of the client have no score, either
                # the latest round counts, and of one round the reason that is about this split
                last[row["name"]] = max(last.get(row["name"], (-1, False, "")), (row["rounds"][-1], of_split, reason))
        without = {self.names[row["client"]] for row in self.clients if row[split] == 0}
        none = "no training rows" if kind == "train" else f"no {split} rows"
        return {name: none if name in without else last.get(name, (0, False, ""))[2] for name in names}

    @property
    def untrained(self) -> list[str]:
        """The names of clients that have a score and never trained."""
        return [self.names[client] for client in self.per_client if client not in self.judged]

    @property
    def final(self) -> dict[str, Any]:
        """The final figures of all clients, see `chart`."""
        return self.figures()

    @checked
    def figures(self, untrained: bool = True) -> dict[str, Any]:
        """The final figures by name.

        Args:
            untrained: count clients that never trained in figures over clients.

        Among them are `mean` and `sd` of the metric over clients, `worst_decile` (see `worst_tenth`), `q10`, `median`
        and `q90` (quantiles over clients, the worst first), `per_client`, `mean_all` (over all clients), `untrained`
        (the number of clients that never trained), `unscored` (the number of those that have no score and are in no
        mean), `common`, `best` (the version that was kept, if not the last), `unseen` (the mean over clients that were
        unseen until the end, each with its best adaptation method), `chosen` (how many clients have chosen each model,
        with `keep = "best_for_each"`, else None), bytes sent, `seconds` of the runtime's clock and `wall` seconds.
        """
        everyone = untrained and not self.held_out
        counted = {client: v for client, v in self.per_client.items() if everyone or client in self.judged}
        # the worst first, so that the first tenth is the worst one
        values = sorted(counted.values(), reverse=not self.higher_is_better)
        return {
            "recipe": self.recipe,
            "label": self.label,
            "seed": self.seed,
            "status": self.meta.get("status"),
            "rounds": self.rounds[-1]["version"] if self.rounds else 0,
            "metric": self.metric,
            "mean": mean(values),
            "sd": spread(values),
            "worst_decile": worst_tenth(values),
            "q10": quantile(values, 0.1),
            "median": quantile(values, 0.5),
            "q90": quantile(values, 0.9),
            "per_client": counted,
            "mean_all": self.score.value,
            "untrained": 0 if self.held_out else len(self.per_client.keys() - self.judged),
            "unscored": len(self.unscored),
            "common": self.common,
            "best": self.best,
            "unseen": mean([value for newcomer in self.newcomers if (value := _of_best(newcomer)) is not None]),
            "chosen": dict(Counter(str(choice["chosen"]) for choice in self.choices)) or None,
            "bytes_down": 0 if self.gathered_bytes else sum(row["bytes_down"] or 0 for row in self.rounds),
            "bytes_up": self.gathered_bytes or sum(row["bytes_up"] or 0 for row in self.rounds),
            "seconds": self.rounds[-1]["time"] or 0.0 if self.rounds else 0.0,
            "wall": self.rounds[-1]["wall"] or 0.0 if self.rounds else 0.0,
        }

    @checked
    def to_target(self, value: float) -> Point | None:
        """The first evaluation at which the mean over clients was at least as good as a value, or None."""
        sign = 1 if self.higher_is_better else -1
        return next((point for point in self.curve if sign * point["mean"] >= sign * value), None)


def _of_best(newcomer: dict[str, Any]) -> float | None:
    """The metric of a newcomer's best method on its test rows, or on its validation rows where it has no test rows."""
    best = next(method for method in newcomer["methods"] if method["name"] == newcomer["best"])
    value = best["validation"] if best["test"] is None else best["test"]
    return None if value is None else float(value)


def load(paths: Sequence[Path | str]) -> list[History]:
    """The runs in these folders and their subfolders, each once, sorted by path.

    Args:
        paths: run folders, or folders that contain run folders.

    Raises:
        RunFolderError: a path does not exist, or there is no run below it.
    """
    folders: dict[Path, None] = {}
    for path in map(Path, paths):
        if not path.is_dir():
            raise RunFolderError(f"{path} is not a folder: name run folders, or folders that contain run folders")
        runs = sorted(database.parent for database in path.rglob(DATABASE))
        if not runs:
            raise RunFolderError(f"there is no run in {path}: no folder below it has a {DATABASE}")
        folders |= dict.fromkeys(folder.resolve() for folder in runs)
    if not folders:
        raise RunFolderError("no run was named: name run folders, or folders that contain run folders")
    return [History(folder) for folder in folders]


class ClientNames(dict[int, str]):
    """Names of clients by number; the run folder of very many clients names none."""

    def __missing__(self, client: int) -> str:
        return f"client {client}"


def client_names(rows: Iterable[Mapping[str, Any]], others: Iterable[int]) -> ClientNames:
    """The name of each client, with its number where several share it.

    Args:
        rows: the table of clients of a run.
        others: numbers of clients that the table may not have.
    """
    name_of = {row["client"]: str(row["name"] or row["client"]) for row in rows}
    named = {client: name_of.get(client, str(client)) for client in dict.fromkeys([*name_of, *others])}
    readable = {client: f"client {name}" if name.isdigit() else name for client, name in named.items()}
    uses = Counter(readable.values())
    return ClientNames({client: name if uses[name] == 1 else f"{name} ({client})" for client, name in readable.items()})


def mean(values: Sequence[float]) -> float | None:
    """The mean, or None of an empty sequence."""
    return sum(values) / len(values) if values else None


def worst_tenth(values: Sequence[float]) -> float | None:
    """The mean of the first tenth of values, the worst first, rounded up to whole clients; None of an empty sequence.

    Examples:
        >>> worst_tenth([0.25, 0.75, *[1.0] * 9])
        0.5
    """
    return mean(values[: math.ceil(len(values) / 10)])


def quantile(values: Sequence[float], share: float) -> float | None:
    """Return the quantile of values in their order, by linear interpolation, or None of an empty sequence.

    Examples:
        >>> quantile([1.0, 2.0, 4.0], 0.75)
        3.0
    """
    last = len(values) - 1
    return float(np.interp(share * last, range(len(values)), values)) if values else None


def spread(values: Sequence[float]) -> float | None:
    """The population standard deviation, or None of an empty sequence."""
    return float(np.std(values)) if values else None


def _listed(reasons: Mapping[str, str]) -> str:
    """Return names with their reasons on one line, the first ten of them."""
    shown = "; ".join(f"{name}: {reason}" for name, reason in list(reasons.items())[:10])
    return f"{shown}; and {len(reasons) - 10} more" if len(reasons) > 10 else shown
