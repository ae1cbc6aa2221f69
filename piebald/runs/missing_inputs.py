"""The models of clients that lack an input."""

from __future__ import annotations

import copy
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from piebald.contracts import Clients, Rows
from piebald.contracts.data import LacksInputs, lacked_inputs, without_inputs
from piebald.contracts.model_spec import ModelSpec
from piebald.core import pytree
from piebald.core.client_models import ClientModels, part_without
from piebald.core.errors import SettingError
from piebald.core.randomness import torch_seed
from piebald.methods.recipe import Recipe


def models_without_inputs(recipe: Recipe, spec: ModelSpec, clients: Clients, rows: Rows) -> ClientModels | None:
    """Return the models of clients that lack an input, without what only that input reaches; None where nobody does.

    A parameter is theirs if a gradient reaches it without the input, and a buffer if its layer runs.  They have no say
    for those that the recipe's sharing says belong to the input.

    Args:
        recipe: how clients train.
        spec: the run's model.
        clients: who has which inputs.
        rows: training rows of a client that has all of them.

    Raises:
        SettingError: the model cannot do without an input, or the recipe takes every update as one of the whole model.
    """
    # inputs without names are all there
    named = isinstance(clients, LacksInputs) and isinstance(rows.x, Mapping)
    lacked = [lacked_inputs(clients, client) for client in range(len(clients) if named else 0)]
    kinds = sorted({names for names in lacked if names}, key=sorted)
    known = rows.x.keys() if isinstance(rows.x, Mapping) else ()
    for name in recipe.sharing.inputs or ():
        if name not in known:
            raise SettingError(
                f"inputs of sharing must name inputs, which are {', '.join(known) or 'not named'}, got {name!r}"
            )
    if not kinds:
        return None
    if reason := recipe.parts_reason():
        raise SettingError(f"some clients lack an input: {reason}")
    reached = _reached(spec.model, rows.x)
    models = []
    for names in kinds:
        client = str(clients.names[lacked.index(names)])
        try:
            gone = reached - _reached(spec.model, without_inputs(rows.x, names))
        except Exception as error:  # whatever the user's own model may raise
            raise SettingError(
                f"client {client!r} lacks {' and '.join(sorted(names))}, and the model cannot do without: "
                f"{type(error).__name__}: {error}; give that argument of its forward a default"
            ) from error
        silent = recipe.sharing.belonging(spec.model, names)
        models.append(part_without(spec.model, spec.layout, spec.outputs, gone, names, silent))
    return ClientModels(tuple(models), tuple(kinds.index(names) if names else None for names in lacked))


def _reached(module: nn.Module, x: pytree.Tree) -> set[str]:
    """Return the names of the parameters that a gradient reaches from some inputs, and of the buffers of layers that
    run.
    """
    trial, ran = copy.deepcopy(module).train(), set[str]()
    for name, layer in trial.named_modules():
        layer.register_forward_hook(lambda *_, name=name: ran.add(name))
    few = pytree.take(x, [0, 0])  # batch norm refuses a single row
    parameters = {name: parameter for name, parameter in trial.named_parameters() if parameter.requires_grad}
    with torch.enable_grad(), torch_seed(0):
        outputs = [leaf for leaf in pytree.leaves(pytree.run(trial, few)) if isinstance(leaf, Tensor)]
        total = sum((leaf.float().sum() for leaf in outputs if leaf.requires_grad), start=torch.zeros(()))
        gradients = torch.autograd.grad(total, list(parameters.values()), allow_unused=True)
    reached = {name for name, gradient in zip(parameters, gradients, strict=True) if gradient is not None}
    return reached | {name for name, _ in trial.named_buffers() if name.rpartition(".")[0] in ran}
