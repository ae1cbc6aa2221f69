"""MOON: features are drawn towards those of the global model, and away from those of the client's last model."""

from __future__ import annotations

from pydantic import Field
from torch import Tensor
from torch.nn import functional

from piebald.contracts import ClientContext, LossBatch, TrainInput, TrainOutput
from piebald.methods.training.sgd import Sgd


class ModelContrastive(Sgd):
    """SGD with a model-contrastive term (Li, He, Song 2021, "Model-contrastive federated learning", eq. 3 and 4).

    With z a row's features under the model that is trained, z_glob under the global model w_t and z_prev under the
    model that the client trained the last time, mu * l_con is added to the row's loss:
    l_con = -log(exp(sim(z, z_glob) / temperature) / (exp(sim(z, z_glob) / temperature) + exp(sim(z, z_prev) /
    temperature))), where sim is the cosine.

    Features are what goes into the model's last linear layer.  The paper adds a projection head of two layers before
    it, which is a matter of the model here.  Where the paper is silent, its program is followed: both anchors are in
    evaluation mode, and at its first task a client's last model is the one that the run started from.  The client keeps
    its last model, private layers included, and sends no more than FedAvg.

    Attributes:
        mu: weight of the term, at least 0; 0 is plain SGD.
        temperature: tau of the paper, above 0.
    """

    reads_features = True
    anchors = ("sent", "previous")

    mu: float = Field(default=1.0, ge=0)
    temperature: float = Field(default=0.5, gt=0)

    def initial_state(self, model: Tensor, shared: int) -> dict[str, Tensor]:
        return super().initial_state(model, shared) | {"previous": model}

    def train(self, inputs: TrainInput, context: ClientContext) -> TrainOutput:
        tensors = {"sent": inputs.model, "previous": inputs.state["previous"]}
        end = self.run_sgd(inputs, context, local_loss=self if self.mu else None, own=tensors)
        return self.output(end, state={"previous": end.model})

    def batch_loss(self, batch: LossBatch) -> Tensor:
        z, sent, previous = (batch.features[name] for name in ("model", *self.anchors))
        # -log(e^a / (e^a + e^b)) = softplus(b - a), which does not overflow at low temperatures
        nearer = functional.cosine_similarity(z, sent) - functional.cosine_similarity(z, previous)
        return batch.losses(batch.outputs, batch.targets) + self.mu * functional.softplus(-nearer / self.temperature)
