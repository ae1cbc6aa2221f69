"""The models that an experiment file names."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor

from piebald.contracts import Clients
from piebald.core import pytree
from piebald.core.errors import SettingError, shown, unknown
from piebald.core.objective import unfit_classes
from piebald.core.references import Reference
from piebald.experiments.sections import Named, own_section
from piebald.settings.setting_places import SettingPlaces
from piebald.settings.toml_document import Key

if TYPE_CHECKING:
    from torch import nn

    from piebald.experiments.run_models import Model

Loss = str | dict[str, Any] | None


def given_models(clients: Clients, section: Named, loss: Loss, seed: int, places: SettingPlaces, key: Key) -> Model:
    """A function of the seed that makes the model of a section, for these clients' inputs and targets.

    Where the section has models for single clients, a mapping of such functions by clients' names, see
    `piebald.experiments.run_models.GivenModels`.
    """
    own = section.model_dump().get("clients")
    made = _maker(clients, section.model_copy(update={"clients": None}), loss, seed, places, key)
    if own is None:
        return made
    here = (*key, "clients")
    if not isinstance(own, Mapping) or not own:
        raise SettingError(
            f"{places.at(*here)}: clients must be a table of models by clients' names or patterns, like "
            f'{{ "ward *" = "mlp" }}, got {shown(own)}'
        )
    makers = {name: _maker(clients, own_section(one), loss, seed, places, (*here, name)) for name, one in own.items()}
    return {**makers, "*": made}


def _maker(
    clients: Clients, section: Named, loss: Loss, seed: int, places: SettingPlaces, key: Key
) -> Callable[[int], nn.Module]:
    """A function of the seed that makes one model."""
    from piebald import models
    from piebald.models.networks import network

    table = section.model_dump(exclude={"clients"})
    name = table.pop("name")
    if name not in models.names() and not isinstance(name, Reference):
        raise SettingError(f"{places.at(*key, 'name')}: {unknown('model', name, models.names())}")
    rows = clients.rows(0, "train")
    shape, y = pytree.form(rows.x), pytree.leaves(rows.y)
    if clients.classes is None and isinstance(rows.y, Tensor) and not rows.y.dtype.is_floating_point:
        raise SettingError(f"{places.at('data')}: the clients' targets are classes without names: give classes")
    if why := unfit_classes(loss, clients.classes):
        raise SettingError(f"{places.at('loss')}: {why}")
    outputs = math.prod(y[0].shape[1:]) if clients.classes is None else len(clients.classes)

    def made(seed: int) -> nn.Module:
        return network(name, shape, outputs, seed, **table)

    try:
        made(seed)
    except SettingError as error:
        raise places.placed(error, key, section) from None
    return made
