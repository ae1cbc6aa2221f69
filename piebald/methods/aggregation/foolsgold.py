"""FoolsGold: sybils are recognised by their similarity."""

from __future__ import annotations

import math
from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor

from piebald.contracts import Cohort, ServerContext
from piebald.core.cohort_matrix import gram, mean, median, too_many_pairs
from piebald.core.tensor_store import places_of, resized
from piebald.methods.aggregation.robust import Robust


class Foolsgold(Robust):
    """Clients whose updates, summed over all server steps, point the same way count less (Fung, Yoon, Beschastnikh
    2020).

    Sybils of one attacker push in one direction; honest clients with data of their own do not.  So it tolerates any
    number of sybils that are alike, but no single attacker, and honest clients with IID data look like sybils to it.
    It needs clients that can be recognised from round to round, and keeps `numbers` evenly spread numbers of the sum of
    each client's trained parameters, for the `remember` clients that took part most recently: 4 bytes each, 0.4 GB in
    all by default.  One that was forgotten starts anew.  Running statistics of batch norms, which say nothing about a
    direction, are the median of the clients', weighted by their shares.

    Attributes:
        numbers: of each client's summed updates, at most.
        remember: clients whose sums are kept; of more, those that were absent longest are forgotten.
    """

    on_device: ClassVar[bool] = True
    needs: ClassVar[str] = "clients that keep their names, and memory of their sums"

    numbers: int = Field(default=100_000, ge=1)
    remember: int = Field(default=1000, ge=1)

    def unsupported_cohort(self, count: int) -> str | None:
        return too_many_pairs(self.kind, count, 6)

    def tolerates(self, count: int) -> int:
        return 0

    def aggregate(self, cohort: Cohort, context: ServerContext) -> tuple[Tensor, list[float]]:
        changes, state = cohort.parameters, context.state
        size = changes.shape[1]
        # float32 has no whole numbers above 2^24, and the last place would be one too far
        spread = torch.linspace(0, size - 1, min(self.numbers, size), dtype=torch.float64).long()
        places = places_of(state, cohort.clients, cohort.version, self.remember)
        sums = resized(state.get("sums"), places, len(spread))
        sums.index_add_(0, places.rows, changes[:, spread].cpu())
        state["sums"] = sums
        believed = confidence(sums[places.rows])
        whole = float(believed.sum())
        # at 0 all look like sybils of one another, and nobody is believed
        shares = believed / whole if whole > 0 else torch.zeros_like(believed)
        average = mean(changes, shares.to(changes.device)) if whole > 0 else torch.zeros_like(changes[0])
        return self.with_buffers(average, shares, cohort), [float(share) for share in shares]

    def merge_buffers(self, buffers: Tensor, shares: Tensor) -> Tensor:
        return median(buffers, shares)


def confidence(history: Tensor) -> Tensor:
    """Return how far each client is believed [n], in [0, 1], from its summed updates [n, s] (Fung et al. 2020,
    algorithm 1).

    cs: cosines; v_i their largest; cs_ij is pardoned by v_i / v_j where v_j > v_i; then alpha = 1 - max_j cs_ij,
    rescaled to a largest of 1, and stretched by the logit ln(alpha / (1 - alpha)) + 1/2, cut to [0, 1].
    """
    if len(history) == 1:
        return torch.ones(1, dtype=torch.float64)
    inner = gram(history)
    # a client that never moved has length 0, and cosines must stay finite
    lengths = inner.diagonal().clamp(min=1e-60).sqrt()
    cosines = inner / (lengths[:, None] * lengths[None, :])
    # or everybody's most similar client would be itself
    cosines.fill_diagonal_(-math.inf)
    # the authors' program has a diagonal of 0: else a client unlike all others would be pardoned by a negative share,
    # and look like what it opposes
    most = cosines.max(dim=1).values.clamp(min=0)
    pardon = torch.where(most[None, :] > most[:, None], most[:, None] / most[None, :], torch.ones_like(cosines))
    alpha = (1 - (cosines.fill_diagonal_(0) * pardon).fill_diagonal_(-1).max(dim=1).values).clamp(0, 1)
    if float(alpha.max()) <= 0:
        return torch.zeros_like(alpha)
    alpha = alpha / alpha.max()
    # the largest alpha is exactly 1 after rescaling, whose logit is infinite
    stretched = torch.log(alpha / (1 - alpha).clamp(min=1e-300)) + 0.5
    return torch.nan_to_num(stretched, nan=0.0, posinf=1.0, neginf=0.0).clamp(0, 1)
