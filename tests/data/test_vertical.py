from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from piebald.contracts.component import build
from piebald.core.errors import SettingError
from piebald.data import DataSet
from piebald.data.partition import Vertical

TABLE = DataSet(
    name="people",
    x=torch.arange(60, dtype=torch.float32).reshape(20, 3),
    y=torch.arange(20) % 2,
    classes=["no", "yes"],
    train=np.arange(16),
    test=np.arange(16, 20),
    features=["age", "pay", "debt"],
)


@settings(max_examples=50, deadline=None)
@given(overlap=st.integers(1, 16), share=st.floats(0, 1), seed=st.integers(0, 99))
def test_rows_are_aligned_and_none_is_lost(overlap: int, share: float, seed: int) -> None:
    parties = Vertical(overlap=overlap, features=("debt", "age"), active_share=share, seed=seed).split(TABLE)
    active, passive = parties.active, parties.passive
    assert active.features == ("age", "debt")
    assert passive.features == ("pay",)
    assert np.intersect1d(active.ids, passive.ids).tolist() == parties.overlap.tolist()
    assert len(parties.overlap) == overlap
    assert np.union1d(active.ids, passive.ids).tolist() == list(range(16))
    assert torch.equal(active.x, TABLE.x[active.ids][:, [0, 2]])
    assert torch.equal(passive.x, TABLE.x[passive.ids][:, [1]])
    assert torch.equal(active.y, TABLE.y[active.ids])
    assert passive.y is None


def test_features_are_the_same_for_test_rows() -> None:
    kind = Vertical(share=0.4, seed=5)
    assert kind.split(TABLE).active.features == kind.split(TABLE, TABLE.test).active.features
    assert kind.split(TABLE, TABLE.test).overlap.tolist() == [16, 17, 18, 19]
    assert build("vertical", kind.table()) == kind


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda: Vertical(overlap=17).split(TABLE), "overlap must be at most the 16 rows, got 17"),
        (lambda: Vertical(features=("agee",)).split(TABLE), "no feature of people called 'agee': did you mean 'age'"),
        (lambda: Vertical(features=("age", "pay", "debt")).split(TABLE), "leave at least one to the passive party"),
        (lambda: Vertical().split(DataSet("images", torch.zeros(4, 1, 8, 8), torch.zeros(4))), "must be a table"),
        (lambda: DataSet("t", torch.zeros(4, 2), torch.zeros(4), features=["a"]), "features must name each number"),
    ],
)
def test_what_cannot_be_is_one_sentence(wrong, message: str) -> None:
    with pytest.raises(SettingError, match=message):
        wrong()
