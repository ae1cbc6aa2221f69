"""FoolsGold: sybils are told by how alike they are."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from piebald.controller.weigh.columns import gram


def confidence(history: Tensor) -> Tensor:
    """How far each client is believed [n], in [0, 1], from its summed updates [n, s] (Fung et al. 2020, algorithm 1).

    cs: cosines; v_i their largest; cs_ij is pardoned by v_i / v_j where v_j > v_i; then alpha = 1 - max_j cs_ij,
    rescaled to a largest of 1, and stretched by the logit ln(alpha / (1 - alpha)) + 1/2, cut to [0, 1].
    """
    if len(history) == 1:
        return torch.ones(1, dtype=torch.float64)
    inner = gram(history)
    lengths = inner.diagonal().clamp(min=1e-60).sqrt()
    cosines = inner / (lengths[:, None] * lengths[None, :])
    cosines.fill_diagonal_(-math.inf)
    most = cosines.max(dim=1).values
    pardon = torch.where(most[None, :] > most[:, None], most[:, None] / most[None, :], torch.ones_like(cosines))
    alpha = (1 - (cosines.fill_diagonal_(0) * pardon).fill_diagonal_(-1).max(dim=1).values).clamp(0, 1)
    if float(alpha.max()) <= 0:
        return torch.zeros_like(alpha)
    alpha = alpha / alpha.max()
    stretched = torch.log(alpha / (1 - alpha).clamp(min=1e-300)) + 0.5
    return torch.nan_to_num(stretched, nan=0.0, posinf=1.0, neginf=0.0).clamp(0, 1)
