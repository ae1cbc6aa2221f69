"""Activation checkpointing: layers that keep no activations for the backward pass and compute them again in it.

Chen et al. 2016, "Training deep nets with sublinear memory cost": gradients are the same, memory for activations falls
to those between the layers, and a step costs one more forward pass of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator
from torch import nn

from piebald.contracts.data import ModelSpec
from piebald.core.errors import SettingError, unknown
from piebald.core.parameters import copied

AUTO = "auto"  # in place of layers: the module says itself which
_LISTS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
_NORMS = nn.modules.batchnorm


def enabling_method(module: object) -> str | None:
    """Return the name of a module's method that checkpoints layers of its own choice, as those of transformers do, or
    None: it has one of two names, of which the second is the older one.
    """
    names = ("activation_checkpointing", "gradient_checkpointing")
    return next((name for name in names if callable(getattr(module, f"{name}_enable", None))), None)


def enable_own(module: object, options: Mapping[str, Any]) -> None:
    """Let a module checkpoint the layers of its choice from now on.

    Args:
        module: one with an `enabling_method`; any other stays as it is.
        options: arguments for `torch.utils.checkpoint.checkpoint`.
    """
    if (name := enabling_method(module)) is not None:
        getattr(module, f"{name}_enable")(**{f"{name}_kwargs": dict(options)})


def checkpointed_layers(module: nn.Module, patterns: Iterable[str]) -> list[str]:
    """Names of the layers to checkpoint; of layers within one another only the outermost.

    Args:
        module: the model.
        patterns: names of layers, or shell patterns over them ("blocks.*").

    Raises:
        SettingError: a pattern matches no layer, or a list of layers, which is never run itself.
    """
    layers = {name: layer for name, layer in module.named_modules() if name}
    names = set[str]()
    for pattern in patterns:
        hit = {name for name in layers if fnmatchcase(name, pattern)}
        if not hit:
            raise unknown("layer of this model called", pattern, layers)
        lists = sorted(name for name in hit if isinstance(layers[name], _LISTS))
        # a pattern may match a list along with its layers, which is fine
        if lists == sorted(hit):
            raise SettingError(f"{lists[0]!r} is a list of layers, which is never run itself: write '{lists[0]}.*'")
        names |= hit.difference(lists)
    # a layer inside a checkpointed one would be computed a third time
    return sorted(name for name in names if not any(name.startswith(f"{outer}.") for outer in names))


def unsupported_checkpointing(patterns: tuple[str, ...], spec: ModelSpec) -> str | None:
    """Return why the setting `checkpointing` does not fit a model, or None."""
    if not patterns:
        return None
    if patterns == (AUTO,):
        if enabling_method(spec.model) is None:
            return (
                f"checkpointing = 'auto' asks the model which layers, and {type(spec.model).__name__} does not say: "
                "name some, such as 'blocks.*'"
            )
        try:
            # on a copy, as this only asks whether it can be done
            enable_own(copied(spec.model), {"use_reentrant": False})
        except Exception as error:  # whatever a module of others raises where it offers none after all
            reason = next(iter(str(error).splitlines()), type(error).__name__)
            return f"checkpointing = 'auto' asks the model which layers, and it says: {reason}"
        chosen = [""]
    else:
        try:
            chosen = checkpointed_layers(spec.model, patterns)
        except SettingError as error:
            return f"checkpointing: {error}"
    for name, layer in copied(spec.model).train().named_modules():
        inside = any(not layer or name == layer or name.startswith(f"{layer}.") for layer in chosen)
        remembers = isinstance(layer, _NORMS._NormBase) and layer.track_running_stats
        if inside and layer.training and remembers:
            return (
                f"checkpointing runs layers twice, and the statistics of the norm {name!r} would count each batch "
                "twice: name other layers, or take group norm (nn.GroupNorm) in its place"
            )
    return None


def _alone(patterns: tuple[str, ...]) -> tuple[str, ...]:
    if AUTO in patterns and len(patterns) > 1:
        raise ValueError("must be 'auto' alone or names of layers, got both: leave one out")
    return patterns


CheckpointedLayers = Annotated[
    tuple[str, ...],
    BeforeValidator(lambda value: (value,) if isinstance(value, str) else value),
    AfterValidator(_alone),
]
