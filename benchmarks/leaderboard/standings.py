"""What the runs say: the scores of each method with its chosen setting, by federation and over federations."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from competition import CLIENTS, REFUSED, SEEDS, chosen, fits, label, read, table
from methods import ALONE, BY_NAME, NAIVE, POOLED, RUN, TOGETHER
from numpy.typing import NDArray
from scipy.stats import norm, t
from tiers import FEDERATIONS, SMALL, Entrants

from piebald.report.crossed_effects import ERROR_RATE
from piebald.report.paired import Difference, Scores, ranking
from piebald.report.verdict import compared
from piebald.storage.schema import unpacked_values

FEWEST = 5  # data sets, below which nothing is said of others
DRAWS = 20_000
SHARED = 0.5  # the correlation of two differences to the same method where single rows are not known
Floats = NDArray[np.float64]


def against(scores: Mapping[str, Scores], reference: str, one_sided: bool = False) -> dict[str, Difference]:
    """The mean of each method minus that of the reference, with simultaneous intervals and p values.

    Args:
        scores: by method.
        reference: the method that all others are compared with.
        one_sided: whether only one direction is asked for; p below the error rate then means that direction.
    """
    others = [name for name in scores if name != reference]
    count = effective_comparisons(scores, reference, one_sided)
    found = {name: compared(scores[name], scores[reference], count) for name in others}
    return {name: difference for name, difference in found.items() if difference is not None}


def not_behind(scores: Mapping[str, Scores]) -> list[str]:
    """The leader, and all methods that are not clearly behind it, the best mean first."""
    order = ranking(scores)
    behind = against(scores, order[0], one_sided=True)
    return [name for name in order if name == order[0] or behind[name].p >= ERROR_RATE]


def effective_comparisons(scores: Mapping[str, Scores], reference: str, one_sided: bool = False) -> int:
    """The number of independent comparisons that exceed the bound as often as these correlated ones, rounded up."""
    # the same scores always give the same number
    correlation = _correlations(scores, reference)
    values, vectors = np.linalg.eigh(correlation)
    root = vectors * np.sqrt(np.clip(values, 0, None))
    drawn = np.random.default_rng(len(correlation)).standard_normal((DRAWS, len(correlation))) @ root.T
    largest = (drawn if one_sided else abs(drawn)).max(axis=1)
    bound = float(np.quantile(largest, 1 - ERROR_RATE))
    # p values are two-sided: of a one-sided question they may be twice as large
    return max(1, math.ceil(ERROR_RATE / (2 * norm.sf(bound)) - 1e-9))


def _correlations(scores: Mapping[str, Scores], reference: str) -> Floats:
    """The correlations of the differences to the reference, from the mean differences of single rows over seeds."""
    gaps = [_row_gaps(table, scores[reference]) for name, table in scores.items() if name != reference]
    found = np.full((len(gaps), len(gaps)), SHARED)
    known = [place for place, gap in enumerate(gaps) if gap is not None and gap.any()]
    if known:
        table = np.stack([gaps[place] for place in known])  # type: ignore[arg-type]
        found[np.ix_(known, known)] = table @ table.T / np.outer(*[np.sqrt((table**2).sum(1))] * 2)
    np.fill_diagonal(found, 1.0)
    return found


def _row_gaps(a: Scores, b: Scores) -> Floats | None:
    """The difference of each row, less its client's mean, by the weight of a row in the mean over clients."""
    parts = []
    for client, vote in zip(a.clients, a.votes, strict=True):
        pairs = [(a.rows.get((seed, client)), b.rows.get((seed, client))) for seed in a.seeds if seed in b.seeds]
        if any(x is None or y is None for x, y in pairs):
            return None
        gap = np.mean([x - y for x, y in pairs if x is not None and y is not None], axis=0)
        parts.append(vote / len(gap) * (gap - gap.mean()) if len(gap) else gap)
    return np.concatenate(parts)


def over_federations(gains: Sequence[float], rows: Sequence[str]) -> tuple[float, float, float]:
    """The mean of gains on several federations, and its 95 % interval for other federations, NaN of too few.

    Args:
        gains: one of each federation.
        rows: the data set of each; those of the same one are drawn together.
    """
    groups = [[gain for gain, own in zip(gains, rows, strict=True) if own == name] for name in dict.fromkeys(rows)]
    mean, count = float(np.mean(gains)), len(groups)
    if count < FEWEST:
        return mean, math.nan, math.nan
    sums, sizes = np.array([sum(group) for group in groups]), np.array([len(group) for group in groups])
    drawn = np.random.default_rng(count).integers(count, size=(DRAWS, count))
    means = sums[drawn].sum(1) / sizes[drawn].sum(1)
    # a bootstrap of few values is too narrow: its percentiles are those that Student's t would need
    level = norm.cdf(-math.sqrt(count / (count - 1)) * t.ppf(1 - ERROR_RATE / 2, count - 1))
    low, high = np.quantile(means, [level, 1 - level])
    return mean, float(low), float(high)


NOT_FEDERATED = (NAIVE, POOLED)


@dataclass(frozen=True)
class Result:
    """A method on a federation, with its chosen setting.

    Attributes:
        settings: the chosen one.
        scores: of test rows.
        validation: the mean share of right validation rows over clients and seeds.
        megabytes, seconds: of a run, the means over seeds; seconds of a processor, NaN where they were not measured.
    """

    settings: Mapping[str, Any]
    scores: Scores
    validation: float
    megabytes: float
    seconds: float


