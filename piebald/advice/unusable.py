"""Recipes that cannot run on these clients with this model, and why: each recipe is asked, no list is kept."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import piebald.runtimes  # noqa: F401 - registers the runtimes
from piebald.contracts import Clients, RowsAtSites
from piebald.core.errors import SettingError
from piebald.methods import recipes
from piebald.methods.recipe import Recipe
from piebald.runs.options import RunOptions
from piebald.runs.prepare import Model, prepare


def unusable(clients: Clients, model: Model, asked: Mapping[str, Recipe | str], options: RunOptions) -> dict[str, str]:
    """The recipes that would be refused before the first round, each with the sentence that refuses it.

    Args:
        clients, model: as given to `run`.
        asked: recipes, or names of recipes with their default settings, by label.
        options: the options that the recipes would run with; the runtime is the one where the rows are.
    """
    at_sites = isinstance(clients, RowsAtSites) and clients.elsewhere
    # An engine is named, or the simulator would train some steps for each recipe to find the fastest.
    where = {"kind": "federation"} if at_sites else {"kind": "simulator", "engine": "sequential"}
    options = replace(options, runtime=where)
    found = {}
    for label, recipe in asked.items():
        try:
            prepare(recipe, clients, model, options)
        except SettingError as error:
            found[label] = str(error)
    return found


def every_recipe() -> dict[str, Recipe | str]:
    """All recipes by name, with their default settings."""
    return {name: name for name in recipes.names()}


def grouped(reasons: Mapping[str, str]) -> list[dict[str, Any]]:
    """Rows of a reason and the recipes that it holds for, the most frequent first."""
    by_reason: dict[str, list[str]] = {}
    for label, why in reasons.items():
        by_reason.setdefault(why, []).append(label)
    return [
        {"recipes": labels, "why": why} for why, labels in sorted(by_reason.items(), key=lambda item: -len(item[1]))
    ]
