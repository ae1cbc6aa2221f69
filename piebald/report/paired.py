"""Paired comparisons: differences between methods with intervals.

Scores of a method are a table seeds x clients (`Scores`).  Two methods are compared on the cells that both have, the
same client under the same seed, so that what makes a client or a seed hard for both drops out of the difference.

Intervals hold for *other clients and other seeds*.  A difference is modelled as a mean, plus what is peculiar to the
seed, plus what is peculiar to the client, plus the rest (crossed random effects).  The variance of the mean is that of
the seeds' means, plus that of the clients' means, less that of the rest, which both contain; components are never
below zero.  Degrees of freedom are Satterthwaite's.  A bootstrap of seeds and clients was tried in its place: three
seeds say little about the spread of seeds, and resampling them cannot know that, so its 95 % intervals held the truth
in 72 of 100 simulated cases where seeds matter most.  These do in 93 to 100 (`tests/report/test_paired.py`), also where
clients' effects are as skewed as an exponential distribution, and where nearly all rows are right.  Where one client of
ten gains or fails many times more than the others (lognormal effects, beta shares near 1) they do in 85 to 95: nothing
mends an interval that has not seen such a client.  With fewer than three seeds there is no such interval: `low` and
`high` are the range over the seeds, and `kind` says so.

With fewer than three seeds p comes from the clients alone, for these seeds, and the seeds must agree in the sign.

Every client counts the same, but one with fewer than `FULL_VOTE` rows in proportion, so that two rows decide nothing.
Where it is known which rows a method is right on, the clients at hand are compared row by row (`report.row_noise`);
`report.verdict` takes the one or the other.

Use it like this:

    scores = {"Local": Scores(local, names), "FedAvg": Scores(fedavg, names)}     # arrays [seeds, clients]
    difference(scores["FedAvg"], scores["Local"])                                 # mean, low, high, kind, p
    probability_within(scores, "FedAvg", 0.01)                                    # within one point of the best

Sources: Owen, *The pigeonhole bootstrap*, Annals of Applied Statistics 2007 (crossed random effects); Satterthwaite,
*An approximate distribution of estimates of variance components*, Biometrics Bulletin 1946.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from piebald.core.arguments import NotNegative, checked
from piebald.core.errors import SettingError, unknown
from piebald.core.randomness import generator
from piebald.report.crossed_effects import CrossedEffects, Floats, Kind

_DRAWS = 20_000
_FEW = 10  # wrong rows, below which a share has no normal distribution
FULL_VOTE = 20  # rows from which a client counts as every other


@dataclass(frozen=True, slots=True)
class RowMoments:
    """Moments of the values of a site's rows under a run, which it tells in place of the values.

    Attributes:
        number: of these values, which nothing else has.
        count: the number of values.
        variance: of their mean, for other rows.
        covariances: of their mean with those of other values of the same rows, by number.
    """

    number: int
    count: int
    variance: float
    covariances: Mapping[int, float] = field(default_factory=dict)

    def covariance(self, other: RowMoments) -> float | None:
        """The covariance of two means, None where neither site nor run tells it."""
        if self.number == other.number:
            # the same values: their covariance is their variance
            return self.variance
        return self.covariances.get(other.number, other.covariances.get(self.number))


@dataclass(frozen=True, eq=False)
class Scores:
    """The metric of one method.

    Args:
        values: numbers [seeds, clients]; NaN where a client was not evaluated.
        clients: the clients' names, each once.
        seeds: the seeds, 0, 1, 2 ... by default.
        trained: which clients took part in training, [clients] or [seeds, clients]; all by default.
        sizes: the number of rows behind the values of each client [clients]; empty where that is not known.
        rows: the values of single rows [n] by seed and client, whose mean is the value of the cell.
        errors: by seed and client the standard error of the value for other rows, where single rows are not known.
        moments: by seed and client what is told of single rows that are not known.
        counted: whether each value is the share of rows that are right, so that its noise follows from `sizes`.
        redrawn: whether each seed has drawn its rows anew: then no row of one seed is paired with one of another.

    Raises:
        SettingError: shapes do not fit, names repeat, or a value is infinite.

    Examples:
        >>> scores = Scores(np.array([[0.5, 0.75], [0.25, np.nan]]), ["north", "south"])
        >>> scores.client_means()
        array([0.375, 0.75 ])
    """

    values: Floats
    clients: Sequence[str]
    seeds: Sequence[int] = ()
    trained: NDArray[np.bool_] | None = None
    sizes: Sequence[int] = ()
    rows: Mapping[tuple[int, str], Floats] = field(default_factory=dict)
    errors: Mapping[tuple[int, str], float] = field(default_factory=dict)
    moments: Mapping[tuple[int, str], RowMoments] = field(default_factory=dict)
    counted: bool = False
    redrawn: bool = False

    def __post_init__(self) -> None:
        try:
            values = np.array(self.values, dtype=np.float64)
        except (TypeError, ValueError):
            raise SettingError("values must be numbers [seeds, clients], NaN where one is missing") from None
        clients = tuple(map(str, self.clients))
        if values.ndim != 2 or values.shape[1] != len(clients):
            raise SettingError(
                f"values must have the shape [seeds, clients] with {len(clients)} clients, got {list(values.shape)}"
            )
        if np.isinf(values).any():
            raise SettingError("values must be finite, or NaN where a client was not evaluated, got an infinite one")
        seeds = tuple(map(int, self.seeds)) or tuple(range(len(values)))
        for axis, names, size in (("clients", clients, len(clients)), ("seeds", seeds, len(values))):
            if len(names) != size or len(set(names)) < len(names):
                raise SettingError(f"{axis} must name each of {size} once, got {len(names)} names")
        trained = np.ones(values.shape, bool) if self.trained is None else np.asarray(self.trained, bool)
        if trained.shape not in (values.shape, values.shape[1:]):
            raise SettingError(f"trained must have the shape of values or [clients], got {list(trained.shape)}")
        if len(self.sizes) not in (0, len(clients)):
            raise SettingError(f"sizes must have a number for each of {len(clients)} clients, got {len(self.sizes)}")
        # one row for all seeds where the caller does not tell seeds apart
        trained = np.broadcast_to(trained, values.shape)
        # the dataclass is frozen, so that scores can be shared; this is the one place that sets its fields
        for name, value in zip(
            ("values", "clients", "seeds", "trained"), (values, clients, seeds, trained), strict=True
        ):
            object.__setattr__(self, name, value)

    def cells(self, untrained: bool = False) -> Floats:
        """The values [seeds, clients] that count: NaN for clients that never trained, unless `untrained`."""
        assert self.trained is not None  # it is made in __post_init__
        return self.values if untrained else np.where(self.trained, self.values, np.nan)

    @property
    def votes(self) -> Floats:
        """The weight of each client in means [clients], from 0 to 1: in proportion to its rows, if they are few."""
        return np.minimum(np.array(self.sizes, float) / FULL_VOTE, 1) if len(self.sizes) else np.ones(len(self.clients))

    @property
    def mean(self) -> float:
        """The mean over seeds and, by their votes, over clients; NaN without a value."""
        if not self.present:
            return float("nan")
        cells = self.cells()  # clients that never trained count only where nobody did
        cells = cells if np.isfinite(cells).any() else self.values
        return float(CrossedEffects.of(cells[None], self.votes).mean[0])

    @property
    def present(self) -> bool:
        """True if there is a value at all."""
        return bool(np.isfinite(self.values).any())

    def of_seeds(self, seeds: Sequence[int]) -> Scores:
        """The scores under these seeds only."""
        places = [index for index, seed in enumerate(self.seeds) if seed in seeds]
        assert self.trained is not None  # it is made in __post_init__
        kept = [self.seeds[index] for index in places]
        return replace(self, values=self.values[places], seeds=kept, trained=self.trained[places])

    def of_client(self, name: str) -> Scores:
        """The scores of one client only."""
        column = list(self.clients).index(name)
        assert self.trained is not None  # it is made in __post_init__
        sizes = self.sizes[column : column + 1]
        trained = self.trained[:, [column]]
        return replace(self, values=self.values[:, [column]], clients=[name], trained=trained, sizes=sizes)

    def client_means(self) -> Floats:
        """The mean of each client over the seeds under which it has a value, NaN where it has none."""
        present = ~np.isnan(self.values)
        sums = np.where(present, self.values, 0.0).sum(0)
        return np.where(present.any(0), sums / np.maximum(present.sum(0), 1), np.nan)


@dataclass(frozen=True, slots=True)
class Level:
    """The mean of a method over clients and seeds.

    `low` and `high` are a 95 % interval for other clients and seeds or, of kind "range", the smallest and the largest
    mean of a seed.  `clients` and `seeds` count those with a value.
    """

    mean: float
    low: float
    high: float
    seeds: int
    clients: int
    kind: Kind


@dataclass(frozen=True, slots=True)
class Difference(Level):
    """The mean difference between two methods on the same clients and seeds, see `Level`.

    `error` is its standard error: for clients and seeds, or, of kind "range", for other clients with these seeds; None
    where one client and fewer than three seeds leave it unknown.  `p` is the two-sided p value of "no difference".
    `noise` says for what they hold: for other "clients", or for other "rows" of the clients at hand.
    """

    error: float | None
    p: float
    noise: Literal["rows", "clients"] = "clients"


@checked
def level(scores: Scores, *, bounds: tuple[float, float] | None = None, untrained: bool = False) -> Level | None:
    """The mean of a method over clients and seeds with its interval, None where it has no value.

    Args:
        scores: its scores.
        bounds: the smallest and the largest possible value, such as (0, 1) of accuracies: the interval is made on the
            logit scale, so that it stays between them.
        untrained: count clients that never trained, too.

    Raises:
        SettingError: a value is outside the bounds.
    """
    cells = scores.cells(untrained)
    if np.isnan(cells).all():
        return None
    if bounds is not None and not bounds[0] <= np.nanmin(cells) <= np.nanmax(cells) <= bounds[1]:
        raise SettingError(f"values must be from {bounds[0]:g} to {bounds[1]:g}, got others: give other bounds")
    effects = CrossedEffects.of(cells[None], scores.votes)
    mean, low, high, seeds, clients, kind = effects.ends(0)
    if kind == "interval" and bounds is not None:
        # a symmetric interval around 0.98 would run beyond 1
        low, high = _inside(mean, float(effects.error[0]), float(effects.quantile()[0]), bounds)
    rows = sum(scores.sizes) if scores.counted and bounds == (0, 1) else 0
    if kind == "interval" and rows and min(mean, 1 - mean) * rows < _FEW:
        # clients with hardly a wrong row among theirs show no spread: their rows alone leave this much open
        ends = wilson(mean, rows)
        low, high = min(low, ends[0]), max(high, ends[1])
    if bounds is not None:  # a mean of ones may be rounded up
        mean, low, high = (min(max(end, bounds[0]), bounds[1]) for end in (mean, low, high))
    return Level(mean, low, high, seeds, clients, kind)


@checked
def difference(a: Scores, b: Scores, *, untrained: bool = False, comparisons: int = 1) -> Difference | None:
    """The mean of `a` minus that of `b` on the clients and seeds of both, None where they share none.

    Args:
        a, b: scores of two methods; clients are matched by name, seeds by number.
        untrained: count clients that never trained with either method, too.
        comparisons: the number of comparisons that the interval and p are to hold for together.

    Examples:
        >>> clients = ["north", "south", "west"]
        >>> fedavg = Scores(np.array([[0.5, 0.75, 0.625], [0.5, 0.625, 0.75]]), clients)
        >>> local = Scores(np.array([[0.375, 0.5, 0.5], [0.375, 0.5, 0.5]]), clients)
        >>> gain = difference(fedavg, local)
        >>> gain.mean, gain.low, gain.high, gain.kind
        (0.16666666666666666, 0.16666666666666666, 0.16666666666666666, 'range')
    """
    if (cells := _paired(a, b, untrained)) is None:
        return None
    effects = CrossedEffects.of(cells[None], _votes(a, b))
    error, p = float(effects.error[0]), min(1.0, comparisons * float(effects.p()[0]))
    mean, low, high, seeds, clients, kind = effects.ends(0, comparisons)
    low, high = within_shares(low, high, a, b)
    return Difference(mean, low, high, seeds, clients, kind, None if np.isnan(error) else error, p)


def within_shares(low: float, high: float, a: Scores, b: Scores) -> tuple[float, float]:
    """Return the ends of an interval of a difference, of shares none beyond -1 and 1, whatever Student's t says."""
    return (max(low, -1.0), min(high, 1.0)) if a.counted and b.counted else (low, high)


