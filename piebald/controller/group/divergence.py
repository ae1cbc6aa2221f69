"""How differently models answer: responses (DistFL, eq. 5) and their divergences (eq. 6)."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from piebald.parameters import Layout

FLOOR = 1e-6  # the least probability: a divergence stays finite where a model is certain


def responses(module: nn.Module, layout: Layout, models: Iterable[Tensor], x: Tensor) -> Tensor:
    """What each model makes of the probes: class probabilities [n, z, classes].

    Args:
        module: a module of the models' form in evaluation mode, whose numbers are overwritten.
        layout: of the models.
        models: [p] each, one at a time, so that a cohort need not be held twice.
        x: the probes [z, ...].
    """
    found = []
    with torch.no_grad():
        for model in models:
            layout.load(module, model)
            found.append(torch.cat([module(part).softmax(1) for part in torch.split(x, 256)]))
    return torch.stack(found)


def divergences(answers: Tensor) -> Tensor:
    """Kullback-Leibler divergences [n, n] in float64 of all pairs: entry (i, j) is KL(i || j), the mean over probes.

    KL(i || j) = sum p_i log p_i - sum p_i log p_j: one product of two matrices for all pairs.  Probabilities are mixed
    with a millionth of the even distribution, so that 0 is safe.

    Args:
        answers: [n, z, classes], each row of probabilities.
    """
    count, probes, classes = answers.shape
    p = answers.double() * (1 - FLOOR) + FLOOR / classes
    logs = p.log().reshape(count, -1)
    p = p.reshape(count, -1)
    found = ((p * logs).sum(1, keepdim=True) - p @ logs.T) / probes
    return found.clamp(min=0).fill_diagonal_(0)


def symmetric(matrix: Tensor) -> Tensor:
    """The mean of both directions."""
    return (matrix + matrix.T) / 2
