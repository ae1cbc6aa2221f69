"""Rows for a stack of clients, and the order in which SGD sees them."""

from __future__ import annotations

import functools
import itertools
import threading
from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from piebald.contracts import SERVER_ID, Batches, Clients, HasServerRows, InMemory, Rows, SgdConfig, Split
from piebald.contracts.data import LacksInputs, ModelSpec, first_passing, lacked_inputs, public_rows_of, without_inputs
from piebald.contracts.training import batch_count
from piebald.core import pytree
from piebald.core.errors import CannotTrain, RuntimeFault, SettingError
from piebald.core.machine import moved
from piebald.core.metrics import MixedTargets
from piebald.core.randomness import permutation, torch_generator
from piebald.core.targets import Weighted, parted
from piebald.methods.client_work import ClientWork

Positions = np.ndarray[Any, np.dtype[np.int64]]
RngKey = tuple[int | str, ...]
T = TypeVar("T")


class Gathered(NamedTuple):
    """Rows of several clients: inputs and targets in one pool, and for each client the positions of its rows in it."""

    x: pytree.Tree
    y: pytree.Tree
    positions: list[Positions]

    def take(self, index: Tensor | Positions) -> Rows:
        """The rows at some positions of the pool."""
        return Rows(pytree.take(self.x, index), pytree.take(self.y, index))


