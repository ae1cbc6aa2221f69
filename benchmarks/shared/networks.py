"""Networks of benchmarks that the package does not have."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def with_group_norm(module: nn.Module, channels: int = 16) -> nn.Module:
    """Replace each batch norm by group norm over so many channels, at least two groups (Wu and He 2018).

    Hsieh et al. 2020 recommend it where clients' labels differ, and Hsu et al. 2020 train ResNet-18 so.
    """
    for name, layer in module.named_children():
        if isinstance(layer, nn.BatchNorm2d):
            setattr(module, name, nn.GroupNorm(max(2, layer.num_features // channels), layer.num_features))
        else:
            with_group_norm(layer, channels)
    return module


class CharacterLstm(nn.Module):
    """The next character: an embedding of 8 numbers and two LSTM layers (McMahan et al. 2017).

    Args:
        letters: different characters.
        outputs: what is told apart, the characters themselves or their kinds.
        width: units of a layer, 256 in the paper.
        everywhere: whether the next character is told at every place, or after the last one only.
    """

    def __init__(self, letters: int, outputs: int, width: int = 256, everywhere: bool = False) -> None:
        super().__init__()
        self.table = nn.Embedding(letters, 8)
        self.layers = nn.LSTM(8, width, 2, batch_first=True)
        self.classifier = nn.Linear(width, outputs)
        self.everywhere = everywhere

    def forward(self, x: Tensor) -> Tensor:
        """Characters [batch, length] to scores [batch, outputs], or [batch, length, outputs] of every place."""
        seen = self.layers(self.table(x.long()))[0]
        scores: Tensor = self.classifier(seen if self.everywhere else seen[:, -1])
        return scores


class LowRank(nn.Module):
    """A frozen linear layer and a trained product of two small matrices (LoRA, Hu et al. 2022, section 4.1)."""

    def __init__(self, layer: nn.Linear, rank: int) -> None:
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.down = nn.Linear(layer.in_features, rank, bias=False)
        self.up = nn.Linear(rank, layer.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        """Inputs [..., in] to outputs [..., out]."""
        made: Tensor = self.layer(x) + self.up(self.down(x))
        return made


class LoraEncoder(nn.Module):
    """A frozen transformer with trained low-rank products in its feed-forward layers, and a trained output layer.

    Args:
        width: numbers a token.
        depth: layers.
        rank: of the products.
    """

    def __init__(self, width: int = 512, depth: int = 6, rank: int = 8) -> None:
        super().__init__()
        self.table = nn.Embedding(256, width)
        # with ReLU or GELU torch would score by a fused path that reads linear1.weight, without the products
        layer = nn.TransformerEncoderLayer(width, 8, 4 * width, 0.0, batch_first=True, activation=nn.functional.silu)
        self.layers = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.requires_grad_(False)
        for one in self.layers.layers:
            one.linear1, one.linear2 = LowRank(one.linear1, rank), LowRank(one.linear2, rank)
        self.out = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Tokens [batch, 32] to logits [batch, 10]."""
        logits: Tensor = self.out(self.layers(self.table(x)).mean(1))
        return logits


def parameters(module: nn.Module) -> int:
    """How many numbers are trained."""
    return sum(one.numel() for one in module.parameters() if one.requires_grad)


def seeded(make: type[nn.Module], *arguments: int) -> nn.Module:
    """A network with initial parameters that are always the same."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return make(*arguments)
