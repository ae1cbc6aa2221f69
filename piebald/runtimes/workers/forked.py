"""Workers that are forked from this process, and calls in a process of their own.

They inherit model, trainer and data, copy nothing and unpickle nothing; vectors travel through shared memory.  On a
GPU, which cannot be inherited, each of them builds its own engine when it is first asked.  Which worker gets which
stack of a sum depends on the stacks alone, and partial sums are added in worker order, so a run repeats bit for bit.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import signal
import warnings
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import Any

import torch

from piebald.contracts import SumRequest
from piebald.core.errors import PiebaldError, RuntimeFault, SettingError
from piebald.core.machine import one_thread
from piebald.engines.sequential import SequentialEngine as Engine
from piebald.engines.stack import ClientStack, RunningSum, StackResult
from piebald.runtimes.workers.pool import HUGE, kept_pages, serve_all, share_out
from piebald.runtimes.workers.serialization import PARTS, Arena, pack_result, pack_stack, unpack_result, unpack_stack


class ForkedWorkers:
    """Serves stacks in forked processes of one thread each.

    Each worker has its next message before it has answered the last one, so that it need not wait for this process.

    Args:
        make: what gives each worker its engine; on the CPU, one that was built before the fork and is inherited.
        parameters: of the largest model.
        count: how many processes.
        size: bytes of shared memory for each direction of each worker; a message gets half of them.
        room: how many clients' inputs or outputs fit into one message.
    """

    def __init__(self, make: Callable[[], Engine], parameters: int, count: int, size: int, room: int) -> None:
        self.room = room
        self.workers: list[_Worker] = []
        self._taken = 0
        self._begun: dict[int, _Begun] = {}
        # The threads of this process would wait for one another while the workers use the cores: adding two vectors
        # took 2 ms instead of 0.05.
        self._context = contextlib.ExitStack()
        self._context.enter_context(one_thread(wanted=True))
        self._context.enter_context(kept_pages(parameters))  # workers inherit it
        context = multiprocessing.get_context("fork")
        for _ in range(count):
            # pages that are given back are cleared again at each message: a seventh of the time of a model of 26 MB
            inbox, outbox = (Arena(size, keeps=parameters <= HUGE) for _ in range(2))
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve_until_closed, args=(make, theirs, ours, inbox, outbox), daemon=True)
            with warnings.catch_warnings():
                # Python 3.12 warns about forking while there are threads.  The children compute with one thread and
                # take no lock of this process.
                warnings.simplefilter("ignore", DeprecationWarning)
                process.start()
            theirs.close()
            self.workers.append(_Worker(process, ours, inbox, outbox))

    def begin(self, stacks: Sequence[ClientStack], costs: Sequence[float], sum_request: SumRequest | None) -> int:
        self._taken += 1
        begun = self._begun[self._taken] = _Begun(stacks, sum_request)
        # a sum must not depend on what else is under way
        loads = [worker.load if sum_request is None else 0.0 for worker in self.workers]
        for worker, queue in zip(self.workers, share_out(costs, len(self.workers), loads), strict=True):
            messages = self._messages(queue, stacks)
            begun.missing += len(messages)
            for places in messages:
                load = sum(costs[index] for index in places)
                worker.add(_Message(begun, places, load, last=places is messages[-1]))
        return self._taken

    def collect(self, number: int) -> tuple[list[StackResult], RunningSum]:
        begun = self._begun.pop(number)
        while begun.missing:
            ready = wait([worker.pipe for worker in self.workers if worker.sent])
            for worker in self.workers:
                if worker.pipe in ready:
                    worker.receive()
        total = RunningSum()
        for worker in self.workers:
            # in the order of workers and not of answers: float64 addition rounds by its order
            if worker in begun.sums:
                weight, vectors, part = begun.sums[worker]
                total.add(weight, vectors)
                # after the addition: the sums are views of memory that the worker may then write to again
                worker.release(part)
        return [begun.results[index] for index in range(len(begun.stacks))], total

    def _messages(self, queue: Sequence[int], stacks: Sequence[ClientStack]) -> list[list[int]]:
        """Split a worker's stacks into messages that fit into its shared memory."""
        pieces: list[list[int]] = []
        used = self.room
        for place in queue:
            if used + len(stacks[place].clients) > self.room:
                # a stack alone always goes, even where it is larger than the room: what does not fit lies in files
                pieces.append([])
                used = 0
            pieces[-1].append(place)
            used += len(stacks[place].clients)
        return pieces

    def close(self) -> None:
        for worker in self.workers:
            # all pipes before anybody is waited for, so that workers end at the same time
            worker.pipe.close()
            if worker.sent:  # nobody will read what it is computing
                worker.process.kill()
        for worker in self.workers:
            worker.process.join(timeout=5)
            if worker.process.is_alive():
                worker.process.kill()
        self._context.close()
        self.workers, self._begun = [], {}


