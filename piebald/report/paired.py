"""Paired comparisons: differences between methods with intervals, and the methods that cannot be told apart.

Scores of a method are a table seeds x clients (`Scores`).  Two methods are compared on the cells that both have, the
same client under the same seed, so that what makes a client or a seed hard for both drops out of the difference.

Intervals hold for *other clients and other seeds*.  A difference is modelled as a mean, plus what is peculiar to the
seed, plus what is peculiar to the client, plus the rest (crossed random effects).  The variance of the mean is that of
the seeds' means, plus that of the clients' means, less that of the rest, which both contain; components are never
below zero.  Degrees of freedom are Satterthwaite's.  A bootstrap of seeds and clients was tried in its place: three
seeds say little about the spread of seeds, and resampling them cannot know that, so its 95 % intervals held the truth
in 72 of 100 simulated cases where seeds matter most.  These do in 93 to 100 (`tests/report/test_paired.py`).  With
fewer than three seeds there is no such interval: `low` and `high` are the range over the seeds, and `kind` says so.

The best of k methods is chosen by the same scores that it is compared by.  It is compared with each other method, and
a p value is multiplied by the k - 1 comparisons (Bonferroni; Hsu's multiple comparisons with the best).  So a method
that is truly the best is left out of those that "cannot be told apart" in at most 5 % of cases, and a single winner
appears among methods that are all equal in at most 5 %.  With fewer than three seeds p comes from the clients alone,
for these seeds, and the seeds must agree in the sign.

Use it like this:

    scores = {"Local": Scores(local, names), "FedAvg": Scores(fedavg, names)}     # arrays [seeds, clients]
    difference(scores["FedAvg"], scores["Local"])                                 # mean, low, high, kind, p
    cannot_be_told_apart(scores)                                                  # labels, the best mean first
    probability_within(scores, "FedAvg", 0.01)                                    # within one point of the best

Sources: Owen, *The pigeonhole bootstrap*, Annals of Applied Statistics 2007 (crossed random effects); Satterthwaite,
*An approximate distribution of estimates of variance components*, Biometrics Bulletin 1946; Hsu, *Constrained
simultaneous confidence intervals for multiple comparisons with the best*, Annals of Statistics 1984.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from piebald.core.arguments import NotNegative, checked
from piebald.core.errors import SettingError, unknown
from piebald.core.randomness import generator
from piebald.report.crossed_effects import ERROR_RATE, CrossedEffects, Floats, Kind

_DRAWS = 20_000


@dataclass(frozen=True, eq=False)
class Scores:
    """The metric of one method.

    Args:
        values: numbers [seeds, clients]; NaN where a client was not evaluated.
        clients: the clients' names, each once.
        seeds: the seeds, 0, 1, 2 ... by default.
        trained: which clients took part in training, [clients] or [seeds, clients]; all by default.

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
    """

    error: float | None
    p: float


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
    effects = CrossedEffects.of(cells[None])
    mean, low, high, seeds, clients, kind = effects.ends(0)
    if kind == "interval" and bounds is not None:
        # a symmetric interval around 0.98 would run beyond 1
        low, high = _inside(mean, float(effects.error[0]), float(effects.quantile()[0]), bounds)
    if bounds is not None:  # a mean of ones may be rounded up
        mean, low, high = (min(max(end, bounds[0]), bounds[1]) for end in (mean, low, high))
    return Level(mean, low, high, seeds, clients, kind)


@checked
def difference(a: Scores, b: Scores, *, untrained: bool = False) -> Difference | None:
    """The mean of `a` minus that of `b` on the clients and seeds of both, None where they share none.

    Args:
        a, b: scores of two methods; clients are matched by name, seeds by number.
        untrained: count clients that never trained with either method, too.

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
    effects = CrossedEffects.of(cells[None])
    error = float(effects.error[0])
    return Difference(*effects.ends(0), None if np.isnan(error) else error, float(effects.p()[0]))


