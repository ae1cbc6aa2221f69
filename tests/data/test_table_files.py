"""Tables in files as they come: what has one meaning is read and said, what has two is refused with file and row."""

from __future__ import annotations

import gzip
import logging
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

import piebald
from piebald.core.errors import SettingError
from piebald.data.clients import table_files
from piebald.data.clients.data_source import DataSource, RunRows
from piebald.data.clients.prepared import preparation_of
from piebald.data.clients.table_files import read_table
from piebald.data.partition import ByOwner
from piebald.data.preparation import PrepareSettings
from piebald.federation.site.site_rows import SiteSource, own_rows

ROWS = [("Zürich", "60.5", "1", "yes"), ("Bath", "50.25", "2", "no")] * 3
HEAD = ("place", "age", "dose", "ill")


def text(rows=ROWS, head=HEAD, separator: str = ",") -> str:
    return "\n".join(separator.join(row) for row in (head, *rows)) + "\n"


def with_age(*ages: str) -> str:
    return text([(place, f'"{age}"', dose, ill) for (place, _, dose, ill), age in zip(ROWS, ages, strict=False)])


def with_ages(*ages: str, ill: str = "yes") -> str:
    return text([("Bath", age, f"{row}", ("no", ill)[row % 2]) for row, age in enumerate(ages)])


def wide(columns: int) -> str:
    names = [f"c{number}" for number in range(columns)]
    return text([("a", *["1"] * columns, ill) for ill in ("no", "yes")], ["place", *names, "ill"])


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
    assert f"{ages[0]!r} in row 2" in caplog.text


@pytest.mark.parametrize(
    ("values", "read", "told"),
    [
        (["31.05.2024", "1.2.2024"], ["2024-05-31", "2024-02-01"], "'31.05.2024' in row 2, read as day.month.year"),
        (["01/02/2024", "01/31/2024"], ["2024-01-02", "2024-01-31"], "read as month/day/year"),
        (["01/02/2024", "31/01/2024"], ["2024-02-01", "2024-01-31"], "read as day/month/year"),
        (["01/02/2024", "03/04/2024"], ["01/02/2024", "03/04/2024"], "may be day/month/year or month/day/year and so"),
        (["31.05.2024 7:30", ""], ["2024-05-31 07:30:00", None], "read as day.month.year"),
        (["5 May 2024", "31-Dec-2023"], ["2024-05-05", "2023-12-31"], "read as day, name of the month, year"),
        (["1.234.567", "89.000"], [1234567.0, 89000.0], "'1.234.567' in row 2, read with a point between thousands"),
        (["1'234", "56"], [1234.0, 56.0], "an apostrophe between thousands"),
        (["1 234,5", "?"], [1234.5, None], "a comma before decimals and a blank between thousands"),
        (["12 %", "7%"], [0.12, 0.07], "read with per cent as shares of 1"),
        (["72.7%", "0.5", "0"], [0.727, 0.5, 0.0], "'72.7%' in row 2, read with a point before decimals and per cent"),
        (["$1,300.00", "$5"], [1300.0, 5.0], "a comma between thousands and the unit $"),
        (["60,5", "61.5"], [60.5, 61.5], "a comma or a point before decimals"),
        (["007", "12"], ["007", "12"], "'007' in row 2, whose zeros in front count: it is taken as text"),
        (["A12", "B7 "], ["A12", "B7"], ""),
        (["3 kg", "3 lb"], ["3 kg", "3 lb"], "'3 kg' in row 2 and the units 'kg, lb', and stays text: write it in one"),
        (["\u22121.5", "2"], [-1.5, 2.0], "read with a point before decimals and \u2212 for minus"),
        (["\u22127", "2"], [-7.0, 2.0], "read with \u2212 for minus"),
        (["3 A", "3 B", "3 C", "4 D"], ["3 A", "3 B", "3 C", "4 D"], ""),
        (["0.5", "00"], [0.5, 0.0], ""),
        (["$7", "-$5.50"], [7.0, -5.5], "'-$5.50' in row 3, read with a point before decimals and the unit $"),
        (["7", "(5)"], [7.0, -5.0], "'(5)' in row 3, read with brackets around what is below zero"),
        (["(7)", "(5)"], ["(7)", "(5)"], ""),
        (["12,34,567", "3,45,100"], [1234567.0, 345100.0], "'12,34,567' in row 2, read with a comma between thousands"),
        (
            ["01/05/14", "02/06/15"],
            ["01/05/14", "02/06/15"],
            "dates like '01/05/14' in row 2, which have no common form",
        ),
        (
            ["1.5.2014", "2014-06-15"],
            ["1.5.2014", "2014-06-15"],
            "dates like '1.5.2014' in row 2, which have no common",
        ),
        (["2014-06-15", "2014-6-1"], ["2014-06-15", "2014-6-1"], ""),
    ],
)
def test_forms_of_a_value(tmp_path: Path, caplog: pytest.LogCaptureFixture, values, read, told: str) -> None:
    pd.DataFrame({"v": values, "w": 1}).to_csv(tmp_path / "t.csv", index=False)
    with caplog.at_level(logging.WARNING, "piebald"):
        column = read_table(tmp_path / "t.csv").v
    assert column.astype(object).where(column.notna(), None).tolist() == read
    assert told in caplog.text
    assert bool(caplog.text) == bool(told)


