"""The run folder: everything that a run leaves behind, written so that it survives a kill at any moment.

    <folder>/
      run.db                               SQLite, in WAL mode while it is written, see `schema`
      vectors-<version>.safetensors        tensors of the newest two checkpoints and of the best, see `tensor_files`
      client-state-<version>.safetensors   the state of clients, in pieces
      start.safetensors                    what the run took over from a finished one, if it goes on from one
      run.lock                             held by the one process that writes

`RunStore.commit` writes files under a temporary name, forces them to the disk and renames them; then ONE transaction
records the server step, its results and the checkpoint that names the files; only then are older files deleted.
Whenever the process dies, the database names complete files only; other files are deleted when the run is next opened.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import re
import secrets
import sqlite3
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, Self

from safetensors import SafetensorError
from torch import Tensor

from piebald.contracts import Checkpoint
from piebald.core.errors import RunFolderError
from piebald.core.files import check_size
from piebald.storage import lease, schema, tensor_files
from piebald.storage.lock import RunLock
from piebald.storage.run_folder import START, UNFINISHED, check_meta, existing, missing, refuse_occupied, remove_again
from piebald.storage.schema import DATABASE, explained, packed_values

log = logging.getLogger("piebald.runs")
KEPT = 2  # checkpoints; the second one is used if the first cannot be read
_WAITS = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0)  # seconds, until a process without a free file descriptor has one again
_SCORES = ("score", "confusion", "row_score", "failure")  # tables of how good models are
_JSON = {"client": ("counts", "device"), "note": ("value",)}


class RunStore:
    """A run folder, or the same tables in memory; implements `contracts.RunRecorder` for the server.

    Make one with `create`, `open` or `open_read_only`; use it as a context manager or call `close`.  Threads may share
    it, one at a time.  A second process may read but not write.

    Attributes:
        path: the folder, or None for a store in memory, which keeps no checkpoints.
        notes: sentences about problems that were worked around, e.g. a damaged checkpoint that was skipped.

    Examples:
        >>> with RunStore.create(None, {"recipe": {"name": "fedavg"}}) as store:
        ...     store.commit({"version": 1, "arrived": 2}, [])
        ...     store.version, store.rows("step")[0]["arrived"]
        (1, 2)
    """

    def __init__(self, db: sqlite3.Connection, path: Path | None, lock: RunLock | None) -> None:
        self.path = path
        self.notes: list[str] = []
        self._db = db
        # no warning where a finished run is not closed
        self._end = weakref.finalize(self, _close, db, lock is not None)
        self._lock = lock
        self._read_only = path is not None and lock is None
        newest = db.execute("SELECT coalesce(max(version), 0), coalesce(max(wall), 0.0) FROM step").fetchone()
        self._version: int = newest[0]
        self._wall: float = newest[1]
        self._opened = time.monotonic()

    @property
    def lasts(self) -> bool:
        """True if the run is kept in a folder."""
        return self.path is not None

    @classmethod
    def create(cls, path: Path | str | None, meta: Mapping[str, Any], start: bytes | None = None) -> Self:
        """Start a new run.

        Args:
            path: a folder that is empty or does not exist; None keeps the run in memory.
            meta: JSON values that describe the run: piebald, torch and python (versions), recipe (name, fields,
                table), label, seed, rounds, objective, metric, higher_is_better, model, parameters, shared, settings,
                classes (their names).
            start: the content of `start.safetensors`, None where the run begins with a model of its own.

        Raises:
            RunFolderError: the folder is not empty, or cannot be written.
        """
        now = datetime.now(UTC).isoformat(timespec="seconds")
        described = {"id": secrets.token_hex(8), "created": now, "status": "running", **meta}
        if path is None:
            db = schema.connect(":memory:")
            schema.make(db)
            store = cls(db, None, None)
            store.set_meta(**described)
            return store
        folder = Path(path)
        with explained(f"a run folder cannot be made at {folder}"):
            refuse_occupied(folder)
            new_folders = missing(folder)
            try:
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                return cls._started(folder, described, start)
            except BaseException:
                remove_again(folder, new_folders)
                raise

    @classmethod
    def _started(cls, folder: Path, described: Mapping[str, Any], start: bytes | None) -> Self:
        """A new run in an empty folder.  A folder with a run.db is always a complete run, which can be resumed."""
        lock = RunLock(folder)
        try:
            (folder / UNFINISHED).unlink(missing_ok=True)
            if start is not None:
                tensor_files.write_bytes(folder, START, start)
            with closing(schema.connect(folder / UNFINISHED)) as empty:
                schema.make(empty)
                # on the disk before the rename: a run without its description could not be resumed
                with schema.transaction(empty, durable=True):
                    schema.insert(empty, "meta", schema.meta_rows(described))
            lease.check()
            # the rename is the moment at which the folder becomes a run
            os.replace(folder / UNFINISHED, folder / DATABASE)
            return cls(schema.connect(folder / DATABASE), folder, lock)
        except BaseException:
            lock.release()
            raise

    @classmethod
    def open(cls, path: Path | str) -> Self:
        """Open an existing run to continue it.

        Raises:
            RunFolderError: there is no run, it is damaged or has a newer schema, or another process is writing to it.
        """
        folder = existing(Path(path))
        with explained(f"{folder} cannot be opened"):
            lock = RunLock(folder)
        try:
            with explained(f"{folder} cannot be opened"):
                db = _checked(folder, read_only=False)
                store = cls(db, folder, lock)
                # before files are deleted, which a damaged database may name wrongly
                if (verdict := db.execute("PRAGMA quick_check(1)").fetchone()[0]) != "ok":
                    raise sqlite3.DatabaseError(f"malformed: {verdict}")
                tensor_files.sweep(db, folder)
        except BaseException:
            lock.release()
            raise
        return store

    @classmethod
    def open_read_only(cls, path: Path | str) -> Self:
        """Open an existing run for reading, also while another process writes to it.

        Raises:
            RunFolderError: there is no run, or it is damaged or has a newer schema.
        """
        folder = existing(Path(path))
        with explained(f"{folder} cannot be opened"):
            return cls(_checked(folder, read_only=True), folder, None)

    # ---------------------------------------------------------------------------------------------------- writing

    def commit(
        self,
        step: Mapping[str, Any],
        results: Sequence[Mapping[str, Any]],
        checkpoint: Checkpoint | None = None,
        notes: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        """Record one server step in a single transaction.

        Rows of the same version and later ones are replaced: a run that was killed and continues from a checkpoint
        repeats the steps after it.

        Args:
            step: columns of `step`; `wall` is filled in if it is missing.
            results: columns of `result` each; `version` is the step's if it is missing.
            checkpoint: the state after this step.  Of the tensors "client_state/<client>/<name>" and
                "last/<client>/<name>" it holds those that changed since the last recorded checkpoint; it holds all
                other tensors.
            notes: columns of `note` each, JSON values that components of the server recorded.

        Raises:
            RunFolderError: the step was not recorded; earlier steps are safe.
        """
        version = int(step["version"])
        with explained(f"server step {version} could not be recorded in {self._name}, but earlier steps are safe"):
            self._check_writable()
            written = None
            if checkpoint is not None and self.path is not None:
                write = partial(tensor_files.write_checkpoint, self._db, self.path, version, checkpoint)
                written = _once_files_can_be_opened(write)
            with self._transaction(durable=written is not None):  # older files are deleted afterwards
                if version <= self._version:
                    self._forget_from(version)
                schema.insert(self._db, "step", [{"wall": self._wall + time.monotonic() - self._opened, **step}])
                named = [result if "version" in result else {"version": version, **result} for result in results]
                schema.insert(self._db, "result", named)
                coded = [{"version": version, **row, "value": json.dumps(row["value"])} for row in notes]
                schema.insert(self._db, "note", coded)
                if written is not None:
                    tensor_files.index_checkpoint(self._db, written, KEPT)
            self._version = version
            if written is not None and self.path is not None:
                # after the transaction: until it is on the disk, a resumed run needs the older files
                tensor_files.sweep(self._db, self.path)

    def scores(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Record columns of `score`: metrics on clients' rows, or on the common test set where client is None.

        An existing score is replaced, so that a resumed run may repeat those of the step at which it was killed.
        """
        self._insert("score", rows)

    def confusion(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Record columns of `confusion`, in place of what was counted of the same clients at the same version."""
        with explained(f"{self._name} cannot be written, but what was recorded before is safe"):
            self._check_writable()
            with self._transaction():
                counted = {(row["version"], row["client"]) for row in rows}
                self._db.executemany("DELETE FROM confusion WHERE version = ? AND client = ?", sorted(counted))
                schema.insert(self._db, "confusion", rows)

    def row_scores(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Record columns of `row_score`, where `row_values` are numbers, in place of earlier ones of this version."""
        values = [row.get("row_values") for row in rows]
        self._insert(
            "row_score",
            [
                {**row, "row_values": None if numbers is None else packed_values(numbers)}
                for row, numbers in zip(rows, values, strict=True)
            ],
        )

    def failures(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Record columns of `failure`: why clients have no score, or not all."""
        self._insert("failure", rows)

    def go_back(self, version: int) -> None:
        """Forget what was recorded after a version, and all checkpoints before the newest that is left, for good."""
        with explained(f"{self._name} cannot be written, but what was recorded before is safe"):
            self._check_writable()
            with self._transaction(durable=True):
                self._forget_from(version + 1)
                if self._checkpoints():
                    tensor_files.forget(self._db, 1)
            self._version = version
            if self.path is not None:
                tensor_files.sweep(self._db, self.path)

    def add_notes(self, rows: Sequence[Mapping[str, Any]], durable: bool = False) -> None:
        """Record columns of `note` after the run's last step, all or none of them; `value` is a JSON value.

        Durable ones are on the disk when this returns and survive a power cut.
        """
        coded = [{"version": self._version, **row, "value": json.dumps(row["value"])} for row in rows]
        self._insert("note", coded, durable)

    def clients(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Record columns of `client`; `counts` is a list (training rows a class), `device` a mapping or a `Device`."""
        coded = [
            {key: schema.dumped(value) if key in _JSON["client"] else value for key, value in row.items()}
            for row in rows
        ]
        self._insert("client", coded)

    def measures(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Record columns of `measure`: heterogeneity of a client, or of the federation where client is None."""
        self._insert("measure", rows)

    def finish(self, status: str) -> None:
        """Record how the run ended: "finished", "stopped" or "failed"."""
        self.set_meta(status=status, finished=datetime.now(UTC).isoformat(timespec="seconds"))

    def set_meta(self, **values: Any) -> None:
        """Record JSON values by name, replacing earlier ones."""
        self._insert("meta", schema.meta_rows(values))

    def all_scores(self) -> dict[str, list[dict[str, Any]]]:
        """All rows that say how good models are, by table, for `become`."""
        return {table: self.query(f"SELECT * FROM {table}") for table in _SCORES}

    def become(self, meta: Mapping[str, Any], scores: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
        """Make this copy of a run the run of another recipe, which has trained the same models and scores them anew.

        Args:
            meta: the description of the other run, see `create`.
            scores: its own ones so far, see `all_scores`; those of the copy are forgotten.
        """
        now = datetime.now(UTC).isoformat(timespec="seconds")
        described = {"id": secrets.token_hex(8), "created": now, **meta, "status": "running"}
        with explained(f"{self._name} cannot be written, but what was recorded before is safe"):
            self._check_writable()
            with self._transaction(durable=True):
                for table in _SCORES:
                    self._db.execute(f"DELETE FROM {table}")
                    schema.insert(self._db, table, scores.get(table, ()))
                schema.insert(self._db, "meta", schema.meta_rows(described))

    def close(self) -> None:
        """Close the database and release the lock.  May be called twice.

        Whoever wrote takes the database out of WAL mode, so that no journal lies beside a run that nobody writes: a
        reader could not delete it.
        """
        if self._lock is not None:
            if lease.token():
                with suppress(sqlite3.Error):
                    # what takes long goes to files that are open; what follows the look deletes the journal by its name
                    self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
            lease.check()
            with suppress(sqlite3.Error):  # it is being read, or closed: the journal stays
                self._db.execute("PRAGMA journal_mode = DELETE")
        self._end()
        if self._lock is not None:
            self._lock.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---------------------------------------------------------------------------------------------------- reading

    @property
    def meta(self) -> dict[str, Any]:
        """The JSON values that describe the run, by name."""
        start = f"in {self._name} the value of"
        values = {row["key"]: schema.decoded(row["value"], f"{start} {row['key']}") for row in self.rows("meta")}
        check_meta(values, self._name)
        return values

    @property
    def version(self) -> int:
        """The number of recorded server steps."""
        return self._version

    def rows(self, table: str) -> list[dict[str, Any]]:
        """All rows of a table, sorted by key."""
        columns = schema.COLUMNS[table]
        coded = _JSON.get(table, ())
        with explained(f"{self._name} cannot be read"):
            if (damaged := schema.damaged_column(self._db, table)) is not None:
                raise RunFolderError(
                    f"in {self._name} the column {damaged} of {table} holds a value of another type: restore the "
                    "folder from a copy"
                )
            fetched = self._fetched(f"SELECT * FROM {table} ORDER BY {', '.join(columns[:5])}")
        for row in fetched:
            subject = f"in {self._name} a value of {table}"
            row.update((key, schema.decoded(row[key], subject)) for key in coded if row[key] is not None)
        return fetched

    def query(self, sql: str, *values: Any) -> list[dict[str, Any]]:
        """Rows of a SELECT over the tables of `schema.TABLES`, for tables that are too large to read completely."""
        with explained(f"{self._name} cannot be read"):
            return self._fetched(sql, *values)

    def last_checkpoint(self) -> tuple[int, Checkpoint] | None:
        """The newest intact checkpoint, with its version; None where none was made.

        A damaged one is skipped and mentioned in `notes`.

        Raises:
            RunFolderError: there are checkpoints but all of them are damaged.
        """
        if self.path is None:
            return None
        checkpoints = self._checkpoints()
        for row in checkpoints:
            try:
                return row["version"], self.checkpoint_of(row["version"])
            except RunFolderError as error:
                self.notes.append(f"the checkpoint of server step {row['version']} was skipped: {error}")
        if checkpoints:
            raise RunFolderError(f"no checkpoint of {self.path} can be used: start a new run ({self.notes[-1]})")
        return None

    def server_checkpoint(self, version: int) -> Checkpoint:
        """The checkpoint of one version, without the state of clients (see `client_state`).

        Raises:
            RunFolderError: it was not kept, or its file is damaged.
        """
        row = next((row for row in self._checkpoints() if row["version"] == version), None)
        if row is None or self.path is None:
            raise RunFolderError(f"{self._name} has no checkpoint of server step {version}")
        values = tensor_files.values(self.path, row)
        return Checkpoint(tensor_files.read(self.path, row["file"], tensor_files.file_digest(row["sha256"])), values)

    def checkpoint_of(self, version: int) -> Checkpoint:
        """The checkpoint of one version with the state of clients, after checking all files.

        Raises:
            RunFolderError: it was not kept, or a file is damaged.
        """
        checkpoint = self.server_checkpoint(version)
        assert self.path is not None
        states = tensor_files.read_client_states(self._db, self.path, version)
        return Checkpoint({**checkpoint.tensors, **states}, checkpoint.values)

    def client_state(self, client: int, version: int | None = None) -> dict[str, Tensor]:
        """The state of one client at a kept version, by default the newest; files are not checked for damage."""
        tensors: dict[str, Tensor] = {}
        if self.path is not None:
            for row in tensor_files.current(self._db, self._version if version is None else version, client):
                if row.name.startswith("last:"):
                    continue
                tensors[row.name] = tensor_files.pick(self.path, row.file, [row.key])[row.key]
        return tensors

    # ------------------------------------------------------------------------------------------------------ inside

    @property
    def _name(self) -> str:
        return "the run in memory" if self.path is None else str(self.path)

    def _fetched(self, sql: str, *values: Any) -> list[dict[str, Any]]:
        """Rows of a SELECT, as many as memory can hold: a short row takes a hundred times more there."""
        rows: list[dict[str, Any]] = []
        for row in self._db.execute(sql, values):
            rows.append(dict(row))
            if len(rows) % 100_000 == 0:
                memory = len(rows) * (200 + 50 * len(row))
                check_size(self._name, memory, memory)
        return rows

    def _checkpoints(self) -> list[sqlite3.Row]:
        with explained(f"{self._name} cannot be read"):
            return self._db.execute("SELECT * FROM checkpoint ORDER BY version DESC").fetchall()

    @contextmanager
    def _transaction(self, durable: bool = False) -> Iterator[None]:
        """A transaction of whoever may write: the only one where all writes pass, before and after each.

        A holder of a lease that hangs in it and wakes after the lease was taken ends with the second look, and tells
        nobody of what it wrote.
        """
        lease.check()
        with schema.transaction(self._db, durable=durable):
            yield
        lease.check()

    def _check_writable(self) -> None:
        if self._read_only:
            raise RunFolderError(f"{self.path} was opened for reading only: use RunStore.open to write to it")

    def _insert(self, table: str, rows: Sequence[Mapping[str, Any]], durable: bool = False) -> None:
        with explained(f"{self._name} cannot be written, but what was recorded before is safe"):
            self._check_writable()
            with self._transaction(durable=durable):
                schema.insert(self._db, table, rows)

    def _forget_from(self, version: int) -> None:
        for table in ("step", "result", "note", "checkpoint", "client_state"):
            self._db.execute(f"DELETE FROM {table} WHERE version >= ?", (version,))
        # those of this version are replaced when they are repeated
        for table in _SCORES:
            self._db.execute(f"DELETE FROM {table} WHERE version > ?", (version,))
        tensor_files.drop_empty(self._db)


def _close(db: sqlite3.Connection, written: bool) -> None:
    """Close a database; the journal of one that was written is deleted by its name, which may be the next holder's."""
    if written:
        lease.check()
    db.close()


def _once_files_can_be_opened(write: Callable[[], tensor_files.WrittenCheckpoint]) -> tensor_files.WrittenCheckpoint:
    """Write a checkpoint, and wait where the process has no free file descriptor, which others soon give back.

    Anything else that fails does so at once: a full disk needs somebody who makes room.
    """
    for seconds in _WAITS:
        try:
            return write()
        except (OSError, SafetensorError) as error:
            # safetensors gives Rust's errors as text: 23 and 24 are too many open files
            code = error.errno if isinstance(error, OSError) else None
            if code not in (errno.EMFILE, errno.ENFILE) and not re.search(r"os error 2[34]\b", str(error)):
                raise
            log.warning("a checkpoint waits for %g seconds: this machine lets no further file be opened", seconds)
            time.sleep(seconds)
    return write()


def _checked(folder: Path, read_only: bool) -> sqlite3.Connection:
    """Open a run's database; close it again if it is not a run."""
    db = schema.connect(folder / DATABASE, read_only=read_only)
    try:
        schema.check(db, folder)
    except BaseException:
        db.close()
        raise
    return db
