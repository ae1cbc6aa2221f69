"""Counts, means and squared deviations that merge without loss: of columns of numbers, and of a model's layers.

Numbers of columns are sorted by the order of float64 as well; of layers it is the mean and variance of their inputs,
for each channel.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, Self, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from piebald.core.errors import SettingError, unknown

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Moments:
    """Moments of the finite numbers in d columns, of one or several clients.

    Attributes:
        rows: number of rows.
        present: finite numbers in each column [d].
        missing: numbers that are not there (NaN) in each column [d].
        infinite: numbers that are infinite in each column [d]; they count in nothing else.
        mean: mean of each column's finite numbers [d], 0 where there are none.
        scatter: sum of their squared deviations from that mean [d].

    Examples:
        >>> first = Moments.of(np.array([[1.0], [2.0]]))
        >>> whole = first.merge(Moments.of(np.array([[3.0], [np.nan]])))
        >>> whole.rows, whole.missing.tolist(), whole.mean.tolist(), whole.variance.tolist()
        (4, [1], [2.0], [1.0])
    """

    rows: int
    present: Ints
    missing: Ints
    infinite: Ints
    mean: Floats
    scatter: Floats

    @classmethod
    def of(cls, values: NDArray[np.floating], names: Sequence[str] = ()) -> Moments:
        """The moments of rows [n, d], by the corrected two-pass algorithm (Chan, Golub, LeVeque 1983, eq. 1.7).

        Args:
            values: the rows.
            names: names of the columns, for the error message.

        Raises:
            SettingError: numbers are so large that their squared deviations overflow.
        """
        # columns one after the other: numpy adds numbers that lie together in pairs, whatever columns are beside
        table = np.ascontiguousarray(np.asarray(values, dtype=np.float64).T)
        finite = np.isfinite(table)
        present, missing = finite.sum(1), np.isnan(table).sum(1)
        counts, rows = np.maximum(present, 1), table.shape[1]
        # the first number of a column as its origin: a constant column has its mean to the bit, and sums stay small
        first = table[np.arange(len(table)), np.argmax(finite, axis=1)] if rows else np.zeros(len(table))
        origin = np.where(present > 0, first, 0.0)[:, None]
        with np.errstate(over="ignore", invalid="ignore"):
            mean = origin[:, 0] + np.where(finite, table - origin, 0.0).sum(1) / counts
            apart = np.where(finite, table - mean[:, None], 0.0)
            off = apart.sum(1)
            # the mean of the deviations, 0 but for rounding, corrects both moments
            scatter = np.maximum(np.square(apart).sum(1) - np.square(off) / counts, 0.0)
            mean = mean + off / counts
        if not (sound := np.isfinite(mean) & np.isfinite(scatter)).all():
            index = int(np.argmin(sound))
            raise SettingError(
                f"column {names[index] if names else index!r} must hold numbers below 1e150 for their variance to be "
                "computed, got larger ones: replace codes for missing values by empty cells"
            )
        return cls(rows, present, missing, rows - present - missing, mean, scatter)

    def merge(self, other: Moments) -> Moments:
        """The moments of the union of both sets of rows (Chan, Golub, LeVeque 1983, eq. 2.1).

        Raises:
            SettingError: they have another number of columns.
        """
        if len(self.mean) != len(other.mean):
            raise SettingError(
                f"moments must have the same number of columns, got {len(self.mean)} and {len(other.mean)}"
            )
        present = self.present + other.present
        # 0 and not 0 / 0 for a column in which neither side has a number
        share = other.present / np.maximum(present, 1)
        apart = other.mean - self.mean
        return Moments(
            self.rows + other.rows,
            present,
            self.missing + other.missing,
            self.infinite + other.infinite,
            np.where(self.present == 0, other.mean, self.mean + share * apart),
            self.scatter + other.scatter + self.present * share * np.square(apart),
        )

    @property
    def variance(self) -> Floats:
        """Unbiased variance of each column [d]; NaN for fewer than two numbers."""
        return np.where(self.present > 1, self.scatter / np.maximum(self.present - 1, 1), np.nan)


class Mergeable(Protocol):
    """Statistics of some rows, which can be merged with those of others."""

    def merge(self, other: Self, /) -> Self:
        """The statistics of both."""
        ...


T = TypeVar("T", bound=Mergeable)


def merged(statistics: Iterable[T]) -> T:
    """The statistics of all rows; in pairs, so that rounding errors grow with the logarithm of the number of clients.

    Raises:
        SettingError: there are none, or they do not fit together.
    """
    parts = list(statistics)
    if not parts:
        raise SettingError("statistics need at least one client, got none")
    # in pairs, so that rounding errors grow with the logarithm of the number of parts
    while len(parts) > 1:
        parts = [parts[i].merge(parts[i + 1]) if i + 1 < len(parts) else parts[i] for i in range(0, len(parts), 2)]
    return parts[0]


def counts_at_most(columns: Sequence[NDArray[np.floating]], thresholds: NDArray[np.floating]) -> Ints:
    """Return how many numbers of each sorted column are at most these thresholds [d, t]."""
    if not len(columns):
        return np.zeros(thresholds.shape, dtype=np.int64)
    counts = [np.searchsorted(column, limits, side="right") for column, limits in zip(columns, thresholds, strict=True)]
    return np.stack(counts).astype(np.int64)


def keys_of(numbers: NDArray[np.floating]) -> Ints:
    """The places of float64 or float32 numbers in their order; those of -0.0 and 0.0 are next to each other."""
    # the bits of positive floats are ordered like whole numbers, those of negative ones in reverse
    kind = np.int32 if numbers.dtype == np.float32 else np.int64
    bits: NDArray[Any] = np.ascontiguousarray(numbers).view(kind)
    return np.where(bits < 0, np.iinfo(kind).min - bits - 1, bits).astype(np.int64)


def number_of(keys: NDArray[np.int64]) -> Floats:
    """The float64 numbers at some places of their order."""
    return np.ascontiguousarray(np.where(keys < 0, np.iinfo(np.int64).min - keys - 1, keys)).view(np.float64)


def number32_of(keys: NDArray[np.int64]) -> NDArray[np.float32]:
    """The float32 numbers at some places of their order."""
    return np.where(keys < 0, np.iinfo(np.int32).min - keys - 1, keys).astype(np.int32).view(np.float32)


def order_statistics(count: Callable[[Ints], Ints], ranks: Ints, low: int, high: int, parts: int = 2) -> Ints:
    """Return the places of the numbers of some ranks in the order of all numbers, from counts alone.

    Args:
        count: counts the numbers of each column that are at most those at some places [d, t]: [d, t].
        ranks: from 0, [d, k].
        low, high: places below and not below all numbers.
        parts: into how many an interval of places is divided by a question, each of which has parts - 1 of them.
    """
    lows, highs = np.full(ranks.shape, low, dtype=np.int64), np.full(ranks.shape, high, dtype=np.int64)
    while bool((lows + 1 < highs).any()):
        # the width of an interval may take 64 bits; upwards, so that the last part is no longer than others
        width = highs.astype(np.uint64) - lows.astype(np.uint64)
        step = ((width + np.uint64(parts - 1)) // np.uint64(parts)).astype(np.int64)[..., None]
        limits = np.minimum(lows[..., None] + step * np.arange(1, parts), highs[..., None])
        below = count(limits.reshape(len(ranks), -1)).reshape(limits.shape) <= ranks[..., None]
        passed = below.sum(-1, keepdims=True)  # limits whose rank is below
        edges = np.concatenate([lows[..., None], limits, highs[..., None]], axis=-1)
        lows, highs = (np.take_along_axis(edges, passed + end, -1)[..., 0] for end in (0, 1))
    return highs


LOWEST, HIGHEST = keys_of(np.array([-np.inf, np.inf])).tolist()


class InputHooks:
    """Context manager that records the inputs of some layers while a model runs.

    Args:
        module: the model.
        names: names of its layers, as in `named_modules`.

    Raises:
        SettingError: the model has no such layer.
    """

    def __init__(self, module: nn.Module, names: Iterable[str]) -> None:
        layers = dict(module.named_modules())
        self.seen: dict[str, Tensor] = {}
        self._layers = {}
        for name in names:
            if name not in layers or not name:
                raise unknown("layer of this model called", name, (layer for layer in layers if layer))
            self._layers[name] = layers[name]
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []

    def __enter__(self) -> InputHooks:
        for name, layer in self._layers.items():

            def record(_: nn.Module, inputs: tuple[Tensor, ...], name: str = name) -> None:
                self.seen[name] = inputs[0]

            self._hooks.append(layer.register_forward_pre_hook(record))
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()


def mean_and_variance(x: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and variance [channels] of a batch [n, channels, ...], over all axes but the second; the variance divides by
    the number of values.
    """
    axes = [axis for axis in range(x.dim()) if axis != 1]
    return x.mean(axes), x.var(axes, unbiased=False)


def sums(x: Tensor) -> tuple[Tensor, Tensor, int]:
    """Sum and sum of squares [channels] in float64 of a batch [n, channels, ...], and the number of values of each."""
    axes = [axis for axis in range(x.dim()) if axis != 1]
    wide = x.double()
    return wide.sum(axes), wide.square().sum(axes), x.numel() // max(1, x.shape[1])
