"""SCAFFOLD: local steps steered by control variates, kept by every client and by the centre."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Self

import torch
from pydantic import model_validator

from piebald.contracts import Learned, Local, Start
from piebald.parameters import pad
from piebald.training.sgd import Sgd

if TYPE_CHECKING:
    from torch import Tensor


class Scaffold(Sgd):
    """Steps along g - c_k + c (Karimireddy et al. 2020, algorithm 1, option II).

    The control variates cover the shared numbers only: a private layer has no drift to correct.  The updated own
    variate is c_k - c + (w_t - w) / (steps * lr), so the rule holds for plain SGD; momentum, weight decay and clipping
    are refused.
    """

    @model_validator(mode="after")
    def _plain_steps_only(self) -> Self:
        for name in ("momentum", "weight_decay", "clip"):
            if getattr(self, name):
                raise ValueError(f"{name} breaks the control variates of scaffold: leave it out")
        return self

    def remember(self, model: Tensor, shared: int) -> dict[str, Tensor]:
        return {"control": torch.zeros(shared)}

    def common(self, shared: int) -> dict[str, Tensor]:
        return {"control": torch.zeros(shared)}

    def learn(self, start: Start, local: Local) -> Learned:
        common = start.parts["control"]
        own = start.memory["control"]
        end = self.descend(start, local, shift=pad(common - own, start.model.shape[-1]))
        moved = start.model[..., : start.shared] - end.model[..., : start.shared]
        change = moved / (end.steps.clamp(min=1).unsqueeze(-1) * self.rate(start)) - common
        change = change * (end.steps > 0).unsqueeze(-1)  # who has no rows learns nothing about its drift
        return self.learned(end, parts={"control": change}, memory={"control": own + change})

    def fold(
        self, common: Mapping[str, Tensor], mean: Mapping[str, Tensor], arrived: int, known: int
    ) -> dict[str, Tensor]:
        """C <- c + |S| / N * mean of the changes."""
        return {"control": common["control"] + mean["control"] * (arrived / known)}
