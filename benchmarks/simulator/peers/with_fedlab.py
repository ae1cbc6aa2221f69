"""FedLab 1.3, its serial trainer: python with_fedlab.py W1"""

import sys
import time
from unittest.mock import MagicMock

import torch

for unused in (
    "torchvision",
    "torchvision.transforms",
):  # imported by FedLab for its data sets, which are not used here
    sys.modules[unused] = MagicMock()

from fedlab.contrib.algorithm.basic_client import SGDSerialClientTrainer
from fedlab.utils.aggregator import Aggregators
from fedlab.utils.serialization import SerializationTool
from shapes import BATCH, RATE, SHAPES, arrays, seconds_a_round, torch_network
from torch.utils.data import DataLoader, TensorDataset

torch.set_num_threads(1)
name = sys.argv[1]
shape = SHAPES[name]
x, y = (torch.from_numpy(part) for part in arrays(shape))


class Clients:
    """What the trainer asks for its rows."""

    def get_dataloader(self, client, batch_size):
        """A client's mini-batches."""
        return DataLoader(TensorDataset(x[client], y[client]), batch_size=batch_size, shuffle=True)


model = torch_network(name)
trainer = SGDSerialClientTrainer(model, shape.clients)
trainer.setup_dataset(Clients())
trainer.setup_optim(1, BATCH, RATE)
sent, times = SerializationTool.serialize_model(model), []
draw = torch.Generator().manual_seed(0)
for _ in range(shape.rounds + 1):
    cohort = torch.randperm(shape.clients, generator=draw)[: shape.cohort].tolist()
    trainer.local_process([sent], cohort)
    sent = Aggregators.fedavg_aggregate([package[0] for package in trainer.uplink_package], [shape.rows] * shape.cohort)
    times.append(time.perf_counter())
print(seconds_a_round(times))
