"""Rows for a stack of clients, and the order in which a descent sees them."""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from piebald.contracts import SERVER_ID, Clients, Rows, SgdConfig, Split
from piebald.errors import RuntimeFault
from piebald.randomness import generator

Places = np.ndarray[Any, np.dtype[np.int64]]


class Gathered(NamedTuple):
    """Rows of several clients: one pool of inputs and targets, and for each client the positions of its rows in it."""

    x: Tensor
    y: Tensor
    places: list[Places]


class RowLoader:
    """Fetches rows.  Clients that keep theirs in one pool are indexed there; others are fetched and joined, and those
    of the next stack while this one trains.
    """

    def __init__(self, clients: Clients, device: torch.device) -> None:
        self.clients = clients
        self.device = device
        self._pool: Rows | None = None
        self._coming: deque[dict[int, Future[Rows]]] = deque(maxlen=2)  # of this stack and the next one
        self._turn = threading.Lock()  # whose thread may ask clients
        self._fetcher: ThreadPoolExecutor | None = None  # started at the first need, so after a fork
        if hasattr(clients, "indices") and not getattr(clients, "lazy", False):
            x, y = clients.x, clients.y  # type: ignore[attr-defined]
            self._pool = Rows(x.to(device), y.to(device))

    @property
    def pooled(self) -> bool:
        """Whether rows lie in one pool, and so stay as they are."""
        return self._pool is not None

    def expect(self, clients: Sequence[int]) -> None:
        """Begin to fetch training rows that are wanted next."""
        if self._pool is not None:
            return
        if self._fetcher is None:
            self._fetcher = ThreadPoolExecutor(1, "piebald-rows")
        run = self._fetcher.submit
        self._coming.append({client: run(self._fetch, client, "train") for client in clients if client != SERVER_ID})

    def close(self) -> None:
        """Fetch no more; what is being fetched is waited for, since clients are never asked by two threads at once."""
        if self._fetcher is not None:
            self._fetcher.shutdown(cancel_futures=True)
            self._fetcher = None
        self._coming.clear()

    def size(self, client: int) -> int:
        """A client's training rows."""
        size = self.clients.size(client, "train")
        return len(self._rows(client, "train")) if size is None else size

    def gather(self, clients: Sequence[int], split: Split) -> Gathered:
        """The rows of some clients, on the device; of the `SERVER_ID` the common test set, or training rows of its own."""
        if self._pool is not None and SERVER_ID not in clients:
            places = [self.clients.indices(client, split) for client in clients]  # type: ignore[attr-defined]
            return Gathered(self._pool.x, self._pool.y, places)
        rows = [self._rows(client, split) for client in clients]
        ends = np.cumsum([len(part) for part in rows])
        places = [np.arange(end - len(part), end) for end, part in zip(ends, rows, strict=True)]
        filled = [part for part in rows if len(part)] or rows[:1]
        x = torch.cat([part.x for part in filled]) if len(filled) > 1 else filled[0].x
        y = torch.cat([part.y for part in filled]) if len(filled) > 1 else filled[0].y
        return Gathered(x.to(self.device), y.to(self.device), places)

    def sample(self) -> Tensor:
        """Two training rows of the first client that has some, for trying a model."""
        first = next((c for c in range(len(self.clients)) if self.clients.size(c, "train") != 0), 0)
        rows = self.gather([first], "train")
        return rows.x[torch.from_numpy(rows.places[0][:2]).to(self.device)]

    def words(self, seed: int, client: int, moment: int | str, phase: int) -> tuple[int | str, ...]:
        """What a client's randomness comes from.  Its name, not its number: numbers depend on who joined first."""
        return (seed, self.clients.names[client] if client != SERVER_ID else SERVER_ID, moment, phase)

    def _rows(self, client: int, split: Split) -> Rows:
        if client != SERVER_ID:
            coming = [one[client] for one in self._coming if split == "train" and client in one]
            if coming and coming[0].exception() is None:
                return coming[0].result()
            return self._fetch(client, split)  # what failed may do so in another thread only, and else says why here
        rows = self.clients.common if split == "test" else getattr(self.clients, "server_rows", None)
        if rows is None:
            raise LookupError(f"the server has no {split} rows")
        return rows

    def _fetch(self, client: int, split: Split) -> Rows:
        with self._turn:
            return self.clients.rows(client, split)


def batches(places: Places, descent: SgdConfig, mixes: bool, *words: int | str) -> Iterator[Places]:
    """One client's mini-batches as positions: each epoch in a fresh order that depends on `words` and the epoch alone.

    Where single rows are hidden (`Descent.privacy`), each step's batch is a Poisson sample instead, perhaps empty.

    Args:
        places: the client's rows.
        descent: batch size, epochs or steps.
        mixes: the model mixes the rows of a batch (batch norm) and cannot take a batch of one, so a lone last row
            joins the batch before it.
        words: what the order is for.
    """
    count = len(places)
    if count == 0:
        return
    if descent.privacy is not None:
        yield from _poisson(places, descent, *words)
        return
    starts = list(range(0, count, descent.batch))
    if mixes and count - starts[-1] == 1:
        if count == 1 or descent.batch == 1:
            raise RuntimeFault(
                "batch norm cannot train on a batch of one row: give every client two rows or more and a batch above 1"
            )
        starts.pop()
    ends = [*starts[1:], count]
    taken = epoch = 0
    while epoch < descent.epochs if descent.steps is None else taken < descent.steps:
        order = places[generator("order", epoch, *words).permutation(count)]
        for start, end in zip(starts, ends, strict=True):
            if taken == descent.steps:
                return
            yield order[start:end]
            taken += 1
        epoch += 1


def _poisson(places: Places, descent: SgdConfig, *words: int | str) -> Iterator[Places]:
    """Each row is in each batch by itself, as the accountants of DP-SGD assume: batches are of uneven size."""
    count = len(places)
    steps = descent.epochs * math.ceil(count / descent.batch) if descent.steps is None else descent.steps
    for step in range(steps):
        yield places[generator("poisson", step, *words).random(count) < descent.batch / count]
