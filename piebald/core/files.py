"""Regular files, opened without waiting and measured before memory is taken for them."""

from __future__ import annotations

import errno
import json
import os
import stat
from io import BufferedReader
from pathlib import Path
from typing import Any

from piebald.core.errors import SettingError

RATIO = 500  # of honest data; text of zeros compresses 1000 times
SMALL = 256 << 20  # bytes that may always be read
MOST_TEXT = 16 << 20  # bytes of settings, credentials and records
_EXPANSION = 25  # bytes of an empty list for each of its text
_KINDS = {
    stat.S_IFDIR: "a directory",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFLNK: "a link",
}
_FLAGS = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)  # a pipe would wait for its writer
NO_LINK = getattr(os, "O_NOFOLLOW", 0)  # Windows has no such flag


class UnfitFile(OSError):
    """A file that is not read: no regular file, a link where none may be, or one that would fill the memory."""

    def __init__(self, why: str, code: int = errno.EINVAL, path: Path | str | None = None) -> None:
        super().__init__(code, why, None if path is None else str(path))

    def __str__(self) -> str:
        return str(self.strerror)


def os_reason(error: OSError) -> str:
    """Return why something failed, in the system's words."""
    return (error.strerror or str(error)).lower()


def regular(path: Path | str, links: bool = True) -> int:
    """Check that a path is a regular file, for libraries that open paths themselves.

    Args:
        path: the file.
        links: whether it may be a symbolic link to one.

    Returns:
        Its size in bytes.

    Raises:
        OSError: it is not there, or is something else, which may wait for ever or never end.
    """
    return _size(path, os.stat(path, follow_symlinks=links))


def _size(path: Path | str, about: os.stat_result) -> int:
    if not stat.S_ISREG(about.st_mode):
        kind = _KINDS.get(stat.S_IFMT(about.st_mode), "no file")
        raise UnfitFile(f"it is {kind}, and only files are read", path=path)
    # st_blocks counts 512 bytes, whatever the blocks of the file system are
    stored = getattr(about, "st_blocks", 0) * 512
    if about.st_size > max(SMALL, stored):  # holes are read as zeros
        stored = _with_data(path, about.st_size) if stored == 0 else stored
        check_size(path, about.st_size, stored)
    return about.st_size


def _with_data(path: Path | str, size: int) -> int:
    """0 of a file that is one hole, and the size of others: some file systems do not tell how much they store."""
    handle = os.open(path, _FLAGS)
    try:
        os.lseek(handle, 0, getattr(os, "SEEK_DATA", os.SEEK_SET))
    except OSError:
        return 0
    finally:
        os.close(handle)
    return size


def check_size(path: Path | str, wanted: int, stored: int, remedy: str = "replace it") -> None:
    """Refuse a file that expands too far.

    A file may expand to half of the memory that this process may have, and a large one to `RATIO` times its size.

    Args:
        path: the file, for the error message.
        wanted: bytes that reading it would take.
        stored: bytes that it has.
        remedy: what the error message advises.

    Raises:
        UnfitFile: it does.
    """
    if wanted > memory() // 2 or (wanted > SMALL and wanted > RATIO * stored):
        raise UnfitFile(
            f"{path} would take {wanted:,} bytes in memory but has {stored:,}: it is damaged, or made to fill the "
            f"memory; {remedy}",
            errno.EFBIG,
        )


def memory() -> int:
    """The bytes of memory that this process may have: of the machine, or its own limit if that is lower."""
    # Windows has no sysconf, and a guess is better than no limit
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else 8 << 30
    try:
        import resource
    except ImportError:  # Windows
        return machine
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    return machine if limit == resource.RLIM_INFINITY else min(machine, limit)


def opened(path: Path | str, links: bool = True) -> BufferedReader:
    """Open a regular file for reading; see `regular`.

    Raises:
        OSError: it is not there, is something else, or cannot be read.
    """
    regular(path, links)  # before it is opened, which has effects on some devices
    handle = os.open(path, _FLAGS | (0 if links else NO_LINK))
    file = os.fdopen(handle, "rb")
    try:
        # again, of what is open: the path may name another file by now
        _size(path, os.fstat(handle))
    except BaseException:
        file.close()
        raise
    return file


def read_bytes(path: Path | str, most: int | None = MOST_TEXT, links: bool = True) -> bytes:
    """Read a file.

    Args:
        path: the file.
        most: the largest number of bytes; None for what memory can hold.
        links: whether it may be a symbolic link.

    Raises:
        OSError: it cannot be read, or is longer.
    """
    with opened(path, links) as file:
        if most is None:
            size = os.fstat(file.fileno()).st_size
            check_size(path, size, size)
        # one byte more than allowed tells a longer file, however its size changes meanwhile
        content = file.read(-1 if most is None else most + 1)
    if most is not None and len(content) > most:
        raise UnfitFile(f"it is longer than the {most:,} bytes that are read of such a file", errno.EFBIG, path)
    return content


def read_text(path: Path | str, most: int = MOST_TEXT, encoding: str = "utf-8") -> str:
    """Read a text; see `read_bytes`.  Line ends become newlines.

    Raises:
        OSError: it cannot be read, or is longer.
        UnicodeDecodeError: it is no text in this encoding.
    """
    return read_bytes(path, most).decode(encoding).replace("\r\n", "\n").replace("\r", "\n")


def settings_text(path: Path | str) -> str:
    """Return the text of a file of settings, which is in UTF-8.

    Raises:
        SettingError: it cannot be read.
    """
    try:
        return read_text(path, encoding="utf-8-sig")
    except UnicodeDecodeError:
        raise SettingError(f"{path} is not a text file in UTF-8") from None
    except OSError as error:
        raise SettingError(f"{path} cannot be read: {os_reason(error)}") from None


def read_json(path: Path | str) -> Any:
    """Read a JSON value; see `read_bytes`.

    Raises:
        OSError: it cannot be read, or is longer.
        ValueError: it is no JSON, or lists and tables are nested too deeply.
    """
    return json_value(read_bytes(path), path)


def json_value(text: str | bytes, where: Path | str) -> Any:
    """A JSON value from its text.

    Raises:
        UnfitFile: it would fill the memory.
        ValueError: it is no JSON, or lists and tables are nested too deeply.
    """
    check_size(where, _EXPANSION * len(text), len(text))
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("lists and tables are nested too deeply") from None