def test_a_date_that_is_none_is_told_among_others(tmp_path: Path) -> None:
    rows = [("Bath", f"{1 + day}.02.2024", "2", ("no", "yes")[day % 2]) for day in range(31)]
    (tmp_path / "t.csv").write_text(text(rows))
    with pytest.raises(SettingError, match=r"'age' must have a date .* got '30.02.2024' in row 31 and '31.02.2024' in"):
        piebald.clients_from(tmp_path / "t.csv", client="place", target="ill")


def test_numbers_among_words_and_classes_that_are_alike_are_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [("Bath", ("low", "1.5", "2.5")[row % 3], "2", ("no", "yes ", "Yes")[row % 3]) for row in range(30)]
    (tmp_path / "t.csv").write_text(text(rows))
    with caplog.at_level(logging.WARNING, "piebald"):
        clients = piebald.clients_from(tmp_path / "t.csv", client="place", target="ill")
    assert list(clients.classes) == ["Yes", "no", "yes"]  # without blanks
    assert "column 'age' has numbers, and 'low' in row 2 and 9 more rows: leave these cells empty" in caplog.text
    assert (
        "correct them, or set gaps = ['low'] in [prepare] where they stand for no value; else all of them"
        in caplog.text
    )
    assert "classes 'yes' and 'Yes' differ in blanks or capitals alone" in caplog.text
    (tmp_path / "t.csv").write_text(with_ages(*(f"{age / 8}{'' if age % 3 else ' kg'}" for age in range(31, 71))))
    with caplog.at_level(logging.WARNING, "piebald"):
        piebald.clients_from(tmp_path / "t.csv", client="place", target="ill")
    assert (
        "has numbers, and '4.125 kg' in row 4 and 12 more rows: leave these cells empty, or correct them; else the"
        in (caplog.text)
    )


@pytest.mark.parametrize(("code", "told"), [("-999", True), ("999", True), ("-998", False), ("68.5", False)])
def test_numbers_that_may_be_codes_for_gaps_are_told_before_training(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, code: str, told: bool
) -> None:
    """In training, and at a site; not where they are among the gaps, nor where the column is said to be a category."""
    ages = [code if row % 20 == 7 else f"{20 + row / 3:.2f}" for row in range(120)]
    (tmp_path / "t.csv").write_text(text([("Bath", age, "2", ("no", "yes")[row % 2]) for row, age in enumerate(ages)]))
    sentence = (
        f"t.csv: column 'age' has {code} in 6 rows, far from all other numbers: if it stands for a gap, set gaps = "
        f"['{code}'] in [prepare]"
    )
    with caplog.at_level(logging.WARNING, "piebald"):
        piebald.clients_from(tmp_path / "t.csv", client="place", target="ill")
        assert (sentence in caplog.text) is told
        caplog.clear()
        run = RunRows(classes=["no", "yes"], prepare=PrepareSettings())
        own_rows(SiteSource(source="t.csv", target="ill"), tmp_path, "Bath", run, ["Bath"])
        assert (f"the rows {sentence}" in caplog.text) is told
        for prepare in ({"gaps": [code]}, {"columns": {"age": "category"}}):
            caplog.clear()
            piebald.clients_from(tmp_path / "t.csv", client="place", target="ill", prepare=prepare)
            assert "far from all other numbers" not in caplog.text


