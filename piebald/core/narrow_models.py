"""Smaller versions of a network: the first channels of each hidden layer (HeteroFL), or adapters of a lower rank."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from piebald.core.errors import SettingError, shown
from piebald.core.parameters import copied, head

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
_CLOSE = 1e-4  # relative difference of outputs that were summed in another order


class _Scaled(nn.Module):
    """A layer whose output is divided by the share of channels that the network has."""

    ratio: float

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = super().forward(x)
        return output / self.ratio


class ScaledLinear(_Scaled, nn.Linear):
    """A linear layer with the scaler."""


class ScaledConv1d(_Scaled, nn.Conv1d):
    """A convolution in one dimension with the scaler."""


class ScaledConv2d(_Scaled, nn.Conv2d):
    """A convolution in two dimensions with the scaler."""


class ScaledConv3d(_Scaled, nn.Conv3d):
    """A convolution in three dimensions with the scaler."""


_SCALED: dict[type[nn.Module], type[_Scaled]] = {
    nn.Linear: ScaledLinear,
    nn.Conv1d: ScaledConv1d,
    nn.Conv2d: ScaledConv2d,
    nn.Conv3d: ScaledConv3d,
}


def width(channels: int, ratio: float) -> int:
    """Return the number of a layer's channels in a network of this ratio: rounded up, as in the paper's program.

    Examples:
        >>> width(10, 0.7), width(9, 0.5)
        (7, 5)
    """
    return math.ceil(round(channels * ratio, 6))  # 10 * 0.7 is 7.000000000000001


def narrowed(model: nn.Module, ratio: float, shape: object, scaler: bool) -> nn.Module:
    """A network with the first channels of each hidden layer, `width` of them.

    Inputs and the outputs of the last linear layer stay whole.  How many inputs a layer has follows from what comes
    out of the layers before it, so a flattened picture loses whole channels.

    Args:
        model: a network of linear layers, convolutions and batch norms; its parameters are copied.
        ratio: share of the channels, above 0 and below 1.
        shape: of one input.
        scaler: divide the outputs of each narrowed linear layer and convolution by the ratio.

    Raises:
        SettingError: the network has other layers, or the narrower one would not be a part of it.
    """
    last = head(model)
    if last is None or not isinstance(shape, tuple) or not all(isinstance(side, int) for side in shape):
        raise SettingError(_refusal(model, "ends in no linear layer after others, or has several inputs"))
    _check_layers(model)
    narrow = copied(model).eval()
    # one input shows by its way through the layers how many inputs each of them has left
    x = torch.randn((1, *shape), generator=torch.Generator().manual_seed(0))
    hooks, visited = [], set[str]()

    def cut(name: str) -> None:
        layer = narrow.get_submodule(name)

        def before(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            _cut_layer(layer, inputs[0], 1.0 if name == last else ratio, again=name in visited)
            visited.add(name)

        hooks.append(layer.register_forward_pre_hook(before))

    for name, layer in narrow.named_modules():
        if isinstance(layer, (nn.Linear, *_CONVOLUTIONS, *_BATCH_NORMS)):
            cut(name)
    try:
        with torch.no_grad():
            outputs, expected = narrow(x), _part_of(model, narrow)(x)
    except SettingError:
        raise
    except Exception as error:  # whatever the user's own forward may raise at sizes that it does not expect
        raise SettingError(_refusal(model, f"fails with fewer channels ({str(error).splitlines()[0]})")) from None
    finally:
        for hook in hooks:
            hook.remove()
    # a forward of the user's own may divide by a width, say, and then the narrow network is no part of the wide one
    alike = isinstance(outputs, Tensor) and outputs.shape == expected.shape
    if not alike or not torch.allclose(outputs, expected, rtol=_CLOSE, atol=_CLOSE):
        raise SettingError(_refusal(model, "computes something else with fewer channels than with the others at zero"))
    for name, layer in narrow.named_modules() if scaler else ():
        if name != last and type(layer) in _SCALED:
            # only the class is exchanged: parameters keep their names and places, so the layout fits as before
            layer.__class__ = _SCALED[type(layer)]
            layer.ratio = ratio
    return narrow.train(model.training)


def _part_of(model: nn.Module, narrow: nn.Module) -> nn.Module:
    """The whole network with 0 for all numbers that the narrower one has not: both compute the same."""
    whole = copied(model).eval()
    small = {**dict(narrow.named_parameters()), **dict(narrow.named_buffers())}
    with torch.no_grad():
        for name, tensor in [*whole.named_parameters(), *whole.named_buffers()]:
            if tensor.dim():
                corner = tuple(slice(size) for size in small[name].shape)
                masked = torch.zeros_like(tensor)
                masked[corner] = tensor[corner]
                tensor.copy_(masked)
    return whole


def _check_layers(model: nn.Module) -> None:
    """Refuse layers whose channels cannot be left out one by one."""
    layers = (nn.Linear, *_CONVOLUTIONS, *_BATCH_NORMS)
    for name, layer in model.named_modules():
        tensors_of_layer = [*layer.parameters(recurse=False), *layer.buffers(recurse=False)]
        # by exact type: a subclass may use its channels in another way
        if tensors_of_layer and type(layer) not in layers:
            raise SettingError(_refusal(model, f"has a {type(layer).__name__} ({name or 'itself'})"))
        if isinstance(layer, _CONVOLUTIONS) and layer.groups != 1:
            raise SettingError(_refusal(model, f"has a convolution in groups ({name})"))
    # a tied tensor would have to be cut in two ways
    tensors = [id(tensor) for _, tensor in model.named_parameters(remove_duplicate=False)]
    if len(set(tensors)) < len(tensors):
        raise SettingError(_refusal(model, "has tied parameters"))


def _refusal(model: nn.Module, reason: str) -> str:
    return (
        f"a model of several widths is made of linear layers, convolutions and batch norms, whose channels can be left "
        f"out, and ends in a linear layer, but {type(model).__name__} {reason}: choose another model, or widths = [1.0]"
    )


def _cut_layer(layer: nn.Module, x: Tensor, ratio: float, again: bool) -> None:
    """Leave as many inputs in a layer as come, and this share of its outputs."""
    if isinstance(layer, nn.Linear):
        count = x.shape[-1]
        sizes: Sequence[int] = (layer.out_features if again else width(layer.out_features, ratio), count)
        layer.out_features, layer.in_features = sizes
    elif isinstance(layer, _CONVOLUTIONS):
        count = x.shape[1]
        sizes = (layer.out_channels if again else width(layer.out_channels, ratio), count)
        layer.out_channels, layer.in_channels = sizes
    else:
        assert isinstance(layer, _BATCH_NORMS)
        layer.num_features = x.shape[1]
        sizes = (x.shape[1],)
    for name, parameter in [*layer.named_parameters(recurse=False)]:
        corner = tuple(slice(size) for size in sizes[: parameter.dim()])
        setattr(layer, name, nn.Parameter(parameter.detach()[corner].clone(), parameter.requires_grad))
    for name, buffer in [*layer.named_buffers(recurse=False)]:
        if buffer.dim():
            setattr(layer, name, buffer[: sizes[0]].clone())


_INNER, _OUTER = "lora_A", "lora_B"  # as peft calls them


class AdapterPair(NamedTuple):
    """The names of an adapter's two tensors: W x + B A x.

    Attributes:
        inner: of A [rank, inputs].
        outer: of B [outputs, rank].
    """

    inner: str
    outer: str


def adapter_pairs(names: Iterable[str]) -> list[AdapterPair]:
    """The adapters among tensors of these names, which are called lora_A and lora_B as in peft."""
    ordered = [*names]
    known_names, pairs = set(ordered), []
    for name in ordered:
        words = name.split(".")
        if _INNER in words:
            outer = ".".join(_OUTER if word == _INNER else word for word in words)
            if outer in known_names:
                pairs.append(AdapterPair(name, outer))
    return pairs


def with_rank(model: nn.Module, rank: int) -> nn.Module:
    """A copy of a model whose adapters have the first `rank` rows of A and columns of B only; the rest is the same.

    Their output is multiplied by the same factor as before, so it is what the model's own is with zeros elsewhere.

    Raises:
        SettingError: the model has no adapters, or none of so high a rank.
    """
    pairs = adapter_pairs(name for name, parameter in model.named_parameters() if parameter.requires_grad)
    if not pairs:
        raise SettingError(
            f"ranks need low-rank adapters, and {type(model).__name__} has none: load it with adapter = 'lora', or "
            "name the matrices of your own lora_A and lora_B"
        )
    smaller = copied(model)
    for pair in pairs:
        inner, outer = smaller.get_parameter(pair.inner), smaller.get_parameter(pair.outer)
        if inner.dim() != 2 or outer.dim() != 2 or inner.shape[0] != outer.shape[1]:
            raise SettingError(
                f"adapters are matrices A [rank, inputs] and B [outputs, rank], got {pair.inner} {list(inner.shape)} "
                f"and {pair.outer} {list(outer.shape)}"
            )
        if rank > len(inner):
            raise SettingError(f"ranks must be at most {len(inner)}, that of the model's adapters, got {shown(rank)}")
        _replace(smaller, pair.inner, nn.Parameter(inner.detach()[:rank].clone()))
        _replace(smaller, pair.outer, nn.Parameter(outer.detach()[:, :rank].clone()))
    return smaller


def _replace(model: nn.Module, name: str, parameter: nn.Parameter) -> None:
    path, _, leaf = name.rpartition(".")
    layer = model.get_submodule(path)
    setattr(layer, leaf, parameter)
    if isinstance(layer, nn.Linear):
        layer.out_features, layer.in_features = parameter.shape
