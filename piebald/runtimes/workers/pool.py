"""Who does the work: this process alone, or worker processes forked from it.

Workers inherit model, rule and data by fork, copy nothing and unpickle nothing; vectors cross through shared memory.
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
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from typing import Any, Protocol

import torch

from piebald.contracts import SERVER_ID, SumRequest
from piebald.errors import PiebaldError, RuntimeFault
from piebald.runtimes.engines.row_loader import RowLoader
from piebald.runtimes.engines.serving import ClientStack, Engine, RunningSum, StackResult, serve
from piebald.runtimes.workers.serialization import Arena, pack_served, pack_stack, unpack_served, unpack_stack

LEAST_ARENA = 64 << 20
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _MMAP_MAX = -1, -3, -4  # of mallopt(3)
_HUGE = 1 << 24  # numbers of a model


class WorkerPool(Protocol):
    """Serves stacks, in the order given."""

    def serve(
        self, stacks: Sequence[ClientStack], costs: Sequence[float], pool: SumRequest | None
    ) -> tuple[list[StackResult], RunningSum]:
        """What came of each stack, and the sum of those that were pooled."""

    def close(self) -> None:
        """Let workers go."""


def can_fork() -> bool:
    """Whether worker processes can be had."""
    return "fork" in multiprocessing.get_all_start_methods()


@contextlib.contextmanager
def one_thread(wanted: bool) -> Iterator[None]:
    """Compute with one thread, if wanted; the user's own setting comes back afterwards."""
    before = torch.get_num_threads()
    if wanted:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextlib.contextmanager
def kept_pages(model: int = 0) -> Iterator[None]:
    """Let this process keep what memory it frees; afterwards it is given back.

    A stack's vectors come and go at every step, and each time the system would map and clear their pages anew, which
    takes longer than to compute them.  Only GNU's C library is told; with others nothing happens.  It goes on with the
    highest of the limits that it would have come to by itself, since it cannot be told to find its own again.

    Args:
        model: numbers of one model.  Of a huge one, pieces above 32 MB are given back at once: holes between them would
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
    """This process does it, on the CPU with one thread.

    Several threads help large tensors only, and on a busy machine they wait for one another many times longer than they
    compute; whoever wants more cores has workers.  Where processes cannot fork, torch's threads are all there is.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._stay = contextlib.ExitStack()
        self._stay.enter_context(one_thread(engine.device.type == "cpu" and can_fork()))
        self._stay.enter_context(kept_pages(engine.work.layout.size))

    def serve(
        self, stacks: Sequence[ClientStack], costs: Sequence[float], pool: SumRequest | None
    ) -> tuple[list[StackResult], RunningSum]:
        total = RunningSum()
        return [guarded(self.engine, stack, pool, total) for stack in foretold(self.engine.feed, stacks)], total

    def close(self) -> None:
        self.engine.feed.close()
        self._stay.close()


class ForkedWorkers:
    """Forked processes of one thread each.

    Args:
        engine: shared by inheritance; built before the fork.
        count: how many processes.
        size: bytes of shared memory for each direction of each worker.
        room: how many clients' inputs or outputs fit into one message.
    """

    def __init__(self, engine: Engine, count: int, size: int, room: int) -> None:
        self.room = room
        self.hands: list[_Worker] = []
        # Our own threads would wait for one another while the workers hold the cores: adding two vectors took 2 ms
        # instead of 0.05.
        self._stay = contextlib.ExitStack()
        self._stay.enter_context(one_thread(wanted=True))
        self._stay.enter_context(kept_pages(engine.work.layout.size))  # workers inherit it
        context = multiprocessing.get_context("fork")
        for _ in range(count):
            inbox, outbox = Arena(size), Arena(size)
            ours, theirs = context.Pipe()
            process = context.Process(target=_work, args=(engine, theirs, ours, inbox, outbox), daemon=True)
            with warnings.catch_warnings():
                # Python 3.12 warns about fork beside threads.  The children compute with one thread and touch no lock
                # of ours.
                warnings.simplefilter("ignore", DeprecationWarning)
                process.start()
            theirs.close()
            self.hands.append(_Worker(process, ours, inbox, outbox))

    def serve(
        self, stacks: Sequence[ClientStack], costs: Sequence[float], pool: SumRequest | None
    ) -> tuple[list[StackResult], RunningSum]:
        queues = share_out(costs, len(self.hands))
        results: dict[int, StackResult] = {}
        pieces = [self._pieces(queue, stacks) for queue in queues]
        aggregation = None if pool is None else {"weight": pool.weight.table(), "limit": pool.limit}
        sums: dict[int, dict[str, Any]] = {}  # what each worker says with its last message
        while any(pieces):
            busy = [(place, mine.pop(0), not mine) for place, mine in enumerate(pieces) if mine]
            for place, piece, last in busy:
                hand = self.hands[place]
                chosen = _pack(hand.inbox, [stacks[one] for one in piece])
                hand.send({"pool": aggregation, "stacks": chosen, "last": last})
            for place, piece, last in busy:
                hand = self.hands[place]
                answer = hand.receive()
                results |= zip(piece, (unpack_served(values, hand.outbox) for values in answer["served"]), strict=True)
                if last:
                    sums[place] = answer
        total = RunningSum()
        for place in sorted(sums) if pool is not None else ():
            outbox, answer = self.hands[place].outbox, sums[place]
            total.add(answer["weight"], {name: outbox.get(where) for name, where in answer["parts"].items()})
        return [results[place] for place in range(len(stacks))], total

    def _pieces(self, queue: Sequence[int], stacks: Sequence[ClientStack]) -> list[list[int]]:
        """A worker's stacks cut into messages that fit into its shared memory."""
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
        for hand in self.hands:
            hand.pipe.close()
        for hand in self.hands:
            hand.process.join(timeout=5)
            if hand.process.is_alive():
                hand.process.kill()
        self._stay.close()
        self.hands = []


