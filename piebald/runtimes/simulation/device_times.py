"""Times at which simulated devices have done a task, drop out or go away, in seconds of the virtual clock."""

from __future__ import annotations

import functools
import heapq
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from piebald.contracts import SERVER_ID, Clients, Device, Fleet, SumRequest, Task, Update
from piebald.core.randomness import generator
from piebald.methods.client_work import ClientWork
from piebald.privacy.secure_aggregation.key_queries import KeyQuery

_DEVICES = 4096  # that are remembered


class Instant:
    """The default fleet: all devices are instant and always available."""

    def __init__(self) -> None:
        self._device = Device()

    def device(self, client: int) -> Device:
        return self._device

    def available(self, clients: int, now: float) -> Sequence[int]:
        return range(clients)


@dataclass(slots=True, eq=False)
class Event:
    """A task under way.

    Attributes:
        task, sent: what was sent, and when.
        sum_request, batch: of what was submitted together; only such updates are summed together.
        begun: the number under which the worker pool has begun it, 0 before.
        served: whether its result is known: `update`, or `failure`.
        counts: whether the new client state will be kept, unless it fails later.
        bytes_down: what was sent.
    """

    task: Task
    sent: float
    sum_request: SumRequest | None
    batch: int
    update: Update | None = None
    counts: bool = False
    failure: str | None = None
    begun: int = 0
    served: bool = False
    bytes_down: int = 0


class Due(NamedTuple):  # many are compared, and tuples are compared at once
    """An event and when it is over, or may be over if it was not served yet; no two have one id."""

    time: float
    id: int
    event: Event


class Agenda:
    """Events in the order in which they are due.

    An event whose time changes costs the logarithm of their number: its former entry stays in the heap, and is passed
    over when it comes to the top.
    """

    def __init__(self) -> None:
        self._heap: list[Due] = []
        self._current: dict[int, Due] = {}

    def __len__(self) -> int:
        return len(self._current)

    def __iter__(self) -> Iterator[Due]:
        return iter(sorted(self._current.values()))

    def __getitem__(self, id: int) -> Due:
        return self._current[id]

    def put(self, due: Due) -> None:
        """Add an event, or change when it is due."""
        self._current[due.id] = due
        heapq.heappush(self._heap, due)

    def first(self) -> Due:
        """Return the event that is due next, of at least one."""
        while self._current.get(self._heap[0].id) is not self._heap[0]:
            heapq.heappop(self._heap)
        return self._heap[0]

    def pop(self) -> Due:
        """Remove the event that is due next, and return it."""
        due = self.first()
        del self._current[due.id]
        return heapq.heappop(self._heap)


class DeviceTimes:
    """The times of a fleet's devices.

    Args:
        fleet: the devices.
        work: what clients do.
        clients: who they are, and how many rows they have.
    """

    def __init__(self, fleet: Fleet, work: ClientWork, clients: Clients) -> None:
        self._fleet, self._work, self._clients = fleet, work, clients
        self._device = functools.lru_cache(_DEVICES)(fleet.device)  # each task asks for its client's several times
        self._min_steps = functools.cache(lambda client, rows: work.trainer_of(client).min_steps(rows))

    def downloaded(self, event: Event) -> float:
        """Return the time at which the task has reached the client."""
        if event.task.free or event.task.client == SERVER_ID:
            return event.sent
        device = self._device(event.task.client)
        return event.sent + device.latency + event.bytes_down / device.down

    def earliest(self, event: Event) -> float:
        """The earliest time at which a task can end: it need not be computed before."""
        task = event.task
        downloaded = self.downloaded(event)
        if event.served or task.query is not None:
            return downloaded
        device = self._device(task.client)
        steps = (
            self._min_steps(task.client, self._clients.size(task.client, "train") or 0)
            if device.seconds_per_step
            else 0
        )
        soonest = downloaded + steps * device.seconds_per_step + device.latency
        leaves = self.leaves(task, event.sent)
        return soonest if leaves is None else min(soonest, leaves)

    def leaves(self, task: Task, sent: float) -> float | None:
        """Return when the client's device, asked at `sent`, will go offline, or None."""
        if task.free or task.client == SERVER_ID:
            return None
        intervals = self._device(task.client).on
        if not intervals:
            return None
        # an interval without an end cuts nothing off, so the task counts as one of a device that stays
        return next((stop for start, stop in intervals if start <= sent < stop and stop < math.inf), None)

    def finished(self, event: Event) -> float:
        """Return the time at which the answer has been uploaded."""
        if event.update is None or event.task.free or event.task.client == SERVER_ID:
            return self.downloaded(event)
        device = self._device(event.task.client)
        work = event.update.steps * device.seconds_per_step
        if event.task.query is not None:
            work = device.answering(event.update.examples)
        return self.downloaded(event) + work + device.latency + event.update.nbytes / device.up

    def next_wake(self, now: float) -> float:
        """Return when the next device comes online, if all are offline and nothing is under way."""
        devices = (self._device(client) for client in range(len(self._clients)))
        starts = (start for device in devices for start, _ in device.on or () if start > now)
        return min(starts, default=now)

    def drops_out(self, task: Task) -> bool:
        """Return whether the device drops out; it depends on the client and the version, not on when it is asked."""
        device = self._device(task.client) if task.client != SERVER_ID else Device()
        if device.dropout <= 0:
            return False
        # clients may drop out between the queries of a key agreement
        kind = (task.query.kind,) if isinstance(task.query, KeyQuery) else ()
        rng_key = ("dropout", self._work.seed, self._clients.names[task.client], task.version, *kind)
        return generator(*rng_key).random() < device.dropout
