"""Arrays that need not fit into memory: large ones lie in temporary files, of which the system reads what it needs."""

from __future__ import annotations

import errno
import math
import os
import tempfile
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from piebald.core.errors import SettingError

MOST_IN_MEMORY = 1 << 26  # bytes of an array that stays in memory
CELLS = 1 << 22  # of a table that are read at once
BLOCK = 1 << 17  # rows that are worked on at once, so that what is made on the way takes no more memory for more rows


def large_array(shape: Sequence[int], dtype: DTypeLike) -> NDArray[Any]:
    """Return an array without values, in a file without a name where it is large; the file is gone with the array.

    Raises:
        SettingError: the disk has no room for it.
    """
    size = math.prod(shape) * np.dtype(dtype).itemsize
    if size <= MOST_IN_MEMORY:
        return np.empty(shape, dtype)
    try:
        with tempfile.TemporaryFile() as file:
            _reserve(file.fileno(), size)
            return np.asarray(np.memmap(file, dtype, "r+", shape=tuple(shape)))
    except OSError as error:
        raise SettingError(
            f"a large table needs {size / 2**30:.1f} GB of temporary files, for which {tempfile.gettempdir()} has no "
            f"room: set TMPDIR to a folder of a larger disk ({error})"
        ) from None


def _reserve(handle: int, size: int) -> None:
    """Take room for a file now, since a disk that is full later would end the process without a word."""
    if hasattr(os, "posix_fallocate"):
        try:
            os.posix_fallocate(handle, 0, size)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):  # of file systems that cannot
                raise


def blocks(rows: int, size: int = 0) -> Iterator[slice]:
    """Yield slices of so many rows, `BLOCK` by default, that cover all rows; an empty one where there are none."""
    size = size or BLOCK
    return (slice(first, min(first + size, rows)) for first in range(0, max(rows, 1), size))


def rows_at_once(columns: int) -> int:
    """Return how many rows of so many columns are read at once."""
    return max(CELLS // max(columns, 1), 1)
