"""The recipes of the benchmark, each with its full grid of settings."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

from piebald import recipes
from piebald.methods.recipe import Recipe

RATES = (0.1, 0.02, 0.5)  # of local steps, the middle one first: an early end leaves the most useful part
ROUNDS = 16
RUNGS = (4, 8, 16)
TRAINING = {"batch": 20, "epochs": 2}
WITHOUT_ROUNDS = ("async_fedavg", "fedbuff")  # tried where devices are unequal
DEFAULT_RATE = 0.05  # of every recipe; not in the grid, and so an entry of its own

# name: the values of its main setting
GRID: dict[str, dict[str, tuple[Any, ...]]] = {
    "local": {},
    "fedavg": {},
    "fine_tuned": {"tune_epochs": (1, 4)},
    "fedprox": {"mu": (0.1, 1.0)},
    "scaffold": {},
    "fedavgm": {"beta": (0.5,)},
    "hdafl": {},
    "lg_fedavg": {},
    "fedbn": {},
    "ditto": {"lam": (0.1, 1.0)},
    "ifca": {"k": (2, 3)},
    "sync_dvw": {},
    "async_fedavg": {},
    "fedbuff": {"buffer_size": (5,)},
}
# recipes above all of the grid in the leaderboard: trained on the federations as well, see `score.with_leaders`
LEADERS: dict[str, dict[str, tuple[Any, ...]]] = {
    "fedphp": {"lam": (0.05,), "horizon": (ROUNDS,)},
    "fedrod": {},
    "fedala": {},
    "apfl": {},
}


@dataclass(frozen=True)
class Entry:
    """A recipe with settings."""

    recipe: str
    settings: tuple[tuple[str, Any], ...]

    @property
    def label(self) -> str:
        """Recipe and settings, for a file."""
        shown = {name: value if isinstance(value, str) else f"{value:g}" for name, value in self.settings}
        return " ".join([self.recipe, *(f"{name}={value}" for name, value in shown.items())])

    def make(self) -> Recipe:
        """The recipe."""
        return recipes.make(self.recipe, **TRAINING, **dict(self.settings))


def entries(slow: bool, leaders: bool = False) -> list[Entry]:
    """The full grid, or that of the leaders; the middle learning rate of all recipes comes first."""
    found = []
    for rate in (*RATES, *(() if leaders else (DEFAULT_RATE,))):
        for name, settings in (LEADERS if leaders else GRID).items():
            if name in WITHOUT_ROUNDS and not slow:
                continue
            points = [dict(zip(settings, values, strict=True)) for values in itertools.product(*settings.values())]
            if rate == DEFAULT_RATE:
                points = [{}]  # the recipe's own settings: what a user gets who tunes nothing
            for point in points:
                found.append(Entry(name, (("lr", rate), *point.items())))
    return found
