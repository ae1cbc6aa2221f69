"""What a benchmark's program would run, without running it, and on which data."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import piebald
from piebald.data import DataSet
from piebald.data.partition import Partition
from piebald.methods.recipe import Recipe

_DEALT: dict[str, None] = {}  # names of data sets, in order


@dataclass(frozen=True)
class Case:
    """The arguments of one run: recipe, clients, the model of a seed, the options, and the name of the data set."""

    recipe: Recipe
    clients: Any
    model: Callable[[int], Any]
    options: Mapping[str, Any]
    data: str = ""


class Captured(Exception):
    """Raised in place of a run, with its `case`."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.case = case


def dealt(data: DataSet) -> DataSet:
    """Return a data set that a captured run deals to its clients, whose name is noted; partitions do so themselves."""
    _DEALT[data.name] = None
    return data


def capture(begin: Callable[[], Any]) -> Case:
    """Return the first run that a function would carry out by `piebald.run` or `piebald.compare`."""
    before, split = (piebald.run, piebald.compare), Partition.split
    _DEALT.clear()
    piebald.run = piebald.compare = _stop
    Partition.split = lambda self, data, *more: split(self, dealt(data), *more)  # type: ignore[method-assign]
    try:
        begin()
    except Captured as captured:
        return replace(captured.case, data=" and ".join(_DEALT))
    finally:
        piebald.run, piebald.compare = before
        Partition.split = split  # type: ignore[method-assign]
    raise RuntimeError("nothing would be run: its results are there already")


def _stop(recipes: Recipe | Mapping[str, Recipe], clients: Any, model: Callable[[int], Any], **options: Any) -> None:
    recipe = next(iter(recipes.values())) if isinstance(recipes, Mapping) else recipes
    clients = clients.in_one_place() if options.get("pooled") else clients
    raise Captured(Case(recipe, clients, model, options))
