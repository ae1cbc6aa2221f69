"""Worker pools: this process, or worker processes forked from it.

Forked workers inherit model, trainer and data, copy nothing and unpickle nothing; vectors travel through shared memory.
On a GPU, which cannot be inherited, each of them builds its own engine when it is first asked.
Which worker gets which stack depends on the stacks alone, and partial sums are added in worker order, so a run repeats
bit for bit.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import multiprocessing
import os
import signal
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from typing import Any, Protocol

import torch

from piebald.contracts import SERVER_ID, SumRequest
from piebald.errors import PiebaldError, RuntimeFault
from piebald.machine import one_thread
from piebald.runtimes.engines.engine import Engine
from piebald.runtimes.engines.row_loader import RowLoader
from piebald.runtimes.engines.serve_stack import serve
from piebald.runtimes.engines.stack import ClientStack, RunningSum, StackResult
from piebald.runtimes.workers.serialization import Arena, pack_result, pack_stack, unpack_result, unpack_stack

MIN_ARENA = 64 << 20
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _MMAP_MAX = -1, -3, -4  # of mallopt(3)
_HUGE = 1 << 24  # parameters of a model


class WorkerPool(Protocol):
    """Serves stacks of clients."""

    def serve(
        self, stacks: Sequence[ClientStack], costs: Sequence[float], sum_request: SumRequest | None
    ) -> tuple[list[StackResult], RunningSum]:
        """Serve stacks; returns their results in the order given, and the sum of updates that the request asks for."""

    def close(self) -> None:
        """Stop the workers."""


def can_fork() -> bool:
    """Whether this platform can fork worker processes."""
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
    if model <= _HUGE:
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
        self.engine = engine
        self._context = contextlib.ExitStack()
        self._context.enter_context(one_thread(engine.device.type == "cpu" and can_fork()))
        self._context.enter_context(kept_pages(engine.work.layout.size))

    def serve(
        self, stacks: Sequence[ClientStack], costs: Sequence[float], sum_request: SumRequest | None
    ) -> tuple[list[StackResult], RunningSum]:
        total = RunningSum()
        with self.engine.copies:
            return [
                serve_naming_client(self.engine, stack, sum_request, total)
                for stack in prefetched(self.engine.row_loader, stacks)
            ], total

    def close(self) -> None:
        self.engine.row_loader.close()
        self._context.close()


class ForkedWorkers:
    """Serves stacks in forked processes of one thread each.

    Args:
        make: what gives each worker its engine; on the CPU, one that was built before the fork and is inherited.
        parameters: of the largest model.
        count: how many processes.
        size: bytes of shared memory for each direction of each worker.
        room: how many clients' inputs or outputs fit into one message.
    """

    def __init__(self, make: Callable[[], Engine], parameters: int, count: int, size: int, room: int) -> None:
        self.room = room
        self.workers: list[_Worker] = []
        # The threads of this process would wait for one another while the workers use the cores: adding two vectors
        # took 2 ms instead of 0.05.
        self._context = contextlib.ExitStack()
        self._context.enter_context(one_thread(wanted=True))
        self._context.enter_context(kept_pages(parameters))  # workers inherit it
        context = multiprocessing.get_context("fork")
        for _ in range(count):
            inbox, outbox = Arena(size), Arena(size)
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve_until_closed, args=(make, theirs, ours, inbox, outbox), daemon=True)
            with warnings.catch_warnings():
                # Python 3.12 warns about forking while there are threads.  The children compute with one thread and
                # take no lock of this process.
                warnings.simplefilter("ignore", DeprecationWarning)
                process.start()
            theirs.close()
            self.workers.append(_Worker(process, ours, inbox, outbox))

    def serve(
        self, stacks: Sequence[ClientStack], costs: Sequence[float], sum_request: SumRequest | None
    ) -> tuple[list[StackResult], RunningSum]:
        queues = share_out(costs, len(self.workers))
        results: dict[int, StackResult] = {}
        pieces = [self._messages(queue, stacks) for queue in queues]
        request = None if sum_request is None else {"weight": sum_request.weight.table(), "limit": sum_request.limit}
        sums: dict[int, dict[str, Any]] = {}  # what each worker sends with its last message
        while any(pieces):
            busy = [(place, mine.pop(0), not mine) for place, mine in enumerate(pieces) if mine]
            for place, piece, last in busy:
                worker = self.workers[place]
                chosen = _pack(worker.inbox, [stacks[one] for one in piece])
                worker.send({"sum_request": request, "stacks": chosen, "last": last})
            for place, piece, last in busy:
                worker = self.workers[place]
                answer = worker.receive()
                results |= zip(
                    piece, (unpack_result(values, worker.outbox) for values in answer["results"]), strict=True
                )
                if last:
                    sums[place] = answer
        total = RunningSum()
        for place in sorted(sums) if sum_request is not None else ():
            outbox, answer = self.workers[place].outbox, sums[place]
            total.add(answer["weight"], {name: outbox.get(where) for name, where in answer["vectors"].items()})
        return [results[place] for place in range(len(stacks))], total

    def _messages(self, queue: Sequence[int], stacks: Sequence[ClientStack]) -> list[list[int]]:
        """Split a worker's stacks into messages that fit into its shared memory."""
        pieces: list[list[int]] = []
        used = self.room
        for place in queue:
            if used + len(stacks[place].clients) > self.room:
                pieces.append([])
                used = 0
            pieces[-1].append(place)
            used += len(stacks[place].clients)
        return pieces

    def close(self) -> None:
        for worker in self.workers:
            worker.pipe.close()
        for worker in self.workers:
            worker.process.join(timeout=5)
            if worker.process.is_alive():
                worker.process.kill()
        self._context.close()
        self.workers = []


