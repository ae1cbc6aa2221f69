"""SQLite databases that may be a stranger's: plain tables only, and limits on what a query may take."""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Collection
from pathlib import Path
from typing import Any

from piebald.core.reading.files import regular

LONGEST = 256 << 20  # bytes of a value or of a row
_LIMITS = {
    sqlite3.SQLITE_LIMIT_LENGTH: LONGEST,
    sqlite3.SQLITE_LIMIT_SQL_LENGTH: 100_000,
    sqlite3.SQLITE_LIMIT_COLUMN: 200,
    sqlite3.SQLITE_LIMIT_EXPR_DEPTH: 100,
    sqlite3.SQLITE_LIMIT_COMPOUND_SELECT: 20,
    sqlite3.SQLITE_LIMIT_ATTACHED: 0,
    sqlite3.SQLITE_LIMIT_TRIGGER_DEPTH: 1,
    sqlite3.SQLITE_LIMIT_LIKE_PATTERN_LENGTH: 1000,
}
_TICK = 1_000_000  # instructions of SQLite's machine
_COLUMN = r"\w+ (?:INTEGER|REAL|TEXT)(?: PRIMARY KEY| NOT NULL)*"
_TABLE = re.compile(
    rf'CREATE TABLE "?\w+"? ?\(\s*{_COLUMN}(?:\s*,\s*{_COLUMN})*(?:\s*,\s*PRIMARY KEY \(\w+(?:, \w+)*\))?\s*\)'
)


class BoundedConnection(sqlite3.Connection):
    """A connection whose statements end: after a number of instructions that grows with the size of the file.

    What has no views and no expressions of a stranger's own takes few for each byte; a damaged file may have none.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._ticks = self._most = 0

    def bound(self, size: int) -> None:
        """Set the limits, for a file of `size` bytes, before anything else is done."""
        for limit, value in _LIMITS.items():
            self.setlimit(limit, value)
        # honest queries take a few instructions for each byte; a damaged tree of pages may lead in a circle
        self._most = 1000 + size // 10_000
        self.set_progress_handler(self._ticked, _TICK)
        # the schema of a stranger's file may call functions in views, triggers and defaults
        self.execute("PRAGMA trusted_schema = OFF")
        self.execute("PRAGMA cell_size_check = ON")

    def execute(self, *args: Any) -> sqlite3.Cursor:
        """Run a statement, whose instructions are counted from here on."""
        self._ticks = 0
        return super().execute(*args)

    def _ticked(self) -> int:
        self._ticks += 1
        return self._ticks > self._most


def connected(path: Path, uri: str | None = None) -> BoundedConnection:
    """Open a database with limits, in autocommit mode.  Threads may share it, one at a time.

    Args:
        path: the file.
        uri: how to open it, by default for reading and writing.

    Raises:
        OSError: it, or what SQLite reads beside it, is no regular file.
        sqlite3.Error: it cannot be opened.
    """
    size = regular(path, links=False) if path.exists() or path.is_symlink() else 0
    # SQLite opens these by itself, and would follow a link or wait for a pipe
    for suffix in ("-wal", "-shm", "-journal"):
        beside = path.with_name(path.name + suffix)
        if beside.exists() or beside.is_symlink():
            size += regular(beside, links=False)
    options: dict[str, Any] = {"isolation_level": None, "check_same_thread": False, "factory": BoundedConnection}
    db: BoundedConnection = sqlite3.connect(uri or path, uri=uri is not None, **options)
    try:
        db.bound(size)
    except BaseException:
        db.close()
        raise
    return db


def foreign_part(db: sqlite3.Connection, indexes: Collection[str]) -> str | None:
    """Return what a database has besides plain tables, in words, or None.

    Such a part would run when the tables are read or written.

    Args:
        db: the database.
        indexes: the statements that made its own indexes.
    """
    try:
        parts = db.execute("SELECT type, name, sql FROM sqlite_master").fetchall()
    except sqlite3.DatabaseError as error:
        if "malformed database schema" in str(error):
            return "a part that SQLite cannot read"
        raise
    for kind, name, sql in parts:
        expected = sql is None or sql in indexes if kind == "index" else kind == "table" and _is_plain(sql)
        if not expected:
            return f"the {kind if kind != 'table' else 'unusual table'} {str(name)[:80]!r}"
    return None


def _is_plain(sql: Any) -> bool:
    # bounded first, since a pattern with repetitions may backtrack for long
    return isinstance(sql, str) and len(sql) < 10_000 and _TABLE.fullmatch(sql) is not None
