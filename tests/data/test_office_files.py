"""Files of Excel, Stata, SPSS and SAS are tables wherever one file goes."""

from __future__ import annotations

import re
import sys
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import piebald
from piebald.core.errors import SettingError
from piebald.data.clients.table_files import read_table
from tests.cli.conftest import Command, command  # noqa: F401 - a fixture

pd = pytest.importorskip("pandas")
KINDS = ["csv", "xlsx", "dta", "sav"]


def rows() -> Any:
    rng = np.random.default_rng(3)
    return pd.DataFrame({
        "site": ["a", "b"] * 20, "age": rng.integers(30, 80, 40), "glucose": rng.normal(6, 1, 40).round(2),
        "ward": ["north", "south", "east", "west"] * 10, "ill": rng.choice(["no", "yes"], 40),
    })  # fmt: skip


def write(kind: str, path: Path, table: Any) -> Path:
    path = path.with_suffix(f".{kind}")
    if kind == "xlsx":
        pytest.importorskip("openpyxl")
        table.to_excel(path, index=False)
    elif kind == "dta":
        table.to_stata(path, write_index=False)
    elif kind == "sav":
        pytest.importorskip("pyreadstat").write_sav(table, str(path))
    else:
        table.to_csv(path, index=False)
    return path


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_rows_are_the_same_clients_statistics_and_models(tmp_path: Path, kind: str) -> None:
    path = write(kind, tmp_path / "rows", rows())
    clients = piebald.clients_from(path, client="site", target="ill", test=0.0)
    expected = piebald.clients_from(rows(), client="site", target="ill", test=0.0, prepare="federated")
    assert clients.preparation.columns == expected.preparation.columns
    assert all(clients.rows(number, "train").x.equal(expected.rows(number, "train").x) for number in range(2))
    assert piebald.statistics(path, client="site")["age"].mean == pytest.approx(rows().age.mean())
    asked: dict[str, Any] = {"client": "site", "target": "ill", "columns": ["age", "glucose"]}
    np.testing.assert_allclose(piebald.glm(path, **asked).coefficients, piebald.glm(rows(), **asked).coefficients)


@pytest.mark.parametrize("kind", KINDS)
def test_commands_take_them(command: Command, tmp_path: Path, kind: str) -> None:  # noqa: F811 - the fixture
    path = write(kind, tmp_path / "rows", rows())
    assert "age" in command("statistics", path, "--client", "site").out
    assert "number of" in command("look", path, "--client", "site", "--target", "ill").out


def test_labels_of_stata_are_words(tmp_path: Path) -> None:
    table = rows().assign(ward=lambda frame: frame.ward.astype("category"))
    assert read_table(write("dta", tmp_path / "rows", table)).ward.astype(str).tolist() == table.ward.tolist()


@pytest.mark.parametrize(("kind", "what"), [("xlsx", "openpyxl"), ("sav", "pyreadstat"), ("xpt", "pyreadstat")])
def test_a_missing_library_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, what: str) -> None:
    (tmp_path / f"rows.{kind}").write_bytes(b"PK")
    monkeypatch.setitem(sys.modules, what, None)
    with pytest.raises(SettingError, match=re.escape(f"needs {what}: pip install '.[office]'")):
        read_table(tmp_path / f"rows.{kind}")


@pytest.mark.parametrize("kind", ["xlsx", "dta", "sav", "sas7bdat", "xpt"])
@pytest.mark.parametrize("content", [b"", b"age,ill\n1,no\n", bytes(range(256)) * 20])
def test_damaged_files_are_refused_in_a_sentence(tmp_path: Path, kind: str, content: bytes) -> None:
    if kind in ("xlsx", "sav"):
        pytest.importorskip("openpyxl" if kind == "xlsx" else "pyreadstat")
    (tmp_path / f"rows.{kind}").write_bytes(content)
    with pytest.raises(SettingError, match="cannot be read as a table, it may be damaged"):
        read_table(tmp_path / f"rows.{kind}")


def test_a_file_of_several_sheets_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("openpyxl")
    with pd.ExcelWriter(tmp_path / "rows.xlsx") as file:
        for name in ("2023", "2024"):
            rows().to_excel(file, sheet_name=name, index=False)
    with pytest.raises(SettingError, match="must have one sheet with a table, got 2023, 2024"):
        read_table(tmp_path / "rows.xlsx")


@pytest.mark.parametrize(
    ("cells", "why"),
    [
        ('<row r="1048576"><c r="XFD1048576"><v>1</v></c></row>', "made to fill the memory"),
        ('<row r="99999999999"><c r="A2"><v>1</v></c></row>', "a sheet has a cell '99999999999'"),
        ('<row r="1e11"><c r="A2"><v>1</v></c></row>', "a sheet has a cell '1e11'"),
        ('<row r="2"><c r="ZZZZZZZ2"><v>1</v></c></row>', "a sheet has a cell 'ZZZZZZZ2'"),
    ],
)
def test_a_cell_far_away_fills_no_memory(tmp_path: Path, cells: str, why: str) -> None:
    """Before, all rows and cells before it were made, of a file of a few kilobytes."""
    whole = write("xlsx", tmp_path / "whole", rows().head(2))
    with zipfile.ZipFile(whole) as parts, zipfile.ZipFile(tmp_path / "rows.xlsx", "w") as changed:
        for part in parts.infolist():
            content = parts.read(part)
            if "sheet1" in part.filename:
                content = content.replace(b"</sheetData>", cells.encode() + b"</sheetData>")
            changed.writestr(part.filename, content)
    with pytest.raises(SettingError, match=re.escape(why)):
        read_table(tmp_path / "rows.xlsx")


