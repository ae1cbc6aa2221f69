"""The objects that an experiment file defines."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from piebald.contracts import Clients
from piebald.experiments.run_models import Model
from piebald.methods.recipe import Recipe
from piebald.runtimes.base import RuntimeSettings
from piebald.server import StoppingCriteria


@dataclass(frozen=True)
class Plan:
    """The objects that settings define.

    Attributes:
        recipes: the recipes by label; one, unless the settings define a comparison.
        clients: the clients and their rows.
        model: a function of a seed that makes the initial model, or several by clients' names.
        runtime: the runtime.
        stop: the stopping criteria besides the number of rounds.
        models: models of recipes that bring their own, by the recipe's label.
    """

    recipes: Mapping[str, Recipe]
    clients: Clients
    model: Model
    runtime: RuntimeSettings
    stop: StoppingCriteria | None = None
    models: Mapping[str, Model] = field(default_factory=dict)

    def model_of(self, label: str) -> Model:
        """The model of a recipe."""
        return self.models.get(label, self.model)
