"""The tables of a run folder's `run.db`, opening it, and rows' scores as text.

One row for each server step (`step`), task that ended (`result`), metric of a model on a client's rows (`score`),
client (`client`), number of a client's rows of one class that its model takes for another (`confusion`), metric of the
single rows of a client by its model (model "rows") or by a constant answer (`row_score`), measure of heterogeneity
(`measure`; client is NULL for the federation), value that a component recorded (`note`), kept checkpoint (`checkpoint`)
and tensor of a client's state (`client_state`).  Times are seconds of the runtime's clock unless named wall; sizes are
bytes.
"""

from __future__ import annotations

import base64
import binascii
import dataclasses
import errno
import json
import os
import re
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError

from piebald.core.errors import RunFolderError, unknown
from piebald.core.files import json_value
from piebald.core.private_files import make_private
from piebald.core.reading import LONGEST, connected, foreign_part

SCHEMA = 1  # a folder with another one is refused
APPLICATION = 0x50424C44  # "PBLD", which distinguishes a run from any other SQLite file
DATABASE = "run.db"

TABLES = {
    "meta": "key TEXT PRIMARY KEY, value TEXT NOT NULL",
    "client": "client INTEGER PRIMARY KEY, name TEXT, train INTEGER, validation INTEGER, test INTEGER, counts TEXT,"
    " device TEXT",
    "measure": "client INTEGER, name TEXT NOT NULL, value REAL",
    "step": "version INTEGER PRIMARY KEY, time REAL, wall REAL, arrived INTEGER, failed INTEGER, clusters INTEGER,"
    " bytes_down INTEGER, bytes_up INTEGER, loss REAL, norm REAL",
    "result": "id INTEGER PRIMARY KEY, version INTEGER, client INTEGER, kind TEXT, sent_version INTEGER,"
    " staleness INTEGER, sent REAL, time REAL, examples INTEGER, steps INTEGER, loss REAL, norm REAL, weight REAL,"
    " raw_weight REAL, cluster INTEGER, bytes_down INTEGER, bytes_up INTEGER, status TEXT, reason TEXT",
    "score": "version INTEGER NOT NULL, client INTEGER, model TEXT NOT NULL, split TEXT NOT NULL, metric TEXT NOT NULL,"
    " value REAL, examples NUMERIC",  # a sum of weights is no whole number
    "confusion": "version INTEGER, client INTEGER, model TEXT, split TEXT, actual INTEGER, predicted INTEGER,"
    " count INTEGER, PRIMARY KEY (version, client, actual, predicted)",
    "row_score": "version INTEGER, client INTEGER, model TEXT, split TEXT, metric TEXT, value REAL, row_values TEXT,"
    " PRIMARY KEY (version, client, model, metric)",
    "failure": "version INTEGER, client INTEGER, kind TEXT, reason TEXT, PRIMARY KEY (version, client, kind, reason)",
    "note": "version INTEGER, axis TEXT, cluster INTEGER, name TEXT, value TEXT,"
    " PRIMARY KEY (version, axis, cluster, name)",
    "checkpoint": "version INTEGER PRIMARY KEY, file TEXT, sha256 TEXT, values_json TEXT",
    "client_state": "client INTEGER, name TEXT, version INTEGER, file TEXT, bytes INTEGER,"
    " PRIMARY KEY (client, name, version)",
    "client_state_file": "file TEXT PRIMARY KEY, sha256 TEXT, bytes INTEGER",
}
_INDEXES = (
    # client is NULL for the common test set, and two NULLs never equal each other in a plain key
    "CREATE UNIQUE INDEX score_once ON score (version, ifnull(client, -1), model, split, metric)",
    "CREATE UNIQUE INDEX measure_once ON measure (ifnull(client, -1), name)",
    "CREATE INDEX client_state_version ON client_state (version)",
)


def make(db: sqlite3.Connection) -> None:
    """Create the tables of the present schema in an empty database."""
    with transaction(db):
        for name, columns in TABLES.items():
            db.execute(f"CREATE TABLE {name} ({columns})")
        for index in _INDEXES:
            db.execute(index)
        db.execute(f"PRAGMA application_id = {APPLICATION}")
        db.execute(f"PRAGMA user_version = {SCHEMA}")


