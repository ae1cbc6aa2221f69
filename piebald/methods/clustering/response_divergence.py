"""Models compared by how they respond: responses (DistFL, eq. 5) and their divergences (eq. 6)."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from piebald.core.machine import moved
from piebald.core.parameters import Layout

FLOOR = 1e-6  # the least probability: a divergence stays finite where a model is certain


def responses(module: nn.Module, layout: Layout, models: Iterable[Tensor], x: Tensor, afresh: bool = False) -> Tensor:
    """Return what each model makes of the probes: class probabilities [n, z, classes], on the host.

    Args:
        module: a module of the models' form in evaluation mode, on the device of the probes; its numbers are
            overwritten.
        layout: of the models.
        models: [p] each, one at a time, so that a cohort need not be held twice.
        x: the probes [z, ...].
        afresh: normalise by the probes' own mean and variance in every batch norm, not by running statistics.
    """
    if afresh:
        for layer in module.modules():
            if isinstance(layer, nn.modules.batchnorm._BatchNorm):
                layer.train()
                layer.momentum = 0.0  # what it remembers stays
    answers = []
    with torch.no_grad():
        for model in models:
            layout.load(module, moved(model, x.device))
            # batch norms in training mode need all probes at once: blocks would each have a mean of their own
            vectors = [x] if afresh else torch.split(x, 256)
            answers.append(torch.cat([module(part).softmax(1) for part in vectors]))
    return torch.stack(answers).cpu()


def divergences(answers: Tensor) -> Tensor:
    """Kullback-Leibler divergences [n, n] in float64 of all pairs: entry (i, j) is KL(i || j), the mean over probes.

    KL(i || j) = sum p_i log p_i - sum p_i log p_j: one product of two matrices for all pairs.  Probabilities are mixed
    with a millionth of the even distribution, so that 0 is safe.

    Args:
        answers: [n, z, classes], each row of probabilities.
    """
    count, probes, classes = answers.shape
    # a probability of 0 would make a divergence infinite, and with it all later means
    p = answers.double() * (1 - FLOOR) + FLOOR / classes
    logs = p.log().reshape(count, -1)
    p = p.reshape(count, -1)
    divergence = ((p * logs).sum(1, keepdim=True) - p @ logs.T) / probes
    # the difference of two sums may round to slightly below 0, which no divergence is
    return divergence.clamp(min=0).fill_diagonal_(0)


def symmetric(matrix: Tensor) -> Tensor:
    """The mean of both directions."""
    return (matrix + matrix.T) / 2


def unlikeness(divergence: Tensor) -> Tensor:
    """1 - correlation [n, n] of what models answer, in [0, 2], from their divergences [n, n].

    A client that trained on few rows answers unlike everybody, itself of other rounds included: its whole row is large,
    and distances are mostly such noise.  Taking rows' and columns' means out of the symmetrised matrix (double
    centring, as in classical scaling) leaves inner products of answers about their common middle; divided by their
    lengths they are correlations, near 1 inside a cluster, whatever the noise of single clients.
    """
    pairs = symmetric(divergence)
    inner = -(pairs - pairs.mean(0) - pairs.mean(1, keepdim=True) + pairs.mean()) / 2
    lengths = inner.diagonal().clamp(min=1e-12).sqrt()
    distances = (1 - inner / lengths[:, None] / lengths[None, :]).clamp(0, 2)
    return symmetric(distances).fill_diagonal_(0)
