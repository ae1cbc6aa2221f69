"""The audit log of a party: who joined, what left which site and what allowed it, as a chain of digests.

    <credentials>/audit.jsonl             one JSON object a line: line, at, event, what it is about, previous, digest
    <credentials>/audit-000000001.jsonl   the lines from this one on, put aside when they were 16 MB

`digest` is the SHA-256 of the line without it, and `previous` that of the line before.  So whoever changes, removes or
moves a line breaks the chain there.  A log that was cut at its end, or written anew as a whole, is a chain as well:
its last digest, the head, must be compared with one that somebody else has noted, or the log with that of the other
side (`missing`).  A line is on the disk before what it tells of leaves.

The chain goes on from one file to the next, so a file that is put aside can be moved to an archive: who checks the
chain then names the folder where it lies.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from piebald.errors import SettingError, shown

FILE = "audit.jsonl"
LONG = 16 << 20  # bytes of a file before it is put aside
_ASIDE = re.compile(r"audit-(\d{9,})\.jsonl")
_FIRST = "0" * 64
_END = re.compile(rb',"digest":"([0-9a-f]{64})"\}')
_END_BYTES = len(',"digest":""}') + 64
_LONGEST = 1 << 20  # bytes of a line
_VALUE = 1 << 15  # bytes of one value in it: what others send, as a server its terms, makes no line that is too long
_NO_LINK = getattr(os, "O_NOFOLLOW", 0)  # Windows has no such flag


class AuditLog:
    """Appends to a party's audit log.  Threads may share it.

    Args:
        folder: the party's credentials.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / FILE
        self._lock = threading.Lock()
        self._line, self._head, self._read = 0, _FIRST, False

    def write(self, event: str, **about: Any) -> None:
        """Append a line, and return once it is on the disk.

        Raises:
            SettingError: the log does not end as this class writes it, or is a link.
            OSError: it cannot be written; nothing was appended.
        """
        with self._lock:
            if self.path.is_symlink():
                raise SettingError(f"{self.path} is a link, and the log would be written elsewhere: remove it")
            self._put_aside()
            handle = os.open(self.path, os.O_RDWR | os.O_CREAT | _NO_LINK, 0o600)
            with os.fdopen(handle, "r+b") as file:
                size = self._end(file)
                at = datetime.now(UTC).isoformat(timespec="milliseconds")
                told = {name: _bounded(value) for name, value in about.items()}
                entry = {"line": self._line + 1, "at": at, "event": event, **told, "previous": self._head}
                text = json.dumps(entry, separators=(",", ":")).encode()
                digest = hashlib.sha256(text).hexdigest()
                try:
                    file.seek(size)
                    file.write(text[:-1] + f',"digest":"{digest}"}}\n'.encode())
                    file.flush()
                    os.fsync(file.fileno())
                except OSError:
                    os.truncate(file.fileno(), size)
                    raise
            self._line, self._head = self._line + 1, digest

    def _put_aside(self) -> None:
        """Rename a file that is long, so that the next line begins another one."""
        if not self._read or self.path.stat().st_size < LONG:
            return
        with self.path.open("rb") as file:
            first = _checked(self.path, file.readline(_LONGEST).rstrip(b"\n"), None, None)[0]
        self.path.rename(self.path.with_name(f"audit-{first:09d}.jsonl"))

    def _end(self, file: Any) -> int:
        """Where the next line goes.  What a killed process has written of a line is no line, and is cut off."""
        size = file.seek(0, os.SEEK_END)
        if self._read:
            return int(size)
        file.seek(max(0, size - 2 * _LONGEST))
        tail = file.read()
        whole = tail[: tail.rfind(b"\n") + 1]
        os.truncate(file.fileno(), size - len(tail) + len(whole))
        if whole:
            last = whole[:-1].rpartition(b"\n")[2]
            self._line, self._head = _checked(self.path, last, None, None)
        elif earlier := _aside(self.path.parent):  # it was killed after it had put the file aside
            for self._line, _, self._head in _lines(earlier[max(earlier)], None, None):
                pass
        self._read = True
        return int(size - len(tail) + len(whole))


def _bounded(value: Any) -> Any:
    """A value, or its digest and length in its place where it is too long for a line."""
    text = json.dumps(value).encode()
    return value if len(text) <= _VALUE else {"sha256": hashlib.sha256(text).hexdigest(), "bytes": len(text)}


@dataclass(frozen=True, slots=True)
class Verified:
    """A log whose chain holds.

    Attributes:
        lines: how many lines it has.
        head: digest of the last one.
        first, last: when these were written, None in an empty log.
    """

    lines: int
    head: str
    first: str | None
    last: str | None


