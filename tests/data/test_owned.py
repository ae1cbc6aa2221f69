"""Rows with the owner of each, and clients with parts of their own: whatever holds them, or one sentence."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from piebald import clients_from
from piebald.core.errors import SettingError

X = np.arange(36.0).reshape(12, 3)
Y = np.arange(12) % 2
OWNER = ["b", "a", "c", "a"] * 3  # six rows of a


@pytest.mark.parametrize(
    "owner",
    [
        OWNER,
        np.array(OWNER),
        np.array(OWNER, dtype=object),
        np.array(OWNER, dtype="S"),
        pd.Series(OWNER),
        pd.Series(OWNER, dtype="category"),
        pd.Series(OWNER, dtype="string"),
        pd.Index(OWNER),
    ],
    ids=lambda owner: f"{type(owner).__name__} {getattr(owner, 'dtype', '')}",
)
def test_each_row_goes_to_its_owner(owner: Any) -> None:
    clients = clients_from((X, Y, owner), test=0.5)
    assert clients.names == ["a", "b", "c"]
    for number, name in enumerate(clients.names):
        rows = torch.cat([clients.rows(number, split).x for split in ("train", "test")])
        assert sorted(rows[:, 0].tolist()) == [
            x[0] for x, whose in zip(X.tolist(), OWNER, strict=True) if whose == name
        ]


HOLDERS: dict[str, Callable[[], tuple[Any, Any]]] = {
    "arrays": lambda: (X, Y),
    "tensors": lambda: (torch.tensor(X), torch.tensor(Y)),
    "pandas": lambda: (pd.DataFrame(X), pd.Series(Y)),
    "lists": lambda: (X.tolist(), Y.tolist()),
    "names of classes": lambda: (X, np.array(["no", "yes"])[Y]),
    "several inputs": lambda: ({"u": X, "v": X[:, :1]}, Y),
}


@pytest.mark.parametrize("holder", HOLDERS)
def test_inputs_and_targets_of_every_kind(holder: str) -> None:
    x, y = HOLDERS[holder]()
    owned = clients_from((x, y, OWNER), test=0.5)
    assert [sum(owned.size(n, split) for split in ("train", "test")) for n in range(3)] == [6, 3, 3]
    parts = {"train": (x, y), "test": (x, y)}
    divided = clients_from({"one": parts, "two": {"train": (x, y)}}, test=0.9)
    assert [[divided.size(n, split) for split in ("train", "validation", "test")] for n in (0, 1)] == [
        [12, 0, 12],
        [12, 0, 0],
    ]


def test_sequences_of_unequal_length_have_owners_too() -> None:
    """Lists of rows were taken for three clients before."""
    clients = clients_from(([[1, 2, 3], [1], [2, 3]] * 4, Y, OWNER), tokens=True, collate="pad")
    assert clients.names == ["a", "b", "c"]


def parts(**given: Any) -> dict[str, Any]:
    return {"ann": {"train": (X, Y), **given}}


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ((X, Y, OWNER[:5]), r"owners must be one name or whole number for each of the 12 rows, got <U1 \[5\]"),
        ((X, Y, [None, *OWNER[1:]]), "owners must be one name or whole number for each of the 12 rows"),
        ((X, Y, Y / 2), r"owners must be one name or whole number .* got float64 \[12\]"),
        ((X, Y, "ann"), "owners must be one name or whole number"),
        ((X, Y, pd.date_range("2020", periods=12)), "owners must be one name or whole number"),
        ((X, Y[:5], OWNER), "the data has 12 inputs but 5 targets"),
        ([X, Y, OWNER], r"write \(x, y, owner\), with the owner of each row, as a tuple"),
        (parts(train=(X[:0], Y[:0])), "client 'ann' has no rows: leave it out"),
        (parts(tset=(X, Y)), "there is no part of client 'ann' called 'tset': did you mean 'test'"),
        (parts(test=None), "client 'ann', test must be a pair"),
        (parts(test=(X[:0], Y)), "client 'ann', test has 0 inputs but 12 targets"),
        (
            parts(test=(X[:, :2], Y)),
            r"rows \[3\] from client 'ann', train and float32 rows \[2\] from client 'ann', test",
        ),
        (parts(test=pd.DataFrame(X)), "client 'ann', test is a table: give its inputs and targets as a pair"),
        (parts() | {"bob": (X, Y)}, "client 'bob' is not divided into train, validation, test but client 'ann' is"),
        (
            {"ann": pd.DataFrame(X, columns=list("abc"))},
            "a table needs target='...', the column that is to be predicted",
        ),
    ],
)
def test_what_is_wrong_is_one_sentence(source: Any, message: str) -> None:
    with pytest.raises(SettingError, match=message) as caught:
        clients_from(source)
    assert "\n" not in str(caught.value)
