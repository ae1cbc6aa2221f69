"""Backups of a run folder, made while the run goes on, and their restoration.

A backup is one uncompressed tar file, which only its owner can read:

    backup.json         format, version of Piebald, and the bytes and SHA-256 of each file
    run.db              the database at one moment, by SQLite's online backup
    *.safetensors       the files that it names at this moment
    tokenizer.json      of a run that reads text

A run never changes a file that its database names, it only deletes it later.  So the files are opened first, and where
one is gone already, all begins again.  The folder of a federation that runs on this machine alone (`federation`), with
its credentials and the state of its sites, is not part of it.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import sqlite3
import stat
import tarfile
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import IO, Any

from piebald.core.arguments import PathLike, checked
from piebald.core.errors import RunFolderError
from piebald.core.files import NO_LINK, opened
from piebald.storage import schema
from piebald.storage.run_folder import START, TOKENIZER, existing
from piebald.storage.schema import DATABASE, explained
from piebald.storage.store import RunStore
from piebald.version import __version__

FORMAT = 1  # of the list of files
_MANIFEST = "backup.json"
_LONGEST = 64 << 20  # bytes of the manifest
_NAME = re.compile(
    rf"{re.escape(DATABASE)}|{re.escape(START)}|{re.escape(TOKENIZER)}|(vectors|client-state|chosen)-\d{{1,15}}(-\d{{1,15}})?\.safetensors"
)
_ATTEMPTS = 100
_CHUNK = 1 << 20
_Source = tuple[IO[bytes], str | None]  # an open file, and its SHA-256 as the run recorded it


@checked
def backup(run_path: PathLike, file: PathLike) -> dict[str, Any]:
    """Write a run folder into one file, also while the run goes on.

    Args:
        run_path: the run folder.
        file: a new file.

    Returns:
        The file, the server step that the backup goes back to, and its bytes.

    Raises:
        RunFolderError: there is no run, a file of it is damaged, or the backup cannot be written.
    """
    folder, target = existing(Path(run_path)), Path(file)
    if target.exists() or target.is_symlink():
        raise RunFolderError(f"{target} exists: choose another name for the backup")
    with explained(f"the backup of {folder} cannot be written to {target}"), _unfinished(target) as beside:
        with ExitStack() as stack:
            sources, version = _snapshot(folder, beside / DATABASE, stack)
            _write(folder, beside / "backup", sources, version)
        os.replace(beside / "backup", target)
    return {"file": str(target), "step": version, "bytes": target.stat().st_size}


@checked
def restore(file: PathLike, folder: PathLike) -> dict[str, Any]:
    """Make a run folder from a backup; `resume` then goes on from there to the same bits.

    Args:
        file: a file that `backup` wrote.  It may come from anybody: nothing in it is written outside the folder.
        folder: a folder that does not exist.

    Returns:
        The folder, and the server step that it holds.

    Raises:
        RunFolderError: the folder exists, or the file is no whole backup.
    """
    source, target = Path(file), Path(folder)
    if target.exists() or target.is_symlink():
        raise RunFolderError(f"{target} exists, and a backup overwrites nothing: choose a new folder")
    with explained(f"the backup {source} cannot be restored to {target}"):
        target.parent.mkdir(parents=True, exist_ok=True)
        with _unfinished(target) as beside:
            unfinished = beside / "run"
            unfinished.mkdir(mode=0o700)
            with opened(source) as tar:
                _unpack(source, tar, unfinished)
            with RunStore.open_read_only(unfinished) as store:
                # checks all files of a checkpoint, so that a backup that cannot be resumed is refused here
                store.last_checkpoint()
                version = store.version
            _without_journal(unfinished)
            os.rename(unfinished, target)
    return {"folder": str(target), "step": version}


@contextmanager
def _unfinished(target: Path) -> Iterator[Path]:
    """A new folder beside the target, for what is not whole yet; a name of its own, so that it is nobody's file."""
    folder = Path(tempfile.mkdtemp(prefix=f".{target.name}.", suffix=".part", dir=target.parent))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


# -- writing


