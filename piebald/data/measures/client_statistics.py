"""Statistics that a client may share instead of rows: counts, a mean and a covariance, which can be merged."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from piebald.contracts import Clients, Split
from piebald.core import pytree
from piebald.core.arguments import checked, checked_class
from piebald.core.errors import SettingError
from piebald.core.moments import merged
from piebald.core.targets import IGNORED
from piebald.data.clients.convert import class_numbers
from piebald.data.partition.split import Ints

Floats = NDArray[np.float64]


@checked_class
@dataclass(frozen=True, slots=True, eq=False)
class Statistics:
    """Statistics of the rows of one or several clients; `merge` gives those of the union of rows.

    Statistics of few rows reveal much: the mean of one row is the row.  Add noise or require a minimum number of rows
    if that matters.

    Attributes:
        rows: number of rows.
        counts: rows of each class [classes], None if targets are not classes.
        mean: mean embedding [d], None without embeddings.
        scatter: sum of (z - mean) (z - mean)' over the embeddings z [d, d], None without embeddings.

    Raises:
        SettingError: counts do not add up to rows, or shapes do not fit together.

    Examples:
        >>> import numpy as np
        >>> import piebald as pb
        >>> ward = pb.partition.Statistics.of(np.array([0, 0, 1, 1]), classes=2)
        >>> both = ward.merge(pb.partition.Statistics.of(np.array([0, 0, 0, 0]), classes=2))
        >>> both.shares
        array([0.75, 0.25])
    """

    rows: int
    counts: Ints | None = None
    mean: Floats | None = None
    scatter: Floats | None = None

    def __post_init__(self) -> None:
        _check_array("counts", self.counts, "iu", 1)
        _check_array("mean", self.mean, "iuf", 1)
        _check_array("scatter", self.scatter, "iuf", 2)
        if self.counts is not None and int(self.counts.sum()) != self.rows:
            raise SettingError(f"counts must add up to the {self.rows} rows, got {int(self.counts.sum())}")
        if (self.mean is None) != (self.scatter is None):
            raise SettingError("mean and scatter must both be given or both be left out")
        if self.mean is not None and self.scatter is not None and self.scatter.shape != (len(self.mean),) * 2:
            d = len(self.mean)
            raise SettingError(f"scatter must be [{d}, {d}] like the mean, got {list(self.scatter.shape)}")

    @classmethod
    def of(
        cls, label: Ints | None = None, classes: int = 0, embedding: NDArray[np.floating] | None = None
    ) -> Statistics:
        """Statistics of rows.

        Args:
            label: class of each row [n], None where targets are not classes; rows of class -100 are left out.
            classes: how many classes there are.
            embedding: a vector for each row [n, d], or None.

        Raises:
            SettingError: neither is given, lengths differ, or a label or a number is out of range.
        """
        if label is None and embedding is None:
            raise SettingError("statistics need a label or an embedding of each row, got neither")
        counts = None
        if label is not None:
            if not (known := label != IGNORED).all():
                label, embedding = label[known], embedding if embedding is None else np.asarray(embedding)[known]
            if len(label) and not 0 <= int(label.min()) <= int(label.max()) < classes:
                raise SettingError(f"labels must be in 0..{classes - 1}, got {int(label.min())}..{int(label.max())}")
            counts = np.bincount(label, minlength=classes)
        if embedding is None:
            return cls(0 if label is None else len(label), counts)
        # sums of squares in float32 lose the small variances of many rows
        z = np.asarray(embedding, dtype=np.float64)
        if z.ndim != 2 or (label is not None and len(label) != len(z)):
            raise SettingError(f"embeddings must be [rows, d] with a row for each label, got {list(z.shape)}")
        if not np.isfinite(z).all():
            raise SettingError("embeddings must be finite numbers: look for rows with gaps or overflows")
        # NumPy's mean of no rows is NaN, which `merge` would carry to the union
        mean = z.mean(0) if len(z) else np.zeros(z.shape[1])
        # Centred before products are summed: the difference of two large sums would lose the small variances.
        centred = z - mean
        return cls(len(z), counts, mean, centred.T @ centred)

    def merge(self, other: Statistics) -> Statistics:
        """The statistics of the union of both sets of rows (Chan, Golub, LeVeque 1979, for the scatter).

        Raises:
            SettingError: one lacks counts or embeddings that the other has, or their shapes differ.
        """
        rows = self.rows + other.rows
        counts = mean = scatter = None
        if self.counts is not None and other.counts is not None and len(self.counts) == len(other.counts):
            counts = self.counts + other.counts
        elif self.counts is not None or other.counts is not None:
            raise SettingError("statistics can be merged only if all count the same classes")
        if self.mean is not None and other.mean is not None and len(self.mean) == len(other.mean):
            assert self.scatter is not None  # for the type checker; it comes with the mean
            assert other.scatter is not None
            # Deviations from the means are merged, not raw sums, which would cancel.
            apart = other.mean - self.mean
            # two empty sets give 0 and not NaN
            share = other.rows / max(rows, 1)
            mean = self.mean + share * apart
            scatter = self.scatter + other.scatter + self.rows * share * np.outer(apart, apart)
        elif self.mean is not None or other.mean is not None:
            raise SettingError("statistics can be merged only if all have embeddings of the same length")
        return Statistics(rows, counts, mean, scatter)

    @property
    def shares(self) -> Floats:
        """Share of each class [classes]; zeros if there are no rows."""
        assert self.counts is not None
        return np.asarray(self.counts / max(self.rows, 1), dtype=np.float64)

    @property
    def covariance(self) -> Floats:
        """Unbiased covariance of the embeddings [d, d]; zeros if there are fewer than two rows."""
        assert self.scatter is not None
        return np.asarray(self.scatter / max(self.rows - 1, 1), dtype=np.float64)


def _check_array(name: str, array: NDArray[np.generic] | None, kinds: str, dimensions: int) -> None:
    if array is not None and (array.dtype.kind not in kinds or array.ndim != dimensions):
        numbers = "whole numbers" if kinds == "iu" else "numbers"
        raise SettingError(
            f"{name} must be an array of {numbers} with {dimensions} dimension{'s' * (dimensions > 1)}, "
            f"got {array.dtype} with {array.ndim}"
        )


@checked
def collect(
    clients: Clients, split: Split = "train", embed: Callable[[Tensor], Tensor] | None = None
) -> list[Statistics]:
    """The statistics of every client.

    Args:
        clients: the clients.
        split: split of the rows.
        embed: function from inputs [n, ...] to embeddings [n, d], such as an extractor; without it rows are only
            counted, and not fetched if the clients know their counts.
    """
    return [_of_client(clients, client, split, embed) for client in range(len(clients))]


def union(statistics: Sequence[Statistics]) -> Statistics:
    """The statistics of the rows of all; counts alone are added at once, for there may be ten thousand of them.

    Raises:
        SettingError: there are none, or they do not fit together.
    """
    counts = [client.counts for client in statistics if client.mean is None and client.counts is not None]
    if counts and len(counts) == len(statistics) and len({len(count) for count in counts}) == 1:
        return Statistics(sum(client.rows for client in statistics), np.sum(counts, axis=0))
    return merged(statistics)


def _of_client(clients: Clients, client: int, split: Split, embed: Callable[[Tensor], Tensor] | None) -> Statistics:
    counts = clients.counts(client, split)
    # known counts come first: no row is fetched or decoded for them
    if embed is None and counts is not None:
        return Statistics(sum(counts), np.asarray(counts, dtype=np.int64))
    if embed is None and clients.classes is None and (size := clients.size(client, split)) is not None:
        return Statistics(size)
    rows = clients.rows(client, split)
    label = None
    if clients.classes is not None:
        label = class_numbers(rows.y)
    if label is None and embed is None:
        return Statistics(len(rows))
    embedding = None if embed is None else embed(pytree.single(rows.x, "an embedding")).detach().cpu().numpy()
    return Statistics.of(label, len(clients.classes or ()), embedding)
