"""The tensors of checkpoints, as safetensors files beside `run.db`.

    vectors-<version>.safetensors        the server's tensors, complete, one file for each checkpoint
    client-state-<version>.safetensors   the state of clients, and their last models where the server keeps them: only
                                         the tensors that changed since the previous checkpoint

Where a server has taken over from one that hangs, its lease's token follows: vectors-<version>-<token>.safetensors.

The newest checkpoints are kept, and the best one where the server looks for it.  A tensor of a client is found through
the table `client_state`, in the row with the largest version up to the checkpoint's.  A superseded row stays until no
kept checkpoint is older than the row that replaced it.  When less than half of a file is still current, its current
tensors are copied into the file of the checkpoint being written; the old file is deleted with the last checkpoint that
needs it.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import sqlite3
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from safetensors.torch import save_file
from torch import Tensor

from piebald.contracts import Checkpoint
from piebald.core.errors import RunFolderError, shown
from piebald.core.files import json_value, opened
from piebald.core.private_files import sync_folder
from piebald.core.reading import opened_tensors
from piebald.storage import lease
from piebald.storage.lock import create_new
from piebald.storage.schema import explained, insert

CLIENT_STATE = "client_state/"
LAST = "last/"  # what the server keeps of each client: rows of the same table whose names begin with "last:"
_UNFINISHED = ".part"
_LATER = re.compile(r"-\d+-(\d+)\.safetensors")  # of a further holder of the lease, see `_named`


class StoredTensor(NamedTuple):
    """The place of one tensor of a client: `file` holds it under `key`."""

    client: int
    name: str
    file: str

    @property
    def key(self) -> str:
        """The tensor's name in the file and in the checkpoint."""
        if self.name.startswith("last:"):
            return f"{LAST}{self.client}/{self.name.removeprefix('last:')}"
        return f"{CLIENT_STATE}{self.client}/{self.name}"


@dataclass(frozen=True, slots=True)
class WrittenCheckpoint:
    """The files of a checkpoint that are not in the database yet.

    Attributes:
        row: columns of `checkpoint`.
        state_file: the name and the SHA-256 of the file with the state of clients, None where there is none.
        states: what that file holds, by (client, name).
    """

    row: dict[str, Any]
    state_file: tuple[str, str] | None
    states: Mapping[tuple[int, str], Tensor]


def write_checkpoint(db: sqlite3.Connection, folder: Path, version: int, checkpoint: Checkpoint) -> WrittenCheckpoint:
    """Write the files of a checkpoint, see `index_checkpoint`."""
    values = json.dumps(dict(checkpoint.values))  # first, so that a value that is not JSON leaves no file
    whole, changed = split_client_state(checkpoint.tensors)
    name = _named("vectors", version)
    row = {"version": version, "file": name, "sha256": digests(write(folder, name, whole), values)}
    row["values_json"] = values
    states = survivors(db, folder, version, changed) | changed
    if not states:
        return WrittenCheckpoint(row, None, {})
    file = _named("client-state", version)
    keyed = {StoredTensor(client, name, file).key: tensor for (client, name), tensor in states.items()}
    return WrittenCheckpoint(row, (file, write(folder, file, keyed)), states)


def _named(kind: str, version: int) -> str:
    """Return the name of a file, with the token of this process's lease after the first: no two holders share one."""
    token = lease.token()
    return f"{kind}-{version}.safetensors" if token < 2 else f"{kind}-{version}-{token}.safetensors"


def index_checkpoint(db: sqlite3.Connection, written: WrittenCheckpoint, keep: int) -> None:
    """Record a checkpoint whose files are written, and drop what only those before the newest `keep` need."""
    insert(db, "checkpoint", [written.row])
    if written.state_file is not None:
        index(db, written.row["version"], *written.state_file, written.states)
    forget(db, keep)


def write(folder: Path, name: str, tensors: Mapping[str, Tensor]) -> str:
    """Write a file of tensors, completely or not at all, and return its SHA-256."""
    with _replaced(folder, name) as unfinished:
        save_file(_separate(tensors), str(unfinished))
        with unfinished.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()


def write_bytes(folder: Path, name: str, body: bytes) -> None:
    """Write a file, completely or not at all."""
    with _replaced(folder, name) as unfinished:
        unfinished.write_bytes(body)