@dataclass(slots=True, eq=False)
class _Begun:
    """The work that one call of `begin` gave out.

    Attributes:
        stacks, sum_request: what was asked for.
        missing: messages that were not answered yet.
        results: by the place of the stack.
        sums: of each worker its weight and sums, which are in that part of its shared memory.
    """

    stacks: Sequence[ClientStack]
    sum_request: SumRequest | None
    missing: int = 0
    results: dict[int, StackResult] = field(default_factory=dict)
    sums: dict[_Worker, tuple[float, dict[str, torch.Tensor], int]] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class _Message:
    """Stacks that a worker serves together, by their places; the last ones of a worker bring the sum."""

    begun: _Begun
    places: list[int]
    load: float
    last: bool
    part: int = 0

    def plain(self, inbox: Arena) -> dict[str, Any]:
        """As it is sent: values that point into the inbox."""
        request, stacks = self.begun.sum_request, [self.begun.stacks[index] for index in self.places]
        inbox.clear(self.part)
        return {
            "sum_request": None if request is None else {"weight": request.weight.table(), "limit": request.limit},
            "stacks": [pack_stack(stack, inbox) for stack in stacks],
            "last": self.last,
            "part": self.part,
        }


class _Worker:
    """One worker, as seen from this process.

    Attributes:
        load: the cost of what it was given and has not answered.
        sent: messages that it has, in their order.
    """

    def __init__(self, process: Any, pipe: Connection, inbox: Arena, outbox: Arena) -> None:
        self.process, self.pipe, self.inbox, self.outbox = process, pipe, inbox, outbox
        self.load = 0.0
        self.sent: deque[_Message] = deque()
        self._queue: deque[_Message] = deque()
        self._free = [*range(PARTS)]  # parts of the shared memory

    def add(self, message: _Message) -> None:
        """Let it do this, when it has done what it was given before."""
        self.load += message.load
        self._queue.append(message)
        self._send()

    def receive(self) -> None:
        """Wait for the answer to the first message that it has."""
        try:
            answer: dict[str, Any] = json.loads(self.pipe.recv_bytes())
        except (EOFError, ConnectionResetError):
            raise self._dead() from None
        if "error" in answer:
            raise RuntimeFault(answer["error"])
        message, get = self.sent.popleft(), self.outbox.get
        begun = message.begun
        # exactly 0 for an idle worker: what rounding leaves would decide who gets the next stack
        self.load = self.load - message.load if self.sent or self._queue else 0.0
        results = (unpack_result(values, self.outbox) for values in answer["results"])
        begun.results |= zip(message.places, results, strict=True)
        begun.missing -= 1
        if message.last and begun.sum_request is not None:
            sums = {name: get(place) for name, place in answer["vectors"].items()}
            begun.sums[self] = (answer["weight"], sums, message.part)
        else:
            self.release(message.part)

    def release(self, part: int) -> None:
        """Let another message use a part of the shared memory."""
        self._free.append(part)
        for arena in (self.inbox, self.outbox):
            arena.give_back(part)
        self._send()

    def _send(self) -> None:
        """Send what fits into the shared memory."""
        while self._queue and self._free:
            message = self._queue.popleft()
            message.part = self._free.pop()  # the last one that became free, whose pages are in memory already
            try:
                self.pipe.send_bytes(json.dumps(message.plain(self.inbox)).encode())
            except (BrokenPipeError, ConnectionResetError):
                raise self._dead() from None
            self.sent.append(message)

    def _dead(self) -> RuntimeFault:
        self.process.join(timeout=5)
        if self.process.exitcode == -signal.SIGTERM:  # sent to all processes of a run, it asks for a clean stop
            raise KeyboardInterrupt
        return RuntimeFault(
            f"a worker process died (exit code {self.process.exitcode}; -9 often means that memory ran out): "
            "continue with `piebald resume`, if need be with fewer workers"
        )


