"""Learning curves: the evaluations of one run, and bands over the seeds of a label."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypedDict, TypeVar

Number = TypeVar("Number", int, float)
Over = Literal["rounds", "megabytes", "seconds"]  # what users name the axes
Axis = Literal["version", "bytes", "seconds", "wall"]
AXES: dict[Axis, tuple[str, str]] = {
    "version": ("Rounds", "over rounds"),
    "bytes": ("Megabytes sent, both ways, by all clients", "over traffic"),
    "seconds": ("Seconds on the run's clock", "over time"),
    "wall": ("Seconds of real time", "over real time"),
}


class Point(TypedDict):
    """One evaluation: after `version` server steps, `bytes` sent both ways and `seconds` of the runtime's clock."""

    version: int
    bytes: int
    seconds: float
    wall: float
    mean: float


class Evaluated(Protocol):
    """A run with curves, such as `tables.History`."""

    @property
    def label(self) -> str:
        """The run's name in tables."""

    @property
    def metric(self) -> str:
        """The main metric."""

    @property
    def metrics(self) -> list[str]:
        """The names of all metrics by which clients were evaluated."""

    @property
    def final(self) -> dict[str, Any]:
        """The final figures."""

    def curve_of(self, metric: str) -> list[Point]:
        """The mean over clients at each evaluation."""


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


def band_of(curves: Sequence[Sequence[Point]], axis: Axis, points: int = 300) -> Band | None:
    """The band of the curves of several seeds over a cost, None where no seed was evaluated.

    Args:
        curves: one for each seed; those without a point are left out.
        axis: the cost.
        points: the largest number of versions, at least 2; more are thinned out.

    Examples:
        >>> seeds = [
        ...     [Point(version=1, bytes=10, seconds=1.0, wall=1.0, mean=score)] for score in (0.25, 0.75)
        ... ]
        >>> band_of(seeds, "version")
        Band(x=[1.0], mean=[0.5], low=[0.25], high=[0.75], seeds=2, level=False)
    """
    seeds = [{point["version"]: point for point in curve} for curve in curves if curve]
    if not seeds:
        return None
    # averages need the same seeds at every point: otherwise a curve would jump where a seed ends
    versions = sorted(set.intersection(*(set(seed) for seed in seeds)))
    rows = [[seed[version] for seed in seeds] for version in thinned(versions, points)]
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


def thinned(values: list[Number], most: int) -> list[Number]:
    """Values at equal distances in their order, the first and the last among them, where they are more than `most`."""
    if len(values) <= most:
        return values
    # both ends are kept: the last value is the one that tables state
    return [values[round(place * (len(values) - 1) / (most - 1))] for place in range(most)]


def bands_of(curves: Mapping[str, Sequence[Sequence[Point]]], axis: Axis) -> dict[str, Band]:
    """The bands of all labels that have one.

    A label that sends almost nothing (less than a twentieth of the largest traffic) would be a dot on the axis of
    bytes, so it is drawn as a level there.

    Args:
        curves: those of the seeds of each label.
        axis: the cost.
    """
    bands = {label: band for label, seeds in curves.items() if (band := band_of(seeds, axis))}
    last = max((band.x[-1] for band in bands.values()), default=0.0)
    for label, band in bands.items():
        # training alone sends nothing, and would be a dot at the left edge
        if axis == "bytes" and band.x[-1] < 0.05 * last:
            means, low, high = ([values[-1]] * 2 for values in (band.mean, band.low, band.high))
            bands[label] = Band([0.0, last], means, low, high, band.seeds, level=True)
    return bands


def time_axis(runs: Sequence[Evaluated]) -> Axis:
    """The axis of time: the run's clock, or real time where devices take no simulated time."""
    return "seconds" if any(run.final["seconds"] for run in runs) else "wall"
