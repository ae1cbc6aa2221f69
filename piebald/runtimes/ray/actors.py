"""A worker pool of Ray actors: the simulator's engines in processes on one machine or many.

    driver                                        each actor: one core, or one GPU
    model, trainer and data, once        ->       built into an engine; rows are read where Ray keeps them
    a round's model, once                ->       read where Ray keeps it, one copy for each node
    a chunk of stacks, with client state ->       served
    sums or updates, new client state    <-

What is in a chunk, and the order in which sums are added, depend on the stacks alone, not on who serves it.  So nothing
is lost when an actor dies: its chunk, and no other, is served again by another actor, with the same bits.

The Ray runtime's settings: the simulator with its engines in Ray actors, on this machine or on a cluster.

The virtual clock, the server and client state stay in this process; `ray.actors` describes what travels.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from piebald.contracts import Clients, SumRequest
from piebald.core.errors import RuntimeFault
from piebald.core.machine import count_cores, set_up_gpu
from piebald.core.references import list_file
from piebald.engines.engine_choice import make_engine
from piebald.engines.sequential import SequentialEngine
from piebald.engines.stack import ClientStack, RunningSum, StackResult
from piebald.methods.client_work import ClientWork
from piebald.runtimes.ray.connection import RayConnection, as_array, as_tensor, connected, imported
from piebald.runtimes.simulation.simulator import Simulated
from piebald.runtimes.workers.pool import LaterWork, WorkerPool, serve_all, share_out
from piebald.runtimes.workers.serialization import pack_result, pack_stack, unpack_result, unpack_stack

_CHUNKS = 2  # for each actor: more would balance unequal nodes and repeat less work, but send more sums
_DEATHS = 3  # a chunk over which this many actors died is not tried again


class ObjectBuffer:
    """Tensors of a message by number, as arrays, which Ray passes on without copying."""

    def __init__(self, arrays: dict[int, Any] | None = None) -> None:
        self.arrays = {} if arrays is None else arrays
        self.touched: set[int] = set()  # numbers of tensors that were put since this was last cleared
        self._places: dict[int, int] = {}
        self._alive: list[Tensor] = []

    def put(self, tensor: Tensor) -> int:
        """Store a tensor, once; returns its number."""
        place = self._places.setdefault(id(tensor), len(self._places))
        if place not in self.arrays:
            self._alive.append(tensor)  # keeps the id from being given to another tensor
            self.arrays[place] = as_array(tensor)
        self.touched.add(place)
        return place

    def get(self, place: int) -> Tensor:
        """A stored tensor, not to be written to."""
        return as_tensor(self.arrays[place])


class RayWorker:
    """An actor that serves chunks."""

    engine: SequentialEngine | None = None

    def list_files(self, files: Iterable[Path]) -> None:
        """Let the modules of these files be imported, where they lie on this node as well."""
        for file in files:
            if file.is_file():
                list_file(file)

    def load(self, work: ClientWork, clients: Clients, settings: Simulated) -> None:
        """Build the engine of a run."""
        torch.set_num_threads(1)
        if settings.device == "cuda":
            set_up_gpu(settings.tf32, settings.deterministic)
        options = (settings.bfloat16, settings.compiled, bool(settings.recorded))
        self.engine = make_engine(settings.engine, work, clients, torch.device(settings.device), *options)

    def measure(self, work: ClientWork, clients: Clients, settings: Simulated, expected: int) -> Simulated:
        """Make the choices that the settings leave open."""
        torch.set_num_threads(1)
        return settings.measured(work, clients, expected)

    def forget(self) -> None:
        """Free what belongs to a run."""
        self.engine = None

    def serve(
        self,
        stacks: list[dict[str, Any]],
        sum_request: SumRequest | None,
        own: dict[int, Any],
        places: list[int],
        *shared: Any,
    ) -> dict[str, Any]:
        """Serve a chunk.

        Args:
            stacks: as `pack_stack` makes them.
            sum_request: see `workers.pool.WorkerPool`.
            own: arrays of this chunk by number.
            places, shared: numbers of arrays that other chunks need too, and these arrays.
        """
        assert self.engine is not None
        buffer, unpacked = ObjectBuffer(own | dict(zip(places, shared, strict=True))), dict[str, Tensor]()
        received = [unpack_stack(values, buffer, unpacked) for values in stacks]
        total, out = RunningSum(), ObjectBuffer()
        packed = [pack_result(result, out) for result in serve_all(self.engine, received, sum_request, total)]
        sums = {name: out.put(part) for name, part in total.vectors.items()}
        return {"results": packed, "weight": total.weight, "sums": sums, "arrays": out.arrays}


def measured(settings: Simulated, connection: RayConnection, work: ClientWork, clients: Clients, expected: int) -> Any:
    """Settings with every choice made, measured by one of the actors."""
    resting = connection.take(settings.workers or 1)
    actors = resting or [connection.start(RayWorker)]
    reference = actors[0].measure.remote(connection.put_work(work), connection.put_rows(clients), settings, expected)
    arrived, resolved = connection.answer(connection.first([], [reference]))
    if not arrived:
        raise RuntimeFault("the Ray actor that measures the engines died: name an engine, like engine = 'sequential'")
    connection.rest(actors)
    return resolved


@dataclass(slots=True)
class _Chunk:
    """The arguments of `RayWorker.serve`: stacks that one actor serves together, and the arrays that they point to."""

    stacks: list[dict[str, Any]]
    own: dict[int, Any]
    shared: dict[int, Any]


class RayWorkerPool:
    """Actors that serve stacks (`workers.pool.WorkerPool`)."""

    def __init__(self, settings: Simulated, connection: RayConnection, work: ClientWork, clients: Clients) -> None:
        self.settings, self.connection = settings, connection
        self.count = max(1, settings.workers or 1)
        self._run = (connection.put_work(work), connection.put_rows(clients), settings)
        self._later = LaterWork()
        self._served: dict[int, tuple[list[StackResult], RunningSum]] = {}  # by number, until they are collected
        self._idle: list[Any] = []
        self._starting: dict[Any, Any] = {}  # actors, by the reference to the answer that they are ready
        self._serving: dict[Any, tuple[Any, int]] = {}  # actors and chunks, by the reference to the answer
        self._failed_starts = 0  # actors that died one after another before they were ready
        resting = connection.take(self.count)
        for actor in [*resting, *(connection.start(RayWorker) for _ in range(self.count - len(resting)))]:
            self._load(actor)

    def begin(self, stacks: Sequence[ClientStack], costs: Sequence[float], sum_request: SumRequest | None) -> int:
        return self._later.add(stacks, costs, sum_request)

    def collect(self, number: int) -> tuple[list[StackResult], RunningSum]:
        # all that waits: actors would idle otherwise
        for numbers, stacks, costs, sum_request in [] if number in self._served else self._later.take_all():
            results, total = self._serve(stacks, costs, sum_request)
            for served_number, count in numbers.items():
                self._served[served_number], results = (results[:count], total), results[count:]
        return self._served.pop(number)

    def _serve(
        self, stacks: Sequence[ClientStack], costs: Sequence[float], sum_request: SumRequest | None
    ) -> tuple[list[StackResult], RunningSum]:
        shares = [share for share in share_out(costs, self.count * _CHUNKS) if share]
        answers = self._serve_chunks(
            self._packed([[stacks[index] for index in share] for share in shares]), sum_request
        )
        results: dict[int, StackResult] = {}
        total = RunningSum()
        for share, answer in zip(shares, answers, strict=True):
            buffer = ObjectBuffer(answer["arrays"])
            results |= zip(share, (unpack_result(values, buffer) for values in answer["results"]), strict=True)
            # in the order of chunks and not of answers: float64 addition rounds by its order
            total.add(answer["weight"], {name: buffer.get(index) for name, index in answer["sums"].items()})
        return [results[index] for index in range(len(stacks))], total

    def close(self) -> None:
        """Keep idle actors for the next run, and stop the others."""
        for actor in [*self._starting.values(), *(actor for actor, _ in self._serving.values())]:
            self.connection.stop(actor)
        self.connection.rest(self._idle)
        self._idle, self._starting, self._serving = [], {}, {}
        del self._run

    # -- internal

    def _packed(self, shares: Sequence[Sequence[ClientStack]]) -> list[_Chunk]:
        """Chunks to send; arrays that several chunks point to are put into Ray's store once."""
        buffer, stacks, touched = ObjectBuffer(), [], []
        for share in shares:
            stacks.append([pack_stack(stack, buffer) | {"query": stack.query} for stack in share])
            touched.append(buffer.touched)
            buffer.touched = set()
        users = Counter(place for places in touched for place in places)
        common = {place: self.connection.put(buffer.arrays[place]) for place, count in users.items() if count > 1}
        return [
            _Chunk(
                packed_stacks,
                {place: buffer.arrays[place] for place in places if place not in common},
                {place: common[place] for place in places if place in common},
            )
            for packed_stacks, places in zip(stacks, touched, strict=True)
        ]

    def _serve_chunks(self, chunks: Sequence[_Chunk], sum_request: SumRequest | None) -> list[dict[str, Any]]:
        """Serve chunks with whichever actor is idle; returns the answers in the order of the chunks."""
        waiting, deaths = deque(range(len(chunks))), Counter[int]()
        answers: dict[int, dict[str, Any]] = {}
        while len(answers) < len(chunks):
            while self._idle and waiting:
                index = waiting.popleft()
                self._send(self._idle.pop(), index, chunks[index], sum_request)
            done = self.connection.first([*self._serving], [*self._starting])
            if done in self._starting:
                self._handle_started(done)
                continue
            actor, index = self._serving.pop(done)
            arrived, answer = self.connection.answer(done)
            if arrived:
                self._idle.append(actor)
                answers[index] = answer
                continue
            self._replace(actor)
            waiting.appendleft(index)
            deaths[index] += 1
            if deaths[index] == _DEATHS:
                raise RuntimeFault(
                    f"Ray actors died {_DEATHS} times over the same {len(chunks[index].stacks)} stacks of clients; "
                    "often memory ran out: continue with `piebald resume`, if need be with fewer workers on a node"
                )
        return [answers[index] for index in range(len(chunks))]

    def _send(self, actor: Any, place: int, chunk: _Chunk, sum_request: SumRequest | None) -> None:
        # shared ones as arguments of their own: Ray puts objects in place of references at the top level only
        reference = actor.serve.remote(chunk.stacks, sum_request, chunk.own, list(chunk.shared), *chunk.shared.values())
        self._serving[reference] = (actor, place)

    def _load(self, actor: Any) -> None:
        self._starting[actor.load.remote(*self._run)] = actor

    def _handle_started(self, done: Any) -> None:
        """Take note that an actor is ready, or died before it was."""
        actor = self._starting.pop(done)
        arrived, _ = self.connection.answer(done)
        if arrived:
            self._failed_starts = 0
            self._idle.append(actor)
            return
        self._failed_starts += 1
        # a node that goes may take all actors with it once
        if self._failed_starts > _DEATHS + self.count:
            raise RuntimeFault("Ray actors die before they are ready: look at Ray's logs, often memory ran out")
        self._replace(actor)

    def _replace(self, actor: Any) -> None:
        self.connection.stop(actor)
        self._load(self.connection.start(RayWorker))


