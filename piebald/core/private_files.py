"""Files that only their owner can read."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from piebald.core.files import NO_LINK

_PART = re.compile(r".+\.(\d+)\.part")  # what is written first (`_part`), with the process that does


def write_private(
    path: Path,
    text: str | bytes | Sequence[memoryview],
    lasting: bool = True,
    ready: Callable[[], object] = bool,
) -> None:
    """Write a file with mode 0600, either completely or not at all.

    Args:
        path: the file, which is replaced if it exists.
        text: the new content, or its pieces.
        lasting: whether to flush it to the disk, so that it survives a power failure.
        ready: called once the new content is beside the file, before it is replaced.
    """
    pieces = [text.encode()] if isinstance(text, str) else [text] if isinstance(text, bytes) else text
    temporary = _part(path)
    # with its mode from the beginning: a file that is narrowed later could be opened in between
    handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(handle, "wb") as file:
            file.writelines(pieces)
            file.flush()
            if lasting:
                # before the file has its name: else a power failure could leave the name with nothing in it
                os.fsync(file.fileno())
        ready()
        os.replace(temporary, path)
        if lasting:
            # the name is an entry of the folder, which the file's own fsync does not write
            sync_folder(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def make_private(path: Path) -> None:
    """Give a file mode 0600, and make it where it is not there, for libraries that would make it with another mode.

    Raises:
        OSError: it cannot be made.
    """
    try:
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
    except FileExistsError:
        with suppress(OSError):  # it is another user's, who says who may read it, or no file, which is refused later
            handle = os.open(path, os.O_RDONLY | NO_LINK | getattr(os, "O_NONBLOCK", 0))
            try:
                os.fchmod(handle, 0o600)
            finally:
                os.close(handle)


@contextmanager
def replaced(path: Path) -> Iterator[Path]:
    """A path to write to.  Its file replaces this one, with mode 0600, once the block has ended without an error.

    Args:
        path: the file, which is replaced if it exists.
    """
    temporary = _part(path)
    try:
        yield temporary
        # before it has the name that others know: a library made it, with a mode of its own
        temporary.chmod(0o600)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def held_alone(path: Path) -> Iterator[None]:
    """Nobody else's turn with a file, in this process or another one, while this lasts.

    Args:
        path: the file; its folder is made where it is not there, and the lock is a file beside it.

    Raises:
        OSError: the folder cannot be written.
    """
    import fcntl  # which Windows does not have

    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    # a file of its own: `path` is replaced, and a lock on it would be one on the old file
    guard = os.open(path.with_name(f"{path.name}.lock"), os.O_CREAT | os.O_RDWR | NO_LINK, 0o600)
    try:
        fcntl.flock(guard, fcntl.LOCK_EX)
        yield
    finally:
        os.close(guard)


def _part(path: Path) -> Path:
    """Return the path to which a file is written first; other processes and threads may write the same file."""
    # the process in the name, so that `clear_parts` knows whether its writer still lives
    temporary = path.with_name(f"{path.name}.{threading.get_ident()}.{os.getpid()}.part")
    temporary.unlink(missing_ok=True)  # a link with this name would be written through
    return temporary


def sync_folder(folder: Path) -> None:
    """Force the names of a folder's files to the disk, on systems where a folder can be opened."""
    if os.name != "posix":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def clear_parts(folder: Path) -> None:
    """Delete what processes that were killed had begun to write in a folder, and in those below it."""
    if os.name == "nt":  # where nobody can ask whether a process lives
        return
    for path in folder.rglob("*.part"):
        if (match := _PART.fullmatch(path.name)) and not _lives(int(match[1])):
            with suppress(OSError):
                path.unlink()


def _lives(process: int) -> bool:
    """Return whether there is a process of this number other than this one, which writes nothing yet."""
    if process == os.getpid():
        return False
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:  # it is somebody else's
        return True
    return True
