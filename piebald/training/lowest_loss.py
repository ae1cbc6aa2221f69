"""Choose among several models the one that fits best, and train that."""

from __future__ import annotations

import torch

from piebald.contracts import Learned, Local, Start
from piebald.parameters import pad
from piebald.training.sgd import Sgd


class LowestLoss(Sgd):
    """SGD from that of the offered models which has the least loss on the client's training rows.

    IFCA (Ghosh et al. 2020, algorithm 1), K-Cluster among the baselines of DistFL (2021).  The choice is told as the
    metric "group", -1 where nothing was offered.  Private layers stay the client's own under every offer.
    """

    def learn(self, start: Start, local: Local) -> Learned:
        offered = start.parts.get("candidates")
        if offered is None:
            end = self.descend(start, local)
            chosen = torch.full((len(start.versions),), -1.0, device=start.model.device)
        else:
            models = [self._whole(start, offered[:, number]) for number in range(offered.shape[1])]
            losses = torch.stack([local.score(model, "train")[0]["loss"] for model in models], dim=1)
            best = torch.nan_to_num(losses, nan=torch.inf).argmin(1)
            stacked = torch.stack(models, dim=1)
            model = stacked[torch.arange(len(best), device=best.device), best]
            end = local.descend(model, self.descent(start), velocity=start.memory.get("velocity"))
            chosen = best.float()
        done = self.learned(end)
        return Learned(done.model, done.steps, done.parts, done.memory, {**done.metrics, "group": chosen})

    def _whole(self, start: Start, shared: torch.Tensor) -> torch.Tensor:
        """Offered numbers [c, s] with the clients' own private ones behind."""
        size = start.model.shape[-1]
        own = torch.zeros_like(start.model)
        own[:, start.shared :] = start.model[:, start.shared :]
        return pad(shared, size) + own
