"""What a benchmark's program would run, without running it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import piebald
from piebald.methods.recipe import Recipe


@dataclass(frozen=True)
class Case:
    """The arguments of one run: recipe, clients, the model of a seed, and the options."""

    recipe: Recipe
    clients: Any
    model: Callable[[int], Any]
    options: Mapping[str, Any]


class Captured(Exception):
    """Raised in place of a run, with its `case`."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.case = case


def capture(begin: Callable[[], Any]) -> Case:
    """Return the first run that a function would carry out by `piebald.run` or `piebald.compare`."""
    before = piebald.run, piebald.compare
    piebald.run = piebald.compare = _stop
    try:
        begin()
    except Captured as captured:
        return captured.case
    finally:
        piebald.run, piebald.compare = before
    raise RuntimeError("nothing would be run: its results are there already")


def _stop(recipes: Recipe | Mapping[str, Recipe], clients: Any, model: Callable[[int], Any], **options: Any) -> None:
    recipe = next(iter(recipes.values())) if isinstance(recipes, Mapping) else recipes
    clients = clients.in_one_place() if options.get("pooled") else clients
    raise Captured(Case(recipe, clients, model, options))
