"""Queries of strangers in `.sql` files: they reach a SQLite file beside them, for a while, and nothing else.

Before, an endless query had no end, took 5 GB, and opened databases anywhere.
"""

from __future__ import annotations

import os
import resource
import sqlite3
import time
from contextlib import closing
from pathlib import Path

import pytest

from piebald.core.errors import SettingError
from piebald.data.clients import query_files
from piebald.data.clients.table_files import read_table

ENDLESS = "WITH RECURSIVE c(x) AS (SELECT 1 UNION {all} SELECT {next} FROM c) SELECT {what} FROM c"
HEAVY = {
    "endless": ENDLESS.format(all="ALL", next="x + 1", what="count(*) AS n"),
    "endless rows": ENDLESS.format(all="ALL", next="x + 1", what="x"),
    "endless and remembered": ENDLESS.format(all="", next="x + 1", what="count(*) AS n"),
    "endless and sorted": ENDLESS.format(all="ALL", next="x + 1", what="x") + " ORDER BY x DESC",
    "endless texts": ENDLESS.format(all="", next="x || x || 1", what="count(*) AS n"),
    "long rows": ENDLESS.format(all="ALL", next="replace(hex(1), '3', x)", what="x"),
    "crossed": "SELECT count(*) AS n FROM t a, t b, t c, t d, t e, t f",
    "crossed rows": "SELECT a.x || b.x AS x FROM t a, t b, t c, t d, t e, t f",
    "doubled": "WITH c0 AS (SELECT x FROM t), "
    + ", ".join(f"c{n + 1} AS (SELECT x FROM c{n} UNION ALL SELECT x FROM c{n})" for n in range(60))
    + " SELECT count(*) AS n FROM c60",
    "widened": "WITH c0 AS (SELECT x AS a, x AS b FROM t), "
    + ", ".join(f"c{n + 1} AS (SELECT p.*, q.* FROM c{n} p, c{n} q)" for n in range(20))
    + " SELECT * FROM c20",
    "joined texts": "SELECT group_concat(a.x || b.x || c.x || d.x) AS x FROM t a, t b, t c, t d, t e",
    "patterns": "SELECT count(*) AS n FROM t a, t b, t c, t d, t e WHERE a.x || b.x || c.x || d.x || e.x LIKE '"
    + "%1%2" * 200
    + "'",
}
ELSEWHERE = [
    "sqlite:///../victim.db",
    "sqlite:////{folder}/victim.db",
    "sqlite:///{folder}/victim.db",
    "sqlite:///inside/../../victim.db",
    "sqlite:///file:../victim.db?uri=true",
    "sqlite:///file:{folder}/victim.db?mode=ro&uri=true",
    "sqlite:///own.db?vfs=unix-none",
    "sqlite+pysqlite:///../victim.db",
    "sqlite+aiosqlite:///../victim.db",
    "sqlite:///link.db",
    "sqlite:///linked/victim.db",
    "sqlite:///pipe.db",
    "sqlite:///.",
    "sqlite://",
    "sqlite:///:memory:",
    "postgresql+psycopg://127.0.0.1:1/x",
    "mysql://127.0.0.1:1/x",
    "duckdb:///own.db",
    "duckdb:///:memory:",
    "evil+driver://x",
]
STATEMENTS = [
    "SELECT * FROM victim",
    "SELECT load_extension('evil') AS x",
    "SELECT readfile('/etc/passwd') AS x",
    "SELECT writefile('x', 'y') AS x",
    "SELECT edit('x') AS x",
    "SELECT fts3_tokenizer('simple') AS x",
    "SELECT zeroblob(900000000) AS x",
    "SELECT randomblob(900000000) AS x",
    "SELECT printf('%900000000d', 1) AS x",
    "SELECT format('%*d', 900000000, 1) AS x",
    "SELECT * FROM pragma_database_list",
    "SELECT * FROM pragma_table_info('t')",
    "SELECT * FROM json_each('[1]')",
    "SELECT * FROM json_tree('[1]')",
    "SELECT * FROM dbstat",
    "SELECT * FROM sqlite_dbpage",
    "SELECT * FROM sqlite_master",
    "SELECT * FROM words",
    "SELECT * FROM attacks",
    "WITH a AS (SELECT 1) DELETE FROM t",
    "WITH a AS (SELECT 1) INSERT INTO t SELECT 2",
    "WITH a AS (SELECT 1) UPDATE t SET x = 2",
    "SELECT 1 AS x; ATTACH '../victim.db' AS v; SELECT * FROM v.victim",
    "SELECT 1 AS x; DROP TABLE t",
    "ATTACH '../victim.db' AS v",
    "PRAGMA writable_schema = ON",
    "VACUUM INTO 'copy.db'",
    "EXPLAIN SELECT * FROM t",
    "CREATE TABLE u AS SELECT 1",
]


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    """A folder of a stranger with a small database, beside a database of the user."""
    folder = tmp_path / "archive"
    (folder / "inside").mkdir(parents=True)
    with closing(sqlite3.connect(tmp_path / "victim.db")) as database, database:
        database.execute("CREATE TABLE victim AS SELECT 'secret' AS x")
    with closing(sqlite3.connect(folder / "own.db")) as database, database:
        database.execute("CREATE TABLE t (x INTEGER)")
        database.executemany("INSERT INTO t VALUES (?)", [(number,) for number in range(100)])
        database.execute("CREATE VIEW attacks AS SELECT load_extension('evil') AS x")
        database.execute("CREATE VIEW seen AS SELECT x + 1 AS y FROM t")
        database.execute("CREATE VIRTUAL TABLE words USING fts5(x)")
    (folder / "link.db").symlink_to(tmp_path / "victim.db")
    (folder / "linked").symlink_to(tmp_path)
    os.mkfifo(folder / "pipe.db")
    return folder


