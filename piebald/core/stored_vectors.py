"""Arrays and named vectors that lie in files and are read when they are needed, so that they take no memory."""

from __future__ import annotations

import errno
import math
import mmap
import os
import tempfile
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import DTypeLike, NDArray
from torch import Tensor

from piebald.core.errors import RuntimeFault, SettingError

LARGE = 1 << 17  # bytes: what takes less is kept in memory


@dataclass(frozen=True, slots=True)
class Place:
    """The place of a vector in a file: its type, its shape, and the offset of its first byte."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class StoredVectors(Mapping[str, Tensor]):
    """Vectors in a file.  Each access reads anew and makes a new tensor, which its user should not keep.

    Args:
        file: a file, which ends with the last who has it.
        places: where the vectors lie, by name.
    """

    def __init__(self, file: NamelessFile, places: Mapping[str, Place]) -> None:
        self._file, self._places = file, dict(places)

    @classmethod
    def keep(cls, folder: Path, vectors: Mapping[str, Tensor]) -> StoredVectors:
        """Write vectors into a nameless file in a folder, which is gone when nobody needs it, however the process ends.

        Raises:
            OSError: the disk is full, or the folder cannot be written.
        """
        file, places, start = NamelessFile(folder), dict[str, Place](), 0
        for name, vector in vectors.items():
            places[name] = Place(vector.dtype, tuple(vector.shape), start)
            start += file.write(raw(vector))
        return cls(file, places)

    def __getitem__(self, name: str) -> Tensor:
        return self.part(name, slice(None)).view(self._places[name].shape)

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)

    def numel(self, name: str) -> int:
        """Return the number of numbers in a vector."""
        return math.prod(self._places[name].shape)

    def part(self, name: str, span: slice) -> Tensor:
        """Some of the numbers of a vector, which counts as flat, as a new one.

        Raises:
            RuntimeFault: the file is shorter than it was.
        """
        place = self._places[name]
        start, stop, _ = span.indices(self.numel(name))
        numbers = torch.empty(max(stop - start, 0), dtype=place.dtype)
        self._file.read_into(raw(numbers), place.start + start * place.dtype.itemsize)
        return numbers


def mapped(vector: Tensor, above: int, folder: Path) -> Tensor:
    """A vector of more than `above` bytes, moved to a nameless file in a folder and mapped from it; else as it is.

    The numbers are the same.  The system reads a page of the file when it is needed and gives it up where memory is
    short, so such a vector costs room on the disk.  The file is gone when the last tensor of it is, however the process
    ends.  The result must not be written to.

    Raises:
        RuntimeFault: the file cannot be made or does not fit.
    """
    if vector.nbytes <= max(above, 0):
        return vector
    try:
        file = NamelessFile(folder)
        file.write(raw(vector))
        return file.mapped(vector.dtype).view(vector.shape)
    except OSError as error:
        raise RuntimeFault(
            f"a vector of {vector.nbytes:,} bytes cannot be kept in a file in {folder} ({error.strerror}): make room "
            "there, or raise the runtime's map_above"
        ) from error


def part_of(vectors: Mapping[str, Tensor], name: str, span: slice) -> Tensor:
    """Some of the numbers of a vector, which counts as flat, wherever it lies."""
    return vectors.part(name, span) if isinstance(vectors, StoredVectors) else vectors[name].flatten()[span]


def numel_of(vectors: Mapping[str, Tensor], name: str) -> int:
    """Return the number of numbers in a vector, wherever it lies."""
    return vectors.numel(name) if isinstance(vectors, StoredVectors) else vectors[name].numel()


def raw(vector: Tensor) -> memoryview:
    """The bytes of a vector; without a copy where it is contiguous and on the CPU."""
    plain = vector.detach().cpu().contiguous().reshape(-1)
    # torch views no empty vector as one of other numbers
    return plain.view(torch.uint8).numpy().data if plain.numel() else memoryview(b"")


class NamelessFile:
    """A file without a name, so that nobody else opens it, and nothing stays of it however the process ends.

    Args:
        folder: where it takes its room.

    Raises:
        OSError: no file can be made there.
    """

    def __init__(self, folder: Path) -> None:
        # a handle without Python's buffer, and without a file object that warns when nobody closes it
        with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
            self._handle = os.dup(file.fileno())
        weakref.finalize(self, os.close, self._handle)

    def write(self, data: bytes | memoryview) -> int:
        """Append bytes; returns how many.

        Raises:
            OSError: the disk is full.
        """
        # the system may write less than it is given, at most 2 GiB at a time on Linux
        rest = memoryview(data)
        while len(rest):
            rest = rest[os.write(self._handle, rest) :]
        return len(data)

    def mapped(self, dtype: torch.dtype) -> Tensor:
        """All of it as a flat tensor, which reads the file when it is read.

        Raises:
            OSError: the file cannot be mapped.
        """
        # mmap duplicates the handle, so the tensor may outlive this object
        return torch.frombuffer(mmap.mmap(self._handle, 0), dtype=dtype)

    def read_into(self, room: memoryview, start: int) -> None:
        """Fill some room with its bytes from an offset on.

        Raises:
            RuntimeFault: there are fewer.
        """
        while len(room):
            # at an offset of the call's own: threads that share the handle do not move each other's position
            if not (count := os.preadv(self._handle, [room], start)):
                raise RuntimeFault("a file of vectors is shorter than it was: run this again")
            room, start = room[count:], start + count


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