def verify(path: Path, archive: Path | None = None) -> Verified:
    """Check the chain of an audit log, with the files that were put aside.

    Args:
        path: the log.
        archive: the folder where files that were put aside have been moved to.

    Raises:
        SettingError: it cannot be read, or a line does not follow from the one before; the first such line is named.
    """
    found = Verified(0, _FIRST, None, None)
    for number, entry, head in _entries(path, archive):
        at = str(entry.get("at"))
        found = Verified(number, head, found.first or at, at)
    return found


def knows(path: Path, head: str, archive: Path | None = None) -> bool:
    """Whether a log whose chain holds still has the line with this digest, which was its head when it was noted."""
    return any(digest == head for _, _, digest in _entries(path, archive))


def missing(path: Path, other: Path, archive: Path | None = None) -> list[str]:
    """What the log of the other side tells of, and this one does not: a sentence about each line.

    One of the two is the server's, and the other one that of a site.  What a site has delivered is in the server's log,
    and what the server has received of it in the site's.
    """
    mine, theirs = [entry for _, entry, _ in _entries(path, archive)], [entry for _, entry, _ in _entries(other)]
    parties = [next((entry["party"] for entry in log if entry["event"] == "started"), None) for log in (mine, theirs)]
    if None in parties or len({*parties}) < 2 or "server" not in parties:
        raise SettingError(f"{path} and {other} must be the logs of a server and of one of its sites, got {parties}")
    site = parties[0] if parties[1] == "server" else parties[1]
    told = {"server": "received", site: "delivered"}[parties[1]]
    has = {"server": "received", site: "sent"}[parties[0]]
    known = {_result(entry) for entry in mine if entry["event"] == has and entry.get("site", site) == site}
    return [
        f"line {entry['line']} of {other} has a result of {site} with digest {entry['body']}, which {path} has not"
        for entry in theirs
        if entry["event"] == told and entry.get("site", site) == site and _result(entry) not in known
    ]


def _result(entry: Mapping[str, Any]) -> tuple[Any, ...]:
    return entry.get("run"), entry.get("task"), entry.get("body")


def _entries(path: Path, archive: Path | None = None) -> Iterator[tuple[int, dict[str, Any], str]]:
    """The lines of a log whose chain holds so far: number, content and digest; first those that were put aside."""
    number, head = 0, _FIRST
    folders = (path.parent,) if archive is None else (archive, path.parent)
    aside = {place: one for folder in folders for place, one in _aside(folder).items()}
    files = [aside[place] for place in sorted(aside)]
    for file in [*files, path] if path.exists() or not files else files:
        for line in _lines(file, number, head):
            yield line
            number, _, head = line


def _lines(path: Path, number: int | None, head: str | None) -> Iterator[tuple[int, dict[str, Any], str]]:
    """The lines of one file, which follow from the line before (None: from any)."""
    try:
        with path.open("rb") as file:
            while line := file.readline(_LONGEST + 1):
                if not line.endswith(b"\n"):
                    where = "the first line" if number is None else f"line {number + 1}"
                    raise SettingError(f"{where} of {path} has no end: it was cut off, or is being written")
                number, head = _checked(path, line[:-1], number, head)
                yield number, json.loads(line), head
    except OSError as error:
        raise SettingError(f"{path} cannot be read: {(error.strerror or str(error)).lower()}") from None


def _aside(folder: Path) -> dict[int, Path]:
    """The files that were put aside, by the number of their first line."""
    if not folder.is_dir():
        return {}
    return {int(match[1]): path for path in folder.iterdir() if (match := _ASIDE.fullmatch(path.name))}


def _checked(path: Path, line: bytes, number: int | None, head: str | None) -> tuple[int, str]:
    """The number and the digest of a line that follows from the one before (None: from any).

    Raises:
        SettingError: it does not.
    """
    where = "the last line" if number is None else f"line {number + 1}"
    found = _END.fullmatch(line[-_END_BYTES:])
    if found is None or hashlib.sha256(line[:-_END_BYTES] + b"}").hexdigest() != found[1].decode():
        raise SettingError(f"{where} of {path} is not as it was written: its digest is another one")
    try:
        entry = json.loads(line)
        own, previous = int(entry["line"]), str(entry["previous"])
    except (ValueError, KeyError, TypeError, RecursionError):
        raise SettingError(f"{where} of {path} is no line of an audit log: {shown(line[:60])}") from None
    if number == 0 and own > 1:
        raise SettingError(
            f"{where} of {path} does not follow from the one before: it is line {own} of the log, so name the folder "
            "with those before it (--archive), or the log was cut at its beginning"
        )
    if number is not None and (own, previous) != (number + 1, head):
        raise SettingError(
            f"{where} of {path} does not follow from the one before: lines were removed, added or moved there"
        )
    return own, found[1].decode()