def _serve_until_closed(
    make: Callable[[], Engine], pipe: Connection, parent: Connection, inbox: Arena, outbox: Arena
) -> None:
    """The loop of a worker: serve until the other end closes."""
    torch.set_num_threads(1)  # before anything else: the others that torch would wait for were not forked
    parent.close()  # otherwise this copy of it would keep the pipe open after the parent has died
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes; the parent decides what to do
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # the parent's answer to it is to record that the run was stopped
    total, messages, engine = RunningSum(), deque[dict[str, Any]](), None
    while True:
        try:
            while not messages or pipe.poll():
                messages.append(json.loads(pipe.recv_bytes()))
        # not by sys.exit: this process must not run what its parent has registered for its own end
        except (EOFError, OSError):
            os._exit(0)
        message = messages.popleft()
        coming = messages[0]["stacks"][0] if messages else None
        next_clients: list[int] = coming["clients"] if coming is not None and coming["query"] is None else []
        outbox.clear(message["part"])
        try:
            engine = engine or make()
            answer: dict[str, Any] = {"results": _serve_all(engine, message, next_clients, inbox, outbox, total)}
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
    engine: Engine,
    message: dict[str, Any],
    next_clients: Sequence[int],
    inbox: Arena,
    outbox: Arena,
    total: RunningSum,
) -> list[dict[str, Any]]:
    from piebald.contracts.component import build
    from piebald.methods.aggregation.linear import Linear

    sum_request = None
    if message["sum_request"] is not None:
        aggregation = build("aggregation", message["sum_request"]["weight"])
        assert isinstance(aggregation, Linear)
        sum_request = SumRequest(aggregation, message["sum_request"]["limit"])
    unpacked: dict[str, torch.Tensor] = {}
    stacks = [unpack_stack(values, inbox, unpacked) for values in message["stacks"]]
    return [pack_result(result, outbox) for result in serve_all(engine, stacks, sum_request, total, next_clients)]


def check_forkable(device: str) -> None:
    """Refuse to fork workers from a process that uses a GPU already: they could not.

    Raises:
        SettingError: it does.
    """
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        raise SettingError(
            f"workers with device = {device!r} are forked from this process, which has used a GPU already, so that "
            "they could not: start the run in a new process, set workers = 0, or take runtime = 'ray' with gpus = 0.5"
        )


def in_fork(function: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Call a function in a forked process and return its result, which is plain JSON.

    Raises:
        SettingError: the function raised it.
        RuntimeFault: it raised another error, or its process died.
    """
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_call, args=(function, theirs), daemon=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of threads, see `forked.ForkedWorkers`
        process.start()
    # this process's copy would keep the pipe open, and the end of the child would never be noticed
    theirs.close()
    try:
        answer: dict[str, Any] = json.loads(ours.recv_bytes())
    except EOFError:
        process.join()
        raise RuntimeFault(f"the process that tries the engines died (exit code {process.exitcode})") from None
    finally:
        ours.close()
    process.join()
    if "error" in answer:
        raise (SettingError if answer["setting"] else RuntimeFault)(answer["error"])
    result: dict[str, Any] = answer["made"]
    return result


def _call(function: Callable[[], dict[str, Any]], pipe: Connection) -> None:
    torch.set_num_threads(1)  # before anything else: the others that torch would wait for were not forked
    answer: dict[str, Any]
    try:
        answer = {"made": function()}
    except Exception as error:  # whatever the user's own code may raise
        reason = str(error) if isinstance(error, PiebaldError) else f"{type(error).__name__}: {error}"
        answer = {"error": reason, "setting": isinstance(error, SettingError)}
    pipe.send_bytes(json.dumps(answer).encode())
