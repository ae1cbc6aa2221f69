"""Clients that write the same in different ways: booleans, classes, and whole numbers that float64 has not."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import piebald
from piebald.data.clients.data_source import DataSource
from piebald.data.partition import ByOwner
from piebald.data.preparation.written_forms import warn_of_unlike_classes

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


CODINGS = [
    ({"a": "yn", "b": "01"}, "a"),  # none in common, of two sites
    ({"a": "01", "b": "01", "c": "12"}, "c"),
    ({"a": "12", "b": "01", "c": "12", "d": "12"}, "b"),
    ({"a": "012", "b": "123", "c": "012"}, "b"),
    ({"a": "abc", "b": "abd", "c": "abc", "d": "ab"}, "b"),
    ({"a": "yn", "b": "ny"}, None),
    ({"a": "abc", "b": "ab", "c": "bc"}, None),  # rows of some classes are lacking, and no name is odd
    ({"a": "yn", "b": "1"}, None),  # one class alone is what unlike clients may have
    ({"a": "01", "b": "12", "c": "23", "d": "34"}, None),  # sites that have few of many classes each
]


@pytest.mark.parametrize(("classes", "odd"), CODINGS)
@pytest.mark.parametrize("form", ["files", "arrays", "column"])
def test_a_client_that_codes_classes_otherwise_is_named_before_training(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, classes: dict[str, str], odd: str | None, form: str
) -> None:
    x = np.arange(48.0)[:, None]
    frames = {
        name: pd.DataFrame({"x": x[:, 0], "s": pd.Series([*own] * (48 // len(own)))}) for name, own in classes.items()
    }
    with caplog.at_level(logging.WARNING, "piebald"):
        if form == "arrays":
            piebald.clients_from({name: (x, frame["s"].to_numpy(dtype=str)) for name, frame in frames.items()},
                                 classes=sorted(set("".join(classes.values()))))  # fmt: skip
        elif form == "files":
            clients(tmp_path, {name: frame["s"].head(40) for name, frame in frames.items()}, target="s", features=["x"])
        else:
            joined = pd.concat([frame.assign(site=name) for name, frame in frames.items()])
            joined.to_csv(tmp_path / "all.csv", index=False)
            source = DataSource(source=str(tmp_path / "all.csv"), client="site", target="s")
            ByOwner(owner="site").split(source.load())
    told = [record.getMessage() for record in caplog.records if "code them alike" in record.getMessage()]
    assert len(told) == (odd is not None)
    assert odd is None or f"{odd} has the classes '{', '.join(sorted(classes[odd]))}'" in told[0]


def test_the_difference_of_codings_that_are_numbers_is_told(caplog: pytest.LogCaptureFixture) -> None:
    warn_of_unlike_classes({"north": ["0", "1"], "south": ["1", "2"], "east": ["0", "1"]}, "ill")
    assert "('1, 2' less 1 are the others')" in caplog.text


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