class RowLoader:
    """Fetches rows.  Where clients share a pool in memory, rows are indexed there; otherwise they are fetched and
    concatenated, and those of the next stack are fetched while this one trains.
    """

    def __init__(self, clients: Clients, device: torch.device, spec: ModelSpec | None = None) -> None:
        self.clients = clients
        self.device = device
        self._spec, self._domain = spec, None if spec is None else spec.objective.domain
        self._pool: Rows | None = None
        self._coming: deque[dict[int, Future[Rows]]] = deque(maxlen=2)  # for this stack and the next one
        self._lock = threading.Lock()  # held by the thread that asks clients
        self._fetcher: ThreadPoolExecutor | None = None  # started at the first need, so after a fork
        self._held: tuple[Sequence[int], Gathered] | None = None  # by `holding`
        self._public: Gathered | None = None  # from the first need on
        self._trial: tuple[int, Split] | None = None  # whose rows a model passed
        self._indexed: InMemory | None = None  # the clients, where they share a pool in memory
        if isinstance(clients, InMemory) and clients.in_memory():
            pool = self._prepared(clients.pool())
            self._indexed, self._pool = clients, _moved(pool, device)
        self._known: dict[int, int] = {}  # training rows with a known target, of clients whose rows were fetched
        self._weights: dict[tuple[int, Split], float | None] = {}  # see `weight`, of rows that were fetched last
        # by client and split: a key, the versions of the rows, the value that follows from both, and the rows
        self._cached: dict[tuple[int, Split], tuple[Any, ...]] = {}
        # of rows that are not here yet nobody knows
        self.lacks_targets = self._domain is not None and (
            self._pool is None or not bool(self._domain.known_rows(parted(self._pool.y)[0]).all())
        )

    def _prepared(self, rows: Rows) -> Rows:
        """Rows with targets as engines train on them, which carry the rows' weights."""
        if rows.weight is not None and isinstance(self._spec, ClientWork) and self._spec.row_privacy is not None:
            raise SettingError(
                f"{self._spec.trainer.kind} hides single rows, and a larger weight would hide a row less: leave "
                "out weights, or train without it"
            )
        if self._domain is not None and self._spec is not None:
            rows = replace(rows, y=self._domain.prepared(rows.y, self._spec.outputs))
        return Rows(rows.x, rows.targets)

    def counted(self, targets: pytree.Tree, mask: Tensor | None = None, axes: int = 1) -> Tensor | None:
        """Return which rows count in a mean, those of `mask` that have a known target, or how much; None for all alike.

        Args:
            targets: of rows whose first `axes` axes count them, also those of mixed rows.
            mask: 1 for rows and 0 for those that only fill a batch up.
        """
        mixed = targets if isinstance(targets, MixedTargets) else None
        several = [parted(part) for part in ((targets,) if mixed is None else (mixed.first, mixed.second))]
        counted = mask
        if self._domain is not None and self.lacks_targets:
            rows = functools.reduce(torch.logical_or, [self._domain.known_rows(part, axes) for part, _ in several])
            counted = rows.to(self.device) if mask is None else mask * rows.to(self.device)
        weight = several[0][1]
        if weight is None:
            return counted
        if mixed is not None:
            weight = mixed.share * weight + (1 - mixed.share) * mixed.second.weights
        return weight if counted is None else weight * counted

    @property
    def indexed(self) -> bool:
        """True if rows are in one pool, and so never change."""
        return self._pool is not None

    def expect(self, clients: Sequence[int]) -> None:
        """Begin to fetch training rows that will be needed next."""
        if self._pool is not None:
            return
        if self._fetcher is None:
            self._fetcher = ThreadPoolExecutor(1, "piebald-rows")
        run = self._fetcher.submit
        self._coming.append({client: run(self._fetch, client, "train") for client in clients if client != SERVER_ID})

    def close(self) -> None:
        """Stop fetching, and wait for what is being fetched: two threads never ask clients at once."""
        if self._fetcher is not None:
            self._fetcher.shutdown(cancel_futures=True)
            self._fetcher = None
        self._coming.clear()

    @contextmanager
    def holding(self) -> Iterator[None]:
        """Keep the training rows that were last gathered, for who gathers them for every step."""
        self._held = ((), Gathered(torch.empty(0), torch.empty(0), []))
        try:
            yield
        finally:
            self._held = None

    def size(self, client: int) -> int:
        """Return the number of a client's training rows."""
        size = self.clients.size(client, "train")
        return len(self._rows(client, "train")) if size is None else size

    def examples(self, client: int) -> int:
        """Return the number of a client's training rows with a known target."""
        if client == SERVER_ID or not self.lacks_targets:
            return self.size(client)
        if self._pool is not None and self._domain is not None:
            return int(self._domain.known_rows(parted(self._targets(client, "train"))[0]).sum())
        return self._known[client] if client in self._known else self.size(client)

    def weight(self, client: int, split: Split) -> float | None:
        """Return how much a client's rows count in an average of losses, None for their number; see `ModelSpec`."""
        if self._spec is None or (client == SERVER_ID and split == "train"):
            return None
        if self._spec.objective.count is None and self._pool is not None and not isinstance(self._pool.y, Weighted):
            return None
        if self._pool is not None or client == SERVER_ID or (client, split) not in self._weights:
            return self._spec.objective.weight(self._targets(client, split))
        return self._weights[client, split]

    def _targets(self, client: int, split: Split) -> Any:
        if self._pool is None or self._indexed is None or client == SERVER_ID:
            return self._rows(client, split).y
        return pytree.take(self._pool.y, moved(torch.from_numpy(self._indexed.indices(client, split)), self.device))

    def gather(self, clients: Sequence[int], split: Split) -> Gathered:
        """Rows of some clients on the device; of `SERVER_ID` the common test set, or the server's own training rows."""
        if self._pool is not None and self._indexed is not None and SERVER_ID not in clients:
            positions = [self._indexed.indices(client, split) for client in clients]
            lacked = self._lacked(clients)
            return Gathered(without_inputs(self._pool.x, lacked), self._pool.y, positions)
        if self._held is not None and split == "train":
            if list(clients) != list(self._held[0]):
                self._held = (clients, self._gathered(clients, split))
            return self._held[1]
        return self._gathered(clients, split)

    def rows(self, client: int, split: Split) -> Rows:
        """A client's rows on the device, which are not copied where they are there and in no pool."""
        if self._pool is not None and client != SERVER_ID:
            gathered = self.gather([client], split)
            rows = gathered.take(torch.from_numpy(gathered.positions[0]).to(self.device))
        else:
            rows = _moved(self._rows(client, split), self.device)
        return Rows(rows.x, *parted(rows.y))

    def cached(self, client: int, split: Split, key: Hashable, function: Callable[[Rows, str], T], name: str) -> T:
        """Return a function of a client's rows and a name, see `contracts.ClientContext.cached`."""
        if self._pool is None:
            with self._lock:
                rows = self.clients.rows(client, split)
        else:
            rows = self._pool
        tensors = [*pytree.leaves(rows.x), *pytree.leaves(rows.targets)]
        # tensors of `torch.inference_mode` count no changes
        versions = [(id(tensor), None if tensor.is_inference() else tensor._version) for tensor in tensors]
        known = self._cached.get((client, split))
        if known is not None and known[:2] == ((key, name), versions):
            value: T = known[2]
            return value
        value = function(self.rows(client, split), name)
        # with the tensors, so that no other object gets their ids
        self._cached[client, split] = (key, name), versions, value, tensors
        return value

    def _lacked(self, clients: Sequence[int]) -> frozenset[str]:
        """Return the names of the inputs that all of some clients lack."""
        if not isinstance(self.clients, LacksInputs):
            return frozenset()
        kinds = {self.clients.lacks(client) for client in clients}
        if len(kinds) > 1:
            raise RuntimeFault("clients that lack different inputs cannot be asked together: ask one after another")
        return next(iter(kinds), frozenset())

    def _gathered(self, clients: Sequence[int], split: Split) -> Gathered:
        rows = [self._rows(client, split) for client in clients]
        ends = np.cumsum([len(part) for part in rows])
        positions = [np.arange(end - len(part), end) for end, part in zip(ends, rows, strict=True)]
        # one at least: without any there would be no form to join rows in
        filled = [part for part in rows if len(part)] or rows[:1]
        targets = [part.y for part in filled]
        if any(isinstance(part, Weighted) for part in targets):  # rows without weights count once
            targets = [t if isinstance(t, Weighted) else Weighted(t, torch.ones(pytree.count(t))) for t in targets]
        x, y = pytree.joined([part.x for part in filled]), pytree.joined(targets)
        return Gathered(pytree.moved(x, self.device), pytree.moved(y, self.device), positions)

    def for_training(self, clients: Sequence[int], config: SgdConfig) -> Gathered:
        """The rows that a run of SGD trains on (`LocalStep.rows`)."""
        return self.public(len(clients)) if config.step.rows == "public" else self.gather(clients, "train")

    def public(self, count: int) -> Gathered:
        """The public rows for so many clients, once on the device; their positions are in place of targets."""
        if self._public is None:
            rows = public_rows_of(self.clients)
            if rows is None:
                raise RuntimeFault("these clients have no public rows: give them some")
            positions = np.arange(len(rows))
            x, y = pytree.moved(rows.x, self.device), torch.from_numpy(positions).to(self.device)
            self._public = Gathered(x, y, [positions])
        return self._public._replace(positions=self._public.positions * count)

    def lasts(self, gathered: Gathered) -> bool:
        """Return whether rows stay where they are from one run to the next, since they are in a pool."""
        return any(pool is not None and gathered.y is pool.y for pool in (self._pool, self._public))

    def public_targets(self) -> pytree.Tree:
        """The targets of the public rows, on the device."""
        rows = public_rows_of(self.clients)
        if rows is None:
            raise RuntimeFault("these clients have no public rows: give them some")
        targets: pytree.Tree = pytree.moved(parted(self._prepared(rows).y)[0], self.device)
        return targets

    def sample(self) -> pytree.Tree:
        """Two rows of the first client that has any, to try a model on."""
        client, split = self._trial or next(self._trials())
        rows = self.gather([client], split)
        return rows.take(torch.from_numpy(rows.positions[0][:2]).to(self.device)).x

    def trial_rows(self) -> Rows:
        """The rows of the first client that has any, to try a model on: training rows, if there are any at all."""
        client, split = self._trial or next(self._trials())
        return self._prepared(self.clients.rows(client, split))

    def tried(self, trial: Callable[[Rows], T], lacked: Collection[str] = ()) -> T:
        """Return the result of a trial on the rows of the first client that passes it, which `trial_rows` are then.

        Args:
            trial: made of rows.
            lacked: the inputs that the client must lack; then `trial_rows` stay as they are.
        """
        held, result = first_passing(lambda held: trial(self._prepared(self.clients.rows(*held))), self._trials(lacked))
        self._trial = self._trial if lacked else held
        return result

    def _trials(self, lacked: Collection[str] = ()) -> Iterator[tuple[int, Split]]:
        """Yield clients that have rows and lack these inputs, each with a split that it has; client 0 if nobody is."""
        splits: tuple[Split, ...] = ("train", "validation", "test")  # a client that only tests has no training rows
        held = ((c, split) for split in splits for c in range(len(self.clients)) if self.clients.size(c, split) != 0)
        fitting = ((client, split) for client, split in held if lacked_inputs(self.clients, client) == set(lacked))
        first = next(fitting, (0, splits[0]))
        return itertools.chain([first], fitting)

    def rng_key(self, seed: int | str, client: int, rng_version: int | str, phase: int) -> RngKey:
        """The rng key of a client's task: its name, not its number, which depends on who joined first."""
        return (seed, self.clients.names[client] if client != SERVER_ID else SERVER_ID, rng_version, phase)

    def _rows(self, client: int, split: Split) -> Rows:
        if client != SERVER_ID:
            coming = [fetched[client] for fetched in self._coming if split == "train" and client in fetched]
            if coming and coming[0].exception() is None:
                return coming[0].result()
            # it may have failed in the other thread only; otherwise the error is raised here
            return self._fetch(client, split)
        if split == "test":
            rows = self.clients.common
        else:
            rows = self.clients.server_rows if isinstance(self.clients, HasServerRows) else None
        if rows is None:
            raise LookupError(f"the server has no {split} rows")
        return self._prepared(rows)

    def _fetch(self, client: int, split: Split) -> Rows:
        with self._lock:
            rows = self.clients.rows(client, split)
        hides = isinstance(self._spec, ClientWork) and self._spec.row_privacy is not None
        # what a loss of the user's own cannot take counts as zero where rows are hidden
        if self._spec is not None and not (hides and self._domain is None):
            self._spec.objective.check_targets(
                rows.y, self._spec.outputs, f"client {self.clients.names[client]!r}, {split} rows"
            )
        prepared = self._prepared(rows)
        if self._spec is not None:
            self._weights[client, split] = self._spec.objective.weight(prepared.y)
        if self._domain is not None and split == "train":
            self._known[client] = int(self._domain.known_rows(parted(prepared.y)[0]).sum())
        return prepared


