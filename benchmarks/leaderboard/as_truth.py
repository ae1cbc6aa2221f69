"""The runs of the leaderboard as truth for the adviser: which settings a portfolio should have, learned from these.

Each portfolio is learned from the federations of other data sets (`benchmarks/advise/portfolio.py`).  What it costs is
the test accuracy of the setting that validation rows choose from all, less that of the one that they choose from the
portfolio.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from competition import CLIENTS, RESULTS, SEEDS, label, read, table
from methods import ALONE, POOLED
from standings import standings
from tiers import Entrants

from piebald.storage.schema import unpacked_values

sys.path.append(str(Path(__file__).parents[1] / "advise"))
import known
import portfolio
import truth
from grid import GRID, RATES
from known import Entry, Known

LEARNED, SHIPPED = "learned here", "learned as the shipped one, from the adviser's runs"
COUNT = 20  # settings that the adviser's race takes
Settings = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Cost:
    """What a portfolio costs, leaving out data sets.

    Attributes:
        words: which one it is.
        points: lost on each federation against choosing from all settings.
    """

    words: str
    points: Sequence[float]


def known_federations(folder: Path = RESULTS) -> list[Known]:
    """The federations with equal devices whose runs are all there: the settings that all have, under the first seed."""
    whole = [one.federation for one in standings(folder) if not one.absent and not one.federation.slow]
    clients = table(CLIENTS, folder)
    rows = {name: {split: known[split] for split in ("validation", "test")} for name, known in clients.items()}
    entries = {one.name: _entries(one, rows[one.name], folder) for one in whole}
    common = set.intersection(*({entry.label for entry in own} for own in entries.values())) if entries else set()
    return [
        Known(one, [e for e in entries[one.name] if e.label in common], rows[one.name])  # type: ignore[arg-type]
        for one in whole
    ]


def _entries(federation: Entrants, rows: Mapping[str, Sequence[int]], folder: Path) -> list[Entry]:
    found = []
    for (method, own, seed), line in read(federation.name, folder).items():
        if seed == SEEDS[0] and method != POOLED:
            # a rate of the adviser's grid says that the setting is a drawn one, and not a recipe's own
            found.append(Entry(
                f"{method} {own}", method, RATES[0], line["settings"],
                _points(line["validation"], rows["validation"])[None], _points(line["test"], rows["test"]),
                line["bytes"], line["steps"],
            ))  # fmt: skip
    return found


def _points(right: str | Sequence[float], sizes: Sequence[int]) -> Any:
    """Points [1, clients] of the clients that have rows, from single rows or the numbers of right ones."""
    if isinstance(right, str):
        right = [part.sum() for part in np.split(unpacked_values(right), np.cumsum(sizes)[:-1])]
    return np.array([[100 * number / size for number, size in zip(right, sizes, strict=True) if size]])


def costs(here: Sequence[Known]) -> list[Cost]:
    """What the portfolios cost: of all methods, of the adviser's recipes, and learned as the shipped one is.

    Nothing is known below two data sets.  The shipped one is learned from the adviser's own runs, whose settings are
    not among the leaderboard's: the nearest of the same recipe stand for them.
    """
    if len({one.federation.data_set for one in here}) < 2:
        return []
    usual = _only(here, GRID)
    adviser = _only(known.known_federations(truth.FOLDER), {entry.recipe for entry in usual[0].entries})
    rows = dict[str, list[float]]()
    for place, one in enumerate(here):
        for words, those in ((f"{LEARNED}, of all methods", here), (f"{LEARNED}, of the adviser's recipes", usual)):
            others = portfolio.without(those, one.federation.data_set)
            rows.setdefault(words, []).append(_lost(one, _labels(portfolio.learned(others, COUNT))))
        shipped = portfolio.learned(portfolio.without(adviser, one.federation.data_set), COUNT)
        near = [_nearest(usual[place].entries, setting) for setting in shipped]
        rows.setdefault(SHIPPED, []).append(_lost(one, near))
        rows.setdefault("training alone", []).append(_lost(one, [e.label for e in one.entries if e.recipe == ALONE]))
    return [Cost(words, points) for words, points in rows.items()]


def _only(those: Sequence[Known], recipes: Collection[str]) -> list[Known]:
    return [replace(one, entries=[entry for entry in one.entries if entry.recipe in recipes]) for one in those]


def _labels(settings: Settings) -> list[str]:
    return [f"{own['recipe']} {label({n: v for n, v in own.items() if n != 'recipe'})}" for own in settings]


def _nearest(entries: Sequence[Entry], setting: Mapping[str, Any]) -> str:
    """The entry of the same recipe with the most similar numbers, by the sum of their logarithms' differences."""

    def apart(entry: Entry) -> float:
        return sum(
            abs(math.log(entry.settings[name] / value))
            for name, value in setting.items() if name != "recipe" and name in entry.settings
        )  # fmt: skip

    return min((entry for entry in entries if entry.recipe == setting["recipe"]), key=apart).label


def _lost(known: Known, labels: Sequence[str]) -> float:
    best, of_portfolio = (
        max(those, key=lambda entry: entry.validation.mean())
        for those in (known.entries, [entry for entry in known.entries if entry.label in set(labels)])
    )
    return best.truth - of_portfolio.truth
