from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
import torch

from piebald.contracts import Clients, Rows
from piebald.core.errors import SettingError
from piebald.data.partition import LazyClients, Lists, PooledClients, clients_from


def pooled() -> PooledClients:
    x = torch.arange(6, dtype=torch.float32)[:, None]
    y = torch.tensor([0, 1, 1, 0, 2, 2])
    parts = {
        "train": Lists.of(np.array([0, 0, 1, -1, -1, 1]), 2),
        "test": Lists.of(np.array([-1, -1, -1, 0, 1, -1]), 2),
    }
    return PooledClients(x, y, parts, classes=["a", "b", "c"], common=np.array([3, 4]))


def test_pooled_rows_sizes_and_counts() -> None:
    clients: Clients = pooled()
    assert len(clients) == 2
    assert list(clients.names) == ["0", "1"]
    assert clients.rows(1, "train").x[:, 0].tolist() == [2, 5]
    assert clients.rows(1, "train").y.tolist() == [1, 2]
    assert len(clients.rows(0, "validation")) == 0
    assert [clients.size(0, split) for split in ("train", "validation", "test")] == [2, 0, 1]
    assert clients.counts(0, "train") == [1, 1, 0]
    assert clients.common.x[:, 0].tolist() == [3, 4]


def test_counts_are_the_same_from_the_table() -> None:
    clients = pooled()
    before = [clients.counts(client, "train") for client in range(2)]
    assert clients.table("train").tolist() == before
    assert [clients.counts(client, "train") for client in range(2)] == before


def test_unknown_split_and_client() -> None:
    with pytest.raises(SettingError, match="got 'tran': did you mean 'train'"):
        pooled().rows(0, "tran")
    with pytest.raises(IndexError, match="no client 2: they are numbered from 0 to 1"):
        pooled().rows(2, "train")
    with pytest.raises(IndexError):
        pooled().size(-1, "train")


def test_images_stay_small_until_they_are_read() -> None:
    x = torch.tensor([[[[0, 255]]], [[[51, 102]]]], dtype=torch.uint8)
    clients = PooledClients(x, torch.tensor([0, 1]), {"train": Lists.of(np.array([0, 1]), 2)})
    assert clients.rows(1, "train").x.tolist() == torch.tensor([[[[0.2, 0.4]]]]).tolist()
    assert clients.x.dtype == torch.float32
    assert clients.x.max() == 1
    assert x.dtype == torch.uint8


def test_a_million_pooled_clients_cost_arrays_only() -> None:
    count = 1_000_000
    lists = Lists.of(np.arange(count), count)
    clients = PooledClients(torch.zeros(count, 1), torch.zeros(count, dtype=torch.int64), {"train": lists})
    assert clients.names[count - 1] == "999999"
    assert clients.size(count - 1, "train") == 1


class Loader:
    """Ten rows a client; remembers who was loaded."""

    def __init__(self) -> None:
        self.loaded: list[int] = []

    def __call__(self, client: int) -> tuple[np.ndarray, np.ndarray]:
        self.loaded.append(client)
        return np.full((10, 3), client), np.arange(10) % 2


def test_a_million_lazy_clients_open_without_touching_data() -> None:
    loader = Loader()
    tracemalloc.start()
    clients: Clients = LazyClients(1_000_000, loader, classes=["even", "odd"])
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 100_000
    assert loader.loaded == []
    assert len(clients) == 1_000_000
    assert clients.names[999_999] == "999999"
    assert clients.size(5, "train") is None
    assert clients.counts(5, "train") is None
    assert loader.loaded == []
    assert clients.rows(999_999, "train").x.tolist() == [[999_999] * 3] * 8
    assert len(clients.rows(999_999, "test")) == 2
    assert loader.loaded == [999_999]


def test_the_least_recently_used_is_forgotten() -> None:
    loader = Loader()
    clients = LazyClients(9, loader, cache=2)
    for client in (0, 1, 0, 2, 0, 1):
        clients.rows(client, "train")
    assert loader.loaded == [0, 1, 2, 1]


def test_lazy_and_pooled_clients_hold_out_the_same_rows() -> None:
    def load(client: int) -> tuple[np.ndarray, np.ndarray]:
        return np.arange(10 + client, dtype=np.float32)[:, None], np.arange(10 + client) % 3

    lazy = LazyClients(5, load, test=0.3, validation=0.2, seed=4)
    pooled = clients_from([load(client) for client in range(5)], test=0.3, validation=0.2, seed=4)
    for client in range(5):
        for split in ("train", "validation", "test"):
            assert torch.equal(lazy.rows(client, split).x, pooled.rows(client, split).x)
            assert torch.equal(lazy.rows(client, split).y, pooled.rows(client, split).y)


def test_load_may_say_the_splits() -> None:
    clients = LazyClients(2, lambda client: {"train": (np.ones((3, 2)), [0, 1, 0]), "test": (np.ones((1, 2)), [1])})
    assert len(clients.rows(0, "train")) == 3
    assert len(clients.rows(0, "test")) == 1
    assert len(clients.rows(0, "validation")) == 0
    rows = LazyClients(1, lambda client: Rows(torch.ones(5, 2), torch.ones(5)), test=0.0).rows(0, "train")
    assert rows.y.dtype == torch.float32


@pytest.mark.parametrize(
    ("loaded", "message"),
    [
        (None, "client '0': load must return a pair"),
        ((np.ones((3, 2)), [0, 1]), "client '0' has 3 inputs but 2 targets"),
        ((np.ones((0, 2)), np.zeros(0, dtype=int)), "client '0' has no rows to train on"),
        ({"test": (np.ones((3, 2)), [0, 1, 0])}, "client '0' was loaded without rows to train on"),
        ({"trian": (np.ones((3, 2)), [0, 1, 0])}, "did you mean 'train'"),
        ((np.ones((1, 2)), ["c"]), "target 'c' is not one of the 2 classes"),
        ((np.ones((1, 2)), [7]), "class numbers must be below 2, got 7"),
        ((np.full((1, 2), np.nan), [0]), "inputs must be finite float32 numbers"),
    ],
)
def test_what_load_must_not_return(loaded, message: str) -> None:
    clients = LazyClients(1, lambda client: loaded, classes=["a", "b"])
    with pytest.raises(SettingError, match=message):
        clients.rows(0, "train")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"count": 0}, "count must be a whole number of at least 1, got 0"),
        ({"load": 3}, "load must be a function"),
        ({"cache": 0}, "cache must be a whole number of at least 1, got 0"),
        ({"names": ["a"]}, "names must give one name to each of the 2 clients, got 1"),
        ({"test": 1.0}, "test must be a finite number of at least 0 and below 1"),
    ],
)
def test_bad_lazy_settings(fields, message: str) -> None:
    with pytest.raises(SettingError, match=message):
        LazyClients(**({"count": 2, "load": Loader()} | fields))