def test_words_among_numbers_are_told_whatever_becomes_of_the_column(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """One site has so many of them that sites agree on categories, where all rows together have few."""
    ages = ["-" if row in range(0, 50, 8) else f"{row / 7:.2f}" for row in range(120)]
    rows = [(("Ulm", "Bath")[row % 4 > 0], age, "2", ("no", "yes")[row // 2 % 2]) for row, age in enumerate(ages)]
    (tmp_path / "t.csv").write_text(text(rows))
    sentence = (
        "column 'age' has numbers, and '-' in row 2 and 6 more rows: leave these cells empty, or correct them, or"
    )
    with caplog.at_level(logging.WARNING, "piebald"):
        clients = piebald.clients_from(tmp_path / "t.csv", client="place", target="ill", test=0.0)
        assert [column.kind for column in preparation_of(clients).columns] == ["category", "number"]
        assert f"t.csv: {sentence} set gaps = ['-'] in [prepare]" in caplog.text
        caplog.clear()
        (tmp_path / "site.csv").write_text(text([row[1:] for row in rows], HEAD[1:]))
        source = SiteSource(source="site.csv", target="ill")
        run = RunRows(classes=["no", "yes"], prepare=PrepareSettings())
        own_rows(source, tmp_path, "Ulm", run, ["Ulm"])
        assert f"the rows site.csv: {sentence}" in caplog.text
        caplog.clear()
        mended = piebald.clients_from(tmp_path / "t.csv", client="place", target="ill", prepare={"gaps": ["-"]})
        own_rows(source, tmp_path, "Ulm", replace(run, prepare=PrepareSettings(gaps=["-"])), ["Ulm"])
        assert "has numbers" not in caplog.text
    assert [column.kind for column in preparation_of(mended).columns] == ["number", "number"]


def test_whole_targets_of_a_table_are_classes_and_told(caplog: pytest.LogCaptureFixture) -> None:
    table = pd.DataFrame({"place": "a", "age": [1.0, 2.0, 4.0], "ill": [0.0, 1.0, 1.0]})
    with caplog.at_level(logging.WARNING, "piebald"):
        assert piebald.clients_from(table, client="place", target="ill").classes == ["0", "1"]
    assert "target 'ill' has 0, 1, which are taken as classes: set regression = true" in caplog.text
    assert piebald.clients_from(table, client="place", target="ill", regression=True).classes is None
    assert piebald.clients_from(table.replace(1.0, 1.5), client="place", target="ill").classes is None


def test_another_encoding_is_said_with_its_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "t.csv").write_bytes(text([ROWS[1], *ROWS]).encode("cp1252"))
    with caplog.at_level(logging.WARNING, "piebald"):
        read_table(tmp_path / "t.csv")
    assert "t.csv is not in UTF-8 (line 3) and is read as Windows-1252" in caplog.text


def test_a_last_byte_that_begins_a_character_of_utf8_is_of_another_encoding(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "t.csv").write_bytes("age,place\n1,Bath\n2,café".encode("cp1252"))
    with caplog.at_level(logging.WARNING, "piebald"):
        assert list(read_table(tmp_path / "t.csv")["place"]) == ["Bath", "café"]
    assert "t.csv is not in UTF-8 (line 3) and is read as Windows-1252" in caplog.text


@pytest.mark.parametrize("size", [1, 2, 3, 5, 13])
def test_zeros_and_blank_lines_are_seen_where_a_file_is_read_in_pieces(
    size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(table_files, "_CHUNK", size)
    (tmp_path / "t.csv").write_text("code,age\n12,1\n \n007,2\n")
    assert table_files._encoding(tmp_path / "t.csv") == ("utf-8-sig", True, True)
    assert list(read_table(tmp_path / "t.csv")["code"]) == ["12", "007"]
    (tmp_path / "t.csv").write_text("code,age\n12,10\n100,2\n")
    assert table_files._encoding(tmp_path / "t.csv") == ("utf-8-sig", False, False)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            with_age("1,234", "2,500").encode(),
            "column 'age' has numbers like '1,234' in row 2, which may be read with a comma before",
        ),
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
            "column 'age' must have a number in each row, got 'unknown' in row 42: correct it, leave the cell",
        ),
        (text([("", *row[1:]) for row in ROWS]).encode(), "column 'place' has no value in any row"),
        (
            with_ages(*map(str, range(38)), "old", "n/k").encode(),
            "number in each row, got 'old' in row 40 and 'n/k' in others",
        ),
        (
            with_ages(*map(str, range(39)), "1e300").encode(),
            "have a number below 1e.150 in each row, got 1e.300 in row 41",
        ),
        (
            with_ages(*["u" * 201] * 40).encode(),
            "column 'age': the category 'u+... has 201 characters, at most 200 are",
        ),
        (
            with_ages(*["1"] * 40, ill="y" * 201).encode(),
            "column 'ill': the class 'y+... has 201 characters, at most 200",
        ),
        (
            text(head=["place", "age" * 99, "dose", "ill"]).encode(),
            "the name of column '(age)+a?g?... has 297 characters",
        ),
        (text(head=["city", "age", "dose", "ill"]).encode(), "there is no column 'place'"),
        (wide(4097).encode(), "the table has 4,097 columns to read, at most 4,096 are allowed: name those that matter"),
        (b"Report\n" + text().encode(), "rows of more values than its first line has names .'Report'.: write the name"),
    ],
    ids=[
        "comma",
        "byte",
        "long row",
        "quote",
        "no rows",
        "nothing",
        "twice",
        "words",
        "no client",
        "several words",
        "huge",
        "long category",
        "long class",
        "long name",
        "no column",
        "columns",
        "title",
    ],
)
def test_what_has_two_meanings_is_one_sentence(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "t.csv").write_bytes(content)
    with pytest.raises(SettingError, match=message) as raised:
        piebald.clients_from(tmp_path / "t.csv", client="place", target="ill")
    assert str(tmp_path / "t.csv") in str(raised.value)
    assert "\n" not in str(raised.value)


