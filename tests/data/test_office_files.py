"""Files of Excel, Stata, SPSS and SAS are tables wherever one file goes."""

from __future__ import annotations

import re
import sys
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


@pytest.mark.parametrize(("kind", "what"), [("xlsx", "openpyxl"), ("sav", "pyreadstat")])
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
