"""The contract tests of data sets and of partitions."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray

from piebald.contracts import Clients
from piebald.core.errors import shown
from piebald.core.pytree import single
from piebald.data.clients.pooled_clients import PooledClients
from piebald.data.partition.by_owner import ByOwner
from piebald.data.partition.leakage import SPLITS
from piebald.data.partition.partition import Iid, Partition
from piebald.data.sets.dataset import DataSet, Owners
from piebald.testing.components import check_component, promises


@promises(object, "what loads a data set")
def check_data_set(load: Callable[[], DataSet]) -> None:
    """Check that a data set is always the same, has numbers that models can take, and can be divided among clients.

    Args:
        load: a function without arguments that returns the data set.

    Raises:
        AssertionError: it breaks one of these promises.
    """
    assert callable(load), f"what loads a data set must be a function without arguments, got {shown(load)}"
    data, again = load(), load()
    assert isinstance(data, DataSet), f"a data set must be a DataSet, got {type(data).__name__}"
    subject = f"data set {data.name!r}"
    assert len(data) > 0, f"{subject}: it has no rows"
    x, x_again = data.inputs[:], again.inputs[:]
    assert isinstance(x, torch.Tensor), f"{subject}: its inputs must be tensors"
    assert x.dtype in (torch.float32, torch.uint8, torch.int64), (
        f"{subject}: inputs must be float32, uint8 images or int64 tokens, got {x.dtype}"
    )
    assert bool(x.isfinite().all()), f"{subject}: inputs must be finite"
    if x.dtype == torch.uint8:
        assert x.dim() == 4, f"{subject}: uint8 inputs must be images [n, channels, height, width], got {list(x.shape)}"
    same = torch.equal(x, x_again) and torch.equal(data.targets, again.targets)
    assert same, f"{subject}: loaded twice, its rows differ"
    y = data.targets
    if data.classes is None:
        assert y.dtype == torch.float32, f"{subject}: without classes, targets must be float32, got {y.dtype}"
        assert bool(y.isfinite().all()), f"{subject}: targets must be finite"
    else:
        assert y.dtype == torch.int64, f"{subject}: class numbers must be int64, got {y.dtype}"
    clients = Iid(clients=2).split(data)
    rows = clients.rows(0, "train")
    kind = single(rows.x, subject).dtype
    assert kind in (torch.float32, torch.int64), f"{subject}: clients get inputs of {kind}"
    for owner, owners in data.owners.items():
        assert len(set(owners.names)) == len(owners.names), f"{subject}: two owners {owner!r} have one name"
        assert len(ByOwner(owner=owner).split(data)) <= len(owners.names)


Ints = NDArray[np.int64]


def numbered_rows(count: int = 240, classes: int = 6, published: int = 0, seed: int = 0, together: int = 0) -> DataSet:
    """A data set whose inputs are the row numbers, with 8 owners called "person".

    Args:
        count: number of rows.
        classes: number of classes, in equal parts.
        published: how many rows at the end are the published test part.
        seed: seed of the order of the classes.
        together: how many neighbouring rows form a group, 0 for none.
    """
    rng = np.random.default_rng(seed)
    y = rng.permutation(np.arange(count) % classes)
    return DataSet(
        name="rows",
        x=torch.arange(count, dtype=torch.float32)[:, None],
        y=torch.from_numpy(y),
        classes=[f"class {number}" for number in range(classes)],
        owners={"person": Owners.of(rng.integers(0, 8, count))},
        train=np.arange(count - published) if published else None,
        test=np.arange(count - published, count) if published else None,
        groups=np.arange(count) // together if together else None,
    )


@promises(Partition, "a partition")
def check_partition(partition: Partition, *, seeds: int = 3) -> None:
    """Check that a partition loses, doubles and leaks no row, repeats, and leaves nobody without training rows.

    It divides 240 rows of 6 classes and 8 owners called "person", with and without a published test part.

    Args:
        partition: the partition, for at most 8 clients or so.
        seeds: how many seeds to try.

    Raises:
        AssertionError: it breaks one of these promises.

    Examples:
        >>> from piebald.data.partition import Dirichlet
        >>> check_partition(Dirichlet(clients=5, alpha=0.5), seeds=1)
    """
    check_component(partition)
    for seed in range(seeds):
        for published in (0, 60):
            for validation in (0.0, 0.2):
                seeded = partition.model_copy(update={"seed": seed, "validation": validation})
                data = numbered_rows(published=published, seed=seed)
                clients = seeded.split(data)
                check_rows(partition, clients, np.arange(len(data)))
                again = seeded.split(data)
                for split in SPLITS:
                    assert _flat(clients, split).tolist() == _flat(again, split).tolist(), (
                        f"partition {partition.kind!r}: two splits with one seed differ: draw from self.seed alone"
                    )


def check_rows(partition: Partition, clients: Clients, every: Ints) -> None:
    """Check that no row is held twice or lost, everybody has training rows, and no training row is in a test."""
    subject = f"partition {partition.kind!r}"
    assert isinstance(clients, PooledClients)
    names = [str(name) for name in clients.names]
    assert len(set(names)) == len(names), f"{subject}: clients must have different names, got {', '.join(names)}"
    held = np.concatenate([_flat(clients, split) for split in SPLITS])
    assert len(np.unique(held)) == len(held), f"{subject}: a row belongs to two clients, or to two splits"
    common = np.zeros(0, dtype=np.int64)
    if clients.common is not None:
        common = single(clients.common.x, subject)[:, 0].numpy().astype(np.int64)
    assert set(held) | set(common) == set(every), f"{subject}: rows are lost"
    empty = [clients.names[client] for client in range(len(clients)) if not clients.size(client, "train")]
    assert not empty, f"{subject}: client {empty[0]!r} has no training row"
    learned = np.concatenate([_flat(clients, "train"), _flat(clients, "validation")])
    assert not set(learned) & set(common), f"{subject}: a training row is in the common test set"
    tested = set(_flat(clients, "test"))
    assert tested <= set(common) or not len(common), f"{subject}: a client's test row is not in the common test set"


def _flat(clients: PooledClients, split: str) -> Ints:
    """The row numbers of all clients, one after another."""
    return np.concatenate([clients.indices(client, split) for client in range(len(clients))])  # type: ignore[arg-type]
