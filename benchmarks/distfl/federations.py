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
from piebald.partition.changed_clients import changed

Truth = np.ndarray[Any, np.dtype[np.int64]]

PAIRS = ((0, 4), (1, 5), (2, 6), (3, 7))  # classes that attackers swap, eight of ten
TYPES = ((0, 1), (2, 3), (4, 5), (6, 7), (8, 9))  # two classes each, Table 2


@cache
def data(name: str) -> DataSet:
    """A data set, read once."""
    return load(name)


def pooled(
    train: Sequence[Sequence[int]],
    test: Sequence[Sequence[int]],
    source: DataSet,
    held: Sequence[Sequence[int]] | None = None,
    **more: list[int],
) -> PooledClients:
    """Clients from row numbers; `held` is for validation, `more` names rows of the common test set and the server's."""
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


def dealt(
    name: str, holders: list[list[int]], each: int, tests: int, seed: int, root: int = 0, held: int = 0
) -> PooledClients:
    """Clients with `each` training, `held` validation and `tests` test rows of their classes, evenly; no training or
    validation row twice.

    CIFAR-10's test images are the 1,000 exact ones and the digits' those that nobody trains on, so clients share them.
    """
    source, draw = data(name), np.random.default_rng(seed)
    y = source.y.numpy()
    train_rows = np.arange(len(y)) if source.train is None else source.train
    stock = {c: [int(row) for row in draw.permutation(train_rows[y[train_rows] == c])] for c in range(10)}
    train = [[stock[classes[i % len(classes)]].pop() for i in range(each)] for classes in holders]
    kept = [stock[i % 10].pop() for i in range(root)]
    own = [[stock[classes[i % len(classes)]].pop() for i in range(held)] for classes in holders]
    if source.test is None:
        actor = stock
    else:
        actor = {c: [int(row) for row in source.test[y[source.test] == c]] for c in range(10)}
    test = [[int(draw.choice(actor[classes[i % len(classes)]])) for i in range(tests)] for classes in holders]
    return pooled(train, test, source, own, common=list(chain(*actor.values())), root=kept)


def planted(sizes: list[int], each: int = 40, tests: int = 40, seed: int = 0) -> tuple[PooledClients, Truth]:
    """CIFAR-10 in groups of these sizes, the k-th with the k-th type's two classes; and each client's true group."""
    truth = np.repeat(np.arange(len(sizes)), sizes)
    return dealt("cifar10", [list(TYPES[kind]) for kind in truth], each, tests, seed), truth


def attacked(
    name: str, count: int, attackers: int, each: int = 40, seed: int = 0, root: int = 0, held: int = 0
) -> tuple[PooledClients, Truth]:
    """IID clients of whom the first `attackers` swap labels in pairs; and who is one (-1) and who is not (0)."""
    clients = dealt(name, [list(range(10))] * count, each, 40, seed, root, held)
    if attackers:
        change = FlipPairs(pairs=PAIRS, clients=tuple(range(attackers)))
        clients = changed(clients, [change], clients.x)
    return clients, -(np.arange(count) < attackers).astype(int)


def mixed(seed: int = 0) -> tuple[PooledClients, Truth]:
    """20 holders of four types of CIFAR-10 (0 to 3), and 5 of each of the first two types whose labels are swapped (-1
    and -2).
    """
    truth = np.repeat([0, 1, 2, 3, -1, -2], 5)
    kinds = [kind if kind >= 0 else -1 - kind for kind in truth]
    clients = dealt("cifar10", [list(TYPES[kind]) for kind in kinds], 40, 40, seed)
    change = FlipPairs(pairs=TYPES[:2], clients=tuple(np.flatnonzero(truth < 0).tolist()))
    return changed(clients, [change], clients.x), truth


def honest(
    name: str, count: int, attackers: int, each: int = 40, seed: int = 0, root: int = 0, held: int = 0
) -> tuple[PooledClients, Truth]:
    """The same federation without the attackers: the bound."""
    clients = dealt(name, [list(range(10))] * count, each, 40, seed, root, held)
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


def writers(seed: int = 0, count: int = 10, each: int = 3000) -> tuple[PooledClients, Truth]:
    """MNIST's digits, IID: enough rows for a guarantee about one of them."""
    clients = dealt("mnist_writers", [list(range(10))] * count, each, 100, seed)
    return clients, np.zeros(count, dtype=int)


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
