"""PyTorch alone, without any framework: FedAvg, FedAsync and FedBuff replayed from the events of Piebald's runs."""

import sys

import numpy as np
import torch
from inputs import ADAPTIVE, FEDASYNC, FEDBUFF, TRAINING, folder_of, linear
from torch.nn.functional import cross_entropy

given, out = folder_of(sys.argv)
x, y = torch.from_numpy(given["x"]), torch.from_numpy(given["y"])


def start():
    """The model that all runs start from."""
    return torch.nn.utils.parameters_to_vector(linear(given).parameters()).detach()


def trained(sent, client, lr, epochs, mu=0.0):
    """The model after some steps on all rows of a client, with a proximal term around the model that was sent."""
    model = torch.nn.Linear(x.shape[2], int(y.max()) + 1)
    torch.nn.utils.vector_to_parameters(sent.clone(), model.parameters())
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    for _ in range(epochs):
        optimizer.zero_grad()
        near = (torch.nn.utils.parameters_to_vector(model.parameters()) - sent).square().sum()
        (cross_entropy(model(x[client]), y[client]) + mu / 2 * near).backward()
        optimizer.step()
    return torch.nn.utils.parameters_to_vector(model.parameters()).detach()


def fedavg():
    """All clients have the same number of rows."""
    model = start()
    for _ in range(TRAINING["rounds"]):
        made = [trained(model, client, TRAINING["lr"], TRAINING["epochs"]) for client in range(len(x))]
        model = torch.stack(made).mean(0)
    return model.numpy()


def fedasync():
    """Xie et al. 2019, algorithm 1: each model is mixed in by alpha * (staleness + 1) ** -a."""
    models = [start()]
    for client, sent, version in given["events, FedAsync"]:
        assert version == len(models)
        made = trained(models[sent], client, FEDASYNC["lr"], 2, FEDASYNC["mu"])
        share = FEDASYNC["alpha"] * (version - 1 - sent + 1.0) ** -FEDASYNC["a"]
        models.append((1 - share) * models[-1] + share * made)
    return models[-1].numpy()


def fedbuff():
    """Nguyen et al. 2022, algorithm 1: the mean of the damped changes of a full buffer."""
    models, buffer = [start()], []
    for client, sent, version in given["events, FedBuff"]:
        change = trained(models[sent], client, FEDBUFF["lr"], 2) - models[sent]
        buffer.append(change * (version - 1 - sent + 1.0) ** -FEDBUFF["a"])
        if len(buffer) == FEDBUFF["buffer_size"]:
            models.append(models[-1] + FEDBUFF["server_lr"] * torch.stack(buffer).mean(0))
            buffer = []
    return models[-1].numpy()


def adaptive(second_moment):
    """Reddi et al. 2021, algorithm 2, with the second moment of Adam or Yogi; in float64."""
    model, first, second, models = 0.0, 0.0, ADAPTIVE["tau"] ** 2, []
    for average in given["averages"].astype(np.float64):
        first = ADAPTIVE["beta1"] * first + (1 - ADAPTIVE["beta1"]) * average
        second = second_moment(second, average**2)
        model = model + ADAPTIVE["lr"] * first / (np.sqrt(second) + ADAPTIVE["tau"])
        models.append(model)
    return np.stack(models)


beta = ADAPTIVE["beta2"]
np.savez(
    out,
    **{
        "FedAvg": fedavg(),
        "FedAsync": fedasync(),
        "FedBuff": fedbuff(),
        "FedAdam": adaptive(lambda v, square: beta * v + (1 - beta) * square),
        "FedYogi": adaptive(lambda v, square: v - (1 - beta) * square * np.sign(v - square)),
    },
)