def _snapshot(folder: Path, database: Path, opened: ExitStack) -> tuple[dict[str, _Source], int]:
    """The database at one moment in a file of its own and the files that it names, opened; and the server step."""
    # a file that the copied database names may be deleted before it is opened: then the database has gone on, too
    for _ in range(_ATTEMPTS):
        names, version = _copy_database(folder, database)
        sources: dict[str, _Source] = {}
        with ExitStack() as attempt:
            try:
                for name, digest in names.items():
                    sources[name] = (attempt.enter_context(_opened(folder / name)), digest)
            except FileNotFoundError:  # the run has gone on, and deleted it meanwhile
                continue
            sources[DATABASE] = (attempt.enter_context(_opened(database)), None)
            opened.push(attempt.pop_all())
            return sources, version
    raise RunFolderError(f"{folder} names files that are missing: restore it from another backup")


def _copy_database(folder: Path, database: Path) -> tuple[dict[str, str | None], int]:
    """Copy the database; returns the files that the copy names with their recorded SHA-256, and its newest step."""
    database.unlink(missing_ok=True)
    # made with its mode first, since SQLite would let others read what it makes
    os.close(os.open(database, os.O_WRONLY | os.O_CREAT | os.O_EXCL | NO_LINK, 0o600))
    live = closing(schema.connect(folder / DATABASE, read_only=True))
    with live as source, closing(sqlite3.connect(database)) as copy:
        schema.check(source, folder)
        source.backup(copy)
        # one file: a backup has no place for a journal beside it
        copy.execute("PRAGMA journal_mode = DELETE")
        rows = copy.execute("SELECT file, sha256 FROM checkpoint UNION SELECT file, sha256 FROM client_state_file")
        names: dict[str, str | None] = {str(name): str(digest).partition(" ")[0] for name, digest in rows}
        version = int(copy.execute("SELECT coalesce(max(version), 0) FROM step").fetchone()[0])
    # no table names these files, which a run writes behind its last step
    names |= {path.name: None for path in folder.glob("chosen-*.safetensors")}
    names |= {name: None for name in (START, TOKENIZER) if (folder / name).exists()}
    for name in names:
        if not _NAME.fullmatch(name):
            raise RunFolderError(f"{folder} is damaged: its database names the file {name!r}")
    return names, version


@contextmanager
def _opened(path: Path) -> Iterator[IO[bytes]]:
    with os.fdopen(os.open(path, os.O_RDONLY | NO_LINK), "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise RunFolderError(f"{path} is no file, and no run writes that")
        yield file


def _write(folder: Path, target: Path, sources: Mapping[str, _Source], version: int) -> None:
    """Write the tar file."""
    listed: dict[str, dict[str, Any]] = {}
    for name, (file, recorded) in sources.items():
        digest = hashlib.file_digest(file, "sha256").hexdigest()  # type: ignore[arg-type]
        if recorded is not None and digest != recorded:
            raise RunFolderError(f"{folder / name} is damaged: its SHA-256 is not the one recorded")
        listed[name] = {"bytes": file.tell(), "sha256": digest}
    manifest = json.dumps({"format": FORMAT, "piebald": __version__, "step": version, "files": listed}).encode()
    target.unlink(missing_ok=True)
    handle = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | NO_LINK, 0o600)
    with os.fdopen(handle, "wb") as tar:
        _add(tar, _MANIFEST, len(manifest), [manifest])
        for name, (file, _) in sources.items():
            # a second pass: the list with all digests comes first in the file. The same handle has the same bytes, even
            # if the run has deleted the name
            file.seek(0)
            _add(tar, name, listed[name]["bytes"], iter(partial(file.read, _CHUNK), b""))
        # two blocks of zeros are the end of a tar file
        tar.write(bytes(2 * tarfile.BLOCKSIZE))
        tar.flush()
        os.fsync(tar.fileno())


def _add(tar: IO[bytes], name: str, size: int, chunks: Any) -> None:
    member = tarfile.TarInfo(name)
    member.size, member.mode = size, 0o600
    tar.write(member.tobuf(tarfile.GNU_FORMAT))
    for chunk in chunks:
        tar.write(chunk)
    tar.write(bytes(-size % tarfile.BLOCKSIZE))


