"""The contract of a worker pool, the pool that is this process alone, and the parts that all pools need."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import logging
import multiprocessing
import sys
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch

from piebald.contracts import SERVER_ID, SumRequest
from piebald.core.errors import CannotTrain, PiebaldError, RuntimeFault, diverged, failure_kind, failure_reason
from piebald.core.machine import naming_lost, one_thread, raise_if_lost
from piebald.engines.device_copies import LaterNumbers
from piebald.engines.outgoing import serve
from piebald.engines.row_loader import RowLoader
from piebald.engines.sequential import SequentialEngine as Engine
from piebald.engines.stack import ClientStack, RunningSum, StackResult

MIN_ARENA = 64 << 20
log = logging.getLogger(__name__)
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _MMAP_MAX = -1, -3, -4  # of mallopt(3)
HUGE = 1 << 24  # parameters of a model


class WorkerPool(Protocol):
    """Serves stacks of clients: `begin` gives out work, `collect` waits for what came of it."""

    def begin(self, stacks: Sequence[ClientStack], costs: Sequence[float], sum_request: SumRequest | None) -> int:
        """Take stacks, whose tensors must not change any more; returns the number to collect their results by."""

    def collect(self, number: int) -> tuple[list[StackResult], RunningSum]:
        """Wait for what `begin` took under a number, once; returns the results in the order of the stacks, and the sum
        of updates that the request asked for.
        """

    def close(self) -> None:
        """Stop the workers, whatever they are doing."""


class LaterWork:
    """Work that was begun and waits until somebody collects it, for pools that do nothing before."""

    def __init__(self) -> None:
        self._taken = 0
        self._waiting: dict[int, tuple[Sequence[ClientStack], Sequence[float], SumRequest | None]] = {}

    def add(self, stacks: Sequence[ClientStack], costs: Sequence[float], sum_request: SumRequest | None) -> int:
        """Keep it; returns its number."""
        self._taken += 1
        self._waiting[self._taken] = (stacks, costs, sum_request)
        return self._taken

    def take(self, number: int) -> tuple[Sequence[ClientStack], Sequence[float], SumRequest | None]:
        """Take it out."""
        return self._waiting.pop(number)

    def take_all(
        self,
    ) -> Iterator[tuple[dict[int, int], list[ClientStack], list[float], SumRequest | None]]:
        """Take all of it out, what is not summed in one piece: counts of stacks by number, then all stacks."""
        waiting, self._waiting = self._waiting, {}
        # updates of different requests must not come into one sum
        single = {number: work for number, work in waiting.items() if work[2] is None}
        pieces = [{number: work} for number, work in waiting.items() if work[2] is not None]
        for piece in [single, *pieces] if single else pieces:
            stacks = [stack for group, _, _ in piece.values() for stack in group]
            costs = [cost for _, group_costs, _ in piece.values() for cost in group_costs]
            counts = {number: len(group) for number, (group, _, _) in piece.items()}
            yield counts, stacks, costs, next(iter(piece.values()))[2]

    @property
    def next_clients(self) -> Sequence[int]:
        """The clients of the next training stack that waits, whose rows will be needed."""
        first = next((stacks[0] for stacks, _, _ in self._waiting.values()), None)
        return first.clients if first is not None and first.query is None else ()


def can_fork() -> bool:
    """Return whether this platform can fork worker processes."""
    return "fork" in multiprocessing.get_all_start_methods()


@contextlib.contextmanager
def kept_pages(model: int = 0) -> Iterator[None]:
    """Let this process keep memory that it frees, until the end of the context.

    A stack's vectors are allocated and freed at every step, and each time the system would map and clear their pages
    again, which takes longer than computing them.  This works with GNU's C library; with others nothing happens.
    Afterwards the library keeps the highest limits that it would have set by itself, since it cannot be told to adapt
    them again.

    Args:
        model: parameters of one model.  Of a huge one, pieces above 32 MB are returned at once: gaps between them would
            take half as much memory again.
    """
    library: Any = ctypes.CDLL(None) if sys.platform == "linux" else None
    if not hasattr(library, "mallopt"):
        yield
        return
    library.mallopt(_MMAP_THRESHOLD, 32 << 20)
    library.mallopt(_TRIM_THRESHOLD, (1 << 31) - 1)
    if model <= HUGE:
        library.mallopt(_MMAP_MAX, 0)
    try:
        yield
    finally:
        library.mallopt(_TRIM_THRESHOLD, 64 << 20)
        library.mallopt(_MMAP_MAX, 65_536)
        library.malloc_trim(0)


class InProcess:
    """Serves stacks in this process, on the CPU with one thread.

    Several threads only help with large tensors, and on a busy machine they wait for one another many times longer than
    they compute; use workers for more cores.  Where processes cannot fork, torch keeps its threads.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine, self._later = engine, LaterWork()
        self._served: dict[int, tuple[list[StackResult], RunningSum]] = {}
        self._context = contextlib.ExitStack()
        self._context.enter_context(one_thread(engine.device.type == "cpu" and can_fork()))
        self._context.enter_context(kept_pages(engine.work.layout.size))

    def begin(self, stacks: Sequence[ClientStack], costs: Sequence[float], sum_request: SumRequest | None) -> int:
        return self._later.add(stacks, costs, sum_request)

    def collect(self, number: int) -> tuple[list[StackResult], RunningSum]:
        if self.engine.device.type == "cpu":
            stacks, _, sum_request = self._later.take(number)
            total = RunningSum()
            return [*serve_all(self.engine, stacks, sum_request, total, self._later.next_clients)], total
        if number not in self._served:  # with all that waits, so that a GPU is waited for once
            for counts, stacks, _, sum_request in self._later.take_all():
                total = RunningSum()
                results = iter([*serve_all(self.engine, stacks, sum_request, total)])
                for begun, count in counts.items():
                    self._served[begun] = [*itertools.islice(results, count)], total
        return self._served.pop(number)

    def close(self) -> None:
        self.engine.row_loader.close()
        self._context.close()


