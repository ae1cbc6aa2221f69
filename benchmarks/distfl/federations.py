"""Federations of real data whose groups are known, or might be: classes, domains, people, attackers."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import chain
from typing import Any

import numpy as np
import torch

from piebald.contracts import Rows
from piebald.data import DataSet, load
from piebald.partition import FlipPairs, Lists, PooledClients
from piebald.partition.changed import changed

Truth = np.ndarray[Any, np.dtype[np.int64]]

PAIRS = ((0, 4), (1, 5), (2, 6), (3, 7))  # classes that attackers swap, eight of ten
TYPES = ((0, 1), (2, 3), (4, 5), (6, 7), (8, 9))  # two classes each, Table 2


@cache
def data(name: str) -> DataSet:
    """A data set, read once."""
    return load(name)


def pooled(
    train: Sequence[Sequence[int]], test: Sequence[Sequence[int]], source: DataSet, **more: list[int]
) -> PooledClients:
    """Clients from row numbers; `more` names rows of the common test set and of the centre."""
    extra = {name: list(rows) for name, rows in more.items()}
    rows = [*chain(*train), *chain(*test), *chain(*extra.values())]
    x, y = source.x[rows], source.y[rows]
    ends = [np.cumsum([0, *map(len, part)]) for part in (train, test)]
    first, second = int(ends[0][-1]), int(ends[0][-1] + ends[1][-1])
    lists = {"train": Lists(np.arange(first), ends[0]), "test": Lists(np.arange(first, second), ends[1])}
    made = PooledClients(x, y, lists, classes=source.classes)
    kept, start = {}, second
    for name, own in extra.items():
        kept[name] = Rows(made.x[start : start + len(own)], y[start : start + len(own)])
        start += len(own)
    return PooledClients(x, y, lists, classes=source.classes, **kept)


def dealt(name: str, holders: list[list[int]], each: int, tests: int, seed: int, root: int = 0) -> PooledClients:
    """Clients with `each` training and `tests` test rows of their classes, evenly; no training row twice.

    CIFAR-10's test images are the 1,000 exact ones and the digits' those that nobody trains on, so clients share them.
    """
    source, draw = data(name), np.random.default_rng(seed)
    y = source.y.numpy()
    train_rows = np.arange(len(y)) if source.train is None else source.train
    stock = {c: [int(row) for row in draw.permutation(train_rows[y[train_rows] == c])] for c in range(10)}
    train = [[stock[classes[i % len(classes)]].pop() for i in range(each)] for classes in holders]
    kept = [stock[i % 10].pop() for i in range(root)]
    if source.test is None:
        shelf = stock
    else:
        shelf = {c: [int(row) for row in source.test[y[source.test] == c]] for c in range(10)}
    test = [[int(draw.choice(shelf[classes[i % len(classes)]])) for i in range(tests)] for classes in holders]
    return pooled(train, test, source, common=list(chain(*shelf.values())), root=kept)


def planted(sizes: list[int], each: int = 40, tests: int = 40, seed: int = 0) -> tuple[PooledClients, Truth]:
    """CIFAR-10 in groups of these sizes, the k-th with the k-th type's two classes; and each client's true group."""
    truth = np.repeat(np.arange(len(sizes)), sizes)
    return dealt("cifar10", [list(TYPES[kind]) for kind in truth], each, tests, seed), truth


def attacked(
    name: str, count: int, attackers: int, each: int = 40, seed: int = 0, root: int = 0
) -> tuple[PooledClients, Truth]:
    """IID clients of whom the first `attackers` swap labels in pairs; and who is one (1) and who is not (0)."""
    clients = dealt(name, [list(range(10))] * count, each, 40, seed, root)
    truth = (np.arange(count) < attackers).astype(int)
    if attackers:
        change = FlipPairs(pairs=PAIRS, clients=tuple(range(attackers)))
        clients = changed(clients, [change], clients.x)
    return clients, truth


def honest(name: str, count: int, attackers: int, each: int = 40, seed: int = 0) -> tuple[PooledClients, Truth]:
    """The same federation without the attackers: the bound."""
    clients = dealt(name, [list(range(10))] * count, each, 40, seed)
    keep = range(attackers, count)
    parts = {
        split: Lists(
            np.concatenate([clients.indices(client, split) for client in keep]),
            np.cumsum([0, *(clients.size(client, split) for client in keep)]),
        )
        for split in ("train", "test")
    }
    made = PooledClients(clients.x, clients.y, parts, classes=clients.classes, common=clients.common)
    return made, np.zeros(len(made), dtype=int)


def domains(seed: int = 0) -> tuple[PooledClients, Truth]:
    """Office-Caltech10 as SqueezeNet features: four domains, five clients each, a fifth of the rows for testing."""
    source, draw = features(), np.random.default_rng(seed)
    owner = source.owners["domain"].codes
    train, test, truth = [], [], []
    for domain in np.unique(owner):
        for part in np.array_split(draw.permutation(np.flatnonzero(owner == domain)), 5):
            cut = max(1, len(part) // 5)
            test.append(part[:cut].tolist())
            train.append(part[cut:].tolist())
            truth.append(int(domain))
    return pooled(train, test, source), np.array(truth)


@cache
def features() -> DataSet:
    """Office-Caltech10, each image as what a frozen SqueezeNet makes of it (standardised over all rows)."""
    from piebald.models import embed, squeezenet

    source = data("office_caltech10")
    x = torch.from_numpy(embed(squeezenet(), source.x, key="squeezenet"))
    x = (x - x.mean(0)) / x.std(0).clamp(min=1e-6)
    return DataSet(**{**{f: getattr(source, f) for f in source.__dataclass_fields__}, "x": x})


def people(seed: int = 0, count: int = 20) -> tuple[PooledClients, Truth]:
    """Human activity: the first people, whole segments for testing, so that no window overlaps one trained on."""
    from piebald.partition import ByOwner

    clients = ByOwner(owner="subject", seed=seed, test=0.3).split(data("har"))
    keep = range(min(count, len(clients)))
    train = [clients.indices(client, "train").tolist() for client in keep]
    test = [clients.indices(client, "test").tolist() for client in keep]
    return pooled(train, test, data("har")), np.arange(len(train))


def torch_threads() -> None:
    """One thread: the machines these figures are made on are shared."""
    torch.set_num_threads(1)
