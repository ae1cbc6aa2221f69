"""Queries of databases in files: a first line that names the database, and a SELECT after it.

    -- sqlite:///visits.db
    SELECT age, ward, ill FROM visits WHERE consent

Such a file may be a stranger's.  It reaches SQLite files that lie beside it, and databases whose URLs the owner of this
machine lists in the environment variable PIEBALD_DATABASES; what it takes is metered.  Neither an experiment file nor a
run folder has what opens a database, and each site has a file of its own.
"""

from __future__ import annotations

import _sqlite3
import ctypes
import os
import re
import sqlite3
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

from piebald.core.errors import SettingError, import_extra, shown
from piebald.core.files import SMALL, UnfitFile, check_size, regular
from piebald.core.reading import BoundedConnection, connected

QUERY = ".sql"
LISTED = "PIEBALD_DATABASES"  # URLs of databases, with spaces between them
_ROWS = 100_000  # of a chunk
_FETCHED = 256  # rows before their bytes are counted
_CELL = 64  # bytes of a cell besides its text
_LONGEST = 1 << 20  # bytes of a query
_LONGEST_VALUE = 1 << 20  # bytes of a value or of a row of SQLite
_MOST_COLUMNS = 2000
_HEAP = 1 << 30  # bytes that SQLite takes, also for sorting and grouping
_TICK = 1000  # instructions of SQLite's machine between two looks at the limits
_SECONDS = 60.0  # for any query; and one more for each megabyte of the file
_FORM = "the database in its first line, like -- sqlite:///visits.db, and a SELECT after it"
_BESIDE = re.compile(r"sqlite(?:\+pysqlite)?:///([^/\\?]+)")
# none makes a value that is longer than its arguments together, or opens, loads or starts anything
_FUNCTIONS = frozenset(
    re.findall(
        r"\w+",
        """
        abs avg ceil ceiling coalesce concat count cume_dist date datetime degrees dense_rank exp first_value floor glob
        group_concat ifnull iif instr julianday lag last_value lead length like ln log log10 log2 lower ltrim max median
        min mod nth_value ntile nullif percent_rank pow power radians rank replace round row_number rtrim sign sqrt
        strftime string_agg substr substring sum time timediff total trim trunc typeof unicode unixepoch upper
        """,
    )
)


def read_query(path: Path) -> Iterator[Any]:
    """Yield the rows of a query as pandas DataFrames, fetched in chunks; nothing is ever written.

    Raises:
        SettingError: the file has another form, its database is none that it may ask, or refuses.
        OSError: the file cannot be read, or the query takes more than it may.
    """
    if regular(path) > _LONGEST:
        raise SettingError(f"{path} is too long for a query: write {_FORM}")
    place, _, query = path.read_text(encoding="utf-8-sig").strip().partition("\n")
    url, query = place.removeprefix("--").strip(), query.strip().rstrip(";")
    if not place.startswith("--") or not re.match(r"(select|with)\b", query, re.IGNORECASE):
        raise SettingError(f"{path} must have {_FORM}")
    if ";" in query:  # what comes after it may be any statement
        raise SettingError(f"{path} must have one SELECT: take out the semicolon")
    if url in os.environ.get(LISTED, "").split():
        return _asked(path, url, query)
    if beside := _BESIDE.fullmatch(url):
        return _asked_beside(path, path.parent / beside[1], query)
    raise SettingError(
        f"{path} may ask a SQLite file that lies beside it, like -- sqlite:///visits.db, or a database whose URL "
        f"is listed in the environment variable {LISTED}, got {shown(url, 60)}"
    )


def _asked_beside(path: Path, file: Path, query: str) -> Iterator[Any]:
    """Yield the rows of a query of a SQLite file."""
    if not file.exists():
        raise SettingError(f"there is no database {file}: correct the first line of the query")
    size = regular(file, links=False)
    with closing(connected(file, f"{file.resolve().as_uri()}?mode=ro")) as database, _heap.bounded(database):
        try:
            meter = _Meter(database, path, size)
            with closing(database.execute(query)) as cursor:
                columns = [str(column[0]) for column in cursor.description]
                yield from _tables(path, columns, meter.fetched(cursor), size)
        except MemoryError:
            raise UnfitFile(f"{path} takes more than {_HEAP:,} bytes inside of SQLite: ask for less") from None
        except sqlite3.Error as error:
            raise _unanswered(path, meter.reason or error) from None


class _Heap:
    """The memory of SQLite in this process, which is bounded while queries of strangers are read."""

    def __init__(self) -> None:
        self._lock, self._readers, self._before = threading.Lock(), 0, dict[str, int]()

    @contextmanager
    def bounded(self, database: BoundedConnection) -> Iterator[None]:
        """Bound it to `_HEAP` bytes while a `with` block lasts; then other databases of the process get theirs back."""
        with self._lock:
            if not self._readers:
                names = ("hard", "soft")  # the hard limit lowers the soft one
                self._before = {name: database.execute(f"PRAGMA {name}_heap_limit").fetchone()[0] for name in names}
                database.execute(f"PRAGMA hard_heap_limit = {_HEAP}")
            self._readers += 1
        try:
            yield
        finally:
            with self._lock:
                self._readers -= 1
                if not self._readers:
                    self._restore()

    def _restore(self) -> None:
        # no pragma raises the hard limit; where a Python has no library of SQLite beside it, the limit stays
        with suppress(AttributeError, OSError):
            library = ctypes.CDLL(_sqlite3.__file__)
            for name, most in self._before.items():
                getattr(library, f"sqlite3_{name}_heap_limit64")(ctypes.c_int64(most))


