"""The objects that an experiment file defines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from piebald.contracts import Clients
from piebald.contracts.component import Component, build
from piebald.data.clients.prepared import rows_of_recipe
from piebald.experiments.recipes import ExperimentFields
from piebald.experiments.run_models import Model
from piebald.experiments.sections import section_settings
from piebald.methods.recipe import Recipe
from piebald.methods.transforms.base import MaskingTransform
from piebald.runtimes.base import RuntimeSettings
from piebald.server import StoppingCriteria
from piebald.settings.plugins import read


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
        on_all_rows: labels of recipes whose clients train on their validation rows as well.
        pooled: labels of recipes that have all training rows in one place.
    """

    recipes: Mapping[str, Recipe]
    clients: Clients
    model: Model
    runtime: RuntimeSettings
    stop: StoppingCriteria | None = None
    models: Mapping[str, Model] = field(default_factory=dict)
    on_all_rows: Sequence[str] = ()
    pooled: Sequence[str] = ()

    def model_of(self, label: str) -> Model:
        """Return the model of a recipe."""
        return self.models.get(label, self.model)

    def clients_of(self, label: str) -> Clients:
        """Return the clients with the rows that a recipe has."""
        return rows_of_recipe(self.clients, label in self.on_all_rows, label in self.pooled)


def runtime_of(fields: ExperimentFields, table: Mapping[str, Any]) -> RuntimeSettings:
    """Build the runtime; a federation sends its sites the settings in `table`, but for those of the server alone."""
    settings: dict[str, Any] = {}
    if "experiment" in fields.component_class("runtime", fields.runtime).model_fields:
        # real devices have their own speed, so there is no fleet
        settings["experiment"] = {key: value for key, value in table.items() if key not in ("out", "runtime", "fleet")}
    elif fields.fleet is not None:
        settings["fleet"] = fields.component("fleet", fields.fleet)
    runtime = fields.component("runtime", fields.runtime, **settings)
    assert isinstance(runtime, RuntimeSettings)
    return runtime


def noise_of(recipe: Recipe) -> str | None:
    """Return the kind of the component that hides rows or updates by noise, or None."""
    hiding = (recipe.training, *recipe.transforms)
    noisy = (one for one in hiding if one.protects and not isinstance(one, MaskingTransform))
    return next((one.kind for one in noisy), None)


def stopping_criteria(fields: ExperimentFields) -> StoppingCriteria | None:
    """Build the limits of a run besides its rounds."""
    if not isinstance(fields.stop, Mapping):
        return fields.stop
    fields.places.check_names(("stop",), fields.stop, [*StoppingCriteria.model_fields], "stop")
    with fields.errors_placed("stop", fields.stop):
        return StoppingCriteria(**fields.stop)


def check_trackers(fields: ExperimentFields) -> None:
    """Refuse trackers that cannot be built."""
    for tracker in read(fields.trackers, fields.resolver):
        build("tracker", tracker)


def question_section(fields: ExperimentFields, name: Literal["trees"]) -> Component:
    """Build the settings of a section that a room above this one defines."""
    settings, values = section_settings(name), getattr(fields, name) or {}
    fields.places.check_names((name,), values, [*settings.model_fields], name)
    with fields.errors_placed(name, values):
        return settings(**values)
