"""Tensors that belong to clients, kept between tasks: in RAM, and in a file beyond a budget."""

from __future__ import annotations

import tempfile
import weakref
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import IO

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

    def take(self, client: int) -> dict[str, Tensor]:
        """Remove a client's tensors and return them."""
        self.get(client)
        tensors = self._near.pop(client)
        self._bytes -= _size(tensors)
        self._changed.discard(client)
        return tensors

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
        for client, own in by_client(tensors, self.prefix).items():
            self.set(client, own)
        self._changed.clear()

    def adopt(self, tensors: Mapping[str, Tensor]) -> None:
        """Take over tensors as `changed` names them; to the next checkpoint they are changes."""
        for client, own in by_client(tensors, self.prefix).items():
            self.set(client, own)

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
        found = tuple((name, tensor.shape, tensor.dtype) for name, tensor in tensors.items())
        kinds = self._kinds.setdefault(found, found)
        holes = self._free.get(_length(kinds))
        place = holes.pop() if holes else self._file.seek(0, 2)
        self._file.seek(place)
        for tensor in tensors.values():
            self._file.write(tensor.contiguous().numpy().tobytes())
        self._far[client] = (place, kinds)

    def _fetch(self, client: int) -> dict[str, Tensor]:
        assert self._file is not None
        place, kinds = self._far.pop(client)
        self._release(place, kinds)
        self._file.seek(place)
        found = {}
        for name, shape, dtype in kinds:
            raw = bytearray(self._file.read(shape.numel() * dtype.itemsize))
            found[name] = torch.frombuffer(raw, dtype=dtype).view(shape) if raw else torch.empty(shape, dtype=dtype)
        return found


def by_client(tensors: Mapping[str, Tensor], prefix: str) -> dict[int, dict[str, Tensor]]:
    """The tensors named "PREFIX/CLIENT/NAME", by client."""
    found: dict[int, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        kind, _, rest = name.partition("/")
        if kind == prefix:
            number, own = rest.split("/", 1)
            found.setdefault(int(number), {})[own] = tensor
    return found


def _size(tensors: Mapping[str, Tensor]) -> int:
    return sum([tensor.nbytes for tensor in tensors.values()])


def _length(kinds: Kinds) -> int:
    return sum(shape.numel() * dtype.itemsize for _, shape, dtype in kinds)
