"""PFLlib: its clients of MOON, FedLC, FedALA and SCAFFOLD on the same rows from the same model, and FedAMP's server.

Its sources lie in the folder PFLlib beside this environment's bin.  Only its clients and FedAMP's mixing are run: its
servers read files, and clients that all have the same number of rows are averaged here.  Its FedLC calibrates by the
rows that all clients have together, where the paper counts those of the client: its client is given its own.
"""

import copy
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from inputs import CLASSES, FEDALA, FEDAMP, FEDLC, MOON, ROWS, TRAINING, folder_of
from torch import nn

sys.path.insert(0, str(Path(sys.executable).parents[1] / "PFLlib" / "system"))
from flcore.clients import clientala, clientbase, clientlc, clientmoon, clientscaffold
from flcore.servers import serveramp

given, out = folder_of(sys.argv)


class Network(nn.Module):
    """Two layers, in the two parts that PFLlib asks a model for."""

    def __init__(self):
        super().__init__()
        self.base = nn.Sequential(nn.Linear(*given["body weight"].shape[::-1]), nn.ReLU())
        self.head = nn.Linear(*given["head weight"].shape[::-1])
        with torch.no_grad():
            for name, layer in (("body", self.base[0]), ("head", self.head)):
                layer.weight.copy_(torch.from_numpy(given[f"{name} weight"]))
                layer.bias.copy_(torch.from_numpy(given[f"{name} bias"]))

    def forward(self, x):
        """Logits."""
        return self.head(self.base(x))


def rows_of(dataset, client, is_train=True, few_shot=0):
    """A client's rows, as PFLlib's loaders want them."""
    return [(torch.from_numpy(x), torch.tensor(y)) for x, y in zip(given["x"][client], given["y"][client], strict=True)]


def clients_of(kind):
    """All clients of one kind."""
    settings = SimpleNamespace(
        model=Network(), algorithm="", dataset="", device="cpu", save_folder_name="", num_classes=CLASSES,
        batch_size=ROWS, local_learning_rate=TRAINING["lr"], local_epochs=TRAINING["epochs"], few_shot=0,
        learning_rate_decay=False, learning_rate_decay_gamma=1.0, mu=MOON["mu"], tau=MOON["temperature"],
        eta=FEDALA["weight_lr"], rand_percent=100, layer_idx=0,
    )  # fmt: skip
    slow = {"train_slow": False, "send_slow": False}
    return [kind(settings, client, ROWS, 0, **slow) for client in range(len(given["x"]))]


def mean_of(models):
    """The model whose parameters are the means of those of these."""
    made = copy.deepcopy(models[0])
    with torch.no_grad():
        for mine, *theirs in zip(made.parameters(), *(model.parameters() for model in models), strict=True):
            mine.copy_(torch.stack(theirs).mean(0))
    return made


def flat(model):
    """All parameters in one vector."""
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).numpy()


def federated(clients, receive):
    """Rounds of averaging; `receive` gives a client the global model."""
    model = Network()
    for _ in range(TRAINING["rounds"]):
        for client in clients:
            receive(client, copy.deepcopy(model))
            client.train()
        model = mean_of([client.model for client in clients])
    return flat(model)


def received_by_fedala(client, model):
    """As its server sends models."""
    client.local_initialization(model)


def scaffold():
    """SCAFFOLD's rounds as its server makes them, with a server learning rate of 1 and all clients."""
    clients, model = clients_of(clientscaffold.clientSCAFFOLD), Network()
    common = [torch.zeros_like(parameter) for parameter in model.parameters()]
    for _ in range(TRAINING["rounds"]):
        changes = []
        for client in clients:
            client.set_parameters(model, common)
            client.train()
            changes.append(client.delta_yc(TRAINING["epochs"])[1])
        model = mean_of([client.model for client in clients])
        common = [one + sum(parts).detach() / len(clients) for one, *parts in zip(common, *changes, strict=True)]
    return flat(model)


def mixed():
    """What FedAMP's server sends: it hands each client the others' part and the weight of its own model."""

    class Holder(nn.Module):
        def __init__(self, vector):
            super().__init__()
            self.vector = nn.Parameter(torch.from_numpy(vector.copy()))

    models, sent = [Holder(vector) for vector in given["averages"]], {}

    def client(number):
        def take(others, own):
            sent[number] = (others.vector + own * models[number].vector).detach().numpy()

        cost = {"num_rounds": 0, "total_cost": 0.0}
        return SimpleNamespace(
            id=number, model=models[number], set_parameters=take, send_slow=False, send_time_cost=cost
        )

    server = SimpleNamespace(
        selected_clients=[client(number) for number in range(len(models))], uploaded_ids=list(range(len(models))),
        uploaded_models=models, global_model=models[0], num_join_clients=len(models),
        alphaK=FEDAMP["alpha"], sigma=FEDAMP["sigma"],
    )  # fmt: skip
    server.e = lambda x: serveramp.FedAMP.e(server, x)
    with torch.no_grad():
        serveramp.FedAMP.send_models(server)
    return np.stack([sent[number] for number in range(len(models))])


clientbase.read_client_data = clientala.read_client_data = rows_of
calibrated = clients_of(clientlc.clientLC)
for one in calibrated:
    one.calibration = FEDLC["tau"] * one.sample_per_class ** (-1 / 4)
np.savez(
    out,
    **{
        "MOON": federated(clients_of(clientmoon.clientMOON), lambda client, model: client.set_parameters(model)),
        "FedLC": federated(calibrated, lambda client, model: client.set_parameters(model)),
        "FedALA": federated(clients_of(clientala.clientALA), received_by_fedala),
        "SCAFFOLD": scaffold(),
        "FedAMP, models sent": mixed(),
    },
)