def connect(path: Path | str, *, read_only: bool = False) -> sqlite3.Connection:
    """Open a connection in autocommit mode; use `transaction` for transactions.

    Threads may share it, one at a time.
    """
    if read_only:
        db = _for_reading(Path(path))
    else:
        if path != ":memory:":
            # SQLite makes its files with the mode that the database has
            for suffix in ("", "-wal", "-shm"):
                if not suffix or Path(f"{path}{suffix}").exists():
                    make_private(Path(f"{path}{suffix}"))
        db = connected(Path(path))
        try:
            db.execute("PRAGMA journal_mode = WAL")
            db.execute("PRAGMA synchronous = NORMAL")  # see `transaction`
        except BaseException:
            db.close()
            raise
    db.row_factory = sqlite3.Row
    return db


def _for_reading(path: Path) -> sqlite3.Connection:
    """Open for reading, also on media that cannot be written, where SQLite could not make its files beside a database.

    There nobody writes, so that a database without a journal may be taken as it is.
    """
    place = f"{path.absolute().as_uri()}?mode=ro"
    db = connected(path, place)
    try:
        db.execute("SELECT count(*) FROM sqlite_master").fetchone()
    except sqlite3.OperationalError:
        journal = path.with_name(path.name + "-wal")
        if os.access(path.parent, os.W_OK, effective_ids=True) or (journal.exists() and journal.stat().st_size):
            return db  # the error will be explained when it is used
        db.close()
        return connected(path, f"{place}&immutable=1")
    except BaseException:
        db.close()
        raise
    return db


def check(db: sqlite3.Connection, folder: Path) -> None:
    """Refuse a database that is not a run, has another schema, or has parts that would run when it is read."""
    application = db.execute("PRAGMA application_id").fetchone()[0]
    schema = int(db.execute("PRAGMA user_version").fetchone()[0])
    if application != APPLICATION:
        raise RunFolderError(f"{folder} is not a run folder: its {DATABASE} was not written by Piebald")
    if schema != SCHEMA:
        raise RunFolderError(
            f"{folder} has schema {schema} but this Piebald reads schema {SCHEMA}: install the Piebald that wrote it"
        )
    # a view or trigger in a folder from elsewhere would run SQL of its author
    if (foreign := foreign_part(db, _INDEXES)) is not None:
        raise RunFolderError(f"{folder} is not as a run writes it: its {DATABASE} has {foreign}, which is never used")


