"""Workloads of the simulator's benchmark, on random data, and the bare loops it is compared with."""

from __future__ import annotations

import copy
import multiprocessing
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

sys.path.append(str(Path(__file__).parents[1]))  # for `shared`

from shared.networks import CharacterLstm
from torch import Tensor, nn

from piebald.data.partition import Lists, PooledClients
from piebald.models import build_model


@dataclass(frozen=True)
class Workload:
    """FedAvg with SGD 0.05, batch 20, weighted by examples.

    Attributes:
        clients, cohort: registered, and a round.
        rows: of each client, or (least, most) for clients of unequal size.
        shape, classes: of the inputs (tokens where `tokens` says how many there are) and the labels.
        make: the model.
        epochs: local ones.
    """

    name: str
    clients: int
    cohort: int
    rows: int | tuple[int, int]
    rounds: int
    shape: tuple[int, ...]
    classes: int
    make: Callable[[], nn.Module]
    tokens: int = 0
    epochs: int = 1

    def data(self) -> PooledClients:
        """Random clients, always the same."""
        generator = torch.Generator().manual_seed(0)
        least, most = self.rows if isinstance(self.rows, tuple) else (self.rows, self.rows)
        sizes = np.random.default_rng(0).integers(least, most + 1, self.clients)
        total = int(sizes.sum())
        x = torch.rand(total, *self.shape, generator=generator)
        if self.tokens:
            x = (x * self.tokens).long()
        y = torch.randint(0, self.classes, (total,), generator=generator)
        train = Lists(np.arange(total), np.cumsum([0, *sizes]))
        return PooledClients(x, y, {"train": train}, classes=[str(n) for n in range(self.classes)])

    def network(self) -> nn.Module:
        """The model at the start."""
        with torch.random.fork_rng(devices=[]):  # of no GPU, so that workers can be forked that use it
            torch.manual_seed(0)
            return self.make()


class Encoder(nn.Module):
    """A small transformer on token sequences: two layers of four heads over 64 numbers a token."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(256, 64)
        self.place = nn.Parameter(torch.zeros(32, 64))
        layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.out = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Tokens [batch, 32] to logits [batch, 10]."""
        logits: Tensor = self.out(self.layers(self.table(x) + self.place).mean(1))
        return logits


