"""Values and tensors between processes, and the store of client state.

Nothing is pickled.  A tensor that occurs twice is stored once, so the model of a round is copied once for each worker.

New state is held under the id of its task, since a result may arrive long after it was computed, next to others of the
same client; it becomes the client's state once the result arrives and counts.
"""

from __future__ import annotations

import json
import mmap
import shutil
import tempfile
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from piebald.contracts import Query, Task
from piebald.contracts.component import build
from piebald.core.tensor_store import TensorStore
from piebald.engines.stack import PRIVATE, ClientStack, StackResult
from piebald.methods.client_work import ClientWork

PARTS = 2  # of an arena: one is written while the other is read
_ALIGN = 64
_SMALL = 1 << 16  # numbers of a tensor, up to which a copy costs less than a call
_DTYPES = {
    str(dtype): dtype for dtype in (torch.float32, torch.float64, torch.int64, torch.int32, torch.uint8, torch.bool)
}


class Store(Protocol):
    """A store of the tensors of a message; a place in it is a plain value."""

    def put(self, tensor: Tensor) -> Any: ...

    def get(self, place: Any) -> Tensor: ...


class Arena:
    """Shared memory that one process fills and another reads; pages take memory only once they are written.

    A message is in one of `PARTS` parts, so that there can be so many at a time.  Tensors beyond the size of a part, as
    the many models of a query, are in files until the next message in that part.

    Args:
        size: bytes of all parts.
        keeps: whether the memory of a part stays with it when its message is read.
    """

    def __init__(self, size: int, keeps: bool = True) -> None:
        unit = _ALIGN if keeps else mmap.PAGESIZE  # the system takes whole pages back
        self.size, self._keeps = size // PARTS // unit * unit, keeps  # of a part
        self._memory = mmap.mmap(-1, size)
        self._bytes = torch.frombuffer(self._memory, dtype=torch.uint8)
        self._free = self._stop = self._part = 0
        self._folders: dict[int, Path] = {}  # of files, by part
        # of the folders and not of the arena itself, which this reference would keep alive
        weakref.finalize(self, _remove, self._folders)
        self._stored: dict[int, list[Any]] = {}
        self._alive: list[Tensor] = []

    def clear(self, part: int = 0) -> None:
        """Begin a new message in a part."""
        self._free, self._stop, self._part = part * self.size, (part + 1) * self.size, part
        if part in self._folders:
            shutil.rmtree(self._folders.pop(part))
        self._stored.clear()
        self._alive.clear()

    def give_back(self, part: int) -> None:
        """Give the system the memory of a part whose message nobody reads any more, unless it is kept (Linux)."""
        if not self._keeps and hasattr(mmap, "MADV_REMOVE"):
            self._memory.madvise(mmap.MADV_REMOVE, part * self.size, self.size)

    def put(self, tensor: Tensor) -> list[Any]:
        """Store a tensor; returns its place."""
        if id(tensor) not in self._stored:
            self._stored[id(tensor)] = [self._copied(tensor), list(tensor.shape), str(tensor.dtype)]
            self._alive.append(tensor)  # keeps the id from being given to another tensor
        return self._stored[id(tensor)]

    def get(self, place: list[Any]) -> Tensor:
        """A view of a stored tensor, valid until the next message in its part."""
        start, shape, dtype = place[0], place[1], _DTYPES[place[2]]
        if isinstance(start, str):
            return torch.from_numpy(np.fromfile(start, np.uint8)).view(dtype).view(*shape)
        return self._view(start, shape, dtype)

    def _copied(self, tensor: Tensor) -> int | str:
        """Copy a tensor into the part, or to a file where it has no room; returns the start or the path."""
        start, length = self._free, tensor.numel() * tensor.element_size()
        if start + length > self._stop:
            return self._written(tensor)
        if length:
            self._view(start, tensor.shape, tensor.dtype).copy_(tensor)
        # torch views bytes as wider numbers only where they begin at a multiple of their size
        self._free += -(-length // _ALIGN) * _ALIGN
        return start

    def _written(self, tensor: Tensor) -> str:
        """Write a tensor to a file, which has its numbers and nothing else; returns the path."""
        if self._part not in self._folders:
            self._folders[self._part] = Path(tempfile.mkdtemp(prefix="piebald-"))  # for this user alone
        path = self._folders[self._part] / str(len(self._stored))
        tensor.contiguous().view(-1).view(torch.uint8).numpy().tofile(path)
        return str(path)

    def _view(self, start: int, shape: Any, dtype: torch.dtype) -> Tensor:
        length = torch.Size(shape).numel() * dtype.itemsize
        return self._bytes[start : start + length].view(dtype).view(*shape)


def _remove(folders: Mapping[int, Path]) -> None:
    for folder in folders.values():
        shutil.rmtree(folder, ignore_errors=True)


def pack_stack(stack: ClientStack, store: Store) -> dict[str, Any]:
    """A stack as JSON values that point into the store."""
    return {
        "clients": list(stack.clients),
        "versions": list(stack.versions),
        "rng_versions": list(stack.rng_versions),
        "committed": list(stack.committed),
        "models": [store.put(model) for model in stack.models],
        "vectors": {name: [store.put(row) for row in rows] for name, rows in stack.vectors.items()},
        "state": {name: _put_rows(rows, store) for name, rows in stack.state.items()},
        "query": None if stack.query is None else stack.query.table(),
    }


def unpack_stack(values: dict[str, Any], store: Store, seen: dict[str, Tensor] | None = None) -> ClientStack:
    """The stack of `pack_stack`; equal places become one tensor object, also in several stacks that share `seen`, so
    that a GPU is sent it once.
    """
    seen = {} if seen is None else seen

    def get(place: Any) -> Tensor:
        name = json.dumps(place)
        if name not in seen:
            seen[name] = store.get(place)
        return seen[name]

    query = values["query"]
    built_query = build("query", query) if query is not None else None
    assert built_query is None or isinstance(built_query, Query)
    return ClientStack(
        values["clients"],
        values["versions"],
        values["rng_versions"],
        values["committed"],
        [get(place) for place in values["models"]],
        {name: [get(place) for place in rows] for name, rows in values["vectors"].items()},
        {name: _get_rows(place, store, get) for name, place in values["state"].items()},
        built_query,
    )


_SCALARS = ("steps", "examples", "norms", "trained_norms", "nbytes", "metrics", "failures")


def pack_result(result: StackResult, store: Store) -> dict[str, Any]:
    """The result of a stack as JSON values that point into the store."""
    values = {name: getattr(result, name) for name in _SCALARS}
    values["vectors"] = {name: store.put(part) for name, part in result.vectors.items()}
    values["state"] = {name: _put_rows(part, store) for name, part in result.state.items()}
    return values


def unpack_result(values: dict[str, Any], store: Store) -> StackResult:
    """The result of `pack_result`, copied out of the store."""
    vectors = {name: store.get(place).clone() for name, place in values["vectors"].items()}
    rows_by_name = {name: _get_rows(place, store, store.get) for name, place in values["state"].items()}
    state = {name: [row.clone() for row in rows] for name, rows in rows_by_name.items()}
    return StackResult(**{name: values[name] for name in _SCALARS}, vectors=vectors, state=state)


def _put_rows(rows: Any, store: Store) -> dict[str, Any]:
    """Store clients' tensors, or their placeholders; several small tensors of one shape are stored as one."""
    if not isinstance(rows, Tensor):
        kinds = {(row.shape, row.dtype) if isinstance(row, Tensor) else None for row in rows}
        distinct = len({id(row) for row in rows}) == len(rows) > 1
        if len(kinds) > 1 or None in kinds or not distinct or rows[0].numel() > _SMALL:
            return {"rows": [store.put(row) for row in rows]}
        rows = torch.stack([*rows])
    return {"whole": store.put(rows)}


def _get_rows(place: dict[str, Any], store: Store, get: Callable[[Any], Tensor]) -> list[Tensor]:
    """The tensors of `_put_rows`, one for each client; `get` fetches those that were stored separately."""
    return (
        [*store.get(place["whole"]).unbind()] if "whole" in place else [get(row_place) for row_place in place["rows"]]
    )


class ClientStateStore:
    """Keeps client state in this process, and beyond a budget in a temporary file.

    Args:
        work: gives the state of a client that was never asked.
        budget: bytes of client state kept in RAM.

    Attributes:
        fresh: state that the trainer gives a client before its first task.
        kept: the state of clients that have taken part.
    """

    def __init__(self, work: ClientWork, budget: int) -> None:
        self.work, self.budget = work, budget
        self.fresh = work.initial_state()
        self.kept = TensorStore(budget)
        self._held: dict[int, Mapping[str, Tensor]] = {}

    @property
    def needed(self) -> bool:
        """True if clients have any state."""
        return self.work.layout.shared < self.work.layout.size or bool(self.fresh)

    def recall(self, task: Task) -> Mapping[str, Tensor]:
        """The state of a task's client, by name."""
        client = task.client
        return self.kept.get(client) if client in self.kept else self.first(task)

    def first(self, task: Task) -> Mapping[str, Tensor]:
        """The state at the first contact: the trainer's, and the private parameters that were sent with the task."""
        work = self.work.of(task.client)
        fresh, shared = self.fresh if work is self.work else work.initial_state(), work.layout.shared
        if shared == work.layout.size:
            return fresh
        return fresh | {PRIVATE: task.vectors.get(PRIVATE, work.initial[shared:])}

    def hold(self, task: Task, tensors: Mapping[str, Tensor]) -> None:
        """Hold the new state of a task's client until it is known whether the result counts."""
        if self.needed:
            self._held[task.id] = tensors

    def settle(self, task: Task, kept: bool) -> None:
        """Make the state that is held for a task the client's state, or discard it."""
        tensors = self._held.pop(task.id, None)
        if kept and tensors is not None:
            self.kept.set(task.client, tensors)

    # -- for checkpoints

    def held(self, tasks: Sequence[Task]) -> Mapping[int, Mapping[str, Tensor]]:
        """The state that is held for some tasks, by id."""
        return {task.id: self._held.get(task.id, {}) for task in tasks}

    def changed(self) -> dict[str, Tensor]:
        """State that has changed since the last call, as "client_state/CLIENT/NAME"."""
        return self.kept.changed()

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore what `changed` returned, over all calls."""
        self.kept.restore(tensors)

    def adopt(self, tensors: Mapping[str, Tensor]) -> None:
        """Take over state as `changed` names it, which the next checkpoint holds."""
        self.kept.adopt(tensors)

    def close(self) -> None:
        """Forget everything."""
        self.kept.close()
        self._held.clear()
