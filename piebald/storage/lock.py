"""A lock that allows one writer for each run folder, and how its holder is asked to let it go.

Whoever can write to the folder asks by a file (`ask_to_stop`), also from another container or machine, where the
number of the holder's process is nobody's or a stranger's.
"""

from __future__ import annotations

import os
import stat
import weakref
from contextlib import suppress
from pathlib import Path

from piebald.core.errors import RunFolderError
from piebald.core.files import NO_LINK

try:
    import fcntl
except ImportError:  # Windows: a second writer is not detected there
    fcntl = None  # type: ignore[assignment]


STOP = "run.stop"  # there while the holder is asked to stop; what is in it does not matter

# the locks of this process, which its forked workers inherit and have to let go
_held: weakref.WeakSet[RunLock] = weakref.WeakSet()


def _release_in_child() -> None:
    """Close inherited handles: a worker that outlives its killed parent must not keep the run locked."""
    for lock in list(_held):
        lock.drop()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_release_in_child)


OWN_FILES = (
    *("run.lock", "run.db*", "trials.json*", "start.safetensors*"),
    *("vectors-*.safetensors*", "client-state-*.safetensors*", "chosen-*.safetensors*"),
)


def refuse_links(folder: Path, written: bool = True) -> None:
    """Refuse a folder in which a file of the run is a link or no file: it would be read, or overwritten, elsewhere.

    Args:
        folder: the run folder.
        written: whether it will be written to, so that a hard link is refused as well.

    Raises:
        RunFolderError: one is.
    """
    for path in sorted(path for pattern in OWN_FILES for path in folder.glob(pattern)):
        try:
            status = path.lstat()
        except FileNotFoundError:  # whoever writes the run has deleted it meanwhile
            continue
        if not stat.S_ISREG(status.st_mode) or (written and status.st_nlink > 1):
            kind = "no file" if not (stat.S_ISLNK(status.st_mode) or stat.S_ISREG(status.st_mode)) else "a link"
            use = "a run would write to it" if written else "no run writes that"
            raise RunFolderError(f"{path} is {kind}, and {use}: remove it, or choose another folder")


def create_new(path: Path) -> None:
    """Create an empty file, in place of one or of a link with this name."""
    path.unlink(missing_ok=True)
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | NO_LINK, 0o600))


def ask_to_stop(folder: Path) -> None:
    """Ask whoever holds the lock of a folder to stop, as Ctrl-C does."""
    create_new(folder / STOP)


def heed_stop() -> None:
    """Stop, as by Ctrl-C, where this process is asked to let go of a folder; for its main thread.

    Raises:
        KeyboardInterrupt: it is asked.
    """
    for lock in list(_held):
        if lock.is_unwanted():
            lock.forget_requests()  # what happens while it ends is not interrupted again
            raise KeyboardInterrupt


class RunLock:
    """An exclusive lock on `run.lock`, held until `release` or until the process dies.

    The file names its holder until `release`: one that nobody holds and that names a process was left by one that was
    killed.

    Raises:
        RunFolderError: another writer holds it, or the file is a link, which would be overwritten elsewhere.
    """

    def __init__(self, folder: Path) -> None:
        refuse_links(folder)
        self._stop = folder / STOP
        # not truncated before the lock is held, since the file names the holder to whoever is refused
        self._handle: int | None = os.open(folder / "run.lock", os.O_RDWR | os.O_CREAT | NO_LINK, 0o600)
        _held.add(self)
        if fcntl is None:
            return self.forget_requests()
        try:
            fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.read(self._handle, 20).decode(errors="replace").strip() or "unknown"
            self.drop()
            raise RunFolderError(
                f"{folder} is being written to by process {holder}: wait for it to end, or stop it"
            ) from None
        except OSError:  # some network file systems have no locks; the run goes on without one
            return self.forget_requests()
        os.ftruncate(self._handle, 0)
        os.write(self._handle, str(os.getpid()).encode())
        self.forget_requests()  # to the holder before

    def is_unwanted(self) -> bool:
        """Return whether its holder is asked to stop."""
        return self._handle is not None and os.path.lexists(self._stop)

    def forget_requests(self) -> None:
        """Take away the file by which somebody has asked for a stop."""
        with suppress(OSError):
            self._stop.unlink()

    def release(self) -> None:
        """Release the lock, and take this process's number out of the file.  May be called twice."""
        if self._handle is not None and fcntl is not None:
            with suppress(OSError):  # on a disk that cannot be written any more
                os.ftruncate(self._handle, 0)
        self.drop()

    def drop(self) -> None:
        """Close the file and leave it as it is."""
        if self._handle is not None:
            # the file stays: a lock on a file that was deleted keeps nobody out
            os.close(self._handle)
            self._handle = None
