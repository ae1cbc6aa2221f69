"""SGD that also sends the loss of the model that was sent."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import ClassVar

import torch

from piebald.contracts import ClientContext, TrainInput, TrainOutput
from piebald.methods.training.sgd import Sgd


class InitialLoss(Sgd):
    """SGD; the update carries F_k(w_t), the loss of the model that was sent on the client's training rows.

    Methods for fairness between clients need it: q-FedAvg, TERM, agnostic federated learning.  It is sent as the metric
    "initial_loss", 0 without rows, and costs one pass over the rows.  The learning rate that the task had is sent
    beside it as "lr", for methods that scale steps by it.
    """

    sends_initial_loss: ClassVar[bool] = True

    def discloses(self) -> str | None:
        return "the loss of the global model on their training rows"

    def known_metrics(self, version: int) -> Mapping[str, float]:
        return {"lr": self.lr * self.lr_schedule.factor(version)}

    def train(self, inputs: TrainInput, context: ClientContext) -> TrainOutput:
        loss = torch.nan_to_num(context.score(inputs.model, "train", metrics=False)[0]["loss"], nan=0.0)
        done = self.output(self.run_sgd(inputs, context))
        rate = self.rate(inputs)
        # of the type of `committed`, which has the widest floating point of the device
        rates = torch.zeros_like(inputs.committed[:, 0]) + (rate.flatten() if isinstance(rate, torch.Tensor) else rate)
        return dataclasses.replace(done, metrics={**done.metrics, "initial_loss": loss, "lr": rates})
