"""What clients offer beyond the minimum is asked for by type, and asking loads nothing."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from piebald.contracts import HasServerRows, HoldsRows, InMemory, Rows, RowsAtSites, Split
from piebald.data.clients.sites import SiteClients
from piebald.data.clients.sources import clients_of
from piebald.data.measures.heterogeneity import embedding
from piebald.data.partition import LazyClients, Lists, PooledClients
from piebald.data.sets.dataset import Decoded
from piebald.engines.row_loader import RowLoader
from piebald.runs.adaptation import hold_out


def unread(*_: Any) -> Any:
    raise AssertionError("a row was loaded")


def pooled(x: Any) -> PooledClients:
    """Two clients with two rows each."""
    parts: dict[Split, Lists] = {"train": Lists(np.arange(4), np.array([0, 2, 4]))}
    return PooledClients(x, torch.arange(4) % 2, parts, classes=["a", "b"])


def test_a_million_lazy_clients_are_asked_without_loading_one() -> None:
    clients = LazyClients(1_000_000, unread, classes=["a", "b"])
    assert clients_of(clients) is clients
    assert not isinstance(clients, InMemory)
    assert not isinstance(clients, RowsAtSites)
    assert isinstance(clients, HasServerRows)
    assert clients.server_rows is None
    assert not RowLoader(clients, torch.device("cpu")).indexed


def test_inputs_in_files_are_not_decoded() -> None:
    clients = pooled(Decoded(4, (3,), torch.float32, unread))
    assert clients_of(clients) is clients
    assert isinstance(clients, InMemory)
    assert not clients.in_memory()
    assert not RowLoader(clients, torch.device("cpu")).indexed
    assert embedding(clients) is None
    there, unseen = hold_out(clients, 1, seed=0)
    assert isinstance(unseen, InMemory)
    assert not there.in_memory()
    assert not unseen.in_memory()


def test_a_pool_in_memory_is_indexed_also_where_clients_are_held_out() -> None:
    clients = pooled(torch.arange(12.0).view(4, 3))
    there, unseen = hold_out(clients, 1, seed=0)
    assert unseen is not None
    for some in (clients, there, unseen):
        loader = RowLoader(some, torch.device("cpu"))
        assert loader.indexed
        gathered, rows = loader.gather([0], "train"), some.rows(0, "train")
        assert torch.equal(gathered.x[gathered.positions[0]], rows.x)
        assert torch.equal(gathered.y[gathered.positions[0]], rows.y)
        assert gathered.x.data_ptr() == clients.x.data_ptr()


def test_clients_at_sites_say_so() -> None:
    clients = SiteClients(["one", "two"], Rows(torch.zeros(1, 3), torch.zeros(1, dtype=torch.int64)), ["a", "b"])
    assert isinstance(clients, RowsAtSites)
    assert clients.elsewhere


@pytest.mark.parametrize("value", [{}, (np.zeros((4, 2)), np.zeros(4)), [1, 2]])
def test_other_values_are_no_clients(value: Any) -> None:
    assert not isinstance(value, HoldsRows)
