"""Comparison of runs: grouped by label, with the seeds of a label as repetitions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from piebald.arguments import checked, checked_class
from piebald.errors import SettingError, unknown
from piebald.report.notebook import html_table
from piebald.report.tables import History, mean

Axis = Literal["version", "bytes", "seconds", "wall"]


_FIGURES = ("sd", "worst_decile", "common", "unseen", "bytes_up", "bytes_down", "rounds", "seconds", "wall")


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


@dataclass(frozen=True, slots=True)
class Band:
    """A curve over seeds: at each `x` the mean, the smallest and the largest value of the seeds.

    A `level` band is a horizontal line at the label's final value, for comparison.
    """

    x: list[float]
    mean: list[float]
    low: list[float]
    high: list[float]
    seeds: int
    level: bool = False


@checked_class
class Comparison:
    """Runs of one objective, grouped by label.

    Args:
        histories: the runs; labels keep their order, but the baselines Local and FedAvg come first.

    Attributes:
        by_label: the runs of each label.

    Raises:
        SettingError: the runs are judged by different metrics.
    """

    def __init__(self, histories: Sequence[History]) -> None:
        self.by_label: dict[str, list[History]] = {}
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
        """What is compared, and each label's mean, in one line."""
        means = {label: found.mean for label in self.labels if (found := self.over_seeds(label, "mean"))}
        scores = ", ".join(f"{label} {mean:.4g}" for label, mean in means.items())
        return f"<Comparison of {len(self.labels)} labels, {len(self.runs)} runs, by {self.metric}: {scores}>"

    def _repr_html_(self) -> str:
        rows = self.summary()
        return html_table(list(rows[0]), [list(row.values()) for row in rows])

    @property
    def labels(self) -> list[str]:
        """The labels in order."""
        return list(self.by_label)

    def made_by(self, recipe: str) -> str | None:
        """The first label whose runs used a recipe of this name."""
        return next((label for label, runs in self.by_label.items() if runs[0].recipe == recipe), None)

    @cached_property
    def finals(self) -> dict[str, list[dict[str, Any]]]:
        """The final figures of each run, by label."""
        return {label: [history.final for history in runs] for label, runs in self.by_label.items()}

    def over_seeds(self, label: str, figure: str) -> Interval | None:
        """A final figure of `History.final`, over the seeds of a label."""
        return Interval.of([final[figure] for final in self.finals[label] if final[figure] is not None])

    def ranking(self) -> list[str]:
        """Labels with an evaluation, the best mean first."""
        sign = -1 if self.higher_is_better else 1
        means = {label: found.mean for label in self.labels if (found := self.over_seeds(label, "mean"))}
        return sorted(means, key=lambda label: sign * means[label])

    # ------------------------------------------------------------------------------------------------------- tables

    def summary(self) -> list[dict[str, Any]]:
        """One row for each label: seeds, parameters of the model, the mean with its interval, sd over clients, worst
        decile, score on the common test set, costs, and the mean over clients that were unseen until the end.

        Megabytes are millions of bytes.  All figures are means over seeds, None where they do not exist.
        """
        rows = []
        for label, finals in self.finals.items():
            value = self.over_seeds(label, "mean")
            average = {figure: found.mean if (found := self.over_seeds(label, figure)) else None for figure in _FIGURES}
            megabytes = {f"mb_{way}": (average.pop(f"bytes_{way}") or 0.0) / 1e6 for way in ("up", "down")}
            interval = {name: getattr(value, name) if value else None for name in ("mean", "low", "high")}
            rows.append(
                {"label": label, "recipe": finals[0]["recipe"], "seeds": len(finals)}
                | {"parameters": self.by_label[label][0].meta.get("parameters")}
                | interval
                | average
                | megabytes
            )
        return rows

    @checked
    def paired(self, base: str) -> list[dict[str, Any]]:
        """One row for each other label: the mean difference to the base label, with its 95% interval.

        Only seeds that both labels have are compared, each with itself.  A positive difference is an improvement if a
        higher metric is better.
        """
        self._check_label(base)
        rows = []
        for label in self.labels:
            pairs = self._pairs(label, base)
            differences = [
                a - b for one, other in pairs if (a := one.accuracy) is not None and (b := other.accuracy) is not None
            ]
            found = Interval.of(differences)
            if label != base and found is not None:
                rows.append({"label": label, "base": base, "seeds": found.count, "difference": found.mean}
                            | {"low": found.low, "high": found.high})  # fmt: skip
        return rows

    def per_client(self, label: str, base: str) -> list[float]:
        """Differences of individual clients to the base label over all common seeds, the greatest loss first."""
        self._check_label(base)
        sign = 1 if self.higher_is_better else -1
        differences = [
            one.per_client[client] - other.per_client[client]
            for one, other in self._pairs(label, base)
            for client in one.per_client.keys() & other.per_client.keys()
        ]
        return sorted(differences, key=lambda difference: sign * difference)

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
        unit = 10.0 ** (math.floor(math.log10(abs(value))) - 1) if value else 1.0
        easier = math.floor if self.higher_is_better else math.ceil
        return float(f"{easier(value / unit + (1e-9 if self.higher_is_better else -1e-9)) * unit:.12g}")

    def to_target(self, value: float) -> list[dict[str, Any]]:
        """One row for each label: in how many of its runs the mean over clients reached a value, and at what cost.

        Rounds, megabytes, seconds of the run's clock and of real time are means over the runs that reached it, None if
        none did.
        """
        rows = []
        for label, runs in self.by_label.items():
            reached = [point for history in runs if (point := history.to_target(value))]
            rows.append(
                {
                    "label": label,
                    "runs": len(runs),
                    "reached": len(reached),
                    "rounds": mean([point["version"] for point in reached]),
                    "mb": mean([point["bytes"] / 1e6 for point in reached]),
                    "seconds": mean([point["seconds"] for point in reached]),
                    "wall": mean([point["wall"] for point in reached]),
                }
            )
        return rows

    # ------------------------------------------------------------------------------------------------------- curves

    def band(self, label: str, axis: Axis, points: int = 300) -> Band | None:
        """The curve of a label over its seeds, None where there is none.

        The metric and the cost are averaged over seeds at each version at which all seeds were evaluated, thinned out
        to `points` versions.
        """
        seeds = [
            {point["version"]: point for point in history.curve} for history in self.by_label[label] if history.curve
        ]
        if not seeds:
            return None
        versions = sorted(set.intersection(*(set(seed) for seed in seeds)))
        if len(versions) > points:
            versions = [versions[round(i * (len(versions) - 1) / (points - 1))] for i in range(points)]
        rows = [[seed[version] for seed in seeds] for version in versions]
        if not rows:  # evaluated at different versions: only the final values can be averaged
            rows = [[seed[max(seed)] for seed in seeds]]
        values = [[point["mean"] for point in row] for row in rows]
        return Band(
            [sum(float(point[axis]) for point in row) / len(row) for row in rows],
            [sum(row) / len(row) for row in values],
            [min(row) for row in values],
            [max(row) for row in values],
            len(seeds),
        )

    def bands(self, axis: Axis) -> dict[str, Band]:
        """The curves of all labels that have one.

        A label that sends almost nothing (less than a twentieth of the largest traffic) would be a dot on the axis of
        bytes, so it is drawn as a level there.
        """
        found = {label: band for label in self.labels if (band := self.band(label, axis))}
        last = max((band.x[-1] for band in found.values()), default=0.0)
        for label, band in found.items():
            if axis == "bytes" and band.x[-1] < 0.05 * last:
                means, low, high = ([values[-1]] * 2 for values in (band.mean, band.low, band.high))
                found[label] = Band([0.0, last], means, low, high, band.seeds, level=True)
        return found

    def _pairs(self, label: str, base: str) -> list[tuple[History, History]]:
        by_seed = {history.seed: history for history in self.by_label[base] if history.seed is not None}
        return [(history, by_seed[history.seed]) for history in self.by_label[label] if history.seed in by_seed]

    def _check_label(self, label: str) -> None:
        if label not in self.by_label:
            raise unknown("label", label, self.by_label)


def _baselines_first(history: History) -> int:
    return {"local": 0, "fedavg": 1}.get(history.recipe, 2)
