"""Tables in files as they come: what has one meaning is read and said, what has two is refused with file and row."""

from __future__ import annotations

import gzip
import logging
from pathlib import Path

import pandas as pd
import pytest

import piebald
from piebald.core.errors import SettingError
from piebald.data.clients.table_files import read_table

ROWS = [("Zürich", "60.5", "1", "yes"), ("Bath", "50.25", "2", "no")] * 3
HEAD = ("place", "age", "dose", "ill")


def text(rows=ROWS, head=HEAD, separator: str = ",") -> str:
    return "\n".join(separator.join(row) for row in (head, *rows)) + "\n"


def with_age(*ages: str) -> str:
    return text([(place, f'"{age}"', dose, ill) for (place, _, dose, ill), age in zip(ROWS, ages, strict=False)])


@pytest.mark.parametrize(
    "content",
    [
        text().encode("utf-8-sig"),
        text().encode("utf-16"),
        text().encode("latin-1"),
        text(separator="\t").encode(),
        text(separator="|").encode(),
        text([(place, age.replace(".", ","), *rest) for place, age, *rest in ROWS], separator=";").encode(),
        text(head=[" place", " age ", "dose", " ill"]).replace(",", ", ").encode(),
        text([tuple(f'"{cell}"' for cell in row) for row in ROWS]).replace("\n", "\r\n").encode(),
        with_age(*["60,5", "50,25"] * 3).encode(),
        text([(place, f'"{age}"', dose, ill) for place, age, dose, ill in ROWS]).encode(),
    ],
    ids=["mark", "utf-16", "latin-1", "tabs", "bars", "semicolons", "blanks", "quotes", "decimal commas", "quoted"],
)
@pytest.mark.parametrize("packed", [False, True])
def test_forms_of_one_table(tmp_path: Path, content: bytes, packed: bool) -> None:
    path = tmp_path / ("t.csv.gz" if packed else "t.csv")
    path.write_bytes(gzip.compress(content) if packed else content)
    frame = read_table(path, "place")
    assert list(frame.columns) == list(HEAD)
    assert frame.place.tolist() == ["Zürich", "Bath"] * 3
    assert frame.age.tolist() == [60.5, 50.25] * 3
    assert frame.ill.tolist() == ["yes", "no"] * 3


@pytest.mark.parametrize(
    ("ages", "numbers", "told"),
    [
        (["1,234.5", "2,000"], [1234.5, 2000.0], "comma between thousands"),
        (["1.234,5", "2.000,25"], [1234.5, 2000.25], "comma before decimals"),
        (["60,5", "61"], [60.5, 61.0], "comma before decimals"),
        (["1,234,567", "5"], [1234567.0, 5.0], "comma between thousands"),
    ],
)
def test_numbers_with_a_comma(tmp_path: Path, caplog: pytest.LogCaptureFixture, ages, numbers, told: str) -> None:
    (tmp_path / "t.csv").write_text(with_age(*ages))
    with caplog.at_level(logging.WARNING, "piebald"):
        assert read_table(tmp_path / "t.csv").age.tolist() == numbers
    assert told in caplog.text
    assert f"{ages[0]!r} in row 1" in caplog.text


def test_another_encoding_is_said_with_its_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "t.csv").write_bytes(text([ROWS[1], *ROWS]).encode("cp1252"))
    with caplog.at_level(logging.WARNING, "piebald"):
        read_table(tmp_path / "t.csv")
    assert "t.csv is not in UTF-8 (line 3) and is read as Windows-1252" in caplog.text


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (with_age("1,234", "2,500").encode(), "column 'age' has numbers like '1,234' in row 1, whose comma may stand"),
        (text([("Bath", "1\x00", "2", "no")]).encode(), "has a byte 0x00 in line 2, which is in no text"),
        (
            text([*ROWS, ("Bath", "1", "2", "no", "more")]).encode(),
            "has 5 values in line 8, and 4 in its first: put text",
        ),
        (text([ROWS[0], ("Bath", '"1', "2", "no")]).encode(), "has a quote in line 3 that nothing closes: close it"),
        (text([]).encode(), "names columns and has no rows: give a file with one row at least"),
        (b"", "has no first line with the names of its columns: write it"),
        (text(head=["place", "age", "age", "ill"]).encode(), "column 'age' occurs twice: rename one of them"),
        (
            text(
                [
                    *((("Bath", "Ulm")[age % 2], f"{age}", "2", "no") for age in range(40)),
                    ("Ulm", "unknown", "2", "yes"),
                ]
            ).encode(),
            "column 'age' must have a number in each row, got 'unknown' in row 41: correct it, leave the cell",
        ),
        (text([*ROWS, ("", "4", "2", "no")]).encode(), r"column 'place' has no value in 1 of 7 rows \(row 7\)"),
    ],
    ids=["comma", "byte", "long row", "quote", "no rows", "nothing", "twice", "words", "no client"],
)
def test_what_has_two_meanings_is_one_sentence(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "t.csv").write_bytes(content)
    with pytest.raises(SettingError, match=message) as raised:
        piebald.clients_from(tmp_path / "t.csv", client="place", target="ill")
    assert str(tmp_path / "t.csv") in str(raised.value)
    assert "\n" not in str(raised.value)


def test_tables_of_several_clients_have_the_same_columns(tmp_path: Path) -> None:
    north = pd.DataFrame({"age": [1.0, 2.0, 3.0], "ill": ["no", "yes", "no"], "lab": [1.0, 2.0, 3.0]})
    north.drop(columns="lab").to_csv(tmp_path / "south.csv", index=False)
    tables = {"north": north, "south": str(tmp_path / "south.csv")}
    with pytest.raises(SettingError, match="column 'lab' is in the table of client 'north' and not in that of 'south'"):
        piebald.clients_from(tables, target="ill")
    clients = piebald.clients_from(tables, target="ill", features=["age"], test=0.0)
    assert list(clients.names) == ["north", "south"]
    assert clients.rows(1, "train").x.tolist() == [[1.0], [2.0], [3.0]]


def test_names_that_differ_in_blanks_alone_are_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "t.csv").write_text(text([*ROWS, ("bath ", "4", "2", "no")]))
    with caplog.at_level(logging.WARNING, "piebald"):
        piebald.clients_from(tmp_path / "t.csv", client="place", target="ill")
    assert "clients 'Bath' and 'bath ' differ in blanks or capitals alone" in caplog.text


def test_targets_that_are_names_are_told(caplog: pytest.LogCaptureFixture) -> None:
    table = pd.DataFrame({"place": "a", "age": range(200), "ill": [f"c{number}" for number in range(200)]})
    with caplog.at_level(logging.WARNING, "piebald"):
        piebald.clients_from(table, client="place", target="ill")
    assert "targets have 200 classes in 200 rows, like c0, c1" in caplog.text


def test_a_table_without_rows_is_no_clients() -> None:
    tables = {"north": pd.DataFrame({"age": [1.0, 2.0], "ill": ["no", "yes"]})}
    tables["south"] = tables["north"][:0]
    with pytest.raises(SettingError, match="the table of client 'south' has no rows: leave it out"):
        piebald.clients_from(tables, target="ill")
