"""Comparison of runs: grouped by label, with the seeds of a label as repetitions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from piebald.core.arguments import checked, checked_class
from piebald.core.errors import SettingError, unknown
from piebald.core.result_table import ResultTable, Tabular
from piebald.privacy.spending import together
from piebald.report.chart import Axis, Band, Over, Point, band_of, bands_of, plot
from piebald.report.paired import Difference, Level, RowMoments, Scores, level, ranking
from piebald.report.row_noise import CHOOSING, COUNTED, PLAIN, answers
from piebald.report.tables import History, mean
from piebald.report.verdict import ScoreVerdict, compared

_SHARES = (
    "accuracy", "auc", "f1", "precision", "recall", "dice", "iou", "jaccard", "concordance", "sensitivity",
    "specificity",
)  # fmt: skip
Points = Annotated[int, Field(ge=2)]

_FIGURES = (
    "mean_all", "untrained", "sd", "worst_decile", "q10", "median", "q90", "common", "unseen", "bytes_up", "bytes_down",
    "rounds", "seconds", "wall",
)  # fmt: skip
_SHOWN = ("label", "seeds", "mean", "low", "high", "worst_decile", "sd", "mb_up", "mb_down", "rounds")  # in a notebook


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean over seeds with its 95% confidence interval by Student's t, which a single seed does not have."""

    mean: float
    low: float | None
    high: float | None
    count: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Interval | None:
        """The interval of repeated measurements, or None of an empty sequence."""
        if not values:
            return None
        average, count = sum(values) / len(values), len(values)
        if count == 1:
            return cls(average, None, None, 1)
        from scipy.stats import t

        error = math.sqrt(sum((value - average) ** 2 for value in values) / (count - 1) / count)
        half = float(t.ppf(0.975, count - 1)) * error
        return cls(average, average - half, average + half, count)