def _moved(rows: Rows, device: torch.device) -> Rows:
    """Rows on a device, whose targets carry their weights."""
    return Rows(pytree.moved(rows.x, device), pytree.moved(rows.y, device))


def augmented(rows: Rows, config: SgdConfig, step: int, rng_key: RngKey) -> Rows:
    """One client's batch after the augmentations of a run, from the random numbers of this step alone."""
    if not config.augmentation or not len(rows):
        return rows
    # numbers go by a row's place in the batch, which tells of rows before it: where rows are hidden, the key is as
    # secret as the noise, so that they are independent of the rows for everybody else
    rng = torch_generator("augment", step, *rng_key)
    for change in config.augmentation:
        rows = change.augment(rows, rng)
    return rows


def batches(
    positions: Positions, config: SgdConfig, mixes: bool, *rng_key: int | str, only: int | None = None
) -> Iterator[Positions]:
    """The rows of each of a client's steps, as positions: each epoch in a new order that depends on `rng_key` and the
    epoch alone.

    Where single rows are hidden, batches are `LocalStep.lots` instead, some of which may be empty.

    Args:
        positions: the client's rows.
        config: rows of a step, epochs or steps.
        mixes: the model mixes the rows of a batch (batch norm) and cannot take a batch of one, so there is one batch
            less where a row would be left alone.
        rng_key: the client's rng key.
        only: if given, the batch of this one of the steps alone, counted from 0; nothing where there are fewer.
    """
    # before rows are left out: it leaves them out itself
    planned = planned_steps(positions, config, mixes)
    if (visible := _visible_rows(len(positions), config)) is not None:
        drawn = permutation(len(positions), "share", *rng_key)
        positions = positions[drawn[:visible]]
    count = len(positions)
    if count == 0:
        return
    if config.step.hides_rows:
        lots = config.step.lots(count, config.step_rows, planned, rng_key)
        for lot in lots if only is None else itertools.islice(lots, only, only + 1):
            yield positions[lot]
        return
    starts = _starts(count, config.step_rows, config.batches, mixes)
    ends = [*starts[1:], count]
    if only is not None:
        if only < planned:
            # an epoch's order depends on its number alone, so a step is found without drawing those before it
            epoch, index = divmod(only, len(starts))
            order = positions[permutation(count, "order", epoch, *rng_key)]
            yield order[starts[index] : ends[index]]
        return
    yielded = epoch = 0
    while yielded < planned:
        order = positions[permutation(count, "order", epoch, *rng_key)]
        for start, end in zip(starts, ends, strict=True):
            if yielded == planned:
                return
            yield order[start:end]
            yielded += 1
        epoch += 1


