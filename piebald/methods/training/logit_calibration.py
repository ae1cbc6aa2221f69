"""FedLC: logits calibrated by how many rows of each class the client has."""

from __future__ import annotations

from pydantic import Field
from torch import Tensor

from piebald.contracts import ClientContext, LossBatch, ModelSpec, TrainInput, TrainOutput
from piebald.methods.training.sgd import Sgd

_FEWEST = 1e-8  # rows that a class without rows counts as


class LogitCalibration(Sgd):
    """SGD on the cross-entropy of logits f_c - tau * n_c^(-1/4), with n_c the client's training rows of class c (Zhang
    et al. 2022, "Federated learning with label distribution skew via logits calibration", section 4, L_cal).

    A class with few rows has to be predicted by a wider margin, so that a client unlearns less of what others know.

    The paper's denominator leaves out the row's own class.  Such a loss has no lower bound and is not that of FedAvg
    for tau = 0, so the sum here is over all classes, as in the public programs.  A class without rows counts as 1e-8
    rows, as there: its logit is 100 tau lower, so that it is hardly unlearned at all.

    Attributes:
        tau: strength of the calibration, at least 0; 0 is plain SGD.
    """

    tau: float = Field(default=1.0, ge=0)

    def unsupported_model(self, spec: ModelSpec) -> str | None:
        if spec.objective.name != "classification" or len(spec.outputs) != 1:
            return (
                f"{self.kind} counts rows by class, so it needs classification with one label for each row: choose "
                "another training, or loss = 'classification'"
            )
        return super().unsupported_model(spec)

    def train(self, inputs: TrainInput, context: ClientContext) -> TrainOutput:
        shift = {"shift": self.tau * context.label_counts().clamp(min=_FEWEST).pow(-0.25)}
        return self.output(self.run_sgd(inputs, context, local_loss=self if self.tau else None, own=shift))

    def batch_loss(self, batch: LossBatch) -> Tensor:
        return batch.losses(batch.outputs - batch.own["shift"], batch.targets)