class Ray(Simulated):
    """The settings of a simulation with Ray (`pip install '.[ray]'`).

    Attributes:
        workers: actors, each on one core or GPU; None starts one for each that Ray offers, at most one for each client
            that works at a time.
        device: "cpu", or "cuda" where each actor has a GPU, or a share of one.
        address: address of a running cluster, "auto" for one on this machine; None takes the existing connection
            (`ray.init`), or starts a Ray on this machine.
        gpus: how much of a GPU each actor takes, with device "cuda": 1, or a share like 0.25, with which four actors
            share each GPU.
        memory: bytes of client state that are kept in RAM by this process; more goes to a temporary file.
        store: bytes of the object store of a Ray that is started here; None is Ray's default, 30% of the memory.
    """

    workers: int | None = Field(default=None, ge=1)
    address: str | None = None
    gpus: float = Field(default=1.0, gt=0, le=1)
    store: int | None = Field(default=None, ge=100_000_000)

    @model_validator(mode="after")
    def _check_reach(self) -> Self:
        if self.device not in ("cpu", "cuda"):
            raise ValueError(f"device must be 'cpu' or 'cuda', Ray says which GPU an actor has, got {self.device!r}")
        if self.device == "cpu" and "gpus" in self.model_fields_set and self.gpus != 1.0:
            raise ValueError(f"gpus says how much of a GPU an actor takes, got {self.gpus:g}: set device = 'cuda' too")
        if self.address is not None and self.address.startswith("ray://"):
            raise ValueError(
                f"address must be that of the cluster itself, like '10.0.0.7:6379', got {self.address!r}: start the "
                "run on one of its nodes"
            )
        return self

    def share_of_gpu(self) -> float:
        return self.gpus

    def resolved(self, work: ClientWork, clients: Clients, expected: int) -> Self:
        """Make the choices of `RuntimeSettings.resolved` where the actors will be."""
        imported()
        here = self.address is None and self.device == "cpu" and not connected()
        workers = self.workers or min(expected, count_cores() if here else self._connection().offers()) or 1
        settings = self.model_copy(update={"workers": workers})
        if here or self.engine != "auto":
            return settings.measured(work, clients, expected)
        resolved = measured(settings, self._connection(), work, clients, expected)
        assert isinstance(resolved, type(self))
        return resolved

    def worker_pool(self, work: ClientWork, clients: Clients, room: tuple[int, int]) -> WorkerPool:
        """A pool of Ray actors."""
        return RayWorkerPool(self, self._connection(), work, clients)

    def _connection(self) -> RayConnection:
        gpus = self.gpus if self.device == "cuda" else 0.0
        return RayConnection(self.address, max(self.workers or 1, count_cores()), self.store, gpus)
