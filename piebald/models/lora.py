"""Low-rank adapters in a network of transformers (LoRA, Hu et al. 2022), through peft."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from piebald.core.errors import SettingError, shown

# What architectures call the projections of queries and values, which Hu et al. (section 7.1) found to be enough; some
# have one layer for queries, keys and values.
_ATTENTION = {
    *("q_lin", "v_lin", "query", "value", "q_proj", "v_proj", "query_proj", "value_proj", "q", "v", "q_attn"),
    *("c_attn", "query_key_value", "qkv_proj", "qkv", "Wqkv"),
}


def with_lora(
    network: nn.Module,
    head: Sequence[str],
    task: str | None,
    rank: int,
    alpha: int,
    dropout: float,
    targets: str | Sequence[str],
) -> nn.Module:
    """A network with adapters: W x + (alpha / rank) B A x, with A [rank, inputs] and B [outputs, rank], B = 0 at first.

    Args:
        network: a network of transformers; its own weights are frozen.
        head: names of the layers of its head, which get no adapter and are trained besides, except where the task is
            "CAUSAL_LM": there it has as many weights as the vocabulary, and often the same ones.
        task: what peft calls the task, or None.
        rank, alpha, dropout: as in the paper; dropout is that of the adapters' input.
        targets: the layers that get an adapter, see `targets_in`.

    Raises:
        SettingError: no layer has such a name, or the rank is larger than a side of a layer.
    """
    import peft

    chosen = targets_in(network, head, targets)
    smallest = min(min(_sides(network.get_submodule(name))) for name in chosen)
    if rank > smallest:
        raise SettingError(
            f"rank must be at most {smallest}, the smaller side of the layers that get adapters, got {rank}"
        )
    config = peft.LoraConfig(
        task_type=task,
        r=rank,
        lora_alpha=alpha,
        lora_dropout=dropout,
        target_modules=chosen,
        modules_to_save=[*head] if task != "CAUSAL_LM" else None,
    )
    adapted: nn.Module = peft.get_peft_model(network, config)
    return adapted


def targets_in(network: nn.Module, head: Sequence[str], targets: str | Sequence[str]) -> list[str]:
    """The full names of the layers that get adapters.

    Args:
        network: a network of transformers.
        head: names of its layers that get none.
        targets: "attention" (projections of queries and values), "all" (every linear layer but the head), or names of
            layers, also only their last word ("q_lin") or shell patterns ("*.layer.0.*").
    """
    linear = [
        name
        for name, layer in network.named_modules()
        if _sides(layer) and not any(name == top or name.startswith(f"{top}.") for top in head)
    ]
    if targets == "all":
        return linear
    words = sorted(_ATTENTION) if targets == "attention" else [targets] if isinstance(targets, str) else [*targets]
    chosen = []
    for word in words:
        hits = [name for name in linear if name == word or name.endswith(f".{word}") or fnmatchcase(name, word)]
        if not hits and targets != "attention":
            raise _unknown(word, linear)
        chosen += [name for name in hits if name not in chosen]
    if not chosen:
        raise _unknown(targets, linear)
    return chosen


def _sides(layer: Any) -> tuple[int, ...]:
    """Inputs and outputs of a linear layer; () for other layers."""
    if isinstance(layer, nn.Linear):
        return layer.in_features, layer.out_features
    if type(layer).__name__ == "Conv1D":  # transformers' linear layer with its weight transposed, in GPT-2
        return tuple(layer.weight.shape)
    return ()


def _unknown(named: object, linear: Sequence[str]) -> SettingError:
    words = sorted({name.rpartition(".")[2] for name in linear})
    return SettingError(
        f"targets must be 'attention', 'all' or names of linear layers of this network ({', '.join(words[:20])}), "
        f"got {shown(named)}"
    )
