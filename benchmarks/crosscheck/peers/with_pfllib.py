"""PFLlib: its clients of MOON, FedLC, FedALA and SCAFFOLD on the same rows from the same model, and FedAMP's server.

See `pfllib_clients`.  Its FedLC calibrates by the rows that all clients have together, where the paper counts those of
the client: its client is given its own.
"""

from types import SimpleNamespace

import numpy as np
import pfllib_clients
import torch
from inputs import FEDALA, FEDAMP, FEDLC, MOON, TRAINING, two_layers
from personal import flat
from pfllib_clients import average, federated, given, out
from torch import nn

from flcore.clients import clientala, clientlc, clientmoon, clientscaffold
from flcore.servers import serveramp

clientala.read_client_data = pfllib_clients.rows_of


class Network(nn.Module):
    """Two layers, in the two parts that PFLlib asks a model for."""

    def __init__(self):
        super().__init__()
        body, head = two_layers(given)
        self.base, self.head = nn.Sequential(body, nn.ReLU()), head

    def forward(self, x):
        """Logits."""
        return self.head(self.base(x))


def clients_of(kind):
    """All clients of one kind."""
    own = {"mu": MOON["mu"], "tau": MOON["temperature"], "eta": FEDALA["weight_lr"], "rand_percent": 100}
    return pfllib_clients.clients_of(kind, Network(), layer_idx=0, **own)


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
        average(model, [client.model for client in clients])
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


calibrated = clients_of(clientlc.clientLC)
for one in calibrated:
    one.calibration = FEDLC["tau"] * one.sample_per_class ** (-1 / 4)
np.savez(
    out,
    **{
        "MOON": flat(federated(clients_of(clientmoon.clientMOON), Network())),
        "FedLC": flat(federated(calibrated, Network())),
        "FedALA": flat(federated(clients_of(clientala.clientALA), Network(), receive=received_by_fedala)),
        "SCAFFOLD": scaffold(),
        "FedAMP, models sent": mixed(),
    },
)
