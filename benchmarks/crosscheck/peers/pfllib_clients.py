"""What both scripts that run PFLlib's clients have in common: the clients, on the given rows, and rounds of averaging.

Its sources, at commit d832e76f6a23b833038949ec1e4fdefe63a4d350, lie in the folder PFLlib beside this environment's bin.
Only its clients are run: its servers read files, and clients that all have the same number of rows are averaged here.
"""

import copy
import sys
from pathlib import Path
from types import SimpleNamespace

import torch
from inputs import CLASSES, ROWS, TRAINING, folder_of

sys.path.insert(0, str(Path(sys.executable).parents[1] / "PFLlib" / "system"))
from flcore.clients import clientbase

given, out = folder_of(sys.argv)


def rows_of(dataset, client, is_train=True, few_shot=0):
    """A client's rows, as PFLlib's loaders want them."""
    return [(torch.from_numpy(x), torch.tensor(y)) for x, y in zip(given["x"][client], given["y"][client], strict=True)]


clientbase.read_client_data = rows_of


def clients_of(kind, model, lr=TRAINING["lr"], **own):
    """All clients of one kind, with settings that this kind has besides."""
    settings = SimpleNamespace(
        model=model, algorithm="", dataset="", device="cpu", save_folder_name="", num_classes=CLASSES,
        batch_size=ROWS, local_learning_rate=lr, local_epochs=TRAINING["epochs"], few_shot=0,
        learning_rate_decay=False, learning_rate_decay_gamma=1.0, **own,
    )  # fmt: skip
    slow = {"train_slow": False, "send_slow": False}
    return [kind(settings, client, ROWS, 0, **slow) for client in range(len(given["x"]))]


def average(model, models):
    """Let the parameters of a model be the means of those of others."""
    with torch.no_grad():
        for mine, *theirs in zip(model.parameters(), *(one.parameters() for one in models), strict=True):
            mine.copy_(torch.stack(theirs).mean(0))


def received(client, model):
    """As most servers send models."""
    client.set_parameters(model)


def federated(clients, model, part=lambda model: model, receive=received):
    """Rounds of averaging a part of the model; returns the global model, which clients end with as well."""
    for _ in range(TRAINING["rounds"]):
        for client in clients:
            receive(client, copy.deepcopy(part(model)))
            client.train()
        average(part(model), [part(client.model) for client in clients])
    for client in clients:
        receive(client, copy.deepcopy(part(model)))
    return model
