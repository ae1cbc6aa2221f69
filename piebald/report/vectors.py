"""The tensors of checkpoints, as safetensors files beside `run.db`.

    vectors-<version>.safetensors   the server's tensors, whole, one file a checkpoint
    memory-<version>.safetensors    what clients remember, and their last models where the server keeps them: only the
                                    rows that changed since the checkpoint before

Kept are the newest checkpoints, and the best one where the server looks for it.  A client's row is found through
the table `memory`: the one with the largest version up to the checkpoint's.  A superseded row stays until no kept
checkpoint is older than the row that took its place.  A file of which less than half is still current is rewritten:
its current rows are copied into the file of the checkpoint being written, and it goes when the last checkpoint that
needs it does.
"""

from __future__ import annotations

import hashlib
import json
import os
import sqlite3
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from piebald.errors import RunFolderError
from piebald.report.schema import explained, insert

MEMORY = "memory/"
LAST = "last/"  # what the server keeps of each client; rows of the same table, their names begin with "last:"
_ASIDE = ".part"


class StoredTensor(NamedTuple):
    """Where one remembered tensor lies: `file` holds it under `key`."""

    client: int
    name: str
    file: str

    @property
    def key(self) -> str:
        """Its name in the file and in the checkpoint."""
        if self.name.startswith("last:"):
            return f"{LAST}{self.client}/{self.name.removeprefix('last:')}"
        return f"{MEMORY}{self.client}/{self.name}"


def write(folder: Path, name: str, tensors: Mapping[str, Tensor]) -> str:
    """Write tensors aside, force them to the disk, give the file its name, and return its SHA-256."""
    aside = folder / (name + _ASIDE)
    try:
        save_file(_apart(tensors), str(aside))
        with aside.open("rb") as file:
            os.fsync(file.fileno())
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        os.replace(aside, folder / name)
        _sync_folder(folder)
    except BaseException:
        with suppress(OSError):
            aside.unlink(missing_ok=True)
        raise
    return digest


def read(folder: Path, name: str, sha256: str, keys: Iterable[str] | None = None) -> dict[str, Tensor]:
    """Read the named tensors (or all) of a file whose SHA-256 is as recorded.

    Raises:
        RunFolderError: the file is missing, damaged, or not what was written.
    """
    verify(folder, name, sha256)
    return pick(folder, name, keys)


def verify(folder: Path, name: str, sha256: str) -> None:
    """Refuse a file that is not what was written."""
    with explained(f"{folder / name} cannot be read"), (folder / name).open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != sha256:
        raise RunFolderError(f"{folder / name} is damaged: its SHA-256 is not the one recorded")


def pick(folder: Path, name: str, keys: Iterable[str] | None = None) -> dict[str, Tensor]:
    """Read the named tensors (or all) of a file without checking its SHA-256."""
    with explained(f"{folder / name} cannot be read"), safe_open(str(folder / name), framework="pt") as file:
        return {key: file.get_tensor(key) for key in (file.keys() if keys is None else keys)}


def split_memory(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[tuple[int, str], Tensor]]:
    """A checkpoint's tensors, and apart from them the clients' memory by (client, name)."""
    whole, memory = {}, {}
    for key, tensor in tensors.items():
        if key.startswith((MEMORY, LAST)):
            kind, client, name = key.split("/", 2)
            memory[int(client), name if kind == "memory" else f"last:{name}"] = tensor
        else:
            whole[key] = tensor
    return whole, memory


def current(db: sqlite3.Connection, version: int, client: int | None = None) -> list[StoredTensor]:
    """The rows of memory as of a version, of one client or of all."""
    found = db.execute(
        "SELECT client, name, file, max(version) FROM memory"
        " WHERE version <= :version AND (:client IS NULL OR client = :client) GROUP BY client, name",
        {"version": version, "client": client},
    )
    return [StoredTensor(row["client"], row["name"], row["file"]) for row in found]


def read_memory(db: sqlite3.Connection, folder: Path, version: int) -> dict[str, Tensor]:
    """All of the clients' memory as of a version, by key, each file checked."""
    digests = {row["file"]: row["sha256"] for row in db.execute("SELECT file, sha256 FROM memory_file")}
    tensors: dict[str, Tensor] = {}
    for file, keys in _by_file(current(db, version)).items():
        tensors |= read(folder, file, digests[file], keys)
    return tensors


