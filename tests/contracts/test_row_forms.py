"""The form of a row, as a run folder describes it: it is data, and whoever wrote it decides no size here."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from piebald.contracts import Rows
from piebald.contracts.data import blank_row, row_form
from piebald.core.errors import SettingError


def nested(depth: int) -> Any:
    form: Any = ["float32", 1]
    for _ in range(depth):
        form = {"several": [form]}
    return form


@pytest.mark.parametrize("x", [torch.ones(3, 2), {"a": torch.ones(3, 2, 4), "b": (torch.ones(3, dtype=torch.int64),)}])
def test_a_form_gives_a_row_of_zeros(x: Any) -> None:
    form = row_form(Rows(x, torch.arange(3)))
    blank = blank_row(form)
    assert row_form(blank) == form
    leaves = [blank.x] if isinstance(x, torch.Tensor) else [blank.x["a"], *blank.x["b"]]
    assert all(len(leaf) == 1 and not leaf.any() for leaf in leaves)


@pytest.mark.parametrize(
    "x",
    [
        ["float32", 1 << 29],
        ["float32", 1 << 15, 1 << 15],
        ["float32", -1],
        ["float32", "wide"],
        ["float32", float("inf")],
        ["complex64", 2],
        ["__class__"],
        [],
        {"several": 3},
        {"named": [1]},
        None,
        nested(20_000),
    ],
    ids=range(12),
)
def test_a_form_that_is_none_ends_in_one_sentence(x: Any) -> None:
    with pytest.raises(SettingError, match="none that a run writes"):
        blank_row({"x": x, "y": ["int64"]})


def test_many_large_inputs_take_no_memory() -> None:
    blank = blank_row({"x": {"several": [["float32", 1 << 28]] * 1000}, "y": ["int64"]})
    assert sum(leaf.untyped_storage().nbytes() for leaf in blank.x) <= 4 * 1000