class _Worker:
    """The near end of one worker."""

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
        return RuntimeFault(
            f"a worker process died (exit code {self.process.exitcode}; -9 often means that memory ran out): "
            "continue with `piebald resume`, if need be with fewer workers"
        )


def share_out(costs: Sequence[float], hands: int) -> list[list[int]]:
    """Places of stacks for each worker: the dearest first, always to the least loaded; then in their own order."""
    queues: list[list[int]] = [[] for _ in range(hands)]
    loads = [0.0] * hands
    for place in sorted(range(len(costs)), key=lambda place: (-costs[place], place)):
        hand = loads.index(min(loads))
        queues[hand].append(place)
        loads[hand] += max(costs[place], 1e-9)
    return [sorted(queue) for queue in queues]


def foretold(feed: RowLoader, stacks: Sequence[ClientStack]) -> Iterator[ClientStack]:
    """Stacks in their order; while one is served, the rows that the next one trains on are fetched."""
    for stack, after in zip(stacks, [*stacks[1:], None], strict=True):
        if after is not None and after.query is None:
            feed.expect(after.clients)
        yield stack


def guarded(engine: Engine, stack: ClientStack, pool: SumRequest | None, total: RunningSum) -> StackResult:
    """`serve`, with an error of the user's own code (model, loss, metric) named by client."""
    try:
        return serve(engine, stack, pool, total)
    except PiebaldError:
        raise
    except Exception as error:
        doing = "training" if stack.query is None else f"answering {stack.query.kind!r}"
        raise RuntimeFault(f"{doing} failed on {_culprit(engine, stack)}: {type(error).__name__}: {error}") from error


def _culprit(engine: Engine, stack: ClientStack) -> str:
    """Whose rows the error came with, found by serving the clients of the stack one by one."""
    for row, client in enumerate(stack.clients):
        alone = stack.row(row)
        try:
            serve(engine, alone)
        except Exception:
            return "the common test set" if client == SERVER_ID else f"client {engine.feed.clients.names[client]!r}"
    return f"a stack of {len(stack.clients)} clients, but on none of them alone"


def _pack(inbox: Arena, stacks: Sequence[ClientStack]) -> list[dict[str, Any]]:
    inbox.clear()
    return [pack_stack(stack, inbox) for stack in stacks]


def _work(engine: Engine, pipe: Connection, parent: Connection, inbox: Arena, outbox: Arena) -> None:
    """A worker's life: serve until the other end closes."""
    parent.close()  # else our own copy of it would keep the pipe open after the parent has died
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent decides what it means
    torch.set_num_threads(1)
    total = RunningSum()
    while True:
        try:
            message = json.loads(pipe.recv_bytes())
        except (EOFError, OSError):
            os._exit(0)
        outbox.clear()
        try:
            answer: dict[str, Any] = {"served": _serve_all(engine, message, inbox, outbox, total)}
            if message["last"]:
                answer |= {"weight": total.weight, "parts": {n: outbox.put(part) for n, part in total.vectors.items()}}
                total = RunningSum()
        except Exception as error:  # told to the parent, which raises it where the user can see it
            answer = {"error": str(error) if isinstance(error, PiebaldError) else f"{type(error).__name__}: {error}"}
        pipe.send_bytes(json.dumps(answer).encode())


def _serve_all(
    engine: Engine, message: dict[str, Any], inbox: Arena, outbox: Arena, total: RunningSum
) -> list[dict[str, Any]]:
    from piebald.aggregation.linear import Linear
    from piebald.component import build

    pool = None
    if message["pool"] is not None:
        aggregation = build("aggregation", message["pool"]["weight"])
        assert isinstance(aggregation, Linear)
        pool = SumRequest(aggregation, message["pool"]["limit"])
    answers = []
    for stack in foretold(engine.feed, [unpack_stack(values, inbox) for values in message["stacks"]]):
        served = guarded(engine, stack, pool, total)
        answers.append(pack_served(served, outbox))
    return answers
