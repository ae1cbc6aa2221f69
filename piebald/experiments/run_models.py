"""The model that a run is given, or the models, where clients have unlike ones."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from pydantic import BeforeValidator
from torch import nn

from piebald.contracts import ModelSpec, Rows
from piebald.core import pytree
from piebald.core.client_models import ClientModel, ClientModels, check_shared, pattern_for_client
from piebald.core.errors import TOKENS, SettingError, shown
from piebald.core.parameters import Layout, copied
from piebald.methods.recipe import Recipe
from piebald.models import PretrainedNetwork


def _no_name(model: Any) -> Any:
    if isinstance(model, str):
        raise ValueError(
            f"must be a Module, a function of the seed that makes one, or a table of them, got {shown(model)}: "
            "piebald.models.build_model makes a model by its name"
        )
    return model


OneModel = nn.Module | Callable[[int], nn.Module]
Model = Annotated[OneModel | Mapping[str, OneModel], BeforeValidator(_no_name)]


@dataclass(frozen=True, slots=True)
class GivenModels:
    """Modules, and which client has which.

    Attributes:
        modules: the first one is that of client 0, and the run's.
        numbers: the number of each client's module.
    """

    modules: tuple[nn.Module, ...]
    numbers: tuple[int, ...]

    @classmethod
    def of(cls, model: Model, names: Sequence[str], seed: int) -> GivenModels:
        """The modules for clients of these names.

        Args:
            model: one for all, or several by clients' names or patterns like "ward *"; the first that fits
                counts.
            names: of the clients, by number.
            seed: of the run.

        Raises:
            SettingError: a client has no model, or a model has no client.
        """
        if not isinstance(model, Mapping):
            return cls((_module(model, seed),), (0,) * len(names))
        patterns = [pattern_for_client(list(model), name) for name in names]
        if idle := next((pattern for pattern in model if pattern not in patterns), None):
            raise SettingError(
                f"model has one for {idle!r}, but no client has this name or is left for it: the clients are "
                f"{shown(list(names))}"
            )
        # in the order of clients, so that the first module is that of client 0, which is the run's
        used = list(dict.fromkeys(patterns))
        modules = tuple(_module(model[pattern], seed) for pattern in used)
        return cls(modules, tuple(used.index(pattern) for pattern in patterns))

    def own_models(self, recipe: Recipe, spec: ModelSpec, rows: Rows) -> ClientModels | None:
        """Return the models of clients that do not have the run's, None where all have it.

        Args:
            recipe: what is shared, and how clients train.
            spec: the run's model.
            rows: a client's training rows, to try the models on.

        Raises:
            SettingError: models differ in what is shared, or in what they put out.
        """
        if len(self.modules) == 1:
            return None
        layouts = [Layout.of(module, recipe.sharing.private(module)) for module in self.modules]
        check_shared(layouts, recipe.name)
        models = []
        for module, layout in zip(self.modules[1:], layouts[1:], strict=True):
            if (outputs := outputs_of(module, rows)) != spec.outputs:
                raise SettingError(
                    f"clients' models must have outputs of one shape, got {list(spec.outputs)} and {list(outputs)}"
                )
            module = copied_for_run(module)
            models.append(ClientModel(module, layout, layout.taken(module), outputs))
        return ClientModels(tuple(models), tuple(number - 1 if number else None for number in self.numbers))


def copied_for_run(module: nn.Module) -> nn.Module:
    """Return a copy for the run, since the user may change the module later; mapped weights of a file are shared."""
    return (copied(module) if isinstance(module, PretrainedNetwork) else copy.deepcopy(module)).cpu()


def outputs_of(module: nn.Module, rows: Rows) -> tuple[int, ...]:
    """The shape of the model's output for one row; refuses a model that does not fit the data."""
    layers = ((n, layer) for n, layer in module.named_modules() if isinstance(layer, nn.modules.batchnorm._BatchNorm))
    for name, layer in layers:
        if layer.running_mean is None:
            raise SettingError(
                f"{type(layer).__name__} {name!r} of the model keeps no running statistics, so that a row's prediction "
                "would depend on the rows beside it: leave out track_running_stats=False, or take nn.GroupNorm"
            )
    trial = copied(module).eval()  # batch norm cannot train on one row, and must not count it
    try:
        # a trial must leave the user's random numbers as they were; on the CPU, so states of GPUs need no copy
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            output = pytree.run(trial, rows[:1].x)
    except Exception as error:
        shape = pytree.plain(pytree.form(rows.x))
        looks_up = any(isinstance(part, nn.Embedding) for part in module.modules()) and "indices" in str(error)
        reason = str(error) if isinstance(error, SettingError) else f"{type(error).__name__}: {error}"
        if looks_up:
            reason = f"it looks up token ids, and these are real numbers: {TOKENS}"
        elif isinstance(error, NotImplementedError) and "forward" in reason:
            reason = f"{type(module).__name__} has no method forward(self, x): define it"
        elif refusing := _refusing_layer(trial, rows[:1].x):
            reason = f"{refusing}: give it the shape that it needs"
        raise SettingError(f"the model fails on an input of shape {shape}: {reason}") from error
    try:
        return tuple(pytree.logits(output).shape[1:])
    except SettingError:
        return ()  # a loss of the user's own may take other outputs


def _refusing_layer(module: nn.Module, x: pytree.Tree) -> str | None:
    """Which layer of torch a batch does not get through, in words; None where the model's own code fails."""
    inside: list[str] = []

    def enter(layer: nn.Module, given: tuple[Any, ...]) -> None:
        shapes = ", ".join(str(list(part.shape[1:])) for part in given if isinstance(part, torch.Tensor))
        inside.append(f"its layer {layer} cannot take rows of shape {shapes}")

    layers = [
        part for part in module.modules() if not any(part.children()) and type(part).__module__.startswith("torch.")
    ]
    hooks = [layer.register_forward_pre_hook(enter) for layer in layers]
    # a layer that has returned did not fail, so what remains in `inside` is the one that did
    hooks += [layer.register_forward_hook(lambda *_: inside.clear()) for layer in layers]
    try:
        with torch.no_grad():
            pytree.run(module, x)
    except Exception:  # as before
        return inside[-1] if inside else None
    finally:
        for hook in hooks:
            hook.remove()
    return None


def _called_with_seed(function: Callable[[int], nn.Module], seed: int) -> nn.Module:
    """Call a function of the seed, after a check of its signature: a class may need other arguments."""
    try:
        inspect.signature(function).bind(seed)
    except TypeError as error:
        name = getattr(function, "__name__", type(function).__name__)
        name = "this lambda" if name == "<lambda>" else name
        again = "write lambda seed: ..." if name == "this lambda" else f"write lambda seed: {name}(...)"
        raise SettingError(
            f"model must be an nn.Module or a function of the seed that makes one, but {name} cannot be called with a "
            f"seed alone ({error}): call it yourself and give its module, or {again}"
        ) from None
    except ValueError:  # a function of another language, which has no signature
        pass
    return function(seed)


def _module(model: OneModel, seed: int) -> nn.Module:
    module = model if isinstance(model, nn.Module) else _called_with_seed(model, seed) if callable(model) else None
    if not isinstance(module, nn.Module):
        raise SettingError(
            f"model must be an nn.Module or a function of the seed that makes one, got {type(model).__name__}"
        )
    return module