def insert(db: sqlite3.Connection, table: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """Insert rows into a table, replacing those with the same key.  Columns that a row does not name are NULL.

    Raises:
        SettingError: a row names a column that the table does not have.
    """
    if rows:
        db.executemany(_INSERT[table], [_values(table, row) for row in rows])


def _values(table: str, row: Mapping[str, Any]) -> tuple[Any, ...]:
    """A row's values in the order of the columns."""
    columns = COLUMNS[table]
    if tuple(row) == columns:  # a result's, of which there may be thousands in a step
        return tuple(row.values())
    if not row.keys() <= _KNOWN[table]:
        raise unknown(f"column of {table} called", min(row.keys() - _KNOWN[table]), columns)
    return tuple(map(row.get, columns))


def dumped(value: Any) -> str | None:
    """A JSON value or a dataclass as the text of a column."""
    if value is None:
        return None
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = dataclasses.asdict(value)
    return json.dumps(value)


def meta_rows(values: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Rows of the table `meta`."""
    return [{"key": key, "value": json.dumps(value)} for key, value in values.items()]


def damaged_column(db: sqlite3.Connection, table: str) -> str | None:
    """A column of a table that holds a value of another type than it was made for, or None.

    SQLite keeps values of any type in any column, and a run folder may come from anybody.
    """
    number = "('real', 'integer', 'null')"
    kinds = {"INTEGER": "('integer', 'null')", "REAL": number, "NUMERIC": number, "TEXT": "('text', 'null')"}
    # one pass over the table in SQLite, before a row of it is read into Python
    wrong = {name: f"typeof({name}) NOT IN {kinds[kind]}" for name, kind in _TYPES[table].items()}
    tests = ", ".join(f"max({test})" for test in wrong.values())
    verdicts = db.execute(f"SELECT {tests} FROM {table}").fetchone()
    return next((name for name, bad in zip(wrong, verdicts, strict=True) if bad), None)


def decoded(text: str, what: str) -> Any:
    """A JSON value of the database.

    Raises:
        RunFolderError: it is none.
    """
    with explained(f"{what} cannot be read"):
        try:
            return json_value(text, what)
        except ValueError:
            raise RunFolderError(f"{what} is no JSON value: restore the folder from a copy") from None


@contextmanager
def transaction(db: sqlite3.Connection, *, durable: bool = False) -> Iterator[None]:
    """Run the block in one transaction; a durable one is on the disk when it ends and survives a power cut."""
    if durable:
        # before the transaction begins, within which SQLite does not change it
        db.execute("PRAGMA synchronous = FULL")
    # takes the lock at once: a transaction that begins by reading could fail when it first writes
    db.execute("BEGIN IMMEDIATE")
    try:
        yield
        end(db)
    except BaseException:
        if db.in_transaction:  # a full disk may already have rolled it back
            db.execute("ROLLBACK")
        raise
    finally:
        if durable:
            db.execute("PRAGMA synchronous = NORMAL")


def end(db: sqlite3.Connection) -> None:
    """Commit; a function of its own, so that tests can kill the process before and after it."""
    db.execute("COMMIT")


@contextmanager
def explained(doing: str) -> Iterator[None]:
    """Turn an error of the disk, SQLite or safetensors into one sentence that begins with `doing`."""
    try:
        yield
    except (OSError, UnicodeDecodeError, sqlite3.Error, SafetensorError) as error:
        raise RunFolderError(f"{doing}: {_reason(error)}") from error


def _reason(error: Exception) -> str:
    text = str(error)
    code = error.errno if isinstance(error, OSError) else None
    # safetensors gives Rust's errors as text: 28 is a full disk, 13 and 30 are missing permissions
    if code in (errno.ENOSPC, errno.EDQUOT) or "disk is full" in text or "os error 28" in text:
        return "the disk is full: make room and try again"
    forbidden = any(words in text for words in ("readonly", "os error 13", "os error 30"))
    if forbidden or code in (errno.EROFS, errno.EACCES, errno.EPERM):
        return "the folder cannot be written: change its permissions or choose another"
    if isinstance(error, UnicodeDecodeError):
        return "the database holds text that is none: restore the folder from a copy"
    if "too big" in text:
        return f"a value in the database has more than {LONGEST:,} bytes, and no run writes that"
    if text == "interrupted":
        return "the database is damaged, and reading it does not end: restore the folder from a copy"
    if "malformed" in text or "not a database" in text:
        return "the database is damaged: restore the folder from a copy or start a new run"
    if "unable to open database file" in text:
        return "the database cannot be opened: check the folder's permissions or copy it to a place that can be written"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror.lower()
    return text


def _columns(definition: str) -> tuple[str, ...]:
    fields = definition.partition(", PRIMARY KEY")[0].split(",")
    return tuple(field.split()[0] for field in fields)


COLUMNS = {name: _columns(definition) for name, definition in TABLES.items()}
_TYPES = {
    table: dict(re.findall(r"(\w+) (INTEGER|NUMERIC|REAL|TEXT)\b", definition)) for table, definition in TABLES.items()
}
_KNOWN = {name: frozenset(columns) for name, columns in COLUMNS.items()}
_INSERT = {
    name: f"INSERT OR REPLACE INTO {name} ({', '.join(columns)}) VALUES ({', '.join('?' * len(columns))})"
    for name, columns in COLUMNS.items()
}


def packed_values(values: Sequence[float]) -> str:
    """Return values as text.

    Examples:
        >>> packed_values([1.0, 0.0, 1.0]), packed_values([0.5])
        ('3:oA==', 'AAAAPw==')
    """
    array = np.asarray(values, dtype="<f4")
    # right or wrong of each row takes one bit, a 32nd of its number
    if bool(((array == 0) | (array == 1)).all()):
        return f"{len(array)}:{base64.b64encode(np.packbits(array.astype(bool)).tobytes()).decode()}"
    return base64.b64encode(array.tobytes()).decode()


def unpacked_values(text: str) -> NDArray[np.float64]:
    """Return the values [n] of a text.

    Raises:
        RunFolderError: it is none.

    Examples:
        >>> unpacked_values("3:oA==").tolist(), unpacked_values("AAAAPw==").tolist()
        ([1.0, 0.0, 1.0], [0.5])
    """
    count, _, bits = text.rpartition(":")
    try:
        data = base64.b64decode(bits, validate=True)
        if not count:
            return np.frombuffer(data, dtype="<f4").astype(np.float64)
        values = np.unpackbits(np.frombuffer(data, dtype=np.uint8)).astype(np.float64)[: int(count)]
        if len(values) == int(count):
            return values
    except (binascii.Error, ValueError):
        pass
    raise RunFolderError("the table row_score holds scores that are none: restore the folder from a copy")
