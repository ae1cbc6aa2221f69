"""FedDecorr: a penalty on the correlation of a batch's features."""

from __future__ import annotations

from pydantic import Field
from torch import Tensor

from piebald.contracts import ClientContext, LossBatch, TrainInput, TrainOutput
from piebald.methods.training.sgd import Sgd

_EPS = 1e-8  # added to variances, as in the authors' program


class Decorrelation(Sgd):
    """SGD with beta / d^2 * |K|_F^2 added to the loss of a batch, where K is the correlation matrix of its rows'
    features, with d of them (Shi et al. 2023, "Towards understanding and mitigating dimensional collapse in
    heterogeneous federated learning", section 4, L_FedDecorr).

    Features are what goes into the model's last linear layer.  Variances divide by the rows of the batch less one, and
    a batch of one row has no such term.  The authors' program sums products where the paper has correlations and leaves
    out the diagonal, which makes its term about as many times larger as a batch has rows; this is the paper's, so take
    a larger beta to have theirs.

    Attributes:
        beta: weight of the term, at least 0; 0 is plain SGD.
    """

    reads_features = True

    beta: float = Field(default=0.1, ge=0)

    def train(self, inputs: TrainInput, context: ClientContext) -> TrainOutput:
        return self.output(self.run_sgd(inputs, context, local_loss=self if self.beta else None))

    def batch_loss(self, batch: LossBatch) -> Tensor:
        z, counted = batch.features["model"], batch.mask.unsqueeze(1)
        rows = counted.sum()
        degrees = (rows - 1).clamp(min=1)  # a lone row has the deviation 0, and so the term 0
        # masked once more after centring: rows that fill up the batch would be minus the mean
        away = (z - (z * counted).sum(0) / rows) * counted
        z = away / (away.square().sum(0) / degrees + _EPS).sqrt()
        correlation = z.T @ z / degrees
        return batch.losses(batch.outputs, batch.targets) + self.beta * correlation.square().mean()
