"""FedLab: its average by examples, and its servers and clients of FedAsync, FedProx, q-FedAvg and FedNova.

Its asynchronous server is handed the models that came, in the order of Piebald's run, each with the version that it was
trained from.

Its q-FedAvg takes the losses of the last epoch, where the paper takes those of the model that was sent: the same where
a task has one step.  Its FedNova counts all clients the same.  Its IFCA and FedDyn are left out: the first hands its
clients no models to choose from (`payload[1:0]`), the other's terms are made of detached numbers, so that they have no
gradient.  Its data sets are not used, so it needs no torchvision.
"""

import logging
import sys
from unittest.mock import MagicMock

import equations
import frameworks
import numpy as np
import personal
import torch

for unused in ("fedlab.contrib.dataset", "fedlab.contrib.dataset.basic_dataset"):
    sys.modules[unused] = MagicMock()
from fedlab.contrib.algorithm.basic_server import AsyncServerHandler
from fedlab.contrib.algorithm.fednova import FedNovaServerHandler
from fedlab.contrib.algorithm.fedprox import FedProxSerialClientTrainer
from fedlab.contrib.algorithm.qfedavg import qFedAvgClientTrainer, qFedAvgServerHandler
from fedlab.utils import Aggregators, Logger
from inputs import FEDASYNC, ROWS, TRAINING, folder_of, linear
from torch.utils.data import DataLoader, TensorDataset

given, out = folder_of(sys.argv)
updates = [torch.from_numpy(row) for row in given["updates"]]
quiet = Logger(log_name="quiet")
logging.getLogger("quiet").setLevel("WARNING")


class Rows:
    """Clients' rows, as FedLab's trainers ask for them."""

    def get_dataloader(self, number, batch_size=None):
        """The batches of a client."""
        x, y = torch.from_numpy(given["x"][number]), torch.from_numpy(given["y"][number])
        return DataLoader(TensorDataset(x, y), batch_size=batch_size)


def near():
    """FedProx's rounds."""
    clients, count = FedProxSerialClientTrainer(personal.network(), len(given["x"]), logger=quiet), len(given["x"])
    clients.setup_dataset(Rows())
    clients.setup_optim(TRAINING["epochs"], ROWS, TRAINING["lr"], equations.PROX)
    model = torch.from_numpy(personal.flat(personal.network()))
    for _ in range(TRAINING["rounds"]):
        clients.local_process([model], range(count))
        model = Aggregators.fedavg_aggregate([package[0] for package in clients.uplink_package])
    return model.numpy()


def mixed():
    """FedAsync's server steps, with clients of FedProx."""
    model = linear(given)
    clients = FedProxSerialClientTrainer(model, len(given["x"]), logger=quiet)
    clients.setup_optim(2, ROWS, FEDASYNC["lr"], FEDASYNC["mu"])
    server = AsyncServerHandler(model, int(FEDASYNC["rounds"]), logger=quiet)
    server.setup_optim(torch.tensor(FEDASYNC["alpha"]), "polynomial", FEDASYNC["a"])
    sent = [server.downlink_package]
    for number, version, _ in given["events, FedAsync"]:
        parameters, time = sent[version]
        server.load([*clients.train(parameters, Rows().get_dataloader(number, ROWS), FEDASYNC["mu"]), time])
        sent.append(server.downlink_package)
    return server.model_parameters.numpy()


def fair():
    """q-FedAvg's rounds."""
    server = qFedAvgServerHandler(personal.network(), TRAINING["rounds"], 1.0, logger=quiet)
    client = qFedAvgClientTrainer(personal.network(), logger=quiet)
    client.setup_dataset(Rows())
    client.setup_optim(1, ROWS, frameworks.ONE_STEP["lr"], frameworks.ONE_STEP["q"])
    client.lr = frameworks.ONE_STEP["lr"]  # which its class reads and does not keep
    for _ in range(TRAINING["rounds"]):
        packages = []
        for number in range(len(given["x"])):
            client.local_process([server.model_parameters], number)
            packages.append(client.uplink_package)
        server.global_update(packages)
    return server.model_parameters.numpy()


def normalized():
    """FedNova's step from zero."""
    holder = torch.nn.Linear(len(updates[0]), 1, bias=False)
    torch.nn.init.zeros_(holder.weight)
    server = FedNovaServerHandler(holder, 1, 1.0, logger=quiet)
    server.num_clients = len(updates)
    server.setup_optim(option="weighted_com")
    server.global_update([[row, torch.tensor([float(n)])] for row, n in zip(updates, equations.STEPS, strict=True)])
    return server.model_parameters.numpy()


weights = torch.from_numpy(given["examples"]).float()
np.savez(
    out,
    **{
        "weighted mean": Aggregators.fedavg_aggregate(updates, weights).numpy(),
        "FedAsync": mixed(),
        "FedProx": near(),
        "q-FedAvg, one step": fair(),
        "FedNova, equal weights": normalized(),
    },
)
