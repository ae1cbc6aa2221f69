"""The audit log of a party: who joined, what left which site and what allowed it, as a chain of digests.

    <credentials>/audit.jsonl             one JSON object a line: line, at, event, what it is about, previous, digest
    <credentials>/audit-000000001.jsonl   the lines from this one on, rotated at 16 MB
    <credentials>/audit.head              number and digest of the last line; status.json beside it has them, too

`digest` is the SHA-256 of the line without it, and `previous` that of the line before.  So whoever changes, removes or
moves a line breaks the chain there.  Lines that are missing at the end break no chain, but the head beside the log
tells of them: where a log has lost its end, the next line follows from the head, so that the gap is found for ever, or
until the lines are restored.

A head that is gone is no sound end either: the line that is written then says so, for ever.  Whoever writes a log, its
head and the status anew leaves a chain as well.  The head must then be compared with one that somebody
else has noted, or the log with that of the other side (`missing`) or with the results of a run.  A line is on the disk
before what it tells of leaves.

The chain goes on from one file to the next, so a rotated file can be moved to an archive: who checks the
chain then names the folder where it lies.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import threading
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from piebald.core.errors import SettingError, shown
from piebald.core.files import NO_LINK, opened, os_reason, read_text
from piebald.federation.credentials.party_files import raise_passing
from piebald.privacy.ledger import Head
from piebald.storage import lease

FILE = "audit.jsonl"
HEAD = "audit.head"
LONG = 16 << 20  # bytes of a file before it is rotated
_ROTATED = re.compile(r"audit-(\d{9,})\.jsonl")
_NOTED = re.compile(r"(\d{1,18}) ([0-9a-f]{64})\n")
_FIRST = "0" * 64
_END = re.compile(rb',"digest":"([0-9a-f]{64})"\}')
_END_BYTES = len(',"digest":""}') + 64
_LONGEST = 1 << 20  # bytes of a line
_VALUE = 1 << 15  # bytes of one value in it: what others send, as a server its terms, makes no line that is too long

log = logging.getLogger("piebald.federation")


class AuditLog:
    """Appends to a party's audit log.  Threads may share it.

    Args:
        folder: the party's credentials.

    Examples:
        >>> from tempfile import TemporaryDirectory
        >>> with TemporaryDirectory() as folder:
        ...     AuditLog(Path(folder)).write("joined", site="north", rows=120)
        ...     verified = verify(Path(folder) / FILE)
        >>> verified.lines, verified.noted
        (1, True)
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / FILE
        self._lock = threading.Lock()
        self._line, self._head, self._read, self._headless = 0, _FIRST, False, False

    @property
    def head(self) -> Head | None:
        """The end of the log, as this process has written it; None where it wrote no line."""
        return Head(self._line, self._head) if self._read else None

    def write(self, event: str, **about: Any) -> None:
        """Append a line, and return once it is on the disk.

        Raises:
            SettingError: the log does not end as this class writes it, or is a link.
            OSError: it cannot be written; nothing was appended.
        """
        with self._lock:
            # the flag below refuses a link too, where the system has it; this says why
            if self.path.is_symlink():
                raise SettingError(f"{self.path} is a link, and the log would be written elsewhere: remove it")
            self._rotate()
            handle = os.open(self.path, os.O_RDWR | os.O_CREAT | NO_LINK, 0o600)
            with os.fdopen(handle, "r+b") as file:
                lease.check()  # after it is open: a file that is opened before a lease is taken is another one then
                size = self._end(file)
                at = datetime.now(UTC).isoformat(timespec="milliseconds")
                if self._headless:
                    about, self._headless = {**about, "headless": True}, False
                values = {name: _bounded(value) for name, value in about.items()}
                entry = {"line": self._line + 1, "at": at, "event": event, **values, "previous": self._head}
                text = json.dumps(entry, separators=(",", ":")).encode()
                digest = hashlib.sha256(text).hexdigest()
                try:
                    _write_at(file.fileno(), size, text[:-1] + f',"digest":"{digest}"}}\n'.encode())
                    os.fsync(file.fileno())
                except OSError:
                    # no line could follow from a part of one
                    os.truncate(file.fileno(), size)
                    raise
            lease.check()  # before anybody is told of the line
            self._line, self._head = self._line + 1, digest
            with suppress(OSError):  # a head that is behind is still in the log
                lease.write(self.path.with_name(HEAD), f"{self._line} {digest}\n", lasting=False)

    def log_head(self) -> None:
        """Log the head, for somebody to keep elsewhere; nothing where this process wrote no line."""
        if self._read:
            fields = {"event": "audit", "lines": self._line, "head": self._head, "log": str(self.path)}
            log.info("the audit log %(log)s has %(lines)d lines, and its head is %(head)s: keep it elsewhere", fields)

    def _rotate(self) -> None:
        """Rename a file that is long, so that the next line begins another one."""
        # the first write of a process may still have to cut off what a killed one has left
        if not self._read or self.path.stat().st_size < LONG:
            return
        with opened(self.path) as file:
            first = _checked(self.path, file.readline(_LONGEST).rstrip(b"\n"), None, None)[0]
        lease.check()  # the name may be that of the next holder's file
        self.path.rename(self.path.with_name(f"audit-{first:09d}.jsonl"))

    def _end(self, file: Any) -> int:
        """Return the place of the next line; the beginning of a line that a killed process has left is cut off."""
        size = file.seek(0, os.SEEK_END)
        if self._read:
            return int(size)
        # a torn line and the whole one before it are within twice the longest
        file.seek(max(0, size - 2 * _LONGEST))
        tail = file.read()
        whole = tail[: tail.rfind(b"\n") + 1]
        os.truncate(file.fileno(), size - len(tail) + len(whole))
        if whole:
            last = whole[:-1].rpartition(b"\n")[2]
            self._line, self._head = _checked(self.path, last, None, None)
        elif earlier := _rotated(self.path.parent):  # it was killed after the rotation of the file
            for self._line, _, self._head in _lines(earlier[max(earlier)], None, None):
                pass
        self._follow_head()
        self._read = True
        return int(size - len(tail) + len(whole))

    def _follow_head(self) -> None:
        """Have the next line follow from the head where the log has lost its end, so that the gap is seen."""
        noted = noted_head(self.path)
        self._headless = noted is None and self._line > 0
        if noted is None or noted.line < self._line or noted == Head(self._line, self._head):
            return
        log.error("%s; what is written from now on follows from that line", _unlike(self.path, self._line, noted))
        self._line, self._head = noted


