"""Clients that write the same in different ways: booleans, classes, and whole numbers that float64 has not."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import piebald

pd = pytest.importorskip("pandas")
TRUE = np.arange(40) % 3 == 0


def clients(folder: Path, columns: dict[str, Any], **asked: Any) -> Any:
    for name, column in columns.items():
        frame = pd.DataFrame({"x": np.arange(40) / 7, "s": column, "ill": ["no", "yes"] * 20})
        frame.to_csv(folder / f"{name}.csv", index=False)
    sources = {name: folder / f"{name}.csv" for name in columns}
    return piebald.clients_from(sources, **{"target": "ill", "test": 0.0} | asked)


@pytest.mark.parametrize("words", [("yes", "no"), ("J", "N"), ("TRUE", "FALSE")])
def test_words_at_one_client_make_booleans_of_0_and_1_at_another(tmp_path: Path, words: tuple[str, str]) -> None:
    numbers = [1.0 if true else 0.0 for true in TRUE]
    made = clients(tmp_path, {"a": np.where(TRUE, *words), "b": [*numbers[:-1], None]})
    assert made.preparation.feature_names_out == ["x", "s", "s is missing"]
    assert made.rows(0, "train").x[:, 1].tolist() == numbers
    assert made.rows(1, "train").x[:-1, 1].tolist() == numbers[:-1]
    other = clients(tmp_path, {"a": np.where(TRUE, *words), "b": [2, *numbers[1:]]}, prepare={"least_rows": 1})
    assert {column.name: column.kind for column in other.preparation.columns} == {"x": "number", "s": "category"}
    plain = clients(tmp_path, {"a": numbers, "b": numbers})
    assert [column.kind for column in plain.preparation.columns] == ["number", "number"]


@pytest.mark.parametrize(
    ("second", "told"),
    [
        (["0", "1"], "target 's': a ('No, Yes') and b ('0, 1') have no class in common: name classes alike where they"),
        (["No", "Yes"], ""),
        (["No", "0"], ""),
        (["1", "1"], ""),  # one class alone is what unlike clients may have
    ],
)
def test_classes_that_two_clients_do_not_share_are_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, second: list[str], told: str
) -> None:
    with caplog.at_level(logging.WARNING, "piebald"):
        clients(tmp_path, {"a": ["No", "Yes"] * 20, "b": second * 20}, target="s", features=["x"])
    assert told in caplog.text
    assert ("class in common" in caplog.text) == bool(told)


def test_whole_numbers_beyond_those_of_floats_are_different_categories(tmp_path: Path) -> None:
    codes = [2**53, 2**53 + 1]
    made = clients(tmp_path, {"a": codes * 20, "b": codes * 20}, prepare={"columns": {"s": "category"}})
    assert made.preparation.columns[1].categories == [*map(str, codes)]
    assert made.rows(1, "train").x[:2, 1:].tolist() == [[1.0, 0.0], [0.0, 1.0]]
    amounts = clients(tmp_path, {"a": codes * 20, "b": [5, 7] * 20})
    assert [column.kind for column in amounts.preparation.columns] == ["number", "number"]


def test_categories_of_pandas_are_such_whatever_their_values() -> None:
    frame = pd.DataFrame({"site": list("ab") * 20, "x": np.arange(40) / 7, "ill": ["no", "yes"] * 20})
    for codes in ([1, 2] * 20, [1.0, None] * 20):
        made = piebald.clients_from(
            frame.assign(s=pd.Categorical(codes)), client="site", target="ill", prepare={"least_rows": 1}
        )
        assert {column.name: column.kind for column in made.preparation.columns} == {"x": "number", "s": "category"}