def test_a_text_that_many_cells_have_is_counted_in_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write("xlsx", tmp_path / "rows", pd.DataFrame({"note": ["x" * 32_000] * 200, "ill": [0, 1] * 100}))
    assert len(read_table(path)) == 200
    # packed parts are looked at first, and are smaller than what is read of them
    monkeypatch.setattr("piebald.data.clients.office_files.check_members", lambda *_: None)
    monkeypatch.setattr("piebald.core.files.SMALL", 1 << 20)
    monkeypatch.setattr("piebald.core.files.RATIO", 50)
    with pytest.raises(SettingError, match="made to fill the memory"):
        read_table(path)


def test_texts_of_great_width_are_refused_before_they_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before, a text counted as 16 bytes, however long it was declared to be."""
    pyreadstat = pytest.importorskip("pyreadstat")
    table = pd.DataFrame({"note": ["x" * 30_000, *["y" * 30_000] * 999], "ill": 1.0})
    pyreadstat.write_sav(table, str(tmp_path / "rows.sav"), compress=True)
    size = (tmp_path / "rows.sav").stat().st_size
    assert size < 1 << 20
    monkeypatch.setattr("piebald.core.files.SMALL", 1 << 20)
    monkeypatch.setattr("piebald.core.files.RATIO", 30_016_000 // size + 1)
    assert len(read_table(tmp_path / "rows.sav")) == 1000
    monkeypatch.setattr("piebald.core.files.RATIO", 30_016_000 // size)
    read = pyreadstat.read_sav
    monkeypatch.setattr(pyreadstat, "read_sav", lambda *given, metadataonly: read(*given, metadataonly=metadataonly))
    with pytest.raises(SettingError, match=r"would take 30,016,000 bytes.*or save it with shorter texts"):
        read_table(tmp_path / "rows.sav")


def test_cells_of_excel_are_those_of_a_text_file(tmp_path: Path) -> None:
    """Before, texts such as 007 lost their zeros."""
    table = pd.DataFrame({"code": ["007", "012"], "number": ["5", "6.5"], "mixed": ["1", "x"], "whole": [1, 2]})
    of_excel, of_text = (read_table(write(kind, tmp_path / "rows", table)) for kind in ("xlsx", "csv"))
    assert of_excel.to_dict("list") == of_text.to_dict("list")


def test_names_that_differ_in_blanks_alone_are_refused(tmp_path: Path) -> None:
    path = write("xlsx", tmp_path / "rows", pd.DataFrame({"age": [1, 2], "age ": [3, 4]}))
    with pytest.raises(SettingError, match="column 'age' occurs twice"):
        read_table(path)


@pytest.mark.full
@pytest.mark.parametrize("kind", ["xpt 5", "xpt 8", "sav", "xlsx", "dta"])
def test_gaps_dates_and_codes_are_read_as_of_a_text_file(tmp_path: Path, kind: str) -> None:
    """SAS has no whole numbers, no gaps in text, and dates as seconds."""
    rng = np.random.default_rng(5)
    table = rows().assign(ill=rng.integers(0, 2, 40), dose=rng.normal(size=40).round(3), level=rng.integers(0, 3, 40))
    table["visit"] = pd.Timestamp("2021-03-01") + pd.to_timedelta(rng.integers(0, 500, 40), "D")
    table.loc[[3, 7], "dose"], table.loc[5, "ward"] = np.nan, None
    suffix, _, version = kind.partition(" ")
    path = tmp_path / f"rows.{suffix}"
    if suffix == "xpt":
        pyreadstat = pytest.importorskip("pyreadstat")
        pyreadstat.write_xport(table, str(path), file_format_version=int(version), table_name="ROWS")
    else:
        write(suffix, path, table)
    table.to_csv(tmp_path / "rows.csv", index=False)
    asked: dict[str, Any] = {"client": "site", "target": "ill"}
    found, expected = (piebald.clients_from(file, **asked, test=0.0) for file in (path, tmp_path / "rows.csv"))
    assert found.classes == expected.classes == ["0", "1"]
    assert found.preparation.columns == expected.preparation.columns
    for number in range(2):
        mine, right = found.rows(number, "train"), expected.rows(number, "train")
        assert mine.x.equal(right.x)
        assert mine.y.equal(right.y)
    counted, told = (piebald.statistics(file, client="site") for file in (path, tmp_path / "rows.csv"))
    assert counted.dates == told.dates == {"visit"}
    assert counted.texts["ward"] == told.texts["ward"]
    assert counted.numbers == told.numbers