def share_out(costs: Sequence[float], workers: int, loads: Sequence[float] = ()) -> list[list[int]]:
    """Assign stacks to workers: the most expensive first, each to the least loaded worker; then in their own order.

    `loads` is what the workers have to do already, nothing by default.
    """
    queues: list[list[int]] = [[] for _ in range(workers)]
    loads = [*loads] or [0.0] * workers
    for place in sorted(range(len(costs)), key=lambda place: (-costs[place], place)):
        worker = loads.index(min(loads))
        queues[worker].append(place)
        # stacks that cost nothing would all go to the same worker
        loads[worker] += max(costs[place], 1e-9)
    return [sorted(queue) for queue in queues]


def prefetched(row_loader: RowLoader, stacks: Sequence[ClientStack], then: Sequence[int] = ()) -> Iterator[ClientStack]:
    """Stacks in their order; while one is served, the training rows of the next one are fetched.

    During the last one these are the rows of the clients `then`.
    """
    coming = [stack.clients if stack.query is None else () for stack in stacks[1:]]
    for stack, clients in zip(stacks, [*coming, then], strict=True):
        if clients:
            row_loader.expect(clients)
        yield stack


def serve_all(
    engine: Engine,
    stacks: Sequence[ClientStack],
    sum_request: SumRequest | None,
    total: RunningSum,
    then: Sequence[int] = (),
) -> Iterator[StackResult]:
    """Serve stacks; clients whose own work fails have a reason in place of a result, and the others go on.

    A GPU is waited for once, when all of them have been served.  `then` is as in `prefetched`.
    """
    numbers, waiting = LaterNumbers(), list[StackResult]()
    with engine.copies:
        for stack in prefetched(engine.row_loader, stacks, then):
            waiting.append(_serve_each(engine, stack, sum_request, total, numbers))
            if engine.device.type == "cpu":
                yield waiting.pop()
        with naming_lost(engine.device):  # where a GPU fails, the host learns of it when it waits
            numbers.read()
    yield from waiting


def _serve_each(
    engine: Engine,
    stack: ClientStack,
    sum_request: SumRequest | None,
    total: RunningSum,
    numbers: LaterNumbers | None,
) -> StackResult:
    """Serve a stack, and where that fails its clients one by one."""
    try:
        return serve(engine, stack, sum_request, total, numbers)
    except torch.OutOfMemoryError as error:
        held = "; it holds one client" if len(stack.clients) == 1 else f": set stack to less than {len(stack.clients)}"
        raise RuntimeFault(f"the memory of device {str(engine.device)!r} ran out{held}") from error
    except Exception as error:
        # first: on a lost GPU each client would fail in turn, and look as if its own work had
        raise_if_lost(error, engine.device)
        # a setting or a component that cannot work is the run's fault, not that of these clients
        if isinstance(error, PiebaldError) and not isinstance(error, CannotTrain):
            raise
        if SERVER_ID in stack.clients and (stack.query is None or stack.query.asked_of == "server"):
            raise RuntimeFault(f"work on the server's rows failed: {type(error).__name__}: {error}") from error
        log.debug("a stack of %d clients failed", len(stack.clients), exc_info=True)
        if len(stack.clients) == 1:
            return StackResult.joined([failure_reason(error)])
    alone = [_serve_each(engine, stack.row(row), sum_request, total, None) for row in range(len(stack.clients))]
    return StackResult.joined([failed_reason(result) or result for result in alone])


def failed_reason(result: StackResult, row: int = 0) -> str | None:
    """Return why the work of a client failed, None where it has a result."""
    reason = result.failures[row]
    return reason if reason is not None and failure_kind(reason) and not diverged(reason) else None