@checked
def against_best(
    scores: Mapping[str, Scores], higher_is_better: bool = True, *, untrained: bool = False
) -> dict[str, Difference | None]:
    """The lead of the best method over each other one: the mean of the best minus the other's, with p adjusted.

    Args:
        scores: scores by label.
        higher_is_better: whether a larger value of the metric is better.
        untrained: count clients that never trained, too.

    Returns:
        the best label first, with a difference of zero to itself, then the others by their means.  p values are
        multiplied by the number of comparisons.  None where two methods share no client and seed.
    """
    order = ranking(scores, higher_is_better, untrained=untrained)
    leads: dict[str, Difference | None] = {}
    for label in order:
        lead = difference(scores[order[0]], scores[label], untrained=untrained)
        if lead is not None and label != order[0]:
            # Bonferroni: the best was chosen by the same scores, so all comparisons with it count
            adjusted = min(1.0, lead.p * (len(order) - 1))
            lead = Difference(lead.mean, lead.low, lead.high, lead.seeds, lead.clients, lead.kind, lead.error, adjusted)
        leads[label] = lead
    return leads


@checked
def cannot_be_told_apart(
    scores: Mapping[str, Scores], higher_is_better: bool = True, *, untrained: bool = False
) -> list[str]:
    """The best method and all that cannot be told apart from it, the best mean first.

    Without scores that pair with those of the best a method cannot be told apart from it either.

    Args:
        scores, higher_is_better, untrained: as for `against_best`.

    Examples:
        >>> rng, clients = np.random.default_rng(0), [f"site-{number}" for number in range(20)]
        >>> base = rng.uniform(0.4, 0.6, (3, 20))
        >>> values = {"local": base, "fedavg": base + 0.2, "fedprox": base + 0.2 + rng.normal(0, 0.05, (3, 20))}
        >>> scores = {label: Scores(table, clients) for label, table in values.items()}
        >>> sorted(cannot_be_told_apart(scores))
        ['fedavg', 'fedprox']
    """
    return not_told_apart(against_best(scores, higher_is_better, untrained=untrained))


def not_told_apart(leads: Mapping[str, Difference | None]) -> list[str]:
    """The labels of `against_best` that cannot be told apart from the best one, which is the first."""
    return [label for label, lead in leads.items() if lead is None or lead.p >= ERROR_RATE]


@checked
def ranking(scores: Mapping[str, Scores], higher_is_better: bool = True, *, untrained: bool = False) -> list[str]:
    """The labels that have a value, the best mean first; ties keep the order of `scores`.

    Examples:
        >>> scores = {"local": Scores([[0.5, 0.75]], "ab"), "fedavg": Scores([[0.75, 0.75]], "ab")}
        >>> ranking(scores), ranking(scores, higher_is_better=False)
        (['fedavg', 'local'], ['local', 'fedavg'])
    """
    means = {
        label: average.mean for label in scores if (average := level(scores[label], untrained=untrained)) is not None
    }
    return sorted(means, key=lambda label: -means[label] if higher_is_better else means[label])


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
    effects = CrossedEffects.of(sign * np.stack([cells for cells in tables if cells is not None]))
    if np.isnan(effects.error).any():
        return None
    # the square root of a covariance that may be singular, where a Cholesky factor would fail
    values, vectors = np.linalg.eigh(effects.covariance())
    root = vectors * np.sqrt(np.clip(values, 0, None))
    # the key has no seed: the same scores always give the same probability
    random = generator("probability within", label)
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
    seeds = [place for place, seed in enumerate(b.seeds) if seed in rows]
    clients = [place for place, client in enumerate(b.clients) if client in columns]
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


def _inside(mean: float, error: float, quantile: float, bounds: tuple[float, float]) -> tuple[float, float]:
    """An interval between bounds: made on the logit scale, where a mean has no end to run into."""
    width = bounds[1] - bounds[0]
    share = (mean - bounds[0]) / width
    # the logit has no value at the ends: all scores are 0 or all are 1
    if share <= 0 or share >= 1:
        return mean, mean
    centre = np.log(share / (1 - share))
    half = quantile * error / width / (share * (1 - share))
    low, high = (float(1 / (1 + np.exp(-end))) for end in (centre - half, centre + half))
    return bounds[0] + width * low, bounds[0] + width * high
