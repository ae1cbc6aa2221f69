"""What is known of each recipe with settings, from the lines of the truth."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from federations import FEDERATIONS, Federation
from grid import DEFAULT_RATE, GRID, LEADERS, RATES
from grid import entries as grid_entries
from numpy.typing import NDArray
from single_rows import Right, single_rows
from truth import SCALE, kept, known_rows

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Entry:
    """What is known of a recipe with settings.

    Attributes:
        label, recipe, rate, settings: of the entry.
        validation: accuracy in points [seeds, rungs, clients].
        test: accuracy in points at the end [seeds, clients].
        bytes, steps: sent and made in a run, the means over seeds.
    """

    label: str
    recipe: str
    rate: float
    settings: Mapping[str, Any]
    validation: Floats
    test: Floats
    bytes: float
    steps: float

    @property
    def truth(self) -> float:
        """Mean test accuracy over seeds and clients, in points."""
        return float(self.test.mean())


@dataclass(frozen=True)
class Known:
    """A federation with its truth: the entries that were run, and the seeds that all of them have.

    Attributes:
        federation: its clients.
        entries: what is known of each recipe with settings.
        rows: the number of rows of each client, by split, and "naive", the test accuracy of its most frequent label.
        right: the single rows that are right, of the runs that were asked for them.
    """

    federation: Federation
    entries: list[Entry]
    rows: Mapping[str, Sequence[int]]
    right: Right = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The name of the federation."""
        return self.federation.name

    @property
    def seeds(self) -> list[int]:
        """Places of the seeds."""
        return list(range(len(self.entries[0].test)))

    @property
    def best(self) -> float:
        """Points of the best on test rows."""
        return max(entry.truth for entry in tuned(self.entries))

    @property
    def naive(self) -> float:
        """Points on test rows of each client's most frequent training label."""
        return float(np.mean(self.rows["naive"])) * 100 / SCALE


def known_federations(
    folder: Path, federations: Sequence[Federation] = FEDERATIONS, leaders: bool = False
) -> list[Known]:
    """The federations whose grid, with that of the leaders or without, is complete for at least one seed, in order."""
    rows, recipes = known_rows(folder), GRID | LEADERS if leaders else GRID
    found = []
    for federation in federations:
        lines = [line for line in kept(folder, federation.name).read() if line["recipe"] in recipes]
        own = rows.get(federation.name, {})
        found.append(Known(federation, entries_of(lines), own, single_rows(folder, federation.name, own)))
    return [one for one in found if one.entries and _complete(one, leaders)]


def _complete(known: Known, leaders: bool) -> bool:
    slow = known.federation.slow
    wanted = [*grid_entries(slow), *(grid_entries(slow, leaders=True) if leaders else [])]
    return {one.label for one in wanted} <= {one.label for one in known.entries}


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
            dict(own[0]["settings"]),  # type: ignore[call-overload]
            points * np.array([one["validation"] for one in own], float),
            points * np.array([one["test"] for one in own], float),
            float(np.mean([one["bytes"] for one in own])),  # type: ignore[list-item]
            float(np.mean([one["steps"] for one in own])),  # type: ignore[list-item]
        ))  # fmt: skip
    return found


def tuned(entries: Sequence[Entry]) -> list[Entry]:
    """The grid, without the recipes' own settings."""
    return [one for one in entries if one.rate in RATES]


def chosen(entries: Sequence[Entry], seeds: Sequence[int]) -> Entry:
    """The best by validation rows at the last rung; ties to the first."""
    return max(entries, key=lambda one: one.validation[list(seeds), -1].mean())


def own_settings(entries: Sequence[Entry], recipe: str) -> Entry:
    """A recipe as it is for a user who tunes nothing."""
    return next(one for one in entries if one.recipe == recipe and one.rate == DEFAULT_RATE)
