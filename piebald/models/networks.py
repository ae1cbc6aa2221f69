"""Networks by name, with seeded initial parameters."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from piebald.core import pytree
from piebald.core.arguments import Count, check_some, checked
from piebald.core.errors import SettingError, shown, unknown
from piebald.core.files import memory
from piebald.core.model_settings import bounded_build
from piebald.core.randomness import key, torch_seed
from piebald.core.references import USERS, Reference
from piebald.models.convolutional import Cnn1d, Cnn1dBn, CnnBn, LeafCnn, Logistic, MetisCnn, Mlp, MlpBn, SmallCnn
from piebald.models.gated import GatedClassifier, GatedCnn, PlainClassifier
from piebald.models.pretrained_networks import pretrained
from piebald.models.resnet import Resnet18, Resnet50, Vgg11

_MODELS: dict[str, Callable[..., nn.Module]] = {
    "cnn_1d": Cnn1d,
    "cnn_1d_bn": Cnn1dBn,
    "cnn_bn": CnnBn,
    "gated_classifier": GatedClassifier,
    "gated_cnn": GatedCnn,
    "leaf_cnn": LeafCnn,
    "metis_cnn": MetisCnn,
    "logistic": Logistic,
    "mlp": Mlp,
    "plain_classifier": PlainClassifier,
    "mlp_bn": MlpBn,
    "pretrained": pretrained,
    "resnet18": Resnet18,
    "resnet50": Resnet50,
    "small_cnn": SmallCnn,
    "vgg11": Vgg11,
}


InputShape = Sequence[int] | Sequence[Sequence[int]] | Mapping[str, Sequence[int]]
_TENSORS = 2000  # more than any of these networks has
_MOST_TENSORS = 20_000  # of a network of the user's, too


def names() -> list[str]:
    """Names of all networks, sorted."""
    return sorted(_MODELS)


@checked
def count_parameters(name: str, input_shape: InputShape, outputs: int, most: int, **settings: Any) -> int:
    """Count the parameters of a network, without memory for them.

    It is built on torch's meta device, and no further than the limit, so that absurd settings cost nothing.

    Args:
        name, input_shape, outputs, settings: see `build_model`.
        most: the largest number allowed.

    Raises:
        SettingError: there are more parameters than `most`, or more tensors than any of these networks has; or as
            `build_model`.

    Examples:
        >>> count_parameters("logistic", [8], outputs=3, most=100)
        27
    """
    # an experiment file may come from others, so sizes are checked before any memory is taken
    with bounded_build(f"model {name!r}", most, _TENSORS) as counts:
        network(name, input_shape, outputs, device="meta", **settings)
    return counts[0]


@checked
def build_model(
    name: str, input_shape: InputShape, outputs: Count, seed: int = 0, device: str = "cpu", **settings: Any
) -> nn.Module:
    """Make a network whose initial parameters depend only on its name, its settings and the seed.

    The global random state of torch is not changed.

    Args:
        name: one of `names()`, or "module:name" for a class or function of a plugin that makes a module.  It gets those
            of `input_shape`, `outputs` and `seed` that its signature names.
        input_shape: shape of one input, without the batch axis; a tuple or dict of shapes where inputs are several.
        outputs: number of classes, or of numbers to predict; at least 1.
        seed: seed of the initial parameters.
        device: where it is made; "meta" makes one without numbers.
        settings: settings of the network, e.g. `hidden=(200, 200)`.

    Returns:
        The network, float32, in training mode.

    Raises:
        SettingError: a name or setting is unknown, or a value is invalid.

    Examples:
        >>> import piebald as pb
        >>> pb.models.build_model("mlp", input_shape=[4], outputs=2, hidden=[8]).classifier
        Linear(in_features=8, out_features=2, bias=True)
    """
    return network(USERS.mark(name), input_shape, outputs, seed, device, **settings)


def network(
    name: str, input_shape: InputShape, outputs: int, seed: int = 0, device: str = "cpu", **settings: Any
) -> nn.Module:
    """`build_model`, where a name is one of `names()` or a reference, and other text names nothing."""
    make, accepted = _maker(name)
    derived: dict[str, Any] = {"input_shape": input_shape, "outputs": outputs, "seed": seed}
    if name in _MODELS and name != "pretrained" and not pytree.is_single(pytree.formed(input_shape)):
        raise SettingError(
            f"model {name!r} takes inputs of one tensor, the data have {pytree.plain(pytree.formed(input_shape))}: "
            "use a module of your own"
        )
    for setting in settings:
        if setting not in accepted or setting in derived:
            raise unknown(
                f"setting of model {name!r} called", setting, [name for name in accepted if name not in derived]
            )
    if name not in _MODELS:
        check_some(make, {n: value for n, value in settings.items() if isinstance(value, str | bool | int | float)})
    try:
        target_device = torch.device(device)
    except RuntimeError:
        raise SettingError(f"device must be one that torch knows, like 'cpu' or 'meta', got {shown(device)}") from None
    room = memory() // 8  # parameters and their gradients
    with (
        # by name, so that networks do not share numbers; keys have 64 bits, and seeds of torch 63
        torch_seed(key(seed, "model", name) >> 1),
        target_device,
        bounded_build(f"model {name!r}", room, _MOST_TENSORS),
    ):
        module = make(**{argument: value for argument, value in derived.items() if argument in accepted}, **settings)
    if not isinstance(module, nn.Module):
        raise SettingError(f"model {name!r} must make a torch.nn.Module, got {type(module).__name__}")
    return module


def _maker(name: str) -> tuple[Callable[..., Any], list[str]]:
    """The class or function that makes a network, and the names of its arguments."""
    if name in _MODELS:
        return _MODELS[name], list(inspect.signature(_MODELS[name]).parameters)
    if not isinstance(name, Reference):
        raise unknown("model", name, _MODELS)
    maker = name.resolved("model")
    # a module is callable, too, and would be called on its settings as if they were inputs
    if not callable(maker) or isinstance(maker, nn.Module):
        raise SettingError(f"model {name!r} must be a class or function that makes a module, got {maker!r}")
    parameters = inspect.signature(maker).parameters.values()
    return maker, [
        parameter.name
        for parameter in parameters
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    ]
