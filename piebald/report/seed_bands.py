"""The learning curve of several seeds: their mean, with the smallest and the largest value."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from piebald.report.tables import Point

Axis = Literal["version", "bytes", "seconds", "wall"]


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


def band_of(curves: Sequence[Sequence[Point]], axis: Axis, points: int) -> Band | None:
    """The band of the curves of several seeds over a cost, None where no seed was evaluated.

    Args:
        curves: one for each seed; those without a point are left out.
        axis: the cost.
        points: the largest number of versions, at least 2; more are thinned out.
    """
    seeds = [{point["version"]: point for point in curve} for curve in curves if curve]
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
