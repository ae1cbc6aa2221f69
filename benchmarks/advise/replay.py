"""The race, replayed from the truth: what it would have tried, dropped and recommended, without training anything.

The rules are those of `piebald advise`: successive halving over all recipes, each with as many settings as the others;
nothing is dropped inside one standard error of the paired difference to the best; validation rows only; one seed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from grid import DEFAULT_RATE, RATES, ROUNDS, RUNGS, WITHOUT_ROUNDS
from numpy.typing import NDArray
from truth import SCALE

from piebald.report.paired import Scores, difference

Floats = NDArray[np.float64]
FIRST_SHARE = 1 / 3  # of what is tried goes on to the next rung, if noise allows


@dataclass(frozen=True)
class Entry:
    """What is known of a recipe with settings.

    Attributes:
        label, recipe, rate: of the entry.
        validation: accuracy in points [seeds, rungs, clients].
        test: accuracy in points at the end [seeds, clients].
        bytes: sent in a run, the mean over seeds.
    """

    label: str
    recipe: str
    rate: float
    validation: Floats
    test: Floats
    bytes: float

    def scores(self, rung: int, seeds: Sequence[int]) -> Scores:
        """Validation scores after a rung."""
        values = self.validation[list(seeds), rung]
        return Scores(values, [str(client) for client in range(values.shape[1])], list(seeds))

    @property
    def truth(self) -> float:
        """Mean test accuracy over seeds and clients, in points."""
        return float(self.test.mean())


def entries_of(lines: Sequence[Mapping[str, object]]) -> list[Entry]:
    """The entries that have the same number of seeds as most others, in the order of the file."""
    grouped: dict[str, dict[int, Mapping[str, object]]] = {}
    for line in lines:
        grouped.setdefault(str(line["entry"]), {})[int(line["seed"])] = line  # type: ignore[call-overload]
    complete = {seed for seed in (0, 1, 2) if all(seed in seeds for seeds in grouped.values())}
    found = []
    for label, seeds in grouped.items():
        own = [seeds[seed] for seed in sorted(complete)]
        if not own:
            continue
        points = 100 / SCALE
        found.append(Entry(
            label, str(own[0]["recipe"]), float(own[0]["settings"]["lr"]),  # type: ignore[index]
            points * np.array([one["validation"] for one in own], float),
            points * np.array([one["test"] for one in own], float),
            float(np.mean([one["bytes"] for one in own])),  # type: ignore[list-item]
        ))  # fmt: skip
    return found


def tuned(entries: Sequence[Entry]) -> list[Entry]:
    """The grid, without the recipes' own settings."""
    return [one for one in entries if one.rate in RATES]


def chosen(entries: Sequence[Entry], seeds: Sequence[int]) -> Entry:
    """The best by validation rows at the last rung; ties to the first."""
    return max(entries, key=lambda one: one.validation[list(seeds), -1].mean())


@dataclass(frozen=True)
class Outcome:
    """What a race ends with.

    Attributes:
        best: the best by validation rows.
        recommended: the cheapest of those that cannot be told apart from it by more than one standard error.
        rounds: server steps of all runs, of one seed.
    """

    best: Entry
    recommended: Entry
    rounds: int


def race(entries: Sequence[Entry], seed: int, share: float = FIRST_SHARE, settings: int | None = None) -> Outcome:
    """Successive halving over the entries.

    Args:
        entries: what may be tried.
        seed: the seed of its runs.
        share: of the entries that goes on to the next rung.
        settings: settings that each recipe is tried with, the first ones; all by default.
    """
    left = list(entries)
    if settings is not None:
        left = [one for one in left if [o for o in left if o.recipe == one.recipe].index(one) < settings]
    rounds, before = 0, 0
    for rung, reached in enumerate(RUNGS):
        rounds += len(left) * (reached - before)
        before = reached
        left.sort(key=lambda one: -one.validation[seed, rung].mean())
        if reached < ROUNDS:
            keep = max(2, round(len(left) * share))
            left = left[:keep] + [one for one in left[keep:] if _within_noise(left[0], one, rung, seed)]
    near = [one for one in left if one is left[0] or _within_noise(left[0], one, -1, seed)]
    cheapest = min(near, key=lambda one: (one.bytes, -one.validation[seed, -1].mean()))
    return Outcome(left[0], cheapest, rounds)


def _within_noise(best: Entry, other: Entry, rung: int, seed: int) -> bool:
    found = difference(best.scores(rung, [seed]), other.scores(rung, [seed]))
    return found is None or found.error is None or found.mean <= found.error


def is_without_rounds(entry: Entry) -> bool:
    """Whether a recipe needs no rounds."""
    return entry.recipe in WITHOUT_ROUNDS


def own_settings(entries: Sequence[Entry], recipe: str) -> Entry:
    """A recipe as it is for a user who tunes nothing."""
    return next(one for one in entries if one.recipe == recipe and one.rate == DEFAULT_RATE)
