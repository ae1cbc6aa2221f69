"""A model's classes, interpolated with those of the nearest of remembered rows."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from piebald.contracts import RowOutputs

_PAIRS = 1 << 22  # distances that are computed at a time


def neighbour_shares(features: Tensor, memory: RowOutputs, k: int, scale: float) -> Tensor:
    """The share of each class among the k nearest remembered rows, nearer ones counting more [n, classes].

    A row at distance d counts exp(-d / scale), see `KnnPer`.

    Args:
        features: [n, d], of the rows that are asked about.
        memory: at least one remembered row.
        k: how many of them; all where there are fewer.
        scale: of the distances, above 0.
    """
    count, classes = min(k, len(memory.features)), memory.outputs.shape[-1]
    parts = []
    for block in torch.split(features, max(1, _PAIRS // len(memory.features))):
        apart = torch.cdist(block, memory.features, compute_mode="donot_use_mm_for_euclid_dist")
        near, rows = apart.topk(count, dim=1, largest=False)
        shares = functional.softmax(-near / scale, dim=1)  # exp(-d) over its sum, without underflow far away
        parts.append(shares.new_zeros(len(block), classes).scatter_add(1, memory.labels[rows], shares))
    return torch.cat(parts) if parts else features.new_zeros(0, classes)


def interpolated(outputs: Tensor, shares: Tensor, lam: float) -> Tensor:
    """Log probabilities lam * shares + (1 - lam) * softmax(outputs) [n, classes]; the outputs themselves for lam = 0,
    which have the same probabilities.
    """
    if lam == 0:
        return outputs
    return (lam * shares + (1 - lam) * functional.softmax(outputs, dim=1)).log()
