"""Choose among several models the one that fits best, and train that."""

from __future__ import annotations

import torch

from piebald.contracts import ClientContext, TrainInput, TrainOutput
from piebald.parameters import pad
from piebald.training.sgd import Sgd


class LowestLoss(Sgd):
    """SGD from that of the offered models which has the least loss on the client's training rows.

    IFCA (Ghosh et al. 2020, algorithm 1), K-Cluster among the baselines of DistFL (2021).  The choice is told as the
    metric "group", -1 where nothing was offered.  Private layers stay the client's own under every offer.
    """

    def train(self, inputs: TrainInput, context: ClientContext) -> TrainOutput:
        offered = inputs.vectors.get("candidates")
        if offered is None:
            end = self.run_sgd(inputs, context)
            chosen = torch.full((len(inputs.versions),), -1.0, device=inputs.model.device)
        else:
            models = [self._whole(inputs, offered[:, number]) for number in range(offered.shape[1])]
            losses = torch.stack([context.score(model, "train")[0]["loss"] for model in models], dim=1)
            best = torch.nan_to_num(losses, nan=torch.inf).argmin(1)
            stacked = torch.stack(models, dim=1)
            model = stacked[torch.arange(len(best), device=best.device), best]
            end = context.run_sgd(model, self.sgd_config(inputs), velocity=inputs.state.get("velocity"))
            chosen = best.float()
        done = self.output(end)
        return TrainOutput(done.model, done.steps, done.vectors, done.state, {**done.metrics, "group": chosen})

    def _whole(self, inputs: TrainInput, shared: torch.Tensor) -> torch.Tensor:
        """Offered numbers [c, s] with the clients' own private ones behind."""
        size = inputs.model.shape[-1]
        own = torch.zeros_like(inputs.model)
        own[:, inputs.shared :] = inputs.model[:, inputs.shared :]
        return pad(shared, size) + own
