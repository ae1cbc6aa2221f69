"""Tensors of clients that are kept between tasks, and arrays and named vectors that lie in files.

What belongs to clients is kept in RAM and in a file, or in tables with rows of recent clients.  What lies in files is
read when it is needed, so that it takes no memory.
"""

from __future__ import annotations

import errno
import math
import mmap
import os
import tempfile
import weakref
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import DTypeLike, NDArray
from torch import Tensor

from piebald.core.errors import RuntimeFault, SettingError

Kinds = tuple[tuple[str, torch.Size, torch.dtype], ...]  # names, shapes and types of a client's tensors


class TensorStore:
    """Named tensors of each client; the least recently used ones move to a file once `budget` bytes are full.

    Only clients that took part are stored, so it grows with the clients asked, not with the clients registered.

    Args:
        budget: bytes kept in RAM.
        prefix: the first word of its tensors' names in checkpoints: "client_state" for the state of clients, "last" for
            the last models that the server keeps.
    """

    def __init__(self, budget: int = 4 << 30, prefix: str = "client_state") -> None:
        self.budget, self.prefix = budget, prefix
        self._near: OrderedDict[int, dict[str, Tensor]] = OrderedDict()
        self._far: dict[int, tuple[int, Kinds]] = {}
        self._kinds: dict[Kinds, Kinds] = {}  # each once: most clients have the same
        self._free: dict[int, list[int]] = {}
        self._bytes = 0
        self._file: IO[bytes] | None = None  # made when it is first needed
        self._changed: set[int] = set()

    def __contains__(self, client: int) -> bool:
        return client in self._near or client in self._far

    def __iter__(self) -> Iterator[int]:
        yield from sorted({*self._near, *self._far})

    def get(self, client: int) -> Mapping[str, Tensor]:
        """A client's tensors, which become the most recently used ones."""
        if client in self._far:
            self._keep(client, self._fetch(client))
        self._near.move_to_end(client)
        return self._near[client]

    def set(self, client: int, tensors: Mapping[str, Tensor]) -> None:
        """Replace a client's tensors."""
        before = self._near.pop(client, None)
        if before is not None:
            self._bytes -= _size(before)
        elif client in self._far:
            self._release(*self._far.pop(client))
        self._keep(client, dict(tensors))
        self._changed.add(client)

    def changed(self) -> dict[str, Tensor]:
        """The tensors that changed since the last call, named "PREFIX/CLIENT/NAME"."""
        tensors = {
            f"{self.prefix}/{client}/{name}": t
            for client in sorted(self._changed)
            for name, t in self.get(client).items()
        }
        self._changed.clear()
        return tensors

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore the tensors that `changed` returned, over all calls."""
        self.adopt(tensors)
        self._changed.clear()

    def adopt(self, tensors: Mapping[str, Tensor]) -> None:
        """Take over tensors as `changed` names them; to the next checkpoint they are changes."""
        for client, tensors_of_client in by_client(tensors, self.prefix).items():
            self.set(client, tensors_of_client)

    def close(self) -> None:
        """Drop all tensors and close the file."""
        if self._file is not None:
            self._file.close()
        self._near.clear()
        self._far.clear()

    def _release(self, place: int, kinds: Kinds) -> None:
        """Mark a place in the file as free."""
        self._free.setdefault(_length(kinds), []).append(place)

    def _keep(self, client: int, tensors: dict[str, Tensor]) -> None:
        self._near[client] = tensors
        self._bytes += _size(tensors)
        # the newest stays in memory even where it alone is larger than the budget
        while self._bytes > self.budget and len(self._near) > 1:
            oldest = next(iter(self._near))
            self._spill(oldest)

    def _spill(self, client: int) -> None:
        """Move a client's tensors to the file, into a free place of the right size if there is one."""
        if self._file is None:
            self._file = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the store
            weakref.finalize(self, self._file.close)
        tensors = self._near.pop(client)
        self._bytes -= _size(tensors)
        described = tuple((name, tensor.shape, tensor.dtype) for name, tensor in tensors.items())
        kinds = self._kinds.setdefault(described, described)
        # holes of other sizes are not split: most clients have tensors of the same shapes
        holes = self._free.get(_length(kinds))
        place = holes.pop() if holes else self._file.seek(0, 2)
        self._file.seek(place)
        for tensor in tensors.values():
            self._file.write(tensor.contiguous().numpy().tobytes())
        self._far[client] = (place, kinds)

    def _fetch(self, client: int) -> dict[str, Tensor]:
        assert self._file is not None
        place, kinds = self._far.pop(client)
        # only a later spill can take the place, so the bytes are still there to be read below
        self._release(place, kinds)
        self._file.seek(place)
        tensors = {}
        for name, shape, dtype in kinds:
            raw = bytearray(self._file.read(shape.numel() * dtype.itemsize))
            tensors[name] = torch.frombuffer(raw, dtype=dtype).view(shape) if raw else torch.empty(shape, dtype=dtype)
        return tensors