@checked
def ranking(scores: Mapping[str, Scores], higher_is_better: bool = True, *, untrained: bool = False) -> list[str]:
    """The labels that have a value, the best mean first, on the seeds and clients that all have.

    A method without a score where others do badly does not lead by that.  Ties keep the order of `scores`.

    Examples:
        >>> scores = {"local": Scores([[0.5, 0.75]], "ab"), "fedavg": Scores([[0.75, 0.75]], "ab")}
        >>> ranking(scores), ranking(scores, higher_is_better=False)
        (['fedavg', 'local'], ['local', 'fedavg'])
    """
    common = common_seeds(list(scores.values()))
    tables = {label: table.of_seeds(common) if common else table for label, table in scores.items()}
    shared, means = _shared(tables, untrained), dict[str, float]()
    for label, table in scores.items():
        # the fairest basis that a method has a value on: shared cells, shared seeds, or at last its own
        tries = (level(part, untrained=untrained) for part in (shared.get(label, table), tables[label], table))
        if (average := next(filter(None, tries), None)) is not None:
            means[label] = average.mean
    return sorted(means, key=lambda label: -means[label] if higher_is_better else means[label])


def _shared(tables: Mapping[str, Scores], untrained: bool) -> dict[str, Scores]:
    """The scores of each method that has some, at the clients and seeds at which all of them do; empty if at none."""
    cells = {label: table.cells(untrained) for label, table in tables.items()}
    scored = {
        label: {(table.seeds[row], table.clients[column]) for row, column in np.argwhere(np.isfinite(cells[label]))}
        for label, table in tables.items()
    }
    # methods without any value are left out, as they would empty the common set for all
    common = set.intersection(*([places for places in scored.values() if places] or [set()]))
    if not common:
        return {}
    selected = {
        label: [[(seed, client) in common for client in table.clients] for seed in table.seeds]
        for label, table in tables.items()
    }
    return {
        label: replace(table, values=np.where(selected[label], table.values, np.nan)) for label, table in tables.items()
    }


