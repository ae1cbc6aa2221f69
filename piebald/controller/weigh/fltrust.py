"""FLTrust: the centre trains on a few rows of its own and trusts who goes the same way."""

from __future__ import annotations

import torch
from torch import Tensor

from piebald.controller.weigh.columns import gram


def trust(matrix: Tensor, root: Tensor) -> tuple[Tensor, Tensor]:
    """The average change [s] and each update's share [n] (Cao et al. 2021, algorithm 2).

    Trust is max(0, cosine with the root's own change); each update is scaled to the root's length and averaged by
    trust.  Where nobody is trusted nothing changes and all shares are 0.

    Args:
        matrix: changes [n, s].
        root: the change [s] that the centre's own rows make.
    """
    inner = gram(torch.cat([root[None], matrix]))
    lengths = inner.diagonal().clamp(min=1e-60).sqrt()
    scores = (inner[0, 1:] / (lengths[0] * lengths[1:])).clamp(min=0)
    whole = float(scores.sum())
    if whole <= 0 or float(inner[0, 0]) == 0:
        return torch.zeros_like(root), torch.zeros(len(matrix), dtype=torch.float64)
    shares = scores / whole
    return (shares * lengths[0] / lengths[1:]).to(matrix.dtype) @ matrix, shares.cpu()
