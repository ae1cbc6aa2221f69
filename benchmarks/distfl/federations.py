"""Federations of CIFAR-10 whose groups are known: planted equal and unequal ones, none, and attackers."""

from __future__ import annotations

from functools import cache
from itertools import chain

import numpy as np
import torch

from piebald.contracts import Rows
from piebald.data import DataSet, load
from piebald.partition import FlipPairs, Lists, PooledClients

PAIRS = ((0, 4), (1, 5), (2, 6), (3, 7))  # classes that attackers swap, eight of ten
TYPES = ((0, 1), (2, 3), (4, 5), (6, 7), (8, 9))  # two classes each, Table 2


@cache
def data(name: str = "cifar10") -> DataSet:
    """A data set, read once."""
    return load(name)


def dealt(holders: list[list[int]], each: int, tests: int, seed: int, root: int = 0) -> PooledClients:
    """Clients with `each` training and `tests` test rows of their classes, evenly; nobody shares a training row.

    Args:
        holders: the classes of each client.
        each, tests: rows.
        seed: of the deal.
        root: rows that the centre keeps.
    """
    source, draw = data(), np.random.default_rng(seed)
    y = source.y.numpy()
    stock = {c: list(draw.permutation(source.train[y[source.train] == c])) for c in range(10)}
    shelf = {c: source.test[y[source.test] == c] for c in range(10)}
    train, test = [], []
    for classes in holders:
        train.append([stock[c].pop() for i in range(each) for c in [classes[i % len(classes)]]])
        test.append([draw.choice(shelf[c]) for i in range(tests) for c in [classes[i % len(classes)]]])
    kept = [stock[c].pop() for i in range(root) for c in [i % 10]]
    common = np.concatenate([shelf[c][:50] for c in range(10)])
    rows = [*chain(*train), *chain(*test), *kept, *common]
    x, labels = source.x[rows], torch.from_numpy(y[rows])
    sizes = [len(part) for part in train], [len(part) for part in test]
    ends = np.cumsum([0, *sizes[0]]), np.cumsum([0, *sizes[1]])
    count = int(ends[0][-1])
    lists = {
        "train": Lists(np.arange(count), ends[0]),
        "test": Lists(np.arange(count, count + int(ends[1][-1])), ends[1]),
    }
    middle = count + int(ends[1][-1])
    made = PooledClients(
        x, labels, lists, classes=source.classes, common=np.arange(middle + root, middle + root + len(common))
    )
    made.root = Rows(made.x[middle : middle + root], labels[middle : middle + root]) if root else None
    return made


def planted(sizes: list[int], each: int = 40, tests: int = 40, seed: int = 0) -> tuple[PooledClients, np.ndarray]:
    """Groups of these sizes, the k-th with the k-th type's two classes; and the true group of each client."""
    truth = np.repeat(np.arange(len(sizes)), sizes)
    return dealt([list(TYPES[kind]) for kind in truth], each, tests, seed), truth


def attacked(
    count: int, attackers: int, each: int = 40, tests: int = 40, seed: int = 0, root: int = 0
) -> tuple[PooledClients, np.ndarray]:
    """IID clients of whom the first `attackers` swap labels; and who is one (1) and who is not (0)."""
    clients = dealt([list(range(10))] * count, each, tests, seed, root)
    truth = (np.arange(count) < attackers).astype(int)
    if attackers:
        from piebald.partition.changed import changed

        kept = clients.root
        clients = changed(clients, [FlipPairs(pairs=PAIRS, clients=tuple(range(attackers)))], clients._stored)
        clients.root = kept
    return clients, truth