def common_seeds(tables: Sequence[Scores]) -> list[int]:
    """The seeds that all tables with a value have, in the order of the first."""
    held = [table.seeds for table in tables if table.present]
    return [seed for seed in held[0] if all(seed in seeds for seeds in held)] if held else []


@checked
def probability_within(
    scores: Mapping[str, Scores],
    label: str,
    points: NotNegative,
    higher_is_better: bool = True,
    *,
    untrained: bool = False,
) -> float | None:
    """The probability that the true mean of a method is at most `points` worse than that of the best method tried.

    The true differences of all methods to this one are drawn together, from a multivariate t around what was measured,
    with the covariance over clients and seeds.  With fewer than three seeds it is that over clients, for these seeds.

    Args:
        scores, higher_is_better, untrained: as for `against_best`.
        label: the method.
        points: in units of the metric: 0.01 is one point of accuracy.

    Returns:
        None where one client and fewer than three seeds leave it unknown.

    Raises:
        SettingError: there is no such label, or it shares no client and seed with another method.
    """
    if label not in scores:
        raise unknown("method called", label, scores)
    rivals = [rival for rival in ranking(scores, higher_is_better, untrained=untrained) if rival != label]
    if not rivals:
        return 1.0
    sign = 1.0 if higher_is_better else -1.0
    # all tables have the seeds and clients of `label`, so that their covariance can be estimated together
    tables = [_paired(scores[rival], scores[label], untrained, full=True) for rival in rivals]
    if any(cells is None for cells in tables):
        raise SettingError(f"{label} shares no client and seed with another method, so nothing can be said about it")
    stack = sign * np.stack([cells for cells in tables if cells is not None])
    # votes are those of the method, since all tables have its clients
    effects = CrossedEffects.of(stack, scores[label].votes)
    if np.isnan(effects.error).any():
        return None
    # the square root of a covariance that may be singular, where a Cholesky factor would fail
    values, vectors = np.linalg.eigh(effects.covariance())
    root = vectors * np.sqrt(np.clip(values, 0, None))
    # the key has no seed: the same scores always give the same probability
    random = generator("probability within", label)
    # a multivariate t has one number of degrees of freedom; the smallest is the careful choice
    freedom = float(effects.freedom.min())
    # one draw of chi-square for all methods makes the vector a multivariate t
    scale = np.sqrt(freedom / random.chisquare(freedom, _DRAWS))
    drawn = effects.mean + scale[:, None] * (random.standard_normal((_DRAWS, len(rivals))) @ root.T)
    # a tolerance, so that a method that ties with itself is within zero points
    return float((drawn.max(axis=1) <= points + 1e-12).mean())


