"""Low-rank adapters: their pairs of matrices in a model, and the same model with adapters of a lower rank."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from torch import nn

from piebald.core.errors import SettingError, shown
from piebald.core.parameters import copied

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
    every = [*names]
    there, found = set(every), []
    for name in every:
        words = name.split(".")
        if _INNER in words:
            outer = ".".join(_OUTER if word == _INNER else word for word in words)
            if outer in there:
                found.append(AdapterPair(name, outer))
    return found


def with_rank(model: nn.Module, rank: int) -> nn.Module:
    """A copy of a model whose adapters have the first `rank` rows of A and columns of B only; the rest is the same.

    Their output is multiplied by the same factor as before, so it is what the model's own is with zeros elsewhere.

    Raises:
        SettingError: the model has no adapters, or none of so high a rank.
    """
    pairs = adapter_pairs(name for name, one in model.named_parameters() if one.requires_grad)
    if not pairs:
        raise SettingError(
            f"ranks are those of low-rank adapters, and {type(model).__name__} has none: load it with "
            "adapter = 'lora', or call the matrices of your own lora_A and lora_B"
        )
    made = copied(model)
    for pair in pairs:
        inner, outer = made.get_parameter(pair.inner), made.get_parameter(pair.outer)
        if inner.dim() != 2 or outer.dim() != 2 or inner.shape[0] != outer.shape[1]:
            raise SettingError(
                f"adapters are matrices A [rank, inputs] and B [outputs, rank], got {pair.inner} {list(inner.shape)} "
                f"and {pair.outer} {list(outer.shape)}"
            )
        if rank > len(inner):
            raise SettingError(f"ranks must be at most {len(inner)}, that of the model's adapters, got {shown(rank)}")
        _replace(made, pair.inner, nn.Parameter(inner.detach()[:rank].clone()))
        _replace(made, pair.outer, nn.Parameter(outer.detach()[:, :rank].clone()))
    return made


def _replace(model: nn.Module, name: str, parameter: nn.Parameter) -> None:
    path, _, leaf = name.rpartition(".")
    layer = model.get_submodule(path)
    setattr(layer, leaf, parameter)
    if isinstance(layer, nn.Linear):
        layer.out_features, layer.in_features = parameter.shape
