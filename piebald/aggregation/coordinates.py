"""A cohort's updates as few numbers each, with all their distances kept."""

from __future__ import annotations

import torch
from torch import Tensor

from piebald.cohort_matrix import gram


def places(matrix: Tensor) -> Tensor:
    """Points [n, n] in float64 with the distances that the rows [n, s] have (classical scaling, exact)."""
    inner = gram(matrix, matrix.mean(0))
    values, vectors = torch.linalg.eigh(inner)
    points: Tensor = vectors * values.clamp(min=0).sqrt()
    return points
