"""Measures of heterogeneity in inputs, labels, sizes and speeds, for each client and for the federation.

They are computed from `Statistics`, so a real federation can report them without moving a row, and a simulation
before a run without loading rows that are not in memory.  A client may share these instead of rows: counts, a mean and
a covariance, which can be merged.  Weight divergence needs training: it is the distance between clients' models after
one local epoch (Zhao et al. 2018).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from piebald.contracts import Clients, Fleet, InMemory, Rows, Split
from piebald.core import pytree
from piebald.core.arguments import Count, Positive, checked, checked_class
from piebald.core.errors import SettingError
from piebald.core.moments import merged
from piebald.core.objective import Objective, objective_for
from piebald.core.parameters import Layout, copied
from piebald.core.randomness import generator, torch_seed
from piebald.core.targets import IGNORED
from piebald.data.clients.convert import class_numbers
from piebald.data.measures.pictures import flat
from piebald.data.partition.split import Ints

if TYPE_CHECKING:
    from piebald.methods.client_work import ClientWork

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


_CLEAR = 1e-8  # share of the largest variance that is far from rounding noise

UNITS = {
    "frechet": "squared units of the embedding, at least 0",
    "total_variation": "share of rows that would have to change class, 0 to 1",
    "earth_mover": "L1 distance of class shares, 0 to 2",
    "rows": "rows",
    "size_gini": "0 (all equal) to 1 (one has all)",
    "speed_gini": "0 (all equal) to 1",
    "seconds": "seconds of one optimizer step",
    "speed_ratio": "slowest over fastest, at least 1",
    "divergence": "share of the average model's length, after one local epoch",
    "pooled_divergence": "share of the length of a model of all rows, after one epoch",
}
MOST_CLIENTS = 10_000  # for more clients the numbers would be unreadable
MOST_EMBEDDED = 100  # clients; each needs the root of a covariance
MOST_ROWS = 100_000  # embedded in total
MOST_NUMBERS = 512  # in an embedding


@checked_class
@dataclass(frozen=True, slots=True, eq=False)
class Heterogeneity:
    """Measures of heterogeneity; `UNITS` has their units.  A measure is None if its data are not known.

    Attributes:
        rows: number of rows of each client [c].
        frechet: squared Fréchet distance of each client's embeddings to those of all others [c].
        total_variation: half the L1 distance of each client's class shares to the federation's [c].
        earth_mover: the L1 distance itself [c], as defined by Zhao et al. 2018, section 3.2.
        seconds: seconds of one step of each client [c].
        divergence: distance of each client's model from the average after one local epoch [c], see `weight_divergence`.
        pooled_divergence: distance of this average from a model trained on all rows.
    """

    rows: Floats
    frechet: Floats | None = None
    total_variation: Floats | None = None
    earth_mover: Floats | None = None
    seconds: Floats | None = None
    divergence: Floats | None = None
    pooled_divergence: float | None = None

    @property
    def federation(self) -> dict[str, float]:
        """One number for each measure: means over clients, each client once, and imbalances.

        The mean of "frechet" is the average Fréchet distance (AFD) of CGAU (Rieger, Høegh, Hansen 2020), eq. 3.
        """
        means = {name: getattr(self, name) for name in ("frechet", "total_variation", "earth_mover", "divergence")}
        # clients without training rows have no divergence (NaN) and do not count
        numbers = {name: float(np.nanmean(values)) for name, values in means.items() if values is not None}
        if self.pooled_divergence is not None:
            numbers["pooled_divergence"] = self.pooled_divergence
        numbers["size_gini"] = gini(self.rows)
        if self.seconds is not None:
            numbers["speed_gini"] = gini(self.seconds)
            numbers["speed_ratio"] = speed_ratio(self.seconds)
        return numbers

    def table(self) -> list[dict[str, float]]:
        """A row of numbers for each client, without unknown measures."""
        columns = {name: getattr(self, name) for name in self.__slots__ if name != "pooled_divergence"}
        numbers_by_name = {name: values.tolist() for name, values in columns.items() if values is not None}
        return [
            dict(zip(numbers_by_name, numbers, strict=True)) for numbers in zip(*numbers_by_name.values(), strict=True)
        ]

    def records(self) -> list[dict[str, Any]]:
        """Rows for a run folder: client (None for the federation), name and value of each measure."""
        rows: list[dict[str, Any]] = [
            {"client": None, "name": name, "value": value} for name, value in self.federation.items()
        ]
        for client, row in enumerate(self.table()):
            rows += [{"client": client, "name": name, "value": value} for name, value in row.items()]
        return rows

    @property
    def units(self) -> dict[str, str]:
        """The unit of each measure that is known."""
        measured = {*self.federation, *self.table()[0]}
        return {name: unit for name, unit in UNITS.items() if name in measured}


@checked
def measure(statistics: Sequence[Statistics], seconds: Sequence[float] | None = None) -> Heterogeneity:
    """Measure heterogeneity from the statistics of each client.

    Args:
        statistics: statistics of each client.
        seconds: seconds of one optimizer step of each client, if known.

    Raises:
        SettingError: there are no clients, or their statistics do not fit together.

    Examples:
        >>> import numpy as np
        >>> import piebald as pb
        >>> labels = [np.array([0, 0]), np.array([1, 1])]
        >>> measured = pb.partition.measure([pb.partition.Statistics.of(label, classes=2) for label in labels])
        >>> measured.federation
        {'total_variation': 0.5, 'earth_mover': 1.0, 'size_gini': 0.0}
    """
    overall = union(statistics)
    if seconds is not None and len(seconds) != len(statistics):
        raise SettingError(f"seconds must have one number for each of {len(statistics)} clients, got {len(seconds)}")
    labels = None
    if overall.counts is not None:
        labels = np.array([total_variation(client.shares, overall.shares) for client in statistics])
    embeddings = None
    if overall.mean is not None:
        with _thread_pools().limit(limits=1):  # several threads take five times as long for matrices of this size
            embeddings = np.array([frechet_to_rest(client, overall) for client in statistics])
    return Heterogeneity(
        rows=np.array([client.rows for client in statistics], dtype=np.float64),
        frechet=embeddings,
        total_variation=labels,
        earth_mover=None if labels is None else 2 * labels,
        seconds=None if seconds is None else np.asarray(seconds, dtype=np.float64),
    )


@cache
def _thread_pools() -> Any:
    """NumPy's pool of threads, which is looked for among the process's libraries once."""
    from threadpoolctl import ThreadpoolController

    return ThreadpoolController()


def total_variation(p: Floats, q: Floats) -> float:
    """Half the L1 distance of two class distributions [classes], in [0, 1]."""
    return float(np.abs(p - q).sum() / 2)


def gini(values: Floats | Sequence[float]) -> float:
    """Gini coefficient of numbers of at least 0: mean difference of two of them over twice their mean.

    0 if all are equal, (n - 1) / n if one of n has all, and 0 by convention if all are 0.

    Examples:
        >>> gini([1, 1, 1]), gini([0, 0, 0, 8])
        (0.0, 0.75)
    """
    ordered = np.sort(np.asarray(values, dtype=np.float64))
    if not len(ordered) or ordered[0] < 0:
        raise SettingError("a Gini coefficient needs at least one number, and none below 0")
    n, whole = len(ordered), float(ordered.sum())
    # The sum over sorted values takes n log n steps, that over pairs n squared.
    if whole == 0:
        return 0.0
    # Rounding may leave a tiny negative number where all are equal.
    return max(0.0, float((2 * np.arange(1, n + 1) - n - 1) @ ordered) / (n * whole))


def speed_ratio(seconds: Floats | Sequence[float]) -> float:
    """Time of the slowest over that of the fastest; 1 where all steps take no time, inf where only some do."""
    times = np.asarray(seconds, dtype=np.float64)
    slowest, fastest = float(times.max()), float(times.min())
    return slowest / fastest if fastest > 0 else 1.0 if slowest == 0 else float("inf")


@checked
def weight_divergence(
    models: NDArray[np.floating], rows: Ints, pooled: NDArray[np.floating] | None = None
) -> tuple[Floats, float | None]:
    """Weight divergence after training from the same start (Zhao et al. 2018, section 3.1), relative to a model's norm.

    Args:
        models: models of the clients after the same local training [c, p].
        rows: number of rows of each client [c], the weights of the average.
        pooled: a model after training on all rows [p], or None.

    Returns:
        |w_k - w| / |w| of each client [c] with the average w, and |w - w_pooled| / |w_pooled| (the paper's measure).
    """
    held = np.asarray(models, dtype=np.float64)  # differences of nearly equal models cancel in float32
    average = np.asarray(rows, dtype=np.float64) @ held / rows.sum()
    tiny = np.finfo(np.float64).tiny
    apart = np.linalg.norm(held - average, axis=1) / max(float(np.linalg.norm(average)), tiny)
    if pooled is None:
        return apart, None
    centre = np.asarray(pooled, dtype=np.float64)
    return apart, float(np.linalg.norm(average - centre) / max(float(np.linalg.norm(centre)), tiny))


def frechet_to_rest(client: Statistics, overall: Statistics) -> float:
    """Squared Fréchet distance of a client's embeddings to those of all others; 0 where one side has no rows.

    Args:
        client: statistics of the client.
        overall: of all clients, this one among them.
    """
    rest = without(overall, client)
    # a mean of no rows is 0 by convention, and a distance to it means nothing
    if not client.rows or not rest.rows:
        return 0.0
    assert client.mean is not None
    assert rest.mean is not None
    return frechet(client.mean, client.covariance, rest.mean, rest.covariance)


def without(overall: Statistics, client: Statistics) -> Statistics:
    """The statistics of the rows of `overall` that are not in `client`; the inverse of `merge`.

    Raises:
        SettingError: `client` is not among them.
    """
    rows = overall.rows - client.rows
    counts = None if overall.counts is None or client.counts is None else overall.counts - client.counts
    if rows < 0 or (counts is not None and counts.min(initial=0) < 0):
        raise SettingError("a client's rows must be among the overall rows: merge its statistics first")
    if overall.mean is None or client.mean is None or overall.scatter is None or client.scatter is None:
        return Statistics(rows, counts)
    if not rows:
        return Statistics(0, counts, np.zeros_like(client.mean), np.zeros_like(client.scatter))
    # Measured from the overall mean, not from 0, to avoid cancellation.
    apart = (client.mean - overall.mean) * (client.rows / rows)
    spread = overall.scatter - client.scatter - np.outer(apart, apart) * (rows * overall.rows / max(client.rows, 1))
    return Statistics(rows, counts, overall.mean - apart, spread)


def frechet(mean: Floats, covariance: Floats, other_mean: Floats, other_covariance: Floats) -> float:
    """Squared Fréchet distance of two normal distributions (CGAU, eq. 2; Dowson, Landau 1982).

        |m1 - m2|^2 + tr(C1) + tr(C2) - 2 tr((C1^(1/2) C2 C1^(1/2))^(1/2))

    The last trace is the sum of the singular values of R1' R2 with C = R R', R without what of C is rounding noise.  No
    root is taken of a product, so covariances of few rows (most eigenvalues are 0) lose no digits.

    Args:
        mean: [d].
        covariance: [d, d], symmetric, positive semi-definite within rounding.
        other_mean: [d].
        other_covariance: [d, d].

    Returns:
        The distance in squared units of the embedding, at least 0.
    """
    roots = _root(covariance).T @ _root(other_covariance)
    shared = np.linalg.svd(roots, compute_uv=False).sum() if roots.size else 0.0
    gap = mean - other_mean
    # rounding may leave a tiny negative number for equal distributions
    return max(0.0, float(gap @ gap + np.trace(covariance) + np.trace(other_covariance) - 2 * shared))


def _root(covariance: Floats) -> Floats:
    """R [d, r] with R R' = covariance, of rank r."""
    with suppress(np.linalg.LinAlgError):  # a tenth of the time of eigenvalues, where none of them is about 0
        lower: Floats = np.linalg.cholesky(np.asarray(covariance, dtype=np.float64))
        if lower.diagonal().min() ** 2 > _CLEAR * covariance.diagonal().max():
            return lower
    values, vectors = np.linalg.eigh(covariance)
    # The bound of numpy.linalg.matrix_rank: smaller eigenvalues are rounding noise.
    positive = values > max(values[-1], 0.0) * len(values) * np.finfo(np.float64).eps
    return np.asarray(vectors[:, positive] * np.sqrt(values[positive]), dtype=np.float64)


@checked
def survey(clients: Clients, fleet: Fleet | None = None) -> Heterogeneity | None:
    """Measure sizes, labels and speeds, and the distance of inputs if few clients have their rows in memory.

    Flattened inputs are the embeddings (`pictures.flat`).

    Args:
        clients: the clients.
        fleet: the clients' devices, if known.

    Returns:
        The measures, or None if counts are not known before rows are loaded, or if there are too many clients.

    Examples:
        >>> import piebald as pb
        >>> clients = pb.partition.Disjoint(clients=2, classes_each=5, limit=200).split(pb.data.digits())
        >>> round(pb.partition.survey(clients).federation["total_variation"], 1)
        0.5
    """
    if len(clients) > MOST_CLIENTS or not _counted(clients):
        return None
    seconds = None if fleet is None else [fleet.device(client).seconds_per_step for client in range(len(clients))]
    return measure(collect(clients, embed=embedding(clients)), seconds)


def embedding(clients: Clients) -> Callable[[Tensor], Tensor] | None:
    """A function from inputs to embeddings, or None if that would be slow: many clients, rows or numbers."""
    if len(clients) > MOST_EMBEDDED or not isinstance(clients, InMemory) or not clients.in_memory():
        return None
    sizes = [clients.size(client, "train") or 0 for client in range(len(clients))]
    if not 0 < sum(sizes) <= MOST_ROWS:
        return None
    # one row is enough to know the form; all of them would be converted to float32
    row = clients.rows(next(client for client, size in enumerate(sizes) if size), "train")[:1].x
    return (
        flat if isinstance(row, Tensor) and row.dtype.is_floating_point and flat(row).shape[1] <= MOST_NUMBERS else None
    )


def _counted(clients: Clients) -> bool:
    """Return whether sizes and classes are known without loading, judged by the first clients."""
    first = range(min(10, len(clients)))
    if any(clients.size(client, "train") is None for client in first):
        return False
    return clients.classes is None or all(clients.counts(client, "train") is not None for client in first)


Measure = Literal["none", "data", "weights"]


MAX_PARAMETERS = 500_000_000  # of all clients' models together, 2 GB


@checked_class
@dataclass(frozen=True, slots=True, eq=False)
class Divergence:
    """The divergence of models after one epoch of local SGD, relative to the norm of a model.

    Attributes:
        clients: |w_k - w| / |w| of each client's model w_k [c]; w is their average weighted by rows,
            which needs no pooled rows.
        pooled: |w - w_SGD| / |w_SGD| (Zhao et al. 2018, section 3.1), w_SGD after one epoch on all rows together.
            Its batches are larger by a factor of the number of clients, so that both take about as many steps.  None
            where rows were not pooled.
    """

    clients: NDArray[np.float64]
    pooled: float | None


@checked
def diverge(
    clients: Clients,
    model: nn.Module,
    *,
    lr: Positive = 0.05,
    batch: Count = 20,
    seed: int = 0,
    loss: Any = None,
    pool: bool = True,
) -> Divergence:
    """Train a copy of one model on each client for one epoch of plain SGD, and measure the divergence.

    Zhao et al. compare FedAvg's model with one that was trained on all rows (`pooled`).  A real federation cannot pool
    rows, so the divergence of each client is measured from the clients' average.  Clients without training rows are
    left out (NaN).

    Args:
        clients: the clients and their rows.
        model: the initial model, which is not changed.
        lr: learning rate.
        batch: rows per step.
        seed: the seed of the order of rows.
        loss: as in `piebald.run`.
        pool: also train on all rows together.

    Raises:
        SettingError: no client has training rows, or the models are too large to keep in memory.
    """
    layout = Layout.of(model)
    if len(clients) * layout.size > MAX_PARAMETERS:
        raise SettingError(
            f"{len(clients)} models of {layout.size} parameters are too large to compare: use fewer clients, or a "
            f"smaller model, for at most {MAX_PARAMETERS} parameters"
        )
    held = [clients.rows(client, "train") for client in range(len(clients))]
    trainable = [client for client, rows in enumerate(held) if len(rows)]
    if not trainable:
        raise SettingError("weight divergence needs clients with training rows, and no client has one")
    objective = objective_for(held[trainable[0]].y, loss)
    # keyed by the client, so that its order of rows does not depend on which clients have rows
    trained = [_epoch(model, layout, objective, held[client], lr, batch, (seed, client)) for client in trainable]
    reference = None
    if pool:
        x, y = ([held[client].x for client in trainable], [held[client].y for client in trainable])
        all_rows = Rows(pytree.joined(x), pytree.joined(y))
        reference = _epoch(model, layout, objective, all_rows, lr, batch * len(trainable), (seed, "pooled")).numpy()
    models = torch.stack(trained).numpy()
    relative, pooled = weight_divergence(models, np.array([len(held[client]) for client in trainable]), reference)
    divergence = np.full(len(clients), np.nan)
    divergence[trainable] = relative
    return Divergence(divergence, pooled)


@checked
def measure_heterogeneity(
    clients: Clients, fleet: Fleet | None, work: ClientWork, how: Measure
) -> Heterogeneity | None:
    """Measure the heterogeneity of a run's clients; None where nothing is requested or known without loading data.

    Args:
        clients: the clients and their rows.
        fleet: the devices of the clients.
        work: the model, loss and seed of the run.
        how: "data" for measures of data and devices, "weights" for weight divergence as well, or "none".
    """
    measured = None if how == "none" else survey(clients, fleet)
    if measured is None or how == "data":
        return measured
    divergence = diverge(clients, work.model, seed=work.seed, loss=work.objective.loss)
    return replace(measured, divergence=divergence.clients, pooled_divergence=divergence.pooled)


def _epoch(
    model: nn.Module,
    layout: Layout,
    objective: Objective,
    rows: Rows,
    lr: float,
    batch: int,
    key: tuple[int | str, ...],
) -> Tensor:
    """The model vector [p] after one epoch of plain SGD.  The global random state is not changed."""
    module = copied(model).train()
    optimiser = torch.optim.SGD(module.parameters(), lr=lr)
    random = generator("divergence", *key)
    with torch_seed(int(random.integers(1 << 62))):  # for dropout
        order = torch.from_numpy(random.permutation(len(rows)))
        for start in range(0, len(rows), batch):
            places = order[start : start + batch]
            if len(places) == 1 and len(rows) > 1:
                continue  # batch norm cannot train on one row; a single last row is left out for all models
            optimiser.zero_grad()
            try:
                loss = objective.loss(pytree.run(module, rows[places].x), rows[places].y).mean()
            except Exception as error:
                raise SettingError(f"the model or the loss fails: {type(error).__name__}: {error}") from error
            torch.autograd.backward(loss)
            optimiser.step()
    return layout.flatten(module)