@dataclass(frozen=True, eq=False)
class Standing:
    """All methods on a federation.

    Attributes:
        federation: which one.
        results: by method; only those whose runs with all seeds are there.
        naive: the scores of each client's most frequent class.
        refused: methods that cannot be trained here, and why.
        absent: methods whose runs are not all there.
    """

    federation: Entrants
    results: Mapping[str, Result]
    naive: Scores
    refused: Mapping[str, str]
    absent: Sequence[str]

    @property
    def scores(self) -> dict[str, Scores]:
        """Of all rows of the table."""
        return {name: result.scores for name, result in self.results.items()} | {NAIVE: self.naive}

    @cached_property
    def over_alone(self) -> dict[str, Difference]:
        """Each method less training alone, all comparisons together."""
        return against(self.scores, ALONE)

    @cached_property
    def near(self) -> list[str]:
        """The leader and those that are not clearly behind it, among what a federation can have."""
        return not_behind({name: own for name, own in self.scores.items() if name not in NOT_FEDERATED})

    def points(self, method: str) -> float:
        """Points of mean test accuracy over training alone."""
        return 0.0 if method == ALONE else 100 * self.over_alone[method].mean

    def side(self, method: str) -> int:
        """Return 1 where a method is clearly better than training alone, -1 where it is clearly worse, else 0."""
        gap = self.over_alone.get(method)
        return 0 if gap is None or gap.p >= ERROR_RATE else 1 if gap.mean > 0 else -1

    def best(self, methods: Sequence[str]) -> str:
        """The method with the most right validation rows: test rows choose nothing."""
        return max((name for name in methods if name in self.results), key=lambda name: self.results[name].validation)


def standings(folder: Path, tier: str = SMALL) -> list[Standing]:
    """The federations whose Local and FedAvg are there with all seeds, and their methods that are."""
    clients, found = table(CLIENTS, folder), []
    for federation in FEDERATIONS:
        if federation.tier != tier or federation.name not in clients:
            continue
        lines, known, refused = read(federation.name, folder), clients[federation.name], table(REFUSED, folder)
        results = {}
        for method in RUN:
            best = chosen(method, lines)
            key = "" if best is None else label(method.settings()[best])
            own = [lines[method.name, key, seed] for seed in SEEDS if (method.name, key, seed) in lines]
            if len(own) == len(SEEDS):
                results[method.name] = _result(own, known)
        cannot = refused.get(federation.name, {})
        absent = [m.name for m in RUN if fits(federation, m) and m.name not in results and m.name not in cannot]
        if ALONE in results and TOGETHER in results:
            naive = [known["naive"]] * len(SEEDS)
            found.append(Standing(federation, results, _scores(naive, known), cannot, absent))
    return found


def families() -> dict[str, list[str]]:
    """The methods of each family, but for the rows that all are held against."""
    found: dict[str, list[str]] = {}
    for method in RUN:
        if method.name not in (ALONE, POOLED):
            found.setdefault(method.family, []).append(method.name)
    return found


def gain(found: Sequence[Standing], pick: Callable[[Standing], str]) -> tuple[float, float, float]:
    """Points over training alone of what is picked on each federation: mean and interval over federations."""
    gains = [one.points(pick(one)) for one in found]
    return over_federations(gains, [one.federation.rows for one in found])


def judged_on(method: str, found: Sequence[Standing]) -> list[Standing]:
    """The federations that a method is judged on: those with equal devices, if it is there at all."""
    own = [one for one in found if method in one.scores]
    return [one for one in own if not one.federation.slow] or own


def hours_of(lines: Sequence[Mapping[str, Any]]) -> float:
    """Hours of a processor of a federation's runs, NaN where none was measured."""
    measured = [line["cpu"] for line in lines if "cpu" in line]
    return float(np.mean(measured)) * len(lines) / 3600 if measured else np.nan


def first_to_try(found: Sequence[Standing]) -> list[str]:
    """The methods that all of some federations have, by the mean gain of validation rows over training alone."""
    common = [name for name in BY_NAME if name != POOLED and all(name in one.results for one in found)]
    gains = {n: np.mean([one.results[n].validation - one.results[ALONE].validation for one in found]) for n in common}
    return sorted(gains, key=lambda name: -gains[name])


def _result(lines: Sequence[dict[str, Any]], known: Mapping[str, Any]) -> Result:
    held = np.array(known["validation"]) > 0
    shares = np.array([line["validation"] for line in lines])[:, held] / np.array(known["validation"])[held]
    return Result(
        settings=lines[0]["settings"],
        scores=_scores([line["test"] for line in lines], known),
        validation=float(shares.mean()),
        megabytes=float(np.mean([line["bytes"] for line in lines])) / 1e6,
        seconds=float(np.mean([line.get("cpu", np.nan) for line in lines])),
    )


def _scores(tests: Sequence[str | list[int]], known: Mapping[str, Any]) -> Scores:
    """Scores of test rows by seed: of single rows as text, or the number of right ones of each client."""
    sizes, ends, rows, values = known["test"], np.cumsum(known["test"])[:-1], {}, []
    for seed, test in zip(SEEDS, tests, strict=True):
        if isinstance(test, str):
            parts = dict(zip(known["clients"], np.split(unpacked_values(test), ends), strict=True))
            rows |= {(seed, client): part for client, part in parts.items()}
            values.append([part.mean() if len(part) else np.nan for part in parts.values()])
        else:
            values.append([right / size if size else np.nan for right, size in zip(test, sizes, strict=True)])
    return Scores(np.array(values), known["clients"], list(SEEDS), sizes=sizes, rows=rows, counted=True)
