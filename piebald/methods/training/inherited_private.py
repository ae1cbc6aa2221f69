"""FedPHP, at the client: the next model is regularized towards a mean of the models that it has trained."""

from __future__ import annotations

import torch
from pydantic import Field
from torch import Tensor

from piebald.contracts import ClientContext, LossBatch, TrainInput, TrainOutput
from piebald.methods.training.sgd import Sgd

_WIDTHS = (0.25, 0.5, 1.0, 2.0, 4.0)  # of the kernels, in mean squared distances: as in the authors' program
_EPS = 1e-8


class InheritedPrivate(Sgd):
    """SGD on (1 - lam) * loss + lam * MMD^2, where the MMD is between a batch's features under the model that is
    trained and under the client's inherited private model (Li, Zhan, Shao, Li, Song 2021, "FedPHP: Federated
    personalization with inherited private models"; written after the authors' program, FedRepo, since the paper's
    equations could not be looked up).

    The inherited model is what the client uses for itself.  After its n-th task, counted from 0, it is
    mu_n * inherited + (1 - mu_n) * trained, where mu_n = mu * n / horizon rises up to mu.  The MMD is the biased one, a
    sum over five Gaussian kernels around the mean squared distance of the batch's features, which are what goes into
    the last linear layer.  PFLlib has kernels of fixed widths, and counts the server's rounds.  The client keeps its
    inherited model and sends no more than FedAvg.

    Attributes:
        lam: weight of the term, in [0, 1); with 0 the shared model is FedAvg's.
        mu: weight of the past in the inherited model at the end, in [0, 1]; with 0 it is the last trained one.
        horizon: tasks until mu is reached, at least 1: those that a client is expected to have in the run.
    """

    reads_features = True
    anchors = ("inherited",)

    lam: float = Field(default=0.05, ge=0, lt=1)
    mu: float = Field(default=0.9, ge=0, le=1)
    horizon: int = Field(default=100, ge=1)

    def initial_state(self, model: Tensor, shared: int) -> dict[str, Tensor]:
        return super().initial_state(model, shared) | {"inherited": model, "tasks": model.new_zeros(1)}

    def train(self, inputs: TrainInput, context: ClientContext) -> TrainOutput:
        inherited, tasks = inputs.state["inherited"], inputs.state["tasks"]
        end = self.run_sgd(inputs, context, local_loss=self if self.lam else None, own={"inherited": inherited})
        # grows with the tasks up to mu: a model that has been inherited once says little about the past
        past = (self.mu * tasks / self.horizon).clamp(max=self.mu)
        renewed = {"inherited": past * inherited + (1 - past) * end.model, "tasks": tasks + 1}
        return self.output(end, state=renewed)

    def batch_loss(self, batch: LossBatch) -> Tensor:
        apart = discrepancy(batch.features["model"], batch.features["inherited"], batch.mask)
        return (1 - self.lam) * batch.losses(batch.outputs, batch.targets) + self.lam * apart

    def personalize(self, inputs: TrainInput, context: ClientContext) -> Tensor:
        return inputs.state["inherited"]


def discrepancy(x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
    """The squared maximum mean discrepancy of rows x and y [n, d], of which those with mask [n] 1 count."""
    # signs turn the three sums of the MMD into one quadratic form; rows that only fill up the batch have 0
    both, signs = torch.cat([x, y]), torch.cat([mask, -mask])
    rows, counted = mask.sum(), signs.abs()
    apart = (both.unsqueeze(1) - both.unsqueeze(0)).square().sum(-1)
    pairs = counted.unsqueeze(1) * counted
    # detached: the width is a scale of the kernels, and must not be minimized along
    width = (apart.detach() * pairs).sum() / (2 * rows * (2 * rows - 1)).clamp(min=1) + _EPS
    kernels = torch.stack([(-apart / (factor * width)).exp() for factor in _WIDTHS]).sum(0)
    return (kernels * signs.unsqueeze(1) * signs).sum() / (rows * rows).clamp(min=1)
