"""Tensors that belong to clients: kept between tasks in RAM and in a file, and tables with rows of recent clients."""

from __future__ import annotations

import tempfile
import weakref
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from typing import IO, Any, NamedTuple

import torch
from torch import Tensor

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
    """A table [size, columns] whose rows lie at their new places; those of new clients are 0."""
    # most often the same clients are asked again, and the table need not be copied
    if table is not None and len(table) == places.size == len(places.kept):
        return table
    resized_table = torch.zeros(places.size, columns)
    if table is not None:
        resized_table[: len(places.kept)] = table[places.kept]
    return resized_table


def resized_pairs(table: Tensor | None, places: Places) -> Tensor:
    """A table [size, size] of pairs, likewise."""
    if table is not None and len(table) == places.size == len(places.kept):
        return table
    pairs, old = torch.zeros(places.size, places.size), places.kept
    if table is not None:
        pairs[: len(old), : len(old)] = table[old[:, None], old]
    return pairs
