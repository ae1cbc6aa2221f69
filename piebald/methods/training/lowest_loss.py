"""Train that of several models which fits the client best (IFCA)."""

from __future__ import annotations

from typing import ClassVar

import torch

from piebald.contracts import ClientContext, TrainInput, TrainOutput
from piebald.core.parameters import pad
from piebald.methods.training.sgd import Sgd


class LowestLoss(Sgd):
    """SGD from the candidate model with the lowest loss on the client's training rows.

    IFCA (Ghosh et al. 2020, algorithm 1), K-Cluster among the baselines of DistFL (2021).  The choice is sent as the
    metric "cluster", -1 without candidates.  Private layers stay the client's own with every candidate.
    """

    sends_choice: ClassVar[bool] = True

    def discloses(self) -> str | None:
        return "which model has the lowest loss on their training rows"

    def train(self, inputs: TrainInput, context: ClientContext) -> TrainOutput:
        offered = inputs.vectors.get("candidates")
        if offered is None:
            end = self.run_sgd(inputs, context)
            chosen = torch.full((len(inputs.versions),), -1.0, device=inputs.model.device)
        else:
            losses = context.losses([self._whole(inputs, model) for model in offered.unbind(1)], "train")
            # a client without rows, or whose loss is no number, takes the first model
            best = torch.nan_to_num(losses, nan=torch.inf).argmin(1)
            model = self._whole(inputs, offered[torch.arange(len(best), device=best.device), best])
            end = context.run_sgd(model, self.sgd_config(inputs), state=self.start_state(inputs))
            chosen = best.float()
        done = self.output(end)
        return TrainOutput(done.model, done.steps, done.vectors, done.state, {**done.metrics, "cluster": chosen})

    def _whole(self, inputs: TrainInput, shared: torch.Tensor) -> torch.Tensor:
        """Offered numbers [c, s] with the clients' own private ones behind."""
        size = inputs.model.shape[-1]
        if inputs.shared == size:  # one model stays one for all clients, and is scored on all their rows at once
            return shared
        whole = torch.zeros_like(inputs.model)
        whole[:, inputs.shared :] = inputs.model[:, inputs.shared :]
        return pad(shared, size) + whole