def test_rows_are_named_as_a_spreadsheet_shows_them(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The first line counts, a cell of two lines is in one row, and blank lines and rows that are left out are rows."""
    rows = [("Bath", f"{age}", ("2", '"a\nb"')[age % 2], ("no", "yes", "")[age % 3]) for age in range(40)]
    bad = ("Bath", "unknown", "2", "yes")
    first, rest = text(rows[:8]), text([*rows[8:], bad]).partition("\n")[2]
    (tmp_path / "t.csv").write_text(f"{first}\n \n{rest}")
    with caplog.at_level(logging.WARNING, "piebald"), pytest.raises(SettingError, match="'unknown' in row 44: correct"):
        piebald.clients_from(tmp_path / "t.csv", client="place", target="ill")
    assert "column 'ill' has no value in 13 of 41 rows (row 4, ...): these rows are left out" in caplog.text
    (tmp_path / "part-1.csv").write_text(first)
    (tmp_path / "part-2.csv").write_text(text([*rows[8:], bad]))
    with pytest.raises(SettingError, match=r"'unknown' in row 34 of part-2\.csv: correct"):
        piebald.clients_from(tmp_path / "part-*.csv", client="place", target="ill")
    tables = {name: str(tmp_path / f"part-{name}.csv") for name in "12"}
    with pytest.raises(SettingError, match=r"'unknown' in row 34 of /.*/part-2\.csv: correct"):
        piebald.clients_from(tables, target="ill", features=["age"])
    frames = {
        "a": pd.DataFrame({"age": range(40), "ill": ["no", "yes"] * 20}),
        "b": pd.DataFrame({"age": ["old"], "ill": "no"}),
    }
    with pytest.raises(SettingError, match="'old' in row 1 of the table of 'b': leave"):
        piebald.clients_from(frames, target="ill")


def test_a_column_that_a_client_lacks_is_named_and_has_gaps(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    north = pd.DataFrame({"age": [1.0, 2.0, 3.0], "ill": ["no", "yes", "no"], "lab": [1.0, 2.0, 3.0]})
    north.drop(columns="lab").to_csv(tmp_path / "south.csv", index=False)
    tables = {"north": north, "south": str(tmp_path / "south.csv")}
    for order in (tables, dict(reversed(tables.items()))):
        caplog.clear()
        several = piebald.clients_from(order, target="ill", prepare="federated", test=0.0)
        assert several.preparation.feature_names_out == ["age", "lab", "lab is missing"]
        assert "column 'lab' is not in the table of south, whose rows count as gaps in it" in caplog.text
    with pytest.raises(SettingError, match="column 'lab' is in the table of client 'north' and not in that of 'south'"):
        piebald.clients_from(tables, target="ill", prepare="none")
    with pytest.raises(SettingError, match="column 'ill' is in the table of client 'north' and not in that of 'east'"):
        piebald.clients_from({"north": north, "east": north.drop(columns="ill")}, target="ill", prepare="federated")
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


def test_a_table_without_rights_is_not_called_damaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (file := tmp_path / "rows.csv").write_bytes(b"a\x00b\n\xff")
    with pytest.raises(SettingError, match="it may be damaged"):
        read_table(file.rename(damaged := tmp_path / "rows.parquet"))
    monkeypatch.setattr("os.access", lambda *_: False)
    with pytest.raises(SettingError, match="cannot be read: permission denied: let this user read it"):
        read_table(damaged)


def test_an_infinite_target_is_named_with_its_row(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("place,age,y\n\nBath,1,0.5\nBath,2,inf\nBath,3,0.7\n")
    with pytest.raises(SettingError, match=r"t.csv: target 'y' is infinite in row 4: correct it, or leave the row out"):
        piebald.clients_from(tmp_path / "t.csv", client="place", target="y")


@pytest.mark.parametrize("folder", ["all", "all [2]"])
def test_folders_of_a_pattern_name_the_clients_of_files_without_such_a_column(folder: str, tmp_path: Path) -> None:
    tmp_path = tmp_path / folder
    table = pd.DataFrame({"age": np.arange(30.0), "ill": [0, 1, 1] * 10})
    for site in ("north", "south"):
        (tmp_path / "all" / site).mkdir(parents=True)
        table.to_csv(tmp_path / "all" / site / "patients.csv", index=False)
        table.assign(hospital="named").to_csv(tmp_path / "all" / site / "with.csv", index=False)
    pattern = tmp_path / "all" / "*" / "patients.csv"
    assert piebald.clients_from(pattern, client="hospital", target="ill").names == ["north", "south"]
    data = DataSource(source=str(pattern), client="hospital", target="ill").load()
    assert ByOwner(owner="hospital").split(data).names == ["north", "south"]
    named = piebald.clients_from(tmp_path / "all" / "*" / "with.csv", client="hospital", target="ill")
    assert named.names == ["named"]
    assert len(read_table(tmp_path / "al?" / "north" / "patients.csv")) == 30
    with pytest.raises(SettingError, match="no file is called like"):
        read_table(tmp_path / "all" / "*" / "none.csv")