def by_client(tensors: Mapping[str, Tensor], prefix: str) -> dict[int, dict[str, Tensor]]:
    """The tensors named "PREFIX/CLIENT/NAME", by client."""
    by_number: dict[int, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        kind, _, rest = name.partition("/")
        if kind == prefix:
            number, tensor_name = rest.split("/", 1)
            by_number.setdefault(int(number), {})[tensor_name] = tensor
    return by_number


def under(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """The tensors whose names begin with a prefix, which is removed."""
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def _size(tensors: Mapping[str, Tensor]) -> int:
    return sum([tensor.nbytes for tensor in tensors.values()])


def _length(kinds: Kinds) -> int:
    return sum(shape.numel() * dtype.itemsize for _, shape, dtype in kinds)


NAMES, SEEN = "clients", "seen"  # in the component's state: whose rows these are, and the step they were last seen at


class Places(NamedTuple):
    """The places of rows in a new table.

    Attributes:
        kept: [k], the old rows that stay, in front.
        rows: [n], the rows of the clients asked for.
        size: the number of rows.
    """

    kept: Tensor
    rows: Tensor
    size: int


def places_of(state: dict[str, Any], clients: Sequence[int], version: int, most: int) -> Places:
    """Make room for some clients' rows and return where they are; writes the list of clients to the state.

    A table with a row for every known client would grow with the federation, and one with their pairs with its square:
    at 100,000 clients 40 GB in float32.  So the clients that were absent longest are forgotten.

    Args:
        state: the component's.
        clients: of this step.
        version: of this step.
        most: clients that are remembered; a step's own are in any case.
    """
    empty = torch.zeros(0, dtype=torch.int64)
    names, seen_at = state.get(NAMES, empty), state.get(SEEN, empty)
    # a client that is asked twice in a step has one row; `fromkeys` keeps the order
    now = torch.tensor(list(dict.fromkeys(clients)), dtype=torch.int64)
    present = torch.isin(names, now)
    fresh = now[~torch.isin(now, names)]
    # this step's clients all need a row, also where they are more than `most`
    spare = max(0, len(names) + len(fresh) - max(most, len(now)))
    absent = torch.nonzero(~present).flatten()
    # stable, so that among clients last seen at the same step it is always the same ones that go
    gone = absent[seen_at[absent].argsort(stable=True)[:spare]]
    stays = torch.ones(len(names), dtype=torch.bool)
    stays[gone] = False
    names = torch.cat([names[stays], fresh])
    seen_now = torch.cat([seen_at[stays], torch.zeros_like(fresh)])
    place = {int(name): row for row, name in enumerate(names.tolist())}
    rows = torch.tensor([place[client] for client in clients], dtype=torch.int64)
    seen_now[rows] = version
    state[NAMES], state[SEEN] = names, seen_now
    return Places(torch.nonzero(stays).flatten(), rows, len(names))


def resized(table: Tensor | None, places: Places, columns: int) -> Tensor:
    """A new table [size, columns] whose rows lie at their new places; those of new clients are 0."""
    resized_table = torch.zeros(places.size, columns)
    if table is not None:
        resized_table[: len(places.kept)] = table[places.kept]
    return resized_table


def resized_pairs(table: Tensor | None, places: Places) -> Tensor:
    """A new table [size, size] of pairs, likewise."""
    # most often the same clients are asked again; a copy, since a step that fails goes back to the table as it was
    if table is not None and len(table) == places.size == len(places.kept):
        return table.clone()
    pairs, old = torch.zeros(places.size, places.size), places.kept
    if table is not None:
        pairs[: len(old), : len(old)] = table[old[:, None], old]
    return pairs


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


def tensor_in(memory: bytes | bytearray | memoryview | mmap.mmap, place: Place) -> Tensor:
    """A tensor that lies in memory: there where it may be written to and its numbers are aligned, else a copy.

    Raises:
        ValueError: the memory is shorter.
    """
    stop = place.start + place.nbytes
    if not place.nbytes or isinstance(memory, bytes | memoryview) or place.start % place.dtype.itemsize:
        copied = bytearray(memoryview(memory)[place.start : stop])
        return (torch.frombuffer(copied, dtype=place.dtype) if copied else torch.empty(0, dtype=place.dtype)).view(
            place.shape
        )
    count = place.nbytes // place.dtype.itemsize
    return torch.frombuffer(memory, dtype=place.dtype, count=count, offset=place.start).view(place.shape)


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
        place = self._places[name]
        if place.nbytes > MOST_IN_MEMORY and place.start % place.dtype.itemsize == 0:
            return tensor_in(self._file.pages(), place)
        return self.part(name, slice(None)).view(place.shape)

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


def mapped(vector: Tensor, above: int, folder: Path | None) -> Tensor:
    """A vector of more than `above` bytes, moved to a nameless file in a folder and mapped from it; else as it is.

    The numbers are the same.  The system reads a page of the file when it is needed and gives it up where memory is
    short, so such a vector costs room on the disk.  The file is gone when the last tensor of it is, however the process
    ends.  The result must not be written to.  Without a folder it is the system's own for temporary files.

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
            f"a vector of {vector.nbytes:,} bytes cannot be kept in a file in {folder or tempfile.gettempdir()} "
            f"({error.strerror}): make room there, or raise the runtime's map_above"
        ) from error


def file_of_start(vector: Tensor, folder: Path | None = None, above: float = math.inf) -> Tensor:
    """The first numbers of a run, likewise, where they take more than 64 MiB already: after the first step hardly
    anybody reads them, and they would lie in memory to the end.

    Args:
        vector: the numbers.
        folder: of the file, None for the system's own.
        above: bytes up to which they stay in memory where no file can be made.

    Raises:
        RuntimeFault: no file can be made of more bytes than that.
    """
    try:
        return mapped(vector, int(min(above, MOST_IN_MEMORY)), folder)
    except RuntimeFault:
        if vector.nbytes > above:
            raise
        return vector


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
        folder: where it takes its room, None for the system's own.

    Raises:
        OSError: no file can be made there.
    """

    def __init__(self, folder: Path | None) -> None:
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
        return torch.frombuffer(self.pages(), dtype=dtype)

    def pages(self) -> mmap.mmap:
        """All of it as memory, which reads the file when it is read; what is written there does not reach the file.

        Raises:
            OSError: the file cannot be mapped.
        """
        # mmap duplicates the handle, so the memory may outlive this object
        return mmap.mmap(self._handle, 0, access=mmap.ACCESS_COPY)

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