# -- restoring


def _unpack(source: Path, tar: IO[bytes], folder: Path) -> None:
    """Write the files of a backup into a folder: those that its manifest lists, each one once, and nothing else."""
    name, size = _head(source, tar)
    if name != _MANIFEST or size > _LONGEST:
        raise RunFolderError(f"{source} is no backup of a run: piebald backup writes one")
    files = _manifest(source, _exactly(source, tar, size))
    _exactly(source, tar, -size % tarfile.BLOCKSIZE)
    size_of_all, free = sum(size for size, _ in files.values()), shutil.disk_usage(folder).free
    if size_of_all > free:
        raise RunFolderError(f"{source} needs {size_of_all:,} bytes and {free:,} are free: make room")
    while files:
        name, size = _head(source, tar)
        if name not in files or files[name][0] != size:
            raise RunFolderError(f"{source} holds {name[:80]!r} of {size:,} bytes, which its list of files has not")
        # each name once: a second entry would replace a file that was checked
        _, wanted_digest = files.pop(name)
        digest = hashlib.sha256()
        handle = os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | NO_LINK, 0o600)
        with os.fdopen(handle, "wb") as file:
            for start in range(0, size, _CHUNK):
                chunk = _exactly(source, tar, min(_CHUNK, size - start))
                digest.update(chunk)
                file.write(chunk)
            file.flush()
            os.fsync(file.fileno())
        if digest.hexdigest() != wanted_digest:
            raise RunFolderError(f"{source} is damaged: the SHA-256 of {name} is not the one in its list")
        _exactly(source, tar, -size % tarfile.BLOCKSIZE)
    if tar.read(2 * tarfile.BLOCKSIZE + 1) != bytes(2 * tarfile.BLOCKSIZE):
        raise RunFolderError(f"{source} holds more than its list of files has, or is cut off")


def _head(source: Path, tar: IO[bytes]) -> tuple[str, int]:
    """The name and the size of the next file.  Links, folders and all other kinds are refused."""
    try:
        member = tarfile.TarInfo.frombuf(_exactly(source, tar, tarfile.BLOCKSIZE), "utf-8", "strict")
    except (tarfile.HeaderError, UnicodeDecodeError):
        raise RunFolderError(f"{source} is no backup of a run, or damaged: piebald backup writes one") from None
    if member.type != tarfile.REGTYPE or member.size < 0:
        raise RunFolderError(f"{source} holds {member.name[:80]!r}, which is no file: a backup holds files only")
    return member.name, member.size


def _manifest(source: Path, text: bytes) -> dict[str, tuple[int, str]]:
    """The files that a backup lists: bytes and SHA-256."""
    unreadable = RunFolderError(f"{source} is no backup of a run: its list of files cannot be read")
    try:
        manifest = json.loads(text)
        version = manifest["format"]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise unreadable from None
    # not isinstance: True would pass as 1
    if type(version) is not int or version != FORMAT:
        raise RunFolderError(
            f"{source} has format {str(version)[:20]}, this Piebald reads {FORMAT}: install the Piebald that wrote it"
        )
    try:
        files = {str(name): (int(entry["bytes"]), str(entry["sha256"])) for name, entry in manifest["files"].items()}
    except (ValueError, KeyError, TypeError, AttributeError):
        raise unreadable from None
    for name, (size, _) in files.items():
        if not _NAME.fullmatch(name) or size < 0:
            raise RunFolderError(f"{source} lists the file {name[:80]!r}, which no run has")
    if DATABASE not in files:
        raise RunFolderError(f"{source} is no backup of a run: it has no {DATABASE}")
    return files


def _exactly(source: Path, tar: IO[bytes], size: int) -> bytes:
    data = tar.read(size)
    if len(data) != size:
        raise RunFolderError(f"{source} is cut off: copy it again")
    return data


def _without_journal(folder: Path) -> None:
    """Remove what reading the database has left beside it."""
    for suffix in ("-wal", "-shm"):
        with suppress(OSError):
            (folder / (DATABASE + suffix)).unlink(missing_ok=True)