@checked_class
class Comparison(Tabular):
    """Runs of one objective, grouped by label.

    Args:
        histories: the runs; labels keep their order, but the baselines Local and FedAvg come first.

    Attributes:
        by_label: the runs of each label.

    Raises:
        SettingError: the runs are judged by different metrics.

    Examples:
        >>> import piebald
        >>> clients = piebald.partition.Iid(clients=3, test=0.2, limit=60).split(piebald.data.digits())
        >>> model = piebald.models.build_model("mlp", (1, 8, 8), 10, hidden=(4,))
        >>> runs = [piebald.run(recipe, clients, model, rounds=1) for recipe in ("fedavg", "local")]
        >>> comparison = Comparison(runs)
        >>> comparison.labels, comparison.metric
        (['local', 'fedavg'], 'accuracy')
        >>> sorted((row["label"], row["rounds"]) for row in comparison.summary())
        [('fedavg', 1.0), ('local', 1.0)]
        >>> comparison.paired("local")[0]["clients"]
        3
    """

    def __init__(self, histories: Sequence[History]) -> None:
        self.by_label: dict[str, list[History]] = {}
        # sorting is stable: labels keep the order in which they were given
        for history in sorted(histories, key=_baselines_first):
            self.by_label.setdefault(history.label, []).append(history)
        self.runs = [history for runs in self.by_label.values() for history in runs]
        metrics = sorted({history.metric for history in self.runs})
        if len(metrics) != 1:
            raise SettingError(
                f"runs of one report must share a metric, got {', '.join(metrics) or 'no run'}: make separate reports"
            )
        self.metric = metrics[0]
        self.higher_is_better = self.runs[0].higher_is_better

    def __repr__(self) -> str:
        """Return the content of the comparison and its finding in one line."""
        content = f"{len(self.labels)} labels, {len(self.runs)} runs, by {self.metric}"
        return f"<Comparison of {content}: {self.headline()}>"

    @property
    def privacy(self) -> list[dict[str, Any]]:
        """The privacy budgets of all runs together, on the same rows; see `privacy.spending.together`."""
        return together(history.meta for history in self.runs)

    def headline(self) -> str:
        """The finding in one sentence, see `report.verdict.ScoreVerdict.sentence`."""
        return "No client has been evaluated yet" if self.verdict is None else self.verdict.sentence()

    def title(self) -> str:
        """The finding in about twenty words, see `report.verdict.ScoreVerdict.title`."""
        return self.headline() if self.verdict is None else self.verdict.title()

    @cached_property
    def verdict(self) -> ScoreVerdict | None:
        """The verdict of the scores on the labels; None where no client was evaluated."""
        alone = self.made_by("local")
        sent = {row["label"]: 1e6 * (row["mb_up"] + row["mb_down"]) for row in self.summary()}
        return ScoreVerdict.of(
            self.scores, self.metric, self.higher_is_better, alone, self.naive, sent, self.labels, self._best_alone
        )

    @cached_property
    def naive(self) -> dict[str, Scores]:
        """Scores of answers that need no model, on the same rows, by name; see `report.naive`."""
        return answers(self.runs, scores_of)

    @cached_property
    def plain_alone(self) -> dict[str, Scores]:
        """Scores of plain models that each client fits alone, by name, which `compare` keeps beside a run of Local."""
        runs = self.by_label.get(self.made_by("local") or "", [])
        kept = dict.fromkeys(row["model"] for run in runs for row in run.row_scores if row["model"].startswith(PLAIN))
        return {model.removeprefix(PLAIN): scores_of(runs, model) for model in kept}

    @cached_property
    def _best_alone(self) -> dict[str, Scores]:
        """Scores of what the leader is held against as the best that is alone: Local, a plain model, or the two.

        It is chosen by validation rows.  Where there are none, cross-validation chooses the plain model, and Local,
        which would have to be trained for that, counts beside it; so it does where its models were not kept.
        """
        local, sign = self.made_by("local"), 1 if self.higher_is_better else -1
        values: dict[str, dict[tuple[int, int], float]] = {}
        for index, run in enumerate(self.by_label.get(local or "", [])):
            for row in run.row_scores:
                if row["metric"] == CHOOSING:
                    values.setdefault(row["model"], {})[index, row["client"]] = row["value"]
        # on the clients that all have; of equal means Local, then the plain model that comes first
        common = set.intersection(*map(set, values.values())) if values else set()
        means = {name: sum(table[key] for key in common) / len(common) for name, table in values.items() if common}
        order = sorted(means, key=lambda name: (-sign * round(means[name], 9), name != "rows"))
        chosen = order[0].removeprefix(PLAIN) if order else "rows"
        alone = {label: table for label, table in self.scores.items() if label == local}
        if chosen == "rows":
            return alone
        return ({} if "rows" in means else alone) | {chosen: self.plain_alone[chosen]}

    def table(self) -> ResultTable:
        """Return the finding, and the main columns of the summary."""
        table = self.summary().only(*_SHOWN)
        table.title = f"{self.headline()}."
        return table

    @property
    def labels(self) -> list[str]:
        """The labels in order."""
        return list(self.by_label)

    @checked
    def made_by(self, recipe: str) -> str | None:
        """The first label whose runs used a recipe of this name."""
        return next((label for label, runs in self.by_label.items() if runs[0].recipe == recipe), None)

    @cached_property
    def finals(self) -> dict[str, list[dict[str, Any]]]:
        """The final figures of each run, by label; clients that never trained are left out of those over clients."""
        return {label: [history.figures(untrained=False) for history in runs] for label, runs in self.by_label.items()}

    @cached_property
    def scores(self) -> dict[str, Scores]:
        """The final metric of each client in each run, by label; for `report.paired`."""
        return {label: scores_of(runs) for label, runs in self.by_label.items() if any(run.per_client for run in runs)}

    @cached_property
    def unscored(self) -> list[str]:
        """The names of clients that have no score in any run, see `History.unscored`."""
        # a client that one run scores, such as after a split by another seed, is in the means
        first, *later = [dict.fromkeys(run.unscored) for run in self.runs]
        return [name for name in first if all(name in names for names in later)]

    @cached_property
    def levels(self) -> dict[str, Level]:
        """The mean of each label that has one, over clients that trained, with its interval."""
        values = [scores.values for scores in self.scores.values()]
        bounds = bounds_of(self.metric, values)
        return {
            label: mean_level for label, scores in self.scores.items() if (mean_level := level(scores, bounds=bounds))
        }

    @property
    def near(self) -> list[str]:
        """The leading label and those that are not clearly behind it, the best mean first."""
        return [] if self.verdict is None else self.verdict.near

    @checked
    def over_seeds(self, label: str, figure: str) -> Interval | None:
        """A final figure of `History.final`, over the seeds of a label."""
        self._check_label(label)
        figures = [name for name, value in self.finals[label][0].items() if isinstance(value, int | float | None)]
        if figure not in figures:
            raise unknown("final figure", figure, figures)
        return Interval.of([final[figure] for final in self.finals[label] if final[figure] is not None])

    def ranking(self) -> list[str]:
        """Labels with an evaluation, the best mean first."""
        return ranking(self.scores, self.higher_is_better)

    @property
    def ordered(self) -> list[str]:
        """All labels, the best mean first, and at the end those without an evaluation."""
        return list(dict.fromkeys([*self.ranking(), *self.labels]))

    # ------------------------------------------------------------------------------------------------------- tables

    def summary(self) -> ResultTable:
        """One row for each label, the best mean first: seeds, parameters of the model, the mean with its interval, sd
        over clients, worst decile, quantiles over clients (`q10`, `median`, `q90`, the worst first), score on the
        common test set, costs, and the mean over clients that were unseen until the end.

        Means are over clients that trained; `mean_all` counts those that never did as well (`untrained` of them, in the
        mean over runs).  `low` and `high` are a 95% interval for other clients and seeds (`kind` "interval"), or the
        range of two seeds ("range"); one seed has none.  Megabytes are millions of bytes.  All figures are means over
        seeds, None where they do not exist.
        """
        rows = list[dict[str, Any]]()
        for label in self.ordered:
            finals = self.finals[label]
            average = {
                figure: interval.mean if (interval := self.over_seeds(label, figure)) else None for figure in _FIGURES
            }
            megabytes = {f"mb_{way}": (average.pop(f"bytes_{way}") or 0.0) / 1e6 for way in ("up", "down")}
            rows.append(
                {"label": label, "recipe": finals[0]["recipe"], "seeds": len(finals)}
                | {"parameters": self.by_label[label][0].meta.get("parameters")}
                | _ends(self.levels.get(label)) | average | megabytes
            )  # fmt: skip
        return ResultTable(rows)

    def by_division(self) -> ResultTable:
        """One row for each division of the rows, such as a fold: the mean of each label over the clients that count.

        Means are over clients and seeds; empty where rows are divided once.
        """
        rows: dict[str, dict[str, Any]] = {}
        for label in self.labels:
            means: dict[str, list[float]] = {}
            for run, final in zip(self.by_label[label], self.finals[label], strict=True):
                if run.division and final["mean"] is not None:
                    means.setdefault(run.division, []).append(final["mean"])
            for title, values in means.items():
                rows.setdefault(title, {"division": title})[label] = sum(values) / len(values)
        return ResultTable(rows.values() if len(rows) > 1 else ())

    @checked
    def paired(self, base: str) -> ResultTable:
        """One row for each other label: the mean difference to the base label, with its 95% interval.

        Only seeds and clients that both labels have are compared, each with itself, see `report.verdict.compared`;
        `noise` is "rows" where that holds for other rows of these clients, "clients" for other clients.  A positive
        difference is an improvement if a higher metric is better.  Intervals and p hold for as many comparisons
        together as the verdict makes; below 0.05 the two labels differ clearly.
        """
        self._check_label(base)
        bounds = bounds_of(self.metric, [table.values for table in self.scores.values()])
        # as many as the verdict makes, so that the table and the sentence above it cannot contradict each other
        rows, rivals = [], max(1, self.verdict.comparisons) if self.verdict else 1
        for label, table in self.scores.items():
            gap = compared(table, self.scores[base], rivals) if base in self.scores and label != base else None
            if gap is not None:
                ends = _ends(gap, None if bounds is None else bounds[1] - bounds[0])
                row = {"label": label, "base": base, "seeds": gap.seeds, "clients": gap.clients}
                rows.append(row | {"difference": ends.pop("mean")} | ends | {"noise": gap.noise, "p": gap.p})
        return ResultTable(rows)

    @checked
    def per_client(self, label: str, base: str) -> list[float]:
        """Differences of individual clients to the base label over all common seeds, the greatest loss first."""
        self._check_label(label)
        self._check_label(base)
        sign = 1 if self.higher_is_better else -1
        differences = [
            run.per_client[client] - base_run.per_client[client]
            for run, base_run in self._pairs(label, base)
            # a client that never trained with a method has the score of a model that it had no part in
            for client in run.judged & base_run.judged & run.per_client.keys() & base_run.per_client.keys()
        ]
        # by sign: of a loss the largest increase is the greatest loss
        return sorted(differences, key=lambda difference: sign * difference)

    @checked
    def gain_of_each(self, label: str, base: str) -> dict[str, float]:
        """The gain of each client over the base label, by name: the mean over common seeds."""
        self._check_label(label)
        self._check_label(base)
        gains: dict[str, list[float]] = {}
        for run, base_run in self._pairs(label, base):
            theirs = {base_run.names[client]: value for client, value in base_run.per_client.items()}
            for client, value in run.per_client.items():
                # matched by name, since numbers of clients may differ between runs
                if run.names[client] in theirs and client in run.judged:
                    gains.setdefault(run.names[client], []).append(value - theirs[run.names[client]])
        return {name: sum(values) / len(values) for name, values in gains.items()}

    def target(self) -> float | None:
        """A default target for all labels: the final value of FedAvg's worst seed, or else of the weakest label's.

        It is rounded to two digits, to the easier side, so that the runs that it comes from reach it.
        """
        ranked = self.ranking()
        if not ranked:
            return None
        fedavg = self.made_by("fedavg")
        finals = self.finals[fedavg if fedavg in ranked else ranked[-1]]
        ends = [final["mean"] for final in finals if final["mean"] is not None]
        value = min(ends) if self.higher_is_better else max(ends)
        # two significant digits
        unit = 10.0 ** (math.floor(math.log10(abs(value))) - 1) if value else 1.0
        easier = math.floor if self.higher_is_better else math.ceil
        # the tiny term keeps a value that is exact in decimals from being rounded one unit too far
        return float(f"{easier(value / unit + (1e-9 if self.higher_is_better else -1e-9)) * unit:.12g}")

    @checked
    def to_target(self, value: float) -> ResultTable:
        """One row for each label: in how many of its runs the mean over clients reached a value, and at what cost.

        Rounds, megabytes, seconds of the run's clock and of real time are means over the runs that reached it, None if
        none did.
        """
        rows = list[dict[str, Any]]()
        for label, runs in self.by_label.items():
            reached = [point for history in runs if (point := history.to_target(value))]
            costs: dict[str, list[float]] = {
                "rounds": [point["version"] for point in reached],
                "mb": [point["bytes"] / 1e6 for point in reached],
                "seconds": [point["seconds"] for point in reached],
                "wall": [point["wall"] for point in reached],
            }
            means = {name: mean(values) for name, values in costs.items()}
            rows.append({"label": label, "runs": len(runs), "reached": len(reached)} | means)
        return ResultTable(rows)

    def against_pooled(self) -> ResultTable:
        """One row for each evaluation of each label, beside a label that has all training rows in one place.

        `lost` is how much worse the mean over clients is than that label's final one, and `gain` is how many times less
        was sent by then than these rows, compressed: the communication gain of HDAFL (Yang, Beliard, Rossi 2020,
        table 5).  Both are means over common seeds; megabytes are sent both ways.  Empty without such a label.
        """
        central = next((label for label, runs in self.by_label.items() if runs[0].gathered_bytes is not None), None)
        rows, sign = list[dict[str, Any]](), 1 if self.higher_is_better else -1
        if central is None:
            return ResultTable(rows)
        for label in (label for label in self.labels if label != central):
            points: dict[int, list[tuple[float, int, int]]] = {}
            for run, base in (pairs := self._pairs(label, central)):
                for point in run.curve if base.curve else ():
                    lost = sign * (base.curve[-1]["mean"] - point["mean"])
                    points.setdefault(point["version"], []).append((lost, point["bytes"], base.gathered_bytes or 0))
            for version, seen in points.items():
                lost, sent, gathered = (sum(numbers) / len(seen) for numbers in zip(*seen, strict=True))
                # a mean over fewer seeds than the others would jump where a seed has no evaluation
                if len(seen) == len(pairs) and sent:
                    row = {"label": label, "rounds": version, "lost": lost, "mb": sent / 1e6, "gain": gathered / sent}
                    rows.append(row | {"seeds": len(seen)})
        return ResultTable(rows)

    # ------------------------------------------------------------------------------------------------------- curves

    @checked
    def plot(self, metric: str | None = None, *, over: Over = "rounds", ax: Any = None) -> Any:
        """Draw the page's curves with matplotlib: the mean over clients, a line for each label with a band over its
        seeds.

        Args:
            metric: one by which all runs were evaluated, like "accuracy" or "loss"; by default the main one.
            over: the cost across: "rounds", "megabytes" sent both ways, or "seconds" of the run's clock.
            ax: `matplotlib.axes.Axes` to draw into; by default those of a new figure of `matplotlib.pyplot`.

        Returns:
            The axes, whose figure is `.figure`.

        Raises:
            SettingError: there is no such metric, or nothing has been evaluated.
        """
        return plot(self.runs, metric, over, ax)

    @checked
    def band(self, label: str, axis: Axis, points: Points = 300, metric: str | None = None) -> Band | None:
        """The curve of a label over its seeds, None where there is none; of the main metric unless another is named.

        The metric and the cost are averaged over seeds at each version at which all seeds were evaluated, thinned out
        to `points` versions.
        """
        self._check_label(label)
        return band_of(self._curves(label, metric), axis, points)

    @checked
    def bands(self, axis: Axis, metric: str | None = None) -> dict[str, Band]:
        """The curves of all labels that have one, see `chart.bands_of`."""
        curves = {label: self._curves(label, metric) for label in self.labels}
        return bands_of(curves, axis)

    def _curves(self, label: str, metric: str | None) -> list[list[Point]]:
        return [history.curve_of(metric or self.metric) for history in self.by_label[label]]

    def _pairs(self, label: str, base: str) -> list[tuple[History, History]]:
        # the division counts as well as the seed: folds of one seed have other rows
        by_seed = {history.repetition: history for history in self.by_label[base] if history.seed is not None}
        runs = self.by_label[label]
        return [(history, by_seed[history.repetition]) for history in runs if history.repetition in by_seed]

    def _check_label(self, label: str) -> None:
        if label not in self.by_label:
            raise unknown("label", label, self.by_label)


