"""Federations of real data whose clusters are known or expected: classes, domains, people, attackers."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import chain
from typing import Any

import numpy as np
import torch

from piebald.contracts import Rows
from piebald.data import DataSet, load
from piebald.data.partition import FlipPairs, Lists, PooledClients
from piebald.data.partition.data_change import changed

Truth = np.ndarray[Any, np.dtype[np.int64]]

PAIRS = ((0, 4), (1, 5), (2, 6), (3, 7))  # classes that attackers swap, eight of ten
TYPES = ((0, 1), (2, 3), (4, 5), (6, 7), (8, 9))  # two classes each, Table 2


@cache
def data(name: str) -> DataSet:
    """Return a data set, which is read only once."""
    return load(name)


def pooled(
    train: Sequence[Sequence[int]],
    test: Sequence[Sequence[int]],
    source: DataSet,
    held: Sequence[Sequence[int]] | None = None,
    **more: list[int],
) -> PooledClients:
    """Return clients made from row numbers.

    `held` are validation rows; `more` are the rows of the common test set and of the server."""
    splits = {"train": train, "test": test, "validation": [[] for _ in train] if held is None else held}
    rows, lists = [], {}
    for split, parts in splits.items():
        own = [*chain(*parts)]
        lists[split] = Lists(np.arange(len(rows), len(rows) + len(own)), np.cumsum([0, *map(len, parts)]))
        rows += own
    start = len(rows)
    rows += chain(*more.values())
    x, y = source.x[rows], source.y[rows]
    made, kept = PooledClients(x, y, lists, classes=source.classes), {}
    for name, own in more.items():
        kept[name] = Rows(made.x[start : start + len(own)], y[start : start + len(own)])
        start += len(own)
    return PooledClients(x, y, lists, classes=source.classes, **kept)


def with_classes(
    name: str, holders: list[list[int]], each: int, tests: int, seed: int, server: int = 0, held: int = 0
) -> PooledClients:
    """Return clients with `each` training, `held` validation and `tests` test rows, spread evenly over their classes.

    No row is used twice for training or validation.  Clients share test rows: CIFAR-10's are the 1,000 exact images,
    those of the digits are rows that no client trains on.
    """
    source, draw = data(name), np.random.default_rng(seed)
    y = source.y.numpy()
    train_rows = np.arange(len(y)) if source.train is None else source.train
    stock = {c: [int(row) for row in draw.permutation(train_rows[y[train_rows] == c])] for c in range(10)}
    train = [[stock[classes[i % len(classes)]].pop() for i in range(each)] for classes in holders]
    kept = [stock[i % 10].pop() for i in range(server)]
    own = [[stock[classes[i % len(classes)]].pop() for i in range(held)] for classes in holders]
    if source.test is None:
        test_stock = stock
    else:
        test_stock = {c: [int(row) for row in source.test[y[source.test] == c]] for c in range(10)}
    test = [[int(draw.choice(test_stock[classes[i % len(classes)]])) for i in range(tests)] for classes in holders]
    return pooled(train, test, source, own, common=list(chain(*test_stock.values())), server_rows=kept)


def planted(sizes: list[int], each: int = 40, tests: int = 40, seed: int = 0) -> tuple[PooledClients, Truth]:
    """Return CIFAR-10 in clusters of these sizes, each with two classes of its own, and each client's true cluster."""
    truth = np.repeat(np.arange(len(sizes)), sizes)
    return with_classes("cifar10", [list(TYPES[kind]) for kind in truth], each, tests, seed), truth


def attacked(
    name: str, count: int, attackers: int, each: int = 40, seed: int = 0, server: int = 0, held: int = 0
) -> tuple[PooledClients, Truth]:
    """Return IID clients, the first `attackers` of which swap labels in pairs; the truth is -1 for them, else 0."""
    clients = with_classes(name, [list(range(10))] * count, each, 40, seed, server, held)
    if attackers:
        change = FlipPairs(pairs=PAIRS, clients=tuple(range(attackers)))
        clients = changed(clients, [change], clients.x)
    return clients, -(np.arange(count) < attackers).astype(int)


def honest(
    name: str, count: int, attackers: int, each: int = 40, seed: int = 0, server: int = 0, held: int = 0
) -> tuple[PooledClients, Truth]:
    """Return the same federation without the attackers, as the upper bound."""
    clients = with_classes(name, [list(range(10))] * count, each, 40, seed, server, held)
    keep = range(attackers, count)
    parts = {
        split: Lists(
            np.concatenate([clients.indices(client, split) for client in keep]),
            np.cumsum([0, *(clients.size(client, split) for client in keep)]),
        )
        for split in ("train", "test", "validation")
    }
    made = PooledClients(clients.x, clients.y, parts, classes=clients.classes, common=clients.common)
    return made, np.zeros(len(made), dtype=int)


def domains(seed: int = 0) -> tuple[PooledClients, Truth]:
    """Return Office-Caltech10 as SqueezeNet features: four domains of five clients, a fifth of the rows for testing."""
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
    """Return Office-Caltech10 embedded by a frozen SqueezeNet, standardised over all rows."""
    from piebald.models import embed, squeezenet

    source = data("office_caltech10")
    x = torch.from_numpy(embed(squeezenet(), source.x, key="squeezenet"))
    x = (x - x.mean(0)) / x.std(0).clamp(min=1e-6)
    return DataSet(**{**{f: getattr(source, f) for f in source.__dataclass_fields__}, "x": x})


def writers(seed: int = 0, count: int = 10, each: int = 3000) -> tuple[PooledClients, Truth]:
    """Return IID clients with MNIST's digits, with enough rows each for a guarantee about single rows."""
    clients = with_classes("mnist_writers", [list(range(10))] * count, each, 100, seed)
    return clients, np.zeros(count, dtype=int)


def people(seed: int = 0, count: int = 20) -> tuple[PooledClients, Truth]:
    """Return human activity of the first people, with whole segments for testing, so that no windows overlap."""
    from piebald.data.partition import ByOwner

    clients = ByOwner(owner="subject", seed=seed, test=0.3).split(data("har"))
    keep = range(min(count, len(clients)))
    train = [clients.indices(client, "train").tolist() for client in keep]
    test = [clients.indices(client, "test").tolist() for client in keep]
    return pooled(train, test, data("har")), np.arange(len(train))


def torch_threads() -> None:
    """Use one thread, since the machines of these measurements are shared."""
    torch.set_num_threads(1)