@contextmanager
def _replaced(folder: Path, name: str) -> Iterator[Path]:
    """A temporary file, which is forced to the disk and renamed to `name` once the block has ended without an error."""
    unfinished = folder / (name + _UNFINISHED)
    try:
        create_new(unfinished)  # safetensors would write through a link
        yield unfinished
        with unfinished.open("rb") as file:
            os.fsync(file.fileno())
        os.replace(unfinished, folder / name)
        sync_folder(folder)
    finally:
        with suppress(OSError):  # it is there after an error only
            unfinished.unlink(missing_ok=True)


def read(folder: Path, name: str, sha256: str, keys: Iterable[str] | None = None) -> dict[str, Tensor]:
    """Read the named tensors (or all) of a file after checking its SHA-256.

    Raises:
        RunFolderError: the file is missing or damaged, or is not the one that was written.
    """
    verify(folder, name, sha256)
    return pick(folder, name, keys)


def verify(folder: Path, name: str, sha256: str) -> None:
    """Refuse a file that is not the one that was written."""
    with explained(f"{folder / name} cannot be read"), opened(_inside(folder, name), links=False) as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != sha256:
        raise RunFolderError(f"{folder / name} is damaged: its SHA-256 is not the one recorded")


def pick(folder: Path, name: str, keys: Iterable[str] | None = None) -> dict[str, Tensor]:
    """Read the named tensors (or all) of a file without checking its SHA-256."""
    with explained(f"{folder / name} cannot be read"), opened_tensors(_inside(folder, name), links=False) as file:
        return {key: file.get_tensor(key) for key in (file.keys() if keys is None else keys)}


def _inside(folder: Path, name: str) -> Path:
    """The path of a file that a database names: one of its own folder."""
    # a run folder may come from anybody, and "../x" would read, or delete, files elsewhere
    if not isinstance(name, str) or Path(name).name != name:
        raise RunFolderError(f"{folder} is damaged: its database names the file {shown(name)}")
    return folder / name


def digests(of_file: str, values: str) -> str:
    """Return the record beside a checkpoint: the SHA-256 of its file, and that of its values."""
    return f"{of_file} {hashlib.sha256(values.encode()).hexdigest()}"


def file_digest(recorded: str) -> str:
    """The SHA-256 of a checkpoint's file."""
    return str(recorded).partition(" ")[0]


def values(folder: Path, row: sqlite3.Row) -> dict[str, Any]:
    """The values of a checkpoint, after checking their SHA-256.

    Raises:
        RunFolderError: they are damaged.
    """
    recorded = str(row["sha256"]).partition(" ")[2]
    try:
        read = json_value(row["values_json"], folder)
    except (OSError, ValueError, TypeError):
        read = None
    if not isinstance(read, dict) or hashlib.sha256(row["values_json"].encode()).hexdigest() != recorded:
        raise RunFolderError(f"{folder} is damaged: the values of server step {row['version']} are not those recorded")
    return read


def split_client_state(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[tuple[int, str], Tensor]]:
    """Split a checkpoint's tensors into those of the server and those of clients, the latter by (client, name)."""
    whole, states = {}, {}
    for key, tensor in tensors.items():
        if key.startswith((CLIENT_STATE, LAST)):
            # names may have slashes of their own
            kind, client, name = key.split("/", 2)
            states[int(client), f"last:{name}" if kind == "last" else name] = tensor
        else:
            whole[key] = tensor
    return whole, states


def current(db: sqlite3.Connection, version: int, client: int | None = None) -> list[StoredTensor]:
    """The current rows of `client_state` as of a version, of one client or of all."""
    rows = db.execute(
        # with max, SQLite takes the other columns from the row that has the largest version
        "SELECT client, name, file, max(version) FROM client_state"
        " WHERE version <= :version AND (:client IS NULL OR client = :client) GROUP BY client, name",
        {"version": version, "client": client},
    )
    return [StoredTensor(row["client"], row["name"], row["file"]) for row in rows]


def read_client_states(db: sqlite3.Connection, folder: Path, version: int) -> dict[str, Tensor]:
    """Read the state of all clients as of a version, by key, checking each file."""
    with explained(f"{folder} is damaged"):
        digest_of = {row["file"]: row["sha256"] for row in db.execute("SELECT file, sha256 FROM client_state_file")}
    tensors: dict[str, Tensor] = {}
    for file, keys in _by_file(current(db, version)).items():
        if file not in digest_of:
            raise RunFolderError(f"{folder} is damaged: nothing is recorded about {file}")
        tensors |= read(folder, file, digest_of[file], keys)
    return tensors


