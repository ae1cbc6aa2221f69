"""The lease of a server whose folder two machines share: who may write, also where one of them hangs and wakes again.

    <folder>/lease-7        of the holder, which writes it anew once a second; the number is its token
    <folder>/lease-7.lost   in place of that, once it has been given back

No clocks are compared: who stands by takes the lease once its file has not changed for some seconds of its own
monotonic clock.  It is taken by renaming the file to the next number, which one of several succeeds in, since each name
is there once; from then on its holder cannot open it.  The holder tries that before and after each write (`check`):
what it had written before is there for the next holder, and what it writes later goes to files that have no name any
more (`seize`), or whose names have its token.

What replaces a file is written beside it, then the holder looks at the lease, then it gets its name (`write`): whoever
takes the lease deletes what lies beside, so a holder that hangs in between has nothing to give the name to.

So a shared file system must rename in one step, and open a file by its name at the server and not from a cache (NFS
does, by "close-to-open").  Equal clocks are not needed, and locks (`flock`) only tell a holder's pause from its end.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import shutil
import socket
import sys
from contextlib import closing, suppress
from pathlib import Path
from typing import NamedTuple, NoReturn, Self

from piebald.core.files import NO_LINK
from piebald.core.plain_text import printable
from piebald.core.private_files import write_private

_NAME = re.compile(r"lease-(\d{1,18})(\.lost)?")
_FILES = ("audit.jsonl", "run.lock")  # that are open while something waits, beside the database
_UNNAMED = ("status.json.*.part", "*.state.json.*.part", "audit.head.*.part", "run.json.*.part", "run.db.part")

log = logging.getLogger("piebald.federation")


class HeldLease(NamedTuple):
    """A lease as others see it: its token, and the content of its file, which changes while the holder lives."""

    token: int
    content: str

    @property
    def holder(self) -> str:
        """Who holds it, in words that follow "held"."""
        return printable(self.content.partition(" ")[2].strip())


class Lease:
    """The lease of this process; there is one at most.

    Args:
        folder: the folder that is shared.
        token: greater than that of all holders before.
    """

    current: Lease | None = None

    def __init__(self, folder: Path, token: int) -> None:
        self.token, self._path, self._beats = token, folder / f"lease-{token}", 0
        Lease.current = self

    @classmethod
    def take(cls, folder: Path, seen: HeldLease | None) -> Self | None:
        """Take a lease, from the one that is seen if there is one; return None where another one was faster."""
        newest = next(iter(_files(folder)), None)
        try:
            if newest is None:
                token, first = 1, folder / "lease-1"
                os.close(os.open(first, os.O_WRONLY | os.O_CREAT | os.O_EXCL | NO_LINK, 0o600))
                # it may have been taken on, and its name be free again, since the look at the folder
                if any(path != first for _, path in _files(folder)):
                    first.unlink(missing_ok=True)
                    return None
            else:
                number, path = newest
                token = number + 1
                if (path.suffix != ".lost") != (seen is not None) or (seen is not None and seen.token != number):
                    return None
                path.rename(folder / f"lease-{token}")
        except (FileNotFoundError, FileExistsError):
            return None
        lease = cls(folder, token)
        lease.beat()
        return lease

    def beat(self) -> None:
        """Give a sign of life; end this process where the lease was taken."""
        self._beats += 1
        content = f"{self._beats:018d} by process {os.getpid()} on {socket.gethostname()}\n".encode()
        try:
            handle = os.open(self._path, os.O_WRONLY | NO_LINK)
            try:
                os.pwrite(handle, content, 0)
                os.ftruncate(handle, len(content))  # the holder before may have had a longer name
            finally:
                os.close(handle)
        except OSError as error:
            if _gone(error):
                self._end()
            # a disk that takes nothing: whoever stands by sees no sign, and may find another way to it

    def held(self) -> bool:
        """Return whether nobody has taken it.

        Raises:
            OSError: this cannot be found out.
        """
        try:
            os.close(os.open(self._path, os.O_RDONLY | NO_LINK))
        except OSError as error:
            if _gone(error):
                return False
            if error.errno not in (errno.EMFILE, errno.ENFILE):
                raise
            return self._path.exists()  # which needs no file descriptor, but may be answered from a cache
        return True

    def give_back(self) -> None:
        """Let the next one have it at once."""
        with suppress(OSError):
            self._path.rename(self._path.with_name(f"{self._path.name}.lost"))
        Lease.current = None

    def _end(self) -> NoReturn:
        fields = {"event": "lease", "folder": str(self._path.parent), "token": self.token}
        log.critical(
            "another server has taken the lease of %(folder)s from this one, which gave no sign of life: this process "
            "ends, and writes nothing any more", fields,
        )  # fmt: skip
        sys.stderr.flush()
        # at once: SQLite would delete the journal of the next holder, by its name, when the database is closed
        os._exit(1)


def check() -> None:
    """End this process where its lease was taken; nothing where it has none.

    Raises:
        OSError: it cannot be found out.
    """
    if Lease.current is not None and not Lease.current.held():
        Lease.current._end()


def write(path: Path, text: str, lasting: bool = True) -> None:
    """Write a file as `write_private` does, and not over that of a process that has taken the lease.

    Raises:
        OSError: it cannot be written.
    """
    try:
        write_private(path, text, lasting, ready=check)
    finally:
        check()  # before anybody is told; and where the next holder has deleted what was to be the file


def token() -> int:
    """Return the token of this process's lease, 0 where it has none."""
    return 0 if Lease.current is None else Lease.current.token


