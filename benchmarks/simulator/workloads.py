"""The two workloads of the simulator's benchmark, on random data, and the bare loop they are compared with."""

from __future__ import annotations

import copy
import time
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from piebald.models import build_model
from piebald.partition import Lists, PooledClients


@dataclass(frozen=True)
class Workload:
    """FedAvg with one local epoch, batch 20, SGD 0.05, weighted by examples, on 28x28 inputs with 62 classes."""

    name: str
    clients: int
    cohort: int
    rows: int
    rounds: int
    model: str

    def data(self) -> PooledClients:
        """Random clients, the same every time."""
        generator = torch.Generator().manual_seed(0)
        total = self.clients * self.rows
        x = torch.rand(total, 1, 28, 28, generator=generator)
        y = torch.randint(0, 62, (total,), generator=generator)
        starts = np.arange(0, total + 1, self.rows)
        return PooledClients(x, y, {"train": Lists(np.arange(total), starts)}, classes=[str(n) for n in range(62)])

    def network(self) -> nn.Module:
        """The model at the start."""
        return build_model(self.model, (1, 28, 28), 62, 0)


W1 = Workload("W1", clients=1000, cohort=100, rows=60, rounds=20, model="mlp")
W2 = Workload("W2", clients=100, cohort=10, rows=100, rounds=5, model="leaf_cnn")


def bare_loop(work: Workload, clients: PooledClients, seed: int = 0) -> float:
    """Seconds a round of the loop one would write by hand: eager PyTorch, one thread, one resident model."""
    torch.set_num_threads(1)
    model = work.network()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    loss_of = nn.CrossEntropyLoss()
    draw = np.random.default_rng(seed)
    began = time.perf_counter()
    for _ in range(work.rounds):
        total = {name: torch.zeros_like(value) for name, value in state.items()}
        cohort = draw.choice(work.clients, work.cohort, replace=False)
        for client in cohort:
            model.load_state_dict(state)
            optimiser = torch.optim.SGD(model.parameters(), lr=0.05)
            rows = clients.rows(int(client), "train")
            for batch in torch.randperm(len(rows)).split(20):
                optimiser.zero_grad()
                loss_of(model(rows.x[batch]), rows.y[batch]).backward()
                optimiser.step()
            for name, value in model.state_dict().items():
                total[name].add_(value, alpha=1 / work.cohort)
        state = copy.deepcopy(total)
    return (time.perf_counter() - began) / work.rounds
