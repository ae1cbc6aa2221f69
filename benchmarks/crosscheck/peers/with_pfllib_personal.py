"""PFLlib: its clients of FedRep, FedBABU, FedRoD, pFedMe, Per-FedAvg, FedPHP and LG-FedAvg, from the same model.

See `pfllib_clients`.
What it does otherwise than the papers is undone: pFedMe's personal steps have a decay of 0.001 (here 0); FedRoD's own
heads start as copies of the shared one (here at 0); Per-FedAvg has one rate for both steps (here two) and adapts to one
batch, which is all rows; FedPHP's kernels have fixed widths (here those of its authors' program).
Its APFL takes the gradient of a client's own model at that model, where the paper's
algorithm 1 takes it at the mixture, so it is left out.
"""

import functools
import itertools

import numpy as np
import personal
import pfllib_clients
import torch
from inputs import ROWS, TRAINING
from pfllib_clients import given, out

from flcore.clients import clientbabu, clientlg, clientperavg, clientpFedMe, clientphp, clientrep, clientrod


def both_batches(self, batch_size=None):
    """Two mini-batches in a row, as Per-FedAvg's steps want them: both are all rows."""
    x, y = torch.from_numpy(given["x"][self.id]), torch.from_numpy(given["y"][self.id])
    return [(torch.cat([x, x]), torch.cat([y, y]))] if batch_size != ROWS else [(x, y)]


def clients_of(kind, lr=TRAINING["lr"]):
    """All clients of one kind."""
    return pfllib_clients.clients_of(
        kind, personal.network(), lr, plocal_epochs=personal.FEDREP["head_epochs"],
        fine_tuning_epochs=personal.FEDBABU["tune_epochs"], lamda=personal.PFEDME["lam"],
        K=personal.PFEDME["inner_steps"], p_learning_rate=TRAINING["lr"], mu=personal.FEDPHP["mu"],
        global_rounds=personal.FEDPHP["horizon"],
    )  # fmt: skip


def federated(clients, *part):
    """Rounds of averaging a part of the model; returns the global model."""
    return pfllib_clients.federated(clients, personal.network(), *part)


def body(model):
    """What FedRep and FedBABU share."""
    return model.base


def head(model):
    """What LG-FedAvg shares."""
    return model.head


def discrepancy(x, y, kernel, device):
    """The squared MMD under five Gaussian kernels around the mean squared distance of two different rows."""
    both = torch.cat([x, y])
    apart = torch.stack([(both - one).square().sum(1) for one in both])
    width = apart.detach().sum() / (len(both) * (len(both) - 1))
    total = sum(torch.exp(-apart / (width * factor)) for factor in (0.25, 0.5, 1, 2, 4))
    n = len(x)
    return (total[:n, :n] + total[n:, n:] - total[:n, n:] - total[n:, :n]).mean()


def received_in_order(client, rounds, model):
    """Give a client the model of the next round: its number says how much the past counts."""
    clientphp.clientPHP.set_parameters(client, model, next(rounds))


found = {}

clients = clients_of(clientrep.clientRep)
federated(clients, body)
found["FedRep, client 0"] = personal.flat(clients[0].model)

clients = clients_of(clientbabu.clientBABU)
federated(clients, body)
clients[0].fine_tune()
found["FedBABU, client 0"] = personal.flat(clients[0].model)

clients = clients_of(clientlg.clientLG)
federated(clients, head)
found["LG-FedAvg, client 0"] = personal.flat(clients[0].model)

clients = clients_of(clientrod.clientROD)
for client in clients:
    for parameter in client.head.parameters():
        torch.nn.init.zeros_(parameter)
found["FedRoD"] = personal.flat(federated(clients))
with torch.no_grad():
    for mine, own in zip(clients[0].model.head.parameters(), clients[0].head.parameters(), strict=True):
        mine += own
found["FedRoD, client 0"] = personal.flat(clients[0].model)

clients = clients_of(clientpFedMe.clientpFedMe, lr=personal.PFEDME["eta"])
for client in clients:
    client.optimizer.param_groups[0]["mu"] = 0.0
found["pFedMe"] = personal.flat(federated(clients))

clientperavg.clientPerAvg.load_train_data = both_batches
clients = clients_of(clientperavg.clientPerAvg, lr=personal.PER_FEDAVG["alpha"])
for client in clients:
    client.beta = TRAINING["lr"]
found["Per-FedAvg"] = personal.flat(federated(clients))
clients[0].train_one_step()
found["Per-FedAvg, client 0"] = personal.flat(clients[0].model)

clientphp.MMD = discrepancy
clients = clients_of(clientphp.clientPHP)
for client in clients:
    client.lamda = personal.FEDPHP["lam"]
    client.set_parameters = functools.partial(received_in_order, client, itertools.count())
found["FedPHP"] = personal.flat(federated(clients))
found["FedPHP, client 0"] = personal.flat(clients[0].model_p)

np.savez(out, **found)
