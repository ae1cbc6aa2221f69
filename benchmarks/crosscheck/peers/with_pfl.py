"""pfl-research: FedAvg on the same rows from the same model."""

import sys

import numpy as np
import torch
from inputs import ROWS, TRAINING, folder_of, linear
from personal import flat
from pfl.aggregate.simulate import SimulatedBackend
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.data.dataset import Dataset
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.sampling import get_user_sampler
from pfl.hyperparam.base import NNEvalHyperParams, NNTrainHyperParams
from pfl.metrics import Weighted
from pfl.model.pytorch import PyTorchModel

given, out = folder_of(sys.argv)
x, y = torch.from_numpy(given["x"]), torch.from_numpy(given["y"])


class Network(torch.nn.Module):
    """The linear model with the loss and metrics that pfl asks a model for."""

    def __init__(self):
        super().__init__()
        self.layer = linear(given)

    def loss(self, rows, labels, eval=False):
        """Mean cross-entropy."""
        return torch.nn.functional.cross_entropy(self.layer(rows), labels)

    @torch.no_grad()
    def metrics(self, rows, labels, eval=True):
        """What an evaluation would report."""
        return {"loss": Weighted(self.loss(rows, labels).item() * len(labels), len(labels))}


network = Network()
model = PyTorchModel(
    network,
    local_optimizer_create=torch.optim.SGD,
    central_optimizer=torch.optim.SGD(network.parameters(), 1.0),
)
sampler = get_user_sampler("minimize_reuse", range(len(x)))  # every client once a round
data = FederatedDataset(lambda client: Dataset(raw_data=[x[client], y[client]]), sampler)
FederatedAveraging().run(
    algorithm_params=NNAlgorithmParams(
        central_num_iterations=TRAINING["rounds"],
        evaluation_frequency=10**6,
        train_cohort_size=len(x),
        val_cohort_size=0,
    ),
    backend=SimulatedBackend(training_data=data, val_data=None),
    model=model,
    model_train_params=NNTrainHyperParams(
        local_num_epochs=TRAINING["epochs"], local_learning_rate=TRAINING["lr"], local_batch_size=ROWS
    ),
    model_eval_params=NNEvalHyperParams(local_batch_size=None),
)
np.savez(out, **{"FedAvg": flat(network)})
