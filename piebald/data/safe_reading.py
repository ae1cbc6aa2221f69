"""Files that claim more than they hold: refused before memory is allocated for them.

A small file may decompress to terabytes, and a header may promise an array that no machine can hold.  Sizes are looked
at first: a file may expand to at most half of this machine's memory, and a large one to at most `RATIO` times its size.
"""

from __future__ import annotations

import gzip
import math
import os
import tokenize
import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from piebald.errors import SettingError

RATIO = 500  # of honest data; text of zeros compresses 1000 times
SMALL = 256 << 20  # bytes that may always be read
MOST_COLUMNS = 100_000
MOST_PIXELS = 1 << 26  # of one image


def check_size(path: Path | str, wanted: int, stored: int) -> None:
    """Refuse a file that expands too far.

    Args:
        path: the file, for the error message.
        wanted: bytes that reading it would take.
        stored: bytes that it has.

    Raises:
        SettingError: it does.
    """
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else 8 << 30
    if wanted > memory // 2 or (wanted > SMALL and wanted > RATIO * stored):
        raise SettingError(
            f"{path} would take {wanted:,} bytes in memory but has {stored:,}: it is damaged, or made to fill the "
            "memory; replace it"
        )


def read_arrays(path: Path, names: Sequence[str] | None = None) -> dict[str, NDArray[Any]]:
    """Read arrays of an npz file; nothing is unpickled.

    Args:
        path: the file.
        names: the arrays to read, by default all.

    Raises:
        SettingError: the file cannot be read, lacks an array, or claims more than it holds.
    """
    try:
        with path.open("rb") as file, zipfile.ZipFile(file) as archive:
            members = {entry.filename.removesuffix(".npy"): entry for entry in archive.infolist()}
            for name in members if names is None else names:
                if name not in members:
                    raise SettingError(
                        f"{path} must hold an array {name!r}, got {', '.join(members) or 'none'}: replace the file"
                    )
            chosen = {name: entry for name, entry in members.items() if names is None or name in names}
            check_size(path, sum(entry.file_size for entry in chosen.values()), path.stat().st_size)
            return {name: _array(archive, entry, path) for name, entry in chosen.items()}
    except SettingError:
        raise
    except (
        OSError,
        EOFError,
        ValueError,
        TypeError,
        SyntaxError,
        OverflowError,
        MemoryError,
        NotImplementedError,
    ) as error:
        raise SettingError(f"{path} cannot be read as npz, it may be damaged: replace it ({error})") from None
    except (zlib.error, zipfile.BadZipFile, RuntimeError, tokenize.TokenError) as error:
        raise SettingError(f"{path} cannot be read as npz, it may be damaged: replace it ({error})") from None


def _array(archive: zipfile.ZipFile, entry: zipfile.ZipInfo, path: Path) -> NDArray[Any]:
    """One array, whose header is compared with its size first."""
    with archive.open(entry) as file:
        version = np.lib.format.read_magic(file)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, _, dtype = read(file)
        if dtype.hasobject:
            raise SettingError(
                f"{path} cannot be read as npz: {entry.filename} holds Python objects, which are never unpickled: save "
                "numbers, or text with array.astype(str)"
            )
        if math.prod(shape) * dtype.itemsize > entry.file_size:
            raise SettingError(f"{path}: {entry.filename} claims to be {list(shape)} but has {entry.file_size} bytes")
    with archive.open(entry) as file:
        found: NDArray[Any] = np.lib.format.read_array(file, allow_pickle=False)
        return found


def check_table(path: Path, separator: str | None) -> None:
    """Refuse a table with too many columns, or a compressed one that expands too far; None is no text.

    Raises:
        SettingError: it is one.
    """
    if path.suffix == ".gz":
        stored, read = path.stat().st_size, 0
        with gzip.open(path) as file:
            while chunk := file.read(1 << 20):
                read += len(chunk)
                check_size(path, read, stored)
    if separator is None:
        return
    with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
        columns = file.readline(64 * MOST_COLUMNS).count(separator.encode()) + 1
    if columns > MOST_COLUMNS:
        raise SettingError(f"{path} has more than {MOST_COLUMNS:,} columns: leave out those that are not needed")