def newest(folder: Path) -> HeldLease | None:
    """Return the lease that is held in a folder, None where there is none."""
    for number, path in _files(folder):
        if path.suffix != ".lost":
            with suppress(FileNotFoundError):
                return HeldLease(number, path.read_text("ascii", errors="replace")[:500])
    return None


def seize(folder: Path) -> None:
    """Give the files of a folder other inodes, so that a holder that lost the lease writes to the old ones.

    The holder may still end one transaction that it was in.  It is in the copy as a whole or not at all: a journal that
    is copied after the database has all that the database lacks, since no second transaction begins.

    Raises:
        RunFolderError: the database is damaged, or a file cannot be read or replaced.
    """
    from piebald.storage import schema  # here, since it loads PyTorch, which a look at a queue does not need

    with schema.explained(f"{folder} cannot be taken over"):
        for part in (part for pattern in _UNNAMED for part in folder.glob(pattern)):
            part.unlink(missing_ok=True)
        for name in _FILES:
            with suppress(FileNotFoundError):
                _copied(folder, name).replace(folder / name)
        database = folder / schema.DATABASE
        if not database.exists():
            return
        copy = _copied(folder, database.name)
        with suppress(FileNotFoundError):
            _copied(folder, f"{database.name}-wal").replace(f"{copy}-wal")
        with closing(schema.connect(copy)) as db:
            schema.check(db, folder)
            db.execute("PRAGMA journal_mode = DELETE")
        copy.replace(database)
        for suffix in ("-wal", "-shm"):
            Path(f"{database}{suffix}").unlink(missing_ok=True)


def _copied(folder: Path, name: str) -> Path:
    """Return a copy of a file beside it."""
    copy = folder / f"{name}.seized"
    copy.unlink(missing_ok=True)
    shutil.copy2(folder / name, copy, follow_symlinks=False)
    return copy


def _files(folder: Path) -> list[tuple[int, Path]]:
    """Return all leases with their tokens, the newest first."""
    matches = [(match, path) for path in folder.iterdir() if (match := _NAME.fullmatch(path.name))]
    return sorted(((int(match[1]), path) for match, path in matches), reverse=True)


def _gone(error: OSError) -> bool:
    return isinstance(error, FileNotFoundError) or error.errno == errno.ESTALE