def _write_at(handle: int, place: int, data: bytes) -> None:
    """Write data at a place of a file, without a buffer: what does not fit would be written when the file is closed."""
    os.lseek(handle, place, os.SEEK_SET)
    while data:
        data = data[os.write(handle, data) :]


def noted_head(path: Path) -> Head | None:
    """Return the end of a log as it is noted beside it; None where there is no note.

    Raises:
        SettingError: what is there is no head.
        OSError: no file can be opened now.
    """
    beside = path.with_name(HEAD)
    try:
        text = read_text(beside, encoding="ascii")
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise_passing(error)
        raise SettingError(f"{beside} cannot be read ({type(error).__name__}): restore it, or remove it") from None
    if (match := _NOTED.fullmatch(text)) is None:
        raise SettingError(f"{beside} holds no number and digest of a line: restore it, or remove it")
    return Head(int(match[1]), match[2])


def _unlike(path: Path, lines: int, noted: Head) -> str:
    """Return what is wrong with a log of `lines` lines that does not have its head."""
    if noted.line <= lines:
        return f"{path} was written anew: its line {noted.line} is not the one that {HEAD} beside it tells of"
    return (
        f"{path} has lost its end: it has {lines} lines, and {HEAD} beside it tells of line {noted.line}: restore it "
        "from a backup, or compare it with the other side (--against)"
    )


def _bounded(value: Any) -> Any:
    """Return a value, or its digest and length where it is too long for a line."""
    text = json.dumps(value).encode()
    return value if len(text) <= _VALUE else {"sha256": hashlib.sha256(text).hexdigest(), "bytes": len(text)}


@dataclass(frozen=True, slots=True)
class Verified:
    """A log whose chain holds.

    Attributes:
        lines: how many lines it has.
        head: digest of the last one.
        first, last: when these were written, None in an empty log.
        noted: whether the head beside it tells of no line after these.
        headless: the number of the last line that was written where no head was any more, None where all had one.
    """

    lines: int
    head: str
    first: str | None
    last: str | None
    noted: bool
    headless: int | None = None


def verify(path: Path, archive: Path | None = None) -> Verified:
    """Check the chain of an audit log, with the rotated files.

    Args:
        path: the log.
        archive: the folder where rotated files have been moved to.

    Raises:
        SettingError: it cannot be read, a line does not follow from the one before (the first such line is named), or
            the head beside it tells of a line that it has not.
    """
    noted = noted_head(path)  # before the lines, of which there are more by then where a process writes
    verified, has_head = Verified(0, _FIRST, None, None, noted is not None), noted is None
    for number, entry, head in _entries(path, archive):
        at, headless = str(entry.get("at")), number if entry.get("headless") else verified.headless
        verified = Verified(number, head, verified.first or at, at, noted is not None, headless)
        has_head = has_head or (number, head) == noted
    if noted is not None and not has_head:
        raise SettingError(_unlike(path, verified.lines, noted))
    return verified


