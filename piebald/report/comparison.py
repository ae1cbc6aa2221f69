"""Many runs side by side: grouped by label, with the seeds of a label as repetitions."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from piebald.errors import SettingError, unknown
from piebald.report.tables import History, mean

Axis = Literal["version", "bytes", "seconds", "wall"]


_FIGURES = ("sd", "worst_decile", "common", "unseen", "bytes_up", "bytes_down", "rounds", "seconds", "wall")


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean over seeds and its 95% confidence interval by Student's t; a single seed has none."""

    mean: float
    low: float | None
    high: float | None
    count: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Interval | None:
        """The interval of values that are repetitions of one another, or None of nothing."""
        if not values:
            return None
        centre, count = sum(values) / len(values), len(values)
        if count == 1:
            return cls(centre, None, None, 1)
        from scipy.stats import t

        error = math.sqrt(sum((value - centre) ** 2 for value in values) / (count - 1) / count)
        half = float(t.ppf(0.975, count - 1)) * error
        return cls(centre, centre - half, centre + half, count)


@dataclass(frozen=True, slots=True)
class Band:
    """A curve over seeds: at each `x` the mean of the seeds and their smallest and largest value.

    A `level` one is only where the label ends, from the axis' beginning to its end, for comparison.
    """

    x: list[float]
    mean: list[float]
    low: list[float]
    high: list[float]
    seeds: int
    level: bool = False


class Comparison:
    """Runs of one objective, grouped by label.

    Args:
        histories: the runs; labels keep the order in which they come, but Local and FedAvg, the baselines, go first.

    Raises:
        SettingError: the runs are judged by different metrics.
    """

    def __init__(self, histories: Iterable[History]) -> None:
        self.groups: dict[str, list[History]] = {}
        for history in sorted(histories, key=_baselines_first):
            self.groups.setdefault(history.label, []).append(history)
        self.runs = [history for group in self.groups.values() for history in group]
        metrics = sorted({history.metric for history in self.runs})
        if len(metrics) != 1:
            raise SettingError(
                f"runs of one report must share a metric, got {', '.join(metrics) or 'no run'}: report apart"
            )
        self.metric = metrics[0]
        self.higher_is_better = self.runs[0].higher_is_better

    @property
    def labels(self) -> list[str]:
        """The labels in order."""
        return list(self.groups)

    def made_by(self, recipe: str) -> str | None:
        """The first label whose runs were made by a recipe of this name."""
        return next((label for label, group in self.groups.items() if group[0].recipe == recipe), None)

    @cached_property
    def finals(self) -> dict[str, list[dict[str, Any]]]:
        """The final figures of each run, by label."""
        return {label: [history.final for history in group] for label, group in self.groups.items()}

    def over_seeds(self, label: str, figure: str) -> Interval | None:
        """A final figure of `History.final`, over the seeds of a label."""
        return Interval.of([final[figure] for final in self.finals[label] if final[figure] is not None])

    def ranking(self) -> list[str]:
        """Labels that were evaluated, the best mean first."""
        sign = -1 if self.higher_is_better else 1
        means = {label: found.mean for label in self.labels if (found := self.over_seeds(label, "mean"))}
        return sorted(means, key=lambda label: sign * means[label])

    # ------------------------------------------------------------------------------------------------------- tables

    def summary(self) -> list[dict[str, Any]]:
        """One row a label: seeds, the mean with its interval, sd over clients, worst decile, common test, costs, and
        the mean over clients that were unseen until the end.

        Megabytes are millions of bytes.  All figures are means over seeds; None where they do not exist.
        """
        rows = []
        for label, finals in self.finals.items():
            value = self.over_seeds(label, "mean")
            average = {figure: found.mean if (found := self.over_seeds(label, figure)) else None for figure in _FIGURES}
            megabytes = {f"mb_{way}": (average.pop(f"bytes_{way}") or 0.0) / 1e6 for way in ("up", "down")}
            interval = {name: getattr(value, name) if value else None for name in ("mean", "low", "high")}
            rows.append(
                {"label": label, "recipe": finals[0]["recipe"], "seeds": len(finals)} | interval | average | megabytes
            )
        return rows

    def paired(self, base: str) -> list[dict[str, Any]]:
        """One row for each other label: the mean difference to the base label, with its 95% interval.

        Only seeds that both have count, each with itself.  Above 0 is better where a higher metric is.
        """
        self._known(base)
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
        """Differences of single clients to the base label over all seeds that both have, the greatest loss first."""
        self._known(base)
        sign = 1 if self.higher_is_better else -1
        differences = [
            one.per_client[client] - other.per_client[client]
            for one, other in self._pairs(label, base)
            for client in one.per_client.keys() & other.per_client.keys()
        ]
        return sorted(differences, key=lambda difference: sign * difference)

    def target(self) -> float | None:
        """A value to reach that means something to all: where FedAvg's worst seed ends, or else the weakest label's.

        It is rounded to two digits, towards the easier side, so that the runs it comes from do reach it.
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
        """One row a label: in how many of its runs the mean over clients came to a value, and what that took.

        Rounds, megabytes, seconds of the run's clock and of real time are means over the runs that came to it, None if
        none did.
        """
        rows = []
        for label, group in self.groups.items():
            reached = [point for history in group if (point := history.to_target(value))]
            rows.append(
                {
                    "label": label,
                    "runs": len(group),
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
        """The curve of a label over its seeds; None where there is no curve.

        Seeds are averaged version by version, in the metric and in what it had cost by then, over the versions at which
        all of them were evaluated, thinned out to `points`.
        """
        seeds = [
            {point["version"]: point for point in history.curve} for history in self.groups[label] if history.curve
        ]
        if not seeds:
            return None
        versions = sorted(set.intersection(*(set(seed) for seed in seeds)))
        if len(versions) > points:
            versions = [versions[round(i * (len(versions) - 1) / (points - 1))] for i in range(points)]
        rows = [[seed[version] for seed in seeds] for version in versions]
        if not rows:  # evaluated at different versions, so only their ends can be averaged
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

        One that sends next to nothing (less than a twentieth of what the most talkative does) would be a dot on the
        axis of bytes, so there it is a level.
        """
        found = {label: band for label in self.labels if (band := self.band(label, axis))}
        last = max((band.x[-1] for band in found.values()), default=0.0)
        for label, band in found.items():
            if axis == "bytes" and band.x[-1] < 0.05 * last:
                means, low, high = ([values[-1]] * 2 for values in (band.mean, band.low, band.high))
                found[label] = Band([0.0, last], means, low, high, band.seeds, level=True)
        return found

    def _pairs(self, label: str, base: str) -> list[tuple[History, History]]:
        by_seed = {history.seed: history for history in self.groups[base] if history.seed is not None}
        return [(history, by_seed[history.seed]) for history in self.groups[label] if history.seed in by_seed]

    def _known(self, label: str) -> None:
        if label not in self.groups:
            raise unknown("label", label, self.groups)


def _baselines_first(history: History) -> int:
    return {"local": 0, "fedavg": 1}.get(history.recipe, 2)