def _paired(a: Scores, b: Scores, untrained: bool, full: bool = False) -> Floats | None:
    """The differences on common seeds and clients; `full` keeps the seeds and clients of `b` and marks the rest NaN."""
    rows = {seed: row for row, seed in enumerate(a.seeds)}
    columns = {client: column for column, client in enumerate(a.clients)}
    seeds = [index for index, seed in enumerate(b.seeds) if seed in rows]
    clients = [index for index, client in enumerate(b.clients) if client in columns]
    # matched by name and seed, as runs need not have the same clients, nor in the same order
    ours = a.cells(untrained)[np.ix_([rows[b.seeds[i]] for i in seeds], [columns[b.clients[i]] for i in clients])]
    theirs = b.cells(untrained)[np.ix_(seeds, clients)]
    gaps = np.asarray(ours - theirs)
    if not np.isfinite(gaps).any():
        return None
    if full:
        table = np.full((len(b.seeds), len(b.clients)), np.nan)
        table[np.ix_(seeds, clients)] = gaps
        return table
    return gaps


def _votes(a: Scores, b: Scores) -> Floats:
    """The votes of the clients of `b` that `a` has as well, in the order of `b`."""
    votes = dict(zip(a.clients, a.votes, strict=True))
    # a difference knows no more of a client than the method that has fewer rows of it
    return np.array([min(votes[name], vote) for name, vote in zip(b.clients, b.votes, strict=True) if name in votes])


def wilson(share: float, rows: int) -> tuple[float, float]:
    """The 95 % score interval of a share of rows (Wilson 1927)."""
    square = 1.959964**2 / max(rows, 1)
    centre, half = share + square / 2, np.sqrt(square * (share * (1 - share) + square / 4))
    return float((centre - half) / (1 + square)), float((centre + half) / (1 + square))


def _inside(mean: float, error: float, quantile: float, bounds: tuple[float, float]) -> tuple[float, float]:
    """An interval between bounds: made on the logit scale, where a mean has no end to run into."""
    width = bounds[1] - bounds[0]
    share = (mean - bounds[0]) / width
    # the logit has no value at the ends: all scores are 0 or all are 1
    if share <= 0 or share >= 1:
        return mean, mean
    centre = np.log(share / (1 - share))
    # the delta method: the derivative of the logit is 1 / (p (1 - p))
    half = quantile * error / width / (share * (1 - share))
    low, high = (float(1 / (1 + np.exp(-end))) for end in (centre - half, centre + half))
    return bounds[0] + width * low, bounds[0] + width * high