def knows(path: Path, heads: Collection[str], archive: Path | None = None) -> bool:
    """Return whether a log whose chain holds has the lines with these digests, earlier heads."""
    return {*heads} <= {digest for _, _, digest in _entries(path, archive)}


def received(path: Path, archive: Path | None = None) -> set[tuple[str, int]]:
    """Return the results in a server's log: run and number of the task of each."""
    entries = [entry for _, entry, _ in _entries(path, archive) if entry["event"] == "received"]
    return {(str(entry.get("run")), int(entry.get("task", -1))) for entry in entries}


def missing(path: Path, other: Path, archive: Path | None = None) -> list[str]:
    """Return a sentence about each line of the other side's log whose event is not in this one.

    One of the two is the server's, and the other one that of a site.  What a site has delivered is in the server's log,
    and what the server has received of it in the site's.
    """
    entries, theirs = [entry for _, entry, _ in _entries(path, archive)], [entry for _, entry, _ in _entries(other)]
    parties = [
        next((entry["party"] for entry in log if entry["event"] == "started"), None) for log in (entries, theirs)
    ]
    if None in parties or len({*parties}) < 2 or "server" not in parties:
        raise SettingError(f"{path} and {other} must be the logs of a server and of one of its sites, got {parties}")
    site = parties[0] if parties[1] == "server" else parties[1]
    event = {"server": "received", site: "delivered"}[parties[1]]
    has = {"server": "received", site: "sent"}[parties[0]]
    results = {_result(entry) for entry in entries if entry["event"] == has and entry.get("site", site) == site}
    return [
        f"line {entry['line']} of {other} has a result of {site} with digest {entry['body']}, which {path} has not"
        for entry in theirs
        if entry["event"] == event and entry.get("site", site) == site and _result(entry) not in results
    ]


def _result(entry: Mapping[str, Any]) -> tuple[Any, ...]:
    return entry.get("run"), entry.get("task"), entry.get("body")


def _entries(path: Path, archive: Path | None = None) -> Iterator[tuple[int, dict[str, Any], str]]:
    """Yield the lines of a log whose chain holds so far: number, content and digest; first those of rotated files."""
    number, head = 0, _FIRST
    folders = (path.parent,) if archive is None else (archive, path.parent)
    rotated = {place: file for folder in folders for place, file in _rotated(folder).items()}
    files = [rotated[place] for place in sorted(rotated)]
    for file in [*files, path] if path.exists() else files:
        for line in _lines(file, number, head):
            yield line
            number, _, head = line


def _lines(path: Path, number: int | None, head: str | None) -> Iterator[tuple[int, dict[str, Any], str]]:
    """Yield the lines of one file, which follow from the line before (None: from any)."""
    try:
        with opened(path) as file:
            # bounded, as a damaged file may have no ends of lines at all
            while line := file.readline(_LONGEST + 1):
                if not line.endswith(b"\n"):
                    place = "the first line" if number is None else f"line {number + 1}"
                    raise SettingError(f"{place} of {path} has no end: it was cut off, or is being written")
                number, head = _checked(path, line[:-1], number, head)
                yield number, json.loads(line), head
    except OSError as error:
        raise SettingError(f"{path} cannot be read: {os_reason(error)}") from None


def _rotated(folder: Path) -> dict[int, Path]:
    """Return the rotated files, by the number of their first line."""
    if not folder.is_dir():
        return {}
    return {int(match[1]): path for path in folder.iterdir() if (match := _ROTATED.fullmatch(path.name))}


def _checked(path: Path, line: bytes, number: int | None, head: str | None) -> tuple[int, str]:
    """Return the number and the digest of a line that follows from the one before (None: from any).

    Raises:
        SettingError: it does not.
    """
    place = "the last line" if number is None else f"line {number + 1}"
    match = _END.fullmatch(line[-_END_BYTES:])
    # the digest is of the line before it was put in, which ended with the brace
    if match is None or hashlib.sha256(line[:-_END_BYTES] + b"}").hexdigest() != match[1].decode():
        raise SettingError(f"{place} of {path} is not as it was written: its digest is another one")
    try:
        entry = json.loads(line)
        line_number, previous = int(entry["line"]), str(entry["previous"])
    except (ValueError, KeyError, TypeError, RecursionError):
        raise SettingError(f"{place} of {path} is not a line of an audit log: {shown(line[:60])}") from None
    if number == 0 and line_number > 1:
        raise SettingError(
            f"{place} of {path} does not follow from the one before: it is line {line_number} of the log, so name the "
            "folder with those before it (--archive), or the log was cut at its beginning"
        )
    if number is not None and (line_number, previous) != (number + 1, head):
        raise SettingError(
            f"{place} of {path} does not follow from the one before: lines were removed, added or moved there"
        )
    return line_number, match[1].decode()
