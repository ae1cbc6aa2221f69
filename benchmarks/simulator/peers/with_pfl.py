"""pfl-research 0.6: python with_pfl.py W1, or torchrun --nproc-per-node 2 with_pfl.py W1 for two processes"""

import os
import sys
import time

import numpy as np
import torch
from pfl.aggregate.simulate import SimulatedBackend
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.dataset import Dataset
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.sampling import get_user_sampler
from pfl.hyperparam.base import NNEvalHyperParams, NNTrainHyperParams
from pfl.metrics import Metrics, Weighted
from pfl.model.pytorch import PyTorchModel
from shapes import BATCH, RATE, SHAPES, arrays, seconds_a_round, torch_network

torch.set_num_threads(1)
name = sys.argv[1]
shape = SHAPES[name]
x, y = (torch.from_numpy(part) for part in arrays(shape))


class Network(torch.nn.Module):
    """The network with the loss and metrics that pfl asks a model for."""

    def __init__(self):
        super().__init__()
        self.layers = torch_network(name)

    def loss(self, rows, labels, eval=False):
        """Mean cross-entropy."""
        self.eval() if eval else self.train()
        return torch.nn.functional.cross_entropy(self.layers(rows), labels)

    @torch.no_grad()
    def metrics(self, rows, labels, eval=True):
        """What an evaluation would report."""
        return {"loss": Weighted(self.loss(rows, labels).item() * len(labels), len(labels))}


class Clock(TrainingProcessCallback):
    """When each round ended."""

    def __init__(self):
        self.times = []

    def after_central_iteration(self, aggregate_metrics, model, *, central_iteration):
        """Note the time."""
        self.times.append(time.perf_counter())
        return False, Metrics()


network = Network()
model = PyTorchModel(
    network,
    local_optimizer_create=torch.optim.SGD,
    central_optimizer=torch.optim.SGD(network.parameters(), 1.0),
)
sampler = get_user_sampler("random", range(shape.clients))
data = FederatedDataset(lambda client: Dataset(raw_data=[x[client], y[client]]), sampler)
backend = SimulatedBackend(training_data=data, val_data=None)
params = NNAlgorithmParams(
    central_num_iterations=shape.rounds + 1,
    evaluation_frequency=10**6,
    train_cohort_size=shape.cohort,
    val_cohort_size=0,
)
clock = Clock()
np.random.seed(0)
FederatedAveraging().run(
    algorithm_params=params,
    backend=backend,
    model=model,
    model_train_params=NNTrainHyperParams(local_num_epochs=1, local_learning_rate=RATE, local_batch_size=BATCH),
    model_eval_params=NNEvalHyperParams(local_batch_size=None),
    callbacks=[clock],
)
if os.environ.get("RANK", "0") == "0":  # two processes' lines may end up as one
    print(seconds_a_round(clock.times))