def survivors(
    db: sqlite3.Connection, folder: Path, version: int, changed: Iterable[tuple[int, str]]
) -> dict[tuple[int, str], Tensor]:
    """The rows to be copied into the memory file of `version`: the current ones of files that are mostly superseded."""
    sizes = {row["file"]: row for row in db.execute("SELECT file, sha256, bytes FROM memory_file")}
    live = db.execute(
        "SELECT file, sum(bytes) AS bytes FROM"
        " (SELECT file, bytes, max(version) FROM memory WHERE version < ? GROUP BY client, name) GROUP BY file",
        (version,),
    )
    sparse = {row["file"] for row in live if 2 * row["bytes"] < sizes[row["file"]]["bytes"]}
    fresh = set(changed)
    rows = (
        [row for row in current(db, version - 1) if row.file in sparse and (row.client, row.name) not in fresh]
        if sparse
        else []
    )
    kept: dict[tuple[int, str], Tensor] = {}
    for file, keys in _by_file(rows).items():
        _, found = split_memory(read(folder, file, sizes[file]["sha256"], keys))
        kept |= found
    return kept


def index(
    db: sqlite3.Connection, version: int, file: str, sha256: str, memory: Mapping[tuple[int, str], Tensor]
) -> None:
    """Record that a file holds these rows."""
    sizes = {key: tensor.numel() * tensor.element_size() for key, tensor in memory.items()}
    rows = [{"client": c, "name": name, "version": version, "file": file, "bytes": n} for (c, name), n in sizes.items()]
    insert(db, "memory", rows)
    insert(db, "memory_file", [{"file": file, "sha256": sha256, "bytes": sum(sizes.values())}])


def forget(db: sqlite3.Connection, keep: int) -> None:
    """Drop what only checkpoints need that are neither among the newest `keep` nor the best one by what those know."""
    newest = "SELECT version, values_json FROM checkpoint ORDER BY version DESC LIMIT ?"
    found = db.execute(newest, (keep,)).fetchall()
    oldest = found[-1]["version"]
    older = sorted({best for row in found if (best := _best(row["values_json"])) is not None and best < oldest})
    marks = ", ".join("?" * len(older))
    db.execute(f"DELETE FROM checkpoint WHERE version < ? AND version NOT IN ({marks})", (oldest, *older))
    # rows up to the checkpoint before have been through this, so only those that came with `oldest` can supersede
    needed = " AND version IS NOT (SELECT max(version) FROM memory AS m WHERE m.client = memory.client"
    needed += " AND m.name = memory.name AND m.version <= ?)"
    db.execute(
        "DELETE FROM memory WHERE version < ?"
        " AND (client, name) IN (SELECT client, name FROM memory WHERE version = ?)" + needed * len(older),
        (oldest, oldest, *older),
    )
    drop_empty(db)


def _best(values: str) -> int | None:
    """The best version by what a checkpoint's values say (see the server's `Best.state`)."""
    if '"best": [' not in values:  # nobody looks for it: the values may be long, so they are not read in vain
        return None
    best = json.loads(values).get("best")
    return int(best[0]) if isinstance(best, list) and best else None


def drop_empty(db: sqlite3.Connection) -> None:
    """Forget memory files that hold no row any more."""
    db.execute("DELETE FROM memory_file WHERE file NOT IN (SELECT file FROM memory)")


def sweep(db: sqlite3.Connection, folder: Path) -> None:
    """Delete the files that no row names: those of dropped checkpoints, and what a killed process left half written."""
    named = {row[0] for row in db.execute("SELECT file FROM checkpoint UNION SELECT file FROM memory_file")}
    for pattern in ("vectors-*.safetensors*", "memory-*.safetensors*"):
        for path in folder.glob(pattern):
            if path.name not in named:
                with suppress(OSError):  # it costs room, no more
                    path.unlink(missing_ok=True)


def _apart(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors on the CPU, contiguous, none sharing memory with another, as safetensors asks."""
    seen: set[int] = set()
    apart = {}
    for name, tensor in tensors.items():
        plain = tensor.detach().cpu().contiguous()
        where = plain.untyped_storage().data_ptr()
        apart[name] = plain.clone() if where in seen else plain
        seen.add(where)
    return apart


def _by_file(rows: Iterable[StoredTensor]) -> dict[str, list[str]]:
    files: dict[str, list[str]] = {}
    for row in rows:
        files.setdefault(row.file, []).append(row.key)
    return files


def _sync_folder(folder: Path) -> None:
    """Force a rename to the disk, where folders can be opened."""
    if os.name != "posix":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
