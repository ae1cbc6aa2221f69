"""W1 and W2 for peers, which have no Piebald installed: the same numbers of rows, the same networks, random data."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np


@dataclass(frozen=True)
class Shape:
    """FedAvg with one local epoch, batch 20, SGD 0.05, weighted by examples, on 28x28 inputs with 62 classes."""

    clients: int
    cohort: int
    rows: int
    rounds: int


SHAPES = {"W1": Shape(1000, 100, 60, 20), "W2": Shape(100, 10, 100, 5)}
BATCH, RATE, CLASSES = 20, 0.05, 62


def arrays(shape: Shape) -> tuple[np.ndarray, np.ndarray]:
    """Inputs [clients, rows, 1, 28, 28] and labels [clients, rows]."""
    draw = np.random.default_rng(0)
    x = draw.random((shape.clients, shape.rows, 1, 28, 28), dtype=np.float32)
    return x, draw.integers(0, CLASSES, (shape.clients, shape.rows))


def torch_network(name: str):
    """The network in torch, for peers that use it."""
    from torch import nn

    if name == "W1":
        return nn.Sequential(nn.Flatten(), nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, CLASSES))
    return nn.Sequential(
        nn.Conv2d(1, 32, 5, padding="same"), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 5, padding="same"), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(3136, 2048), nn.ReLU(), nn.Linear(2048, CLASSES),
    )  # fmt: skip


@cache
def kept(name: str):
    """Inputs, labels and a network in torch, made once a process: Ray's actors keep what an imported module keeps, but
    not what the script itself does, which comes to them anew with every message.
    """
    import torch

    torch.set_num_threads(1)
    return *(torch.from_numpy(part) for part in arrays(SHAPES[name])), torch_network(name)


def seconds_a_round(times: list[float]) -> float:
    """From the end of the first round to the end of the last, so that start-up and compilation are not counted."""
    return (times[-1] - times[0]) / (len(times) - 1)
