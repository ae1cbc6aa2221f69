"""Networks that read text character by character."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class CharacterLstm(nn.Module):
    """The next character at every place: an embedding of 8 numbers and two LSTM layers (McMahan et al. 2017).

    Args:
        letters: different characters.
        width: units of a layer, 256 in the paper.
    """

    def __init__(self, letters: int, width: int) -> None:
        super().__init__()
        self.table = nn.Embedding(letters, 8)
        self.layers = nn.LSTM(8, width, 2, batch_first=True)
        self.head = nn.Linear(width, letters)

    def forward(self, x: Tensor) -> Tensor:
        """Characters [batch, length] to scores [batch, length, letters]."""
        scores: Tensor = self.head(self.layers(self.table(x))[0])
        return scores


class CharacterTransformer(nn.Module):
    """A decoder with learned places and normalisation in front of each part.

    Args:
        letters: different characters.
        length: longest sequence.
        width: numbers for each character.
        blocks: number of blocks.
    """

    def __init__(self, letters: int, length: int, width: int, blocks: int) -> None:
        super().__init__()
        self.table, self.places = nn.Embedding(letters, width), nn.Embedding(length, width)
        make = lambda: nn.TransformerEncoderLayer(  # noqa: E731
            width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True
        )
        self.blocks = nn.ModuleList([make() for _ in range(blocks)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, letters)

    def forward(self, x: Tensor) -> Tensor:
        """Characters [batch, length] to scores [batch, length, letters]."""
        later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).triu(1)
        seen = self.table(x) + self.places(torch.arange(x.shape[1], device=x.device))
        for block in self.blocks:
            seen = block(seen, src_mask=later)
        scores: Tensor = self.head(self.norm(seen))
        return scores