def pass_slices(count: int, config: SgdConfig, mixes: bool) -> list[slice]:
    """The passes over the rows of one step, of a batch each; `mixes` is as in `batches`."""
    if count <= config.batch or config.passes.accumulate == 1:
        return [slice(0, count)]
    starts = _starts(count, config.batch, config.batches, mixes)
    return [slice(start, end) for start, end in zip(starts, [*starts[1:], count], strict=True)]


def _starts(count: int, size: int, batches: Batches, mixes: bool) -> list[int]:
    """Return where the batches of an epoch begin.

    Args:
        count: rows, at least 1.
        size, batches, mixes: as for `batch_count`.

    Raises:
        CannotTrain: batches of one row cannot be avoided where the model mixes rows.
    """
    if mixes and (count == 1 or size == 1):
        raise CannotTrain(
            "cannot train on a batch of one row with batch norm: give every client two rows or more and a batch above 1"
        )
    number = batch_count(count, size, batches, mixes)
    if batches == "exact":
        return list(range(0, number * size, size))
    # larger ones first, so that at one step clients of a stack have batches of one length more often
    each, larger = divmod(count, number)
    return [index * each + min(index, larger) for index in range(number)]


def planned_steps(positions: Positions, config: SgdConfig, mixes: bool, only: int | None = None) -> int:
    """Return how many batches `batches` makes of a client's rows."""
    if only is not None:
        return int(only < planned_steps(positions, config, mixes))
    visible = _visible_rows(len(positions), config)
    count = len(positions) if visible is None else visible
    if count == 0 or config.steps is not None:
        return config.steps or 0 if count else 0
    mixes = mixes and not config.step.hides_rows
    steps = config.epochs * batch_count(count, config.step_rows, config.batches, mixes)
    return steps if config.step_limit is None else min(steps, config.step_limit)


def _visible_rows(count: int, config: SgdConfig) -> int | None:
    """Return how many of a client's rows a run sees, None for all in their order."""
    visible = config.step.seen(count)
    return None if visible is None else min(count, visible)
