"""Tables of databases: a file with SQLAlchemy's URL and a query is a table like any other."""

from __future__ import annotations

import os
import sqlite3
import sys
from contextlib import closing
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

import piebald
from piebald.core.errors import SettingError
from piebald.data.clients import query_files
from piebald.data.clients.table_files import read_table

QUERY = "-- sqlite:///visits.db\nSELECT ward, age, seen, ill FROM visits WHERE age > 20 OR age IS NULL\n"


@pytest.fixture
def visits(tmp_path: Path) -> pd.DataFrame:
    rng = np.random.default_rng(0)
    table = pd.DataFrame(
        {"ward": ["a", "b"] * 30, "age": rng.normal(60, 9, 60), "seen": "31.05.2024", "ill": [0, 0, 1] * 20}
    )
    table.loc[3, "age"] = np.nan
    with closing(sqlite3.connect(tmp_path / "visits.db")) as database, database:
        table.to_sql("visits", database, index=False)
    (tmp_path / "visits.sql").write_text(QUERY)
    return table


def test_a_query_is_a_table_read_in_chunks(tmp_path: Path, visits: pd.DataFrame, monkeypatch) -> None:
    monkeypatch.setattr(query_files, "_ROWS", 7)
    rows = read_table(tmp_path / "visits.sql", "ward")  # also from another folder than the present one
    pd.testing.assert_frame_equal(rows, visits.assign(seen="2024-05-31"), check_dtype=False)
    clients = piebald.clients_from(tmp_path / "visits.sql", client="ward", target="ill", test=0.0)
    visits.to_csv(tmp_path / "visits.csv", index=False)
    same = piebald.clients_from(tmp_path / "visits.csv", client="ward", target="ill", test=0.0)
    assert clients.preparation == same.preparation
    assert clients.rows(1, "train").x.tolist() == same.rows(1, "train").x.tolist()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("SELECT * FROM visits", "must have the database in its first line, like -- sqlite:///visits.db, and a SELECT"),
        ("-- sqlite:///visits.db\nDROP TABLE visits", "must have the database in its first line"),
        ("-- sqlite:///visits.db\nWITH a AS (SELECT 1) DELETE FROM visits", "does not answer the query: "),
        ("-- sqlite:///none.db\nSELECT 1 AS a", "there is no database .*none.db: correct the first line"),
        ("-- sqlite:///visits.db\nSELECT * FROM visit", "the database does not answer the query: no such table: visit"),
        (
            "-- sqlite:///visits.db\nSELECT age, age FROM visits",
            "column 'age' occurs twice: rename one of them with AS",
        ),
        ("-- sqlite:///visits.db\nSELECT age FROM visits WHERE age < 0", "names columns and has no rows"),
        ("-- nowhere\nSELECT 1", "may ask a SQLite file that lies beside it, .* got 'nowhere'"),
    ],
)
def test_what_is_no_query_is_one_sentence(tmp_path: Path, visits: pd.DataFrame, content: str, message: str) -> None:
    (tmp_path / "visits.sql").write_text(content)
    with pytest.raises(SettingError, match=message) as raised:
        read_table(tmp_path / "visits.sql")
    assert "\n" not in str(raised.value)
    if sys.platform == "linux":  # no connection waits in a pool for whoever asks next
        opened = [os.path.realpath(f"/proc/self/fd/{number}") for number in os.listdir("/proc/self/fd")]
        assert str(tmp_path / "visits.db") not in opened
    database = sqlite3.connect(tmp_path / "visits.db")
    assert database.execute("SELECT COUNT(*) FROM visits").fetchone() == (len(visits),)
    database.close()