class _Worker:
    """One worker, as seen from this process."""

    def __init__(self, process: Any, pipe: Connection, inbox: Arena, outbox: Arena) -> None:
        self.process, self.pipe, self.inbox, self.outbox = process, pipe, inbox, outbox

    def send(self, message: dict[str, Any]) -> None:
        try:
            self.pipe.send_bytes(json.dumps(message).encode())
        except (BrokenPipeError, ConnectionResetError):
            raise self._dead() from None

    def receive(self) -> dict[str, Any]:
        try:
            answer: dict[str, Any] = json.loads(self.pipe.recv_bytes())
        except (EOFError, ConnectionResetError):
            raise self._dead() from None
        if "error" in answer:
            raise RuntimeFault(answer["error"])
        return answer

    def _dead(self) -> RuntimeFault:
        self.process.join(timeout=5)
        if self.process.exitcode == -signal.SIGTERM:  # sent to all processes of a run, it asks for a clean stop
            raise KeyboardInterrupt
        return RuntimeFault(
            f"a worker process died (exit code {self.process.exitcode}; -9 often means that memory ran out): "
            "continue with `piebald resume`, if need be with fewer workers"
        )


def share_out(costs: Sequence[float], workers: int) -> list[list[int]]:
    """Assign stacks to workers: the most expensive first, each to the least loaded worker; then in their own order."""
    queues: list[list[int]] = [[] for _ in range(workers)]
    loads = [0.0] * workers
    for place in sorted(range(len(costs)), key=lambda place: (-costs[place], place)):
        worker = loads.index(min(loads))
        queues[worker].append(place)
        loads[worker] += max(costs[place], 1e-9)
    return [sorted(queue) for queue in queues]


def prefetched(row_loader: RowLoader, stacks: Sequence[ClientStack]) -> Iterator[ClientStack]:
    """Stacks in their order; while one is served, the training rows of the next one are fetched."""
    for stack, after in zip(stacks, [*stacks[1:], None], strict=True):
        if after is not None and after.query is None:
            row_loader.expect(after.clients)
        yield stack


def serve_naming_client(
    engine: Engine, stack: ClientStack, sum_request: SumRequest | None, total: RunningSum
) -> StackResult:
    """`serve`, with errors of the user's own code (model, loss, metric) that name the client."""
    try:
        return serve(engine, stack, sum_request, total)
    except PiebaldError:
        raise
    except torch.OutOfMemoryError as error:
        held = "; it holds one client" if len(stack.clients) == 1 else f": set stack to less than {len(stack.clients)}"
        raise RuntimeFault(f"the memory of device {str(engine.device)!r} ran out{held}") from error
    except Exception as error:
        doing = "training" if stack.query is None else f"answering {stack.query.kind!r}"
        raise RuntimeFault(f"{doing} failed on {_culprit(engine, stack)}: {type(error).__name__}: {error}") from error


def _culprit(engine: Engine, stack: ClientStack) -> str:
    """The client whose rows cause the error, found by serving the clients of the stack one by one."""
    for row, client in enumerate(stack.clients):
        alone = stack.row(row)
        try:
            serve(engine, alone)
        except Exception:
            return (
                "the common test set" if client == SERVER_ID else f"client {engine.row_loader.clients.names[client]!r}"
            )
    return f"a stack of {len(stack.clients)} clients, but on none of them alone"


def _pack(inbox: Arena, stacks: Sequence[ClientStack]) -> list[dict[str, Any]]:
    inbox.clear()
    return [pack_stack(stack, inbox) for stack in stacks]


def _serve_until_closed(
    make: Callable[[], Engine], pipe: Connection, parent: Connection, inbox: Arena, outbox: Arena
) -> None:
    """The loop of a worker: serve until the other end closes."""
    parent.close()  # otherwise this copy of it would keep the pipe open after the parent has died
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes; the parent decides what to do
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # the parent's answer to it is to record that the run was stopped
    torch.set_num_threads(1)
    total, engine = RunningSum(), None
    while True:
        try:
            message = json.loads(pipe.recv_bytes())
        except (EOFError, OSError):
            os._exit(0)
        outbox.clear()
        try:
            engine = engine or make()
            answer: dict[str, Any] = {"results": _serve_all(engine, message, inbox, outbox, total)}
            if message["last"]:
                answer |= {
                    "weight": total.weight,
                    "vectors": {n: outbox.put(part) for n, part in total.vectors.items()},
                }
                total = RunningSum()
        except Exception as error:  # sent to the parent, which raises it where the user can see it
            answer = {"error": str(error) if isinstance(error, PiebaldError) else f"{type(error).__name__}: {error}"}
        try:
            pipe.send_bytes(json.dumps(answer).encode())
        except OSError:  # the parent was stopped meanwhile
            os._exit(0)


def _serve_all(
    engine: Engine, message: dict[str, Any], inbox: Arena, outbox: Arena, total: RunningSum
) -> list[dict[str, Any]]:
    from piebald.aggregation.linear import Linear
    from piebald.component import build

    sum_request = None
    if message["sum_request"] is not None:
        aggregation = build("aggregation", message["sum_request"]["weight"])
        assert isinstance(aggregation, Linear)
        sum_request = SumRequest(aggregation, message["sum_request"]["limit"])
    seen: dict[str, torch.Tensor] = {}
    stacks = [unpack_stack(values, inbox, seen) for values in message["stacks"]]
    with engine.copies:
        return [
            pack_result(serve_naming_client(engine, stack, sum_request, total), outbox)
            for stack in prefetched(engine.row_loader, stacks)
        ]
