"""A tensor store behaves like a dictionary, however much fits into RAM."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from piebald.core.tensor_store import TensorStore
from tests.fakes import few

DTYPES = [torch.float32, torch.float64, torch.int64, torch.int32, torch.uint8, torch.bool]
shapes = st.lists(st.integers(0, 4), max_size=3)
entries = st.dictionaries(
    st.sampled_from(["private", "control", "velocity"]), st.tuples(shapes, st.sampled_from(DTYPES)), max_size=3
)
moves = st.lists(st.tuples(st.sampled_from(["set", "set", "get"]), st.integers(0, 6), entries), max_size=40)


def filled(kinds: dict[str, Any], start: int) -> dict[str, Tensor]:
    return {
        name: (torch.arange(start, start + torch.Size(shape).numel()) % 251).view(shape).to(dtype)
        for name, (shape, dtype) in kinds.items()
    }


def same(one: Any, two: Any) -> bool:
    return one.keys() == two.keys() and all(
        one[name].dtype == two[name].dtype and torch.equal(one[name], two[name]) for name in one
    )


@few
@given(moves, st.sampled_from([0, 16, 100, 1 << 20]))
def test_it_is_a_dictionary_at_any_budget(sequence: list[Any], budget: int) -> None:
    store, plain = TensorStore(budget), {}
    for step, (what, client, kinds) in enumerate(sequence):
        if what == "set":
            plain[client] = filled(kinds, step)
            store.set(client, filled(kinds, step))
        elif client in plain:
            assert same(store.get(client), plain[client])
        assert (client in store) == (client in plain)
    assert list(store) == sorted(plain)
    for client, kept in plain.items():
        assert same(store.get(client), kept)
    store.close()


@few
@given(moves, st.sampled_from([0, 100]))
def test_all_changes_together_restore_everything(sequence: list[Any], budget: int) -> None:
    store, changed, plain = TensorStore(budget), {}, {}
    for step, (what, client, _) in enumerate(sequence):
        if what == "set":
            plain[client] = {"private": torch.full((3,), float(step)), "control": torch.full((2, 2), -float(step))}
            store.set(client, plain[client])
        if step % 7 == 6:
            changed |= store.changed()
            assert store.changed() == {}
    changed |= store.changed()
    again = TensorStore(budget)
    again.restore(changed)
    assert list(again) == sorted(plain)
    assert all(same(again.get(client), kept) for client, kept in plain.items())
    assert again.changed() == {}
    store.close()
    again.close()


def test_tensors_beyond_the_budget_are_on_disk_and_holes_are_used_again() -> None:
    store = TensorStore(budget=4 * 100 * 2)
    for _ in range(5):
        for client in range(50):
            store.set(client, {"private": torch.full((100,), float(client))})
        for client in range(50):
            store.get(client)
    assert store._file is not None
    store._file.flush()
    near = sum(t.numel() for tensors in store._near.values() for t in tensors.values())
    assert near == 200
    assert os.fstat(store._file.fileno()).st_size <= 4 * 100 * 50
    assert all(bool((store.get(client)["private"] == client).all()) for client in range(50))
    store.close()


def test_closing_closes_the_file() -> None:
    store = TensorStore(budget=0)
    store.set(1, {"private": torch.ones(3)})
    store.set(2, {"private": torch.ones(3)})  # client 1 has to make room
    file = store._file
    store.close()
    store.close()
    assert file is not None
    assert file.closed
    assert list(store) == []
    with pytest.raises(KeyError):
        store.get(1)
