"""The models that an experiment file names."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from torch import Tensor

from piebald.contracts import Clients
from piebald.contracts.data import rows_with_all_inputs
from piebald.core import pytree
from piebald.core.errors import SettingError, shown, unknown
from piebald.core.objective import unfit_classes
from piebald.core.randomness import key as rng_key
from piebald.core.randomness import torch_seed
from piebald.core.references import Reference
from piebald.data.clients.prepared import preparation_of
from piebald.data.preparation.settings import PrepareSettings
from piebald.experiments.fields import ExperimentFields
from piebald.experiments.sections import Named, own_section
from piebald.settings.toml_document import Key

if TYPE_CHECKING:
    from torch import nn

    from piebald.experiments.run_models import Model


def models_of(
    fields: ExperimentFields,
    clients: Clients,
    section: Named | None = None,
    key: Key = ("model",),
    shape: pytree.Form | None = None,
) -> Model:
    """Return a function of the seed that makes the model of a section, for these clients' inputs and targets.

    Where the section has models for single clients, a mapping of such functions by clients' names, see
    `piebald.experiments.run_models.GivenModels`.

    Args:
        fields: the experiment file.
        clients: with their inputs as the model reads them.
        section, key: a section with the name of a model and its place in the file, [model] by default.
        shape: of one row of inputs; by default that of a client that lacks none.
    """
    section = section or fields.model
    by_client = section.model_dump().get("clients")
    default = _maker(fields, clients, section.model_copy(update={"clients": None}), key, shape)
    if by_client is None:
        return default
    key = (*key, "clients")
    if not isinstance(by_client, Mapping) or not by_client:
        raise SettingError(
            f"{fields.places.at(*key)}: clients must be a table of models by clients' names or patterns, like "
            f'{{ "ward *" = "mlp" }}, got {shown(by_client)}'
        )
    makers = {
        name: _maker(fields, clients, own_section(model), (*key, name), shape) for name, model in by_client.items()
    }
    return {**makers, "*": default}


def _maker(
    fields: ExperimentFields, clients: Clients, section: Named, key: Key, form: pytree.Form | None
) -> Callable[[int], nn.Module]:
    """Return a function of the seed that makes one model, after a trial with the file's seed."""
    from piebald import models
    from piebald.models.networks import network
    from piebald.models.wrappers import with_embeddings

    places, table = fields.places, section.model_dump(exclude={"clients"})
    name = table.pop("name")
    if name not in models.names() and not isinstance(name, Reference):
        raise SettingError(f"{places.at(*key, 'name')}: {unknown('model', name, models.names())}")
    rows = clients.rows(0, "train") if form else rows_with_all_inputs(clients, range(len(clients)))
    shape, y = form or pytree.form(rows.x), pytree.leaves(rows.y)
    if clients.classes is None and isinstance(rows.y, Tensor) and not rows.y.dtype.is_floating_point:
        raise SettingError(f"{places.at('data')}: the clients' targets are classes without names: give classes")
    if problem := unfit_classes(fields.loss, clients.classes):
        raise SettingError(f"{places.at('loss')}: {problem}")
    outputs = math.prod(y[0].shape[1:]) if clients.classes is None else len(clients.classes)

    agreed = preparation_of(clients) or (fields.prepare.agreed if isinstance(fields.prepare, PrepareSettings) else None)
    embedded, agreed_width = ({}, 0) if agreed is None else (agreed.embedded, len(agreed.feature_names_out))

    def make(seed: int) -> nn.Module:
        if not embedded:
            return network(name, shape, outputs, seed, **table)
        with torch_seed(rng_key(seed, "embeddings") >> 1):
            return with_embeddings(
                lambda width: network(name, (width,), outputs, seed, **table), agreed_width, embedded
            )

    try:
        make(fields.first_seed)
    except SettingError as error:
        raise places.placed(error, key, section) from None
    return make