def scores_of(runs: Sequence[History], model: str | None = None) -> Scores:
    """The final metric of each client in each run of a label, or that of an answer that needs no model."""
    names = {name: index for index, name in enumerate(sorted({n for run in runs for n in run.names.values()}))}
    # runs of one label may have different clients; NaN marks those that a run lacks
    values = np.full((len(runs), len(names)), np.nan)
    trained, sizes = np.zeros(values.shape, bool), np.zeros(len(names), int)
    seeds: list[int] = []
    for index, run in enumerate(runs):  # runs without a seed of their own pair with no other
        # negative numbers, which no seed has, keep runs apart that cannot be paired
        seeds.append(-1 - index if run.repetition is None or run.repetition in seeds else run.repetition)
    rows: dict[tuple[int, str], NDArray[np.float64]] = {}
    errors: dict[tuple[int, str], float] = {}
    moments: dict[tuple[int, str], RowMoments] = {}
    for row, run in enumerate(runs):
        single = run.values_of_rows("rows" if model is None else model)
        row_errors = run.naive("rows" if model is None else model, "standard_error")
        errors |= {(seeds[row], run.names[client]): error for client, error in row_errors.items()}
        moments |= {(seeds[row], run.names[client]): held for client, held in run.moments_of_rows(model).items()}
        for client, value in (run.per_client if model is None else run.naive(model)).items():
            column, name = names[run.names[client]], run.names[client]
            values[row, column], trained[row, column] = value, client in run.judged or model is not None
            # the smallest number over runs: the noise is never understated
            size = run.judged_rows.get(client, 0)
            sizes[column] = min(size, sizes[column] or size)
            # rows whose mean is not this value are of another evaluation, whose noise is not its own
            if client in single and np.isclose(single[client].mean(), value, rtol=1e-4, atol=1e-4):
                rows[seeds[row], name] = single[client]
    counted = runs[0].metric == COUNTED
    # one unknown size leaves no votes that would be fair to all
    known = sizes.tolist() if (sizes[np.isfinite(values).any(0)] > 0).all() else ()
    return Scores(values, list(names), seeds, trained, known, rows, errors, moments, counted)