_heap = _Heap()


class _Meter:
    """Limits on what a query of a SQLite file may read, call and take.

    Args:
        database: the file, on which nothing has run yet.
        path: of the query.
        size: bytes of the file.

    Attributes:
        reason: why the query was interrupted, "" as long as it was not.
    """

    def __init__(self, database: BoundedConnection, path: Path, size: int) -> None:
        self.reason = ""
        self._most_seconds, self._most_ticks = _SECONDS + size / 1e6, (1_000_000_000 + 100 * size) // _TICK
        self._seconds, self._begun, self._ticks = 0.0, time.monotonic(), 0
        database.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, _LONGEST_VALUE)
        database.setlimit(sqlite3.SQLITE_LIMIT_COLUMN, _MOST_COLUMNS)
        database.execute("PRAGMA temp_store = MEMORY")  # on a disk it would have no limit
        database.execute("PRAGMA query_only = ON")
        database.set_progress_handler(self._ticked, _TICK)
        parts = database.execute("SELECT name, sql FROM sqlite_master WHERE type IN ('table', 'view')").fetchall()
        # a virtual table runs a module of SQLite on numbers that a stranger wrote
        self._tables = {name for name, sql in parts if not re.match(r"\s*create\s+virtual", str(sql), re.IGNORECASE)}
        database.set_authorizer(self._allowed)

    def fetched(self, cursor: sqlite3.Cursor) -> Iterator[list[Any]]:
        """Yield rows, a few at a time, while the time is counted that SQLite takes."""
        self._seconds += time.monotonic() - self._begun
        while True:
            self._begun = time.monotonic()
            rows = cursor.fetchmany(_FETCHED)
            self._seconds += time.monotonic() - self._begun
            if not rows:
                return
            yield rows

    def _ticked(self) -> bool:
        self._ticks += 1
        seconds = self._seconds + time.monotonic() - self._begun
        if self._ticks > self._most_ticks or seconds > self._most_seconds:
            self.reason = f"it takes more than {self._most_seconds:.0f} seconds or {self._most_ticks * _TICK:,} steps"
        return bool(self.reason)

    def _allowed(self, action: int, first: str | None, second: str | None, *_: str | None) -> int:
        allowed = (
            action in (sqlite3.SQLITE_SELECT, sqlite3.SQLITE_RECURSIVE)
            or (action == sqlite3.SQLITE_READ and first in self._tables)
            or (action == sqlite3.SQLITE_FUNCTION and str(second).lower() in _FUNCTIONS)
        )
        return sqlite3.SQLITE_OK if allowed else sqlite3.SQLITE_DENY


def _asked(path: Path, url: str, query: str) -> Iterator[Any]:
    """Yield the rows of a query of a database that the owner of this machine lists."""
    sqlalchemy = import_extra("sqlalchemy", "sql", f"{path} asks a database, which needs SQLAlchemy")
    try:
        engine = sqlalchemy.create_engine(url, poolclass=sqlalchemy.pool.NullPool)  # nobody asks a second time
        with engine.connect().execution_options(stream_results=True, postgresql_readonly=True) as connection:
            # a transaction, which is rolled back at the end, since "WITH ... DELETE" writes
            cursor = connection.execution_options(max_row_buffer=_FETCHED).exec_driver_sql(query)
            yield from _tables(path, list(cursor.keys()), cursor.partitions(_FETCHED), SMALL)
    except ModuleNotFoundError as error:
        raise SettingError(f"{path} asks a database whose driver is missing: pip install {error.name}") from None
    except sqlalchemy.exc.SQLAlchemyError as error:
        cause = error.__cause__ or error
        raise _unanswered(path, getattr(cause, "orig", None) or cause) from None


def _tables(path: Path, columns: list[str], fetched: Iterable[Any], stored: int) -> Iterator[Any]:
    """Yield rows as DataFrames of `_ROWS` rows each, after their bytes were counted.

    Args:
        path: of the query.
        columns: their names.
        fetched: rows, a few at a time.
        stored: bytes of the database.

    Raises:
        SettingError: two columns have one name.
        UnfitFile: the rows would fill the memory.
    """
    import pandas

    if twice := next((column for column in columns if columns.count(column) > 1), None):
        raise SettingError(f"{path}: column {twice!r} occurs twice: rename one of them with AS")
    held, memory, any_rows = list[Any](), 0, False

    def table() -> Any:
        return pandas.DataFrame.from_records(held, columns=columns, coerce_float=True).infer_objects()

    for rows in fetched:
        texts = sum(len(cell) for row in rows for cell in row if isinstance(cell, str | bytes))
        memory += texts + _CELL * len(rows) * len(columns)
        check_size(path, memory, stored)
        held.extend(map(tuple, rows))
        if len(held) >= _ROWS:
            yield table()
            held, any_rows = [], True
    if held or not any_rows:  # a table without rows has columns
        yield table()


def _unanswered(path: Path, reason: object) -> SettingError:
    return SettingError(f"{path}: the database does not answer the query: {' '.join(str(reason).split())}")