class Block(nn.Module):
    """Two convolutions with group norm, and what came in."""

    def __init__(self, inside: int, out: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(inside, out, 3, stride, 1, bias=False)
        self.second = nn.Conv2d(out, out, 3, 1, 1, bias=False)
        self.norms = nn.ModuleList(nn.GroupNorm(8, out) for _ in range(2))
        self.past = nn.Conv2d(inside, out, 1, stride, bias=False) if stride > 1 else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """Images to images."""
        made = self.norms[0](self.first(x)).relu()
        return torch.relu(self.norms[1](self.second(made)) + self.past(x))


class Resnet8(nn.Module):
    """ResNet-8 with group norm: a convolution and three blocks, 16 to 64 channels."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 16, 3, 1, 1, bias=False)
        self.norm = nn.GroupNorm(8, 16)
        self.blocks = nn.Sequential(Block(16, 16, 1), Block(16, 32, 2), Block(32, 64, 2))
        self.out = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Images [batch, 3, 32, 32] to logits [batch, 10]."""
        made = self.blocks(self.norm(self.first(x)).relu())
        logits: Tensor = self.out(made.mean((2, 3)))
        return logits


ROWS, WIDTH, CLASSES = 40, 64, 10  # of each registered client, its inputs and labels


def registered_clients(count: int) -> PooledClients:
    """So many clients that share 4,000 random rows, one of them for validation."""
    draw = torch.Generator().manual_seed(0)
    x, y = torch.rand(4_000, WIDTH, generator=draw), torch.randint(0, CLASSES, (4_000,), generator=draw)
    rows = np.random.default_rng(0).integers(0, 4_000, count * ROWS)
    lists = {"train": Lists(rows, np.arange(count + 1) * ROWS), "validation": Lists(rows[:count], np.arange(count + 1))}
    return PooledClients(x, y, lists, classes=[str(n) for n in range(CLASSES)])  # type: ignore[arg-type]


IMAGE = (1, 28, 28)
W1 = Workload("W1", 1000, 100, 60, 20, IMAGE, 62, lambda: build_model("mlp", IMAGE, 62, 0))
W2 = Workload("W2", 100, 10, 100, 5, IMAGE, 62, lambda: build_model("leaf_cnn", IMAGE, 62, 0))
GENERAL = (
    Workload("VGG-11", 20, 20, 40, 2, (3, 32, 32), 10, lambda: build_model("vgg11", (3, 32, 32), 10, 0)),
    Workload("1D-CNN", 30, 30, (40, 320), 4, (9, 128), 6, lambda: build_model("cnn_1d", (9, 128), 6, 0)),
    Workload("transformer", 100, 20, 60, 4, (32,), 10, Encoder, tokens=256),
    Workload("LSTM", 300, 60, (5, 60), 2, (40,), 80, lambda: CharacterLstm(80, 80, 100), tokens=80),
    Workload("ResNet-8", 40, 20, 40, 2, (3, 32, 32), 10, Resnet8),
    Workload("logistic", 2000, 2000, (1, 40), 5, (60,), 10, lambda: nn.Linear(60, 10)),
)
WORKLOADS = {work.name: work for work in (W1, W2, *GENERAL)}


def bare_loop(work: Workload, clients: PooledClients, processes: int = 1, device: str = "cpu") -> float:
    """Seconds a round of the loop one would write by hand: eager PyTorch, one thread, one resident model.

    With two processes each forked one trains half of the cohort and adds up its half of the average.  On another device
    a client's rows are copied there once a round.
    """
    torch.set_num_threads(1)
    model = work.network().to(device)
    state = nn.utils.parameters_to_vector(model.parameters()).detach()
    floats = [value for value in model.buffers() if value.is_floating_point()]
    state = torch.cat([state, *(value.flatten() for value in floats)])
    halves = torch.zeros(processes, len(state), device=device)
    if processes > 1:
        state, halves = state.share_memory_(), halves.share_memory_()
    workers = (
        [_start_worker(work, clients, state, halves[place]) for place in range(processes)] if processes > 1 else []
    )
    draw = np.random.default_rng(0)
    began = 0.0
    for round_ in range(work.rounds + 1):  # the first one is not counted
        began = time.perf_counter() if round_ == 1 else began
        cohort = draw.choice(work.clients, work.cohort, replace=False).tolist()
        total = sum(len(clients.indices(client, "train")) for client in cohort)
        if workers:
            for place, (pipe, _) in enumerate(workers):
                pipe.send((cohort[place::processes], total))
            for pipe, _ in workers:
                pipe.recv()
        else:
            _train(work, clients, model, state, halves[0], cohort, total)
        state.copy_(halves.sum(0))
        float(state[0])  # waits until a GPU is done
    seconds = (time.perf_counter() - began) / work.rounds
    for pipe, process in workers:
        pipe.send(None)
        process.join()
    return seconds


def arithmetic(work: Workload, clients: PooledClients) -> float:
    """Seconds a round of the arithmetic alone: forward and backward passes over a cohort's rows, by one thread.

    All rows pass through one set of weights, in batches of 100 or of 500, whichever take less time.  Nothing is
    updated, averaged or copied.
    """
    torch.set_num_threads(1)
    model, loss_of = work.network(), nn.CrossEntropyLoss()
    draw, sizes = np.random.default_rng(0), (100, 500)
    spent = dict.fromkeys(sizes, 0.0)
    for round_ in range(work.rounds + 1):  # the first one is not counted
        cohort = draw.choice(work.clients, work.cohort, replace=False).tolist()
        chosen = torch.from_numpy(np.concatenate([clients.indices(client, "train") for client in cohort]))
        x, y = clients.x[chosen], clients.y[chosen]
        for size in sizes:
            began = time.perf_counter()
            for rows, targets in zip(x.split(size), y.split(size), strict=True):
                model.zero_grad()
                loss_of(model(rows), targets).backward()
            spent[size] += (time.perf_counter() - began) * bool(round_)
    return work.epochs * min(spent.values()) / work.rounds


def _train(
    work: Workload, clients: PooledClients, model: nn.Module, state: Tensor, out: Tensor, cohort: list[int], total: int
) -> None:
    """Train some clients from `state`, and leave their share of the average in `out`."""
    tensors = [*model.parameters(), *(value for value in model.buffers() if value.is_floating_point())]
    loss_of, ends = nn.CrossEntropyLoss(), np.cumsum([0, *(tensor.numel() for tensor in tensors)])
    out.zero_()
    for client in cohort:
        with torch.no_grad():
            for tensor, lo, hi in zip(tensors, ends, ends[1:], strict=False):
                tensor.copy_(state[lo:hi].view(tensor.shape))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        rows = clients.rows(client, "train")
        x, y = rows.x.to(state.device), rows.y.to(state.device)
        for _ in range(work.epochs):
            for batch in torch.randperm(len(rows)).to(state.device).split(20):
                optimizer.zero_grad()
                loss_of(model(x[batch]), y[batch]).backward()
                optimizer.step()
        with torch.no_grad():
            out.add_(torch.cat([tensor.flatten() for tensor in tensors]), alpha=len(rows) / total)


def _start_worker(work: Workload, clients: PooledClients, state: Tensor, out: Tensor) -> tuple:
    """A forked process that trains what it is sent, until it is sent None."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()

    def serve() -> None:
        torch.set_num_threads(1)
        model = copy.deepcopy(work.network())
        while (message := theirs.recv()) is not None:
            _train(work, clients, model, state, out, *message)
            theirs.send("done")

    process = context.Process(target=serve, daemon=True)
    process.start()
    return ours, process