def survivors(
    db: sqlite3.Connection, folder: Path, version: int, changed: Iterable[tuple[int, str]]
) -> dict[tuple[int, str], Tensor]:
    """The tensors to copy into the file of `version`: the current ones of files that are mostly superseded."""
    sizes = {row["file"]: row for row in db.execute("SELECT file, sha256, bytes FROM client_state_file")}
    live = db.execute(
        "SELECT file, sum(bytes) AS bytes FROM"
        " (SELECT file, bytes, max(version) FROM client_state WHERE version < ? GROUP BY client, name) GROUP BY file",
        (version,),
    )
    # what is left of a file is copied once less than half of it is current, so the disk holds at most about twice that
    sparse = {row["file"] for row in live if 2 * row["bytes"] < sizes[row["file"]]["bytes"]}
    fresh = set(changed)
    rows = (
        [row for row in current(db, version - 1) if row.file in sparse and (row.client, row.name) not in fresh]
        if sparse
        else []
    )
    tensors: dict[tuple[int, str], Tensor] = {}
    for file, keys in _by_file(rows).items():
        _, current_tensors = split_client_state(read(folder, file, sizes[file]["sha256"], keys))
        tensors |= current_tensors
    return tensors


def index(
    db: sqlite3.Connection, version: int, file: str, sha256: str, states: Mapping[tuple[int, str], Tensor]
) -> None:
    """Record that a file holds these tensors."""
    sizes = {key: tensor.numel() * tensor.element_size() for key, tensor in states.items()}
    rows = [{"client": c, "name": name, "version": version, "file": file, "bytes": n} for (c, name), n in sizes.items()]
    insert(db, "client_state", rows)
    insert(db, "client_state_file", [{"file": file, "sha256": sha256, "bytes": sum(sizes.values())}])


def forget(db: sqlite3.Connection, keep: int) -> None:
    """Drop what only old checkpoints need: those that are neither among the newest `keep` nor the best version."""
    newest = "SELECT version, values_json FROM checkpoint ORDER BY version DESC LIMIT ?"
    newest_rows = db.execute(newest, (keep,)).fetchall()
    oldest = newest_rows[-1]["version"]
    older = sorted({best for row in newest_rows if (best := _best(row["values_json"])) is not None and best < oldest})
    marks = ", ".join("?" * len(older))
    db.execute(f"DELETE FROM checkpoint WHERE version < ? AND version NOT IN ({marks})", (oldest, *older))
    # earlier calls have handled the rows up to the previous checkpoint, so only those of `oldest` can supersede others
    needed = " AND version IS NOT (SELECT max(version) FROM client_state AS other"
    needed += " WHERE other.client = client_state.client AND other.name = client_state.name AND other.version <= ?)"
    db.execute(
        "DELETE FROM client_state WHERE version < ?"
        " AND (client, name) IN (SELECT client, name FROM client_state WHERE version = ?)" + needed * len(older),
        (oldest, oldest, *older),
    )
    drop_empty(db)


def _best(values: str) -> int | None:
    """The best version according to a checkpoint's values (see `server.evaluation.BestVersion.state`)."""
    if '"best": [' not in values:  # the run does not look for it, and long values need not be parsed
        return None
    best = json.loads(values).get("best")
    return int(best[0]) if isinstance(best, list) and best else None


def drop_empty(db: sqlite3.Connection) -> None:
    """Delete the rows of client state files that hold no current tensor."""
    db.execute("DELETE FROM client_state_file WHERE file NOT IN (SELECT file FROM client_state)")


def sweep(db: sqlite3.Connection, folder: Path) -> None:
    """Delete the files that no row names: those of dropped checkpoints, and half-written ones of a killed process."""
    named = {row[0] for row in db.execute("SELECT file FROM checkpoint UNION SELECT file FROM client_state_file")}
    for pattern in ("vectors-*.safetensors*", "client-state-*.safetensors*"):
        for path in folder.glob(pattern):
            later = (match := _LATER.search(path.name)) and int(match[1]) > lease.token() > 0
            if path.name not in named and not later:
                with suppress(OSError):  # a file that stays only takes up space
                    path.unlink(missing_ok=True)


def _separate(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors on the CPU, contiguous and without shared memory, as safetensors requires."""
    addresses: set[int] = set()
    separate = {}
    for name, tensor in tensors.items():
        # safetensors refuses two names for one piece of memory, as views of one vector are
        plain = tensor.detach().cpu().contiguous()
        address = plain.untyped_storage().data_ptr()
        separate[name] = plain.clone() if address in addresses else plain
        addresses.add(address)
    return separate


def _by_file(rows: Iterable[StoredTensor]) -> dict[str, list[str]]:
    files: dict[str, list[str]] = {}
    for row in rows:
        files.setdefault(row.file, []).append(row.key)
    return files
