"""Tables as other programs write them: each form is read as what it means, or refused in a sentence."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from piebald.core.errors import SettingError
from piebald.data.partition import clients_from

pd = pytest.importorskip("pandas")

ROWS = [("1.5", "2", "N", "0"), ("3", "4", "S", "1"), ("5", "6", "N", "1"), ("7.25", "8", "S", "0")]


def text(separator: str = ",", rows: list[tuple[str, ...]] = ROWS, header: str = "a,b,who,y") -> str:
    lines = [header.split(","), *rows]
    return "".join(separator.join(line) + "\n" for line in lines)


def read(folder: Path, content: str | bytes, name: str = "t.csv", **asked: object):
    (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)
    return clients_from(folder / name, **{"client": "who", "target": "y", "test": 0.0, "prepare": "none"} | asked)


COMMA = [(a.replace(".", ","), *rest) for a, *rest in ROWS]


@pytest.mark.parametrize(
    ("content", "name"),
    [
        (text(), "t.CSV"),
        (text().encode("utf-8-sig"), "t.csv"),
        (text(header='"a","b","who","y"').encode("utf-8-sig"), "t.csv"),
        (text().replace("\n", "\r\n"), "t.csv"),
        (text(";"), "t.csv"),
        (text(";", COMMA), "t.csv"),
        (text("\t"), "t.csv"),
        (text(), "t.tsv"),
        (text(rows=[(*row, "") for row in ROWS]), "t.csv"),  # a comma at the end of each row
        ("sep=;\n" + text(";", COMMA), "t.csv"),
        ('"sep=|"\r\n'.encode("utf-8-sig") + text("|").encode(), "t.csv"),
        ("sep=;\n" + text(";", COMMA).replace("\n3", "\n\n3"), "t.csv"),
    ],
    ids=[
        "plain",
        "mark",
        "mark and quotes",
        "windows",
        "semicolon",
        "decimal comma",
        "tab",
        "comma",
        "trailing",
        "told",
        "told with mark",
        "told with blank line",
    ],
)
def test_forms_of_one_table(tmp_path: Path, content: str | bytes, name: str) -> None:
    clients = read(tmp_path, content, name)
    assert list(clients.names) == ["N", "S"]
    assert clients.rows(0, "train").x.tolist() == [[1.5, 2.0], [5.0, 6.0]]
    assert clients.rows(1, "train").y.tolist() == [1, 0]


@pytest.mark.parametrize(
    ("names", "clients"),
    [
        (["01", "1", "01", "1"], ["01", "1"]),
        (["NA", "DE", "null", "nan"], ["DE", "NA", "nan", "null"]),
        (["10", "9", "10", "2"], ["2", "9", "10"]),  # in the order of their numbers
        (["2020-01-02", "2019-01-02"] * 2, ["2019-01-02", "2020-01-02"]),
        (["Zürich", "東京", "🏥", "Zürich"], ["Zürich", "東京", "🏥"]),
        (['"St. Mary\n2nd floor"', '"a,b"'] * 2, ["St. Mary\n2nd floor", "a,b"]),
        (["True", "False"] * 2, ["False", "True"]),
        (["1.0", "1"] * 2, ["1", "1.0"]),
    ],
)
def test_names_of_clients_are_taken_as_written(tmp_path: Path, names: list[str], clients: list[str]) -> None:
    """Before, "01" and "1" were one client, and a country "NA" was a missing value."""
    rows = [(a, b, name, y) for (a, b, _, y), name in zip(ROWS, names, strict=True)]
    assert list(read(tmp_path, text(rows=rows)).names) == clients


def test_one_client_alone_and_labels_of_hugging_face(tmp_path: Path) -> None:
    alone = read(tmp_path, text(rows=[(a, b, "only", y) for a, b, _, y in ROWS]))
    assert (list(alone.names), alone.size(0, "train")) == (["only"], 4)
    datasets = pytest.importorskip("datasets")
    kinds = {"who": datasets.ClassLabel(names=["Ulm", "Bath"]), "x": datasets.Value("float32")}
    kinds["y"] = datasets.Value("int64")
    rows = {"who": [1, 0, 1], "x": [1.0, 2.0, 3.0], "y": [0, 1, 0]}
    made = datasets.Dataset.from_dict(rows, features=datasets.Features(kinds))
    found = clients_from(made, client="who", target="y", test=0.0)
    assert {name: found.size(number, "train") for number, name in enumerate(found.names)} == {"Bath": 2, "Ulm": 1}


def test_whole_numbers_can_be_predicted(tmp_path: Path) -> None:
    rows = [(a, b, name, age) for (a, b, name, _), age in zip(ROWS, ["-4", "250000", "31", "7"], strict=True)]
    assert list(read(tmp_path, text(rows=rows)).classes or ()) == ["-4", "7", "31", "250000"]  # by size
    clients = read(tmp_path, text(rows=rows), regression=True)
    assert clients.classes is None
    assert clients.rows(1, "train").y.tolist() == [250000.0, 7.0]
    assert clients.rows(1, "train").y.dtype == torch.float32
    with pytest.raises(SettingError, match="regression needs targets of numbers, got text targets"):
        read(tmp_path, text(), target="who", client="y", regression=True)
    with pytest.raises(SettingError, match="regression predicts numbers, which have no classes"):
        read(tmp_path, text(), classes=["no", "yes"], regression=True)


@pytest.mark.parametrize(
    ("content", "asked", "message"),
    [
        (text(header="a,a,who,y"), {}, "column 'a' occurs twice: rename one of them"),
        (text(header="a,who,who,y"), {}, "column 'who' occurs twice"),
        (text(header="a,b,who"), {}, "rows of more values than its first line has names"),
        (text(rows=[(a, b, "", y) for a, b, _, y in ROWS]), {}, "column 'who' has no value in any row"),
        (text(), {"client": "y"}, "client and target must be different columns, got 'y' for both"),
        (text(), {"features": ["a", "a"]}, "features must be different columns, got 'a' twice"),
    ],
)
def test_what_could_be_misread_is_refused(tmp_path: Path, content: str | bytes, asked, message: str) -> None:
    with pytest.raises(SettingError, match=message) as raised:
        read(tmp_path, content, **asked)
    assert "\n" not in str(raised.value)


def test_a_column_without_a_name_is_left_out_and_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    clients = read(tmp_path, text(header=",b,who,y"))
    assert np.asarray(clients.rows(0, "train").x).tolist() == [[2.0], [6.0]]
    assert "column 'Unnamed: 0' has no name, as pandas and R write row numbers: left out" in caplog.text