def bounds_of(metric: str, values: Sequence[NDArray[np.float64]]) -> tuple[float, float] | None:
    """(0, 1) for metrics that are shares, else None."""
    # a name alone may mislead, such as of an own metric; so the values must be inside, too
    named = any(word in metric.lower() for word in _SHARES)
    inside = all(not (table < 0).any() and not (table > 1).any() for table in values)
    return (0.0, 1.0) if named and inside else None


def _ends(level: Level | None, largest: float | None = None) -> dict[str, Any]:
    """Mean, interval and kind of a row; `largest` is the largest possible difference."""
    if level is None:
        return {"mean": None, "low": None, "high": None, "kind": None}
    # a difference of accuracies lies between -1 and 1, whatever Student's t says
    most = math.inf if largest is None else largest
    ends: dict[str, float | None] = {"low": max(level.low, -most), "high": min(level.high, most)}
    # one seed says nothing of other seeds, but its rows may say what they do of other rows
    single = level.seeds == 1 and not (isinstance(level, Difference) and level.noise == "rows")
    if single:
        ends = dict.fromkeys(ends)
    return {"mean": level.mean, **ends, "kind": "one seed" if single else level.kind}


def _baselines_first(history: History) -> int:
    return {"local": 0, "fedavg": 1}.get(history.recipe, 2)