def asked(archive: Path, query: str, url: str = "sqlite:///own.db") -> object:
    (archive / "q.sql").write_text(f"-- {url}\n{query}\n")
    return read_table(archive / "q.sql")


@pytest.mark.full
@pytest.mark.parametrize("name", HEAVY)
def test_a_query_that_takes_too_much_ends_with_one_sentence(
    name: str, archive: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(query_files, "_SECONDS", 5.0)
    began, before = time.monotonic(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(SettingError) as raised:
        asked(archive, HEAVY[name])
    assert "\n" not in str(raised.value)
    assert "q.sql" in str(raised.value)
    assert time.monotonic() - began < 60  # on a busy machine as well
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 3 << 20  # KiB


@pytest.mark.parametrize("url", ELSEWHERE)
def test_no_database_elsewhere_is_opened(url: str, archive: Path, tmp_path: Path) -> None:
    for query in ("SELECT * FROM victim", "SELECT 1 AS x"):
        with pytest.raises(SettingError) as raised:
            asked(archive, query, url.replace("{folder}", str(tmp_path)))
        assert "\n" not in str(raised.value)


@pytest.mark.parametrize("query", STATEMENTS)
def test_a_query_reads_plain_tables_and_does_nothing_else(query: str, archive: Path) -> None:
    before = sorted(archive.iterdir())
    with pytest.raises(SettingError) as raised:
        asked(archive, query)
    assert "\n" not in str(raised.value)
    assert sorted(archive.iterdir()) == sorted({*before, archive / "q.sql"})
    with closing(sqlite3.connect(archive / "own.db")) as database:
        assert database.execute("SELECT count(*), sum(x) FROM t").fetchone() == (100, 4950)


def test_what_honest_queries_use_is_answered(archive: Path) -> None:
    query = (
        "WITH a AS (SELECT x, round(x / 3.0, 1) AS third, upper('n' || x) AS name FROM t WHERE x BETWEEN 1 AND 50) "
        "SELECT name, count(*) AS n, avg(third) AS mean, row_number() OVER (ORDER BY name) AS place, "
        "strftime('%Y', '2024-05-31') AS year, iif(max(y) > 5, 'high', 'low') AS level "
        "FROM a JOIN seen ON a.x = seen.y GROUP BY name ORDER BY 1;"
    )
    assert asked(archive, query).shape == (50, 6)  # type: ignore[attr-defined]


def test_the_owner_lists_databases_that_lie_elsewhere(
    archive: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("sqlalchemy")
    url = f"sqlite:///{tmp_path}/victim.db"
    monkeypatch.setenv(query_files.LISTED, f"postgresql://registry/visits {url}")
    assert asked(archive, "SELECT x FROM victim", url)["x"].tolist() == ["secret"]  # type: ignore[index]
    with pytest.raises(SettingError, match="listed in the environment variable PIEBALD_DATABASES"):
        asked(archive, "SELECT 1 AS x", f"{url}?mode=rw")


def test_other_databases_of_the_process_have_their_memory_back_after_queries(tmp_path: Path) -> None:
    """Before, whatever used SQLite in this process kept the limit of one stranger's query."""
    with closing(sqlite3.connect(tmp_path / "own.db")) as database:
        database.execute("CREATE TABLE t AS SELECT 1 AS x")
        database.commit()
        (tmp_path / "q.sql").write_text("-- sqlite:///own.db\nSELECT x FROM t")

        def limits() -> list[int]:
            return [database.execute(f"PRAGMA {kind}_heap_limit").fetchone()[0] for kind in ("hard", "soft")]

        before = limits()
        first, second = (query_files.read_query(tmp_path / "q.sql") for _ in range(2))
        assert [len(next(first)), len(next(second))] == [1, 1]
        assert limits()[0] == query_files._HEAP
        assert list(first) == []
        assert limits()[0] == query_files._HEAP
        assert list(second) == []
        assert limits() == before
