"""FedAMP: every client has a model at the server, moved towards those of clients with similar models."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor

from piebald.contracts import Cohort, ServerContext
from piebald.core.cohort_matrix import squared_distances, too_many_pairs
from piebald.methods.clustering.base import Clustering


class Attentive(Clustering):
    """Every client is a cluster of its own, and is sent a mean of all clients' last models in which those that are like
    its own count more (Huang et al. 2021, "Personalized cross-silo federated learning on non-IID data", algorithm 1).

    With w_i the model that client i trained the last time, it is sent u_i = (1 - sum_j a_ij) w_i + sum_j a_ij w_j over
    the other clients j, where a_ij = alpha / sigma * exp(-|w_i - w_j|^2 / sigma): the derivative of the paper's
    A(x) = 1 - exp(-x / sigma), times alpha.  The paper asks for an alpha so small that no client's own weight is
    negative; where it would be, the weights of the others are scaled down to sum to 1.  Lengths are those of trained
    parameters, and running statistics of batch norms are mixed with the same weights.

    The server keeps every client's model.  A client that has not trained yet, a newcomer and the common test set get
    the plain mean of all these models.

    Attributes:
        alpha: alpha_k of the paper, step towards the others, at least 0; with 0 clients do not learn from one another.
        sigma: scale of the squared distance within which models learn from one another, above 0.
    """

    on_device: ClassVar[bool] = True
    compares_changes: ClassVar[bool] = False
    from_current_model: ClassVar[bool] = True

    alpha: float = Field(default=0.1, ge=0)
    sigma: float = Field(default=1.0, gt=0)

    def unsupported_cohort(self, count: int) -> str | None:
        return too_many_pairs(self.kind, count, 4)

    def assign(self, cohort: Cohort, known: Mapping[int, int], context: ServerContext) -> list[int]:
        return [client + 1 for client in cohort.clients]  # 0 is the mean of all

    def mix(self, trained: Mapping[int, Tensor], context: ServerContext) -> dict[int, Tensor]:
        models: dict[str, Tensor] = context.state
        models.update({str(cluster): model for cluster, model in trained.items()})
        # names are text, and as text "10" comes before "2"
        clusters = sorted(models, key=int)
        stacked = torch.stack([models[cluster] for cluster in clusters])
        count = context.spec.layout.shared_trained
        mixed = self.weights(stacked[:, :count]) @ stacked
        return {0: stacked.mean(0)} | {int(cluster): row.clone() for cluster, row in zip(clusters, mixed, strict=True)}

    def weights(self, parameters: Tensor) -> Tensor:
        """The weights [n, n] of clients' parameters [n, t] in what each of them is sent; rows sum to 1."""
        apart = squared_distances(parameters)
        shares = (self.alpha / self.sigma * torch.exp(-apart / self.sigma)).fill_diagonal_(0)
        # scaled down only where they exceed 1, which keeps a client's own weight at 0 or above
        shares = shares / shares.sum(1, keepdim=True).clamp(min=1)
        return (shares + torch.diag(1 - shares.sum(1))).to(parameters.dtype)
