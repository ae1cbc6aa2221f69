"""Ray actors as a workers: the simulator's engines in processes on one machine or many.

    here                                          each actor: one core, or one GPU
    model, rule and data, once           ->       built into an engine; rows are read where Ray keeps them
    a round's model, once                ->       read where Ray keeps it, one copy a node
    a chunk of stacks                    ->       served, with memory from the clients' state_actors (`state_actors`)
    sums or updates                      <-

What a chunk is, and the order in which sums are added, depend on the stacks alone; who serves it does not matter.  So
an actor that dies loses nothing: its chunk, and nothing but it, is served again by another, with the same bits.  So
is a chunk that met a actor that was gone, once that is replaced; what it wrote before is overwritten.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from piebald.client_work import ClientWork
from piebald.contracts import Clients, SumRequest
from piebald.errors import RuntimeFault
from piebald.runtimes.engines.choose import make_engine
from piebald.runtimes.engines.matrix_products import set_onednn
from piebald.runtimes.engines.sequential import SequentialEngine
from piebald.runtimes.engines.serving import ClientStack, RunningSum, StackResult
from piebald.runtimes.ray.connection import RayConnection, as_array, as_tensor, gone
from piebald.runtimes.ray.state_actors import StateActorRow, StateActors
from piebald.runtimes.workers.pool import foretold, guarded, share_out
from piebald.runtimes.workers.serialization import pack_served, pack_stack, unpack_served, unpack_stack

if TYPE_CHECKING:
    from piebald.runtimes.ray.settings import Ray

_CHUNKS = 2  # for each actor: more would even out unequal nodes and lose less with an actor, but send more sums
_DEATHS = 3  # a chunk that so many actors died over is not tried again


class ObjectBuffer:
    """Tensors of a message by number, as arrays, which Ray hands over without copying them; what stands for a client's
    memory is kept as it is.
    """

    def __init__(self, arrays: dict[int, Any] | None = None) -> None:
        self.arrays = {} if arrays is None else arrays
        self.touched: set[int] = set()  # what was put lately; whoever asks empties it
        self._places: dict[int, int] = {}
        self._alive: list[Tensor] = []

    def put(self, tensor: Tensor) -> int:
        """Store a tensor, once; returns its number."""
        place = self._places.setdefault(id(tensor), len(self._places))
        if place not in self.arrays:
            self._alive.append(tensor)  # keeps the id from being given to another tensor
            self.arrays[place] = as_array(tensor) if isinstance(tensor, Tensor) else tensor
        self.touched.add(place)
        return place

    def get(self, place: int) -> Tensor:
        """A stored tensor, not to be written to."""
        return as_tensor(self.arrays[place])


class RayWorker:
    """What an actor does."""

    engine: SequentialEngine | None = None

    def load(self, work: ClientWork, clients: Clients, settings: Ray) -> None:
        """Get ready for a run."""
        torch.set_num_threads(1)
        set_onednn(bool(settings.onednn))
        self.engine = make_engine(settings.engine, work, clients, torch.device(settings.device), settings.bfloat16)

    def measure(self, work: ClientWork, clients: Clients, settings: Ray, expected: int) -> Ray:
        """Make the choices that were left open."""
        torch.set_num_threads(1)
        return settings.measured(work, clients, expected)

    def forget(self) -> None:
        """Let go of a run."""
        self.engine = None

    def serve(
        self,
        stacks: list[dict[str, Any]],
        pool: SumRequest | None,
        state_actors: list[Any],
        own: dict[int, Any],
        places: list[int],
        *shared: Any,
    ) -> dict[str, Any] | None:
        """Serve a chunk; None says that a actor was gone.

        Args:
            stacks: as `pack_stack` makes them.
            state_actors: where clients' memory lies; none where it comes and goes with the chunk.
            own: arrays of this chunk by number.
            places, shared: numbers of arrays that other chunks have too, and these.
        """
        row = StateActorRow(state_actors) if state_actors else None
        try:
            crate = ObjectBuffer((own if row is None else row.fill_in(own)) | dict(zip(places, shared, strict=True)))
            return self._serve([unpack_stack(values, crate) for values in stacks], pool, row)
        except Exception as error:
            if row is not None and gone(error):
                return None
            raise

    def _serve(self, stacks: list[ClientStack], pool: SumRequest | None, row: StateActorRow | None) -> dict[str, Any]:
        assert self.engine is not None
        total, out = RunningSum(), ObjectBuffer()
        served = [guarded(self.engine, stack, pool, total) for stack in foretold(self.engine.feed, stacks)]
        if row is not None:
            row.hand_in(stacks, served)
        answers = [pack_served(one, out) for one in served]
        sums = {name: out.put(part) for name, part in total.vectors.items()}
        return {"served": answers, "weight": total.weight, "sums": sums, "arrays": out.arrays}


def measured(settings: Ray, session: RayConnection, work: ClientWork, clients: Clients, expected: int) -> Any:
    """Settings with every choice made, by one of the actors."""
    resting = session.take(settings.workers or 1)
    actors = resting or [session.start(RayWorker)]
    asked = actors[0].measure.remote(session.put(work), session.put_rows(clients), settings, expected)
    came, made = session.answer(session.first([], [asked]))
    if not came:
        raise RuntimeFault("the Ray actor that measures the engines died: name an engine, like engine = 'sequential'")
    session.rest(actors)
    return made


@dataclass(slots=True)
class _Chunk:
    """What `Hand.serve` takes: stacks that one actor serves in one go, and the arrays that they point to."""

    stacks: list[dict[str, Any]]
    own: dict[int, Any]
    shared: dict[int, Any]


class RayWorkerPool:
    """Actors that serve stacks (`workers.Crew`), with clients' memory on `state_actors` where they have any."""

    def __init__(
        self,
        settings: Ray,
        session: RayConnection,
        work: ClientWork,
        clients: Clients,
        state_actors: StateActors | None = None,
    ) -> None:
        self.settings, self.session, self.state_actors = settings, session, state_actors
        self.count = max(1, settings.workers or 1)
        self._run = (session.put(work), session.put_rows(clients), settings)
        self._idle: list[Any] = []
        self._starting: dict[Any, Any] = {}  # actors, by the answer that they are ready
        self._serving: dict[Any, tuple[Any, int]] = {}  # actors and chunks, by the answer to come
        self._stillborn = 0  # actors that died one after another before they were ready
        resting = session.take(self.count)
        for actor in [*resting, *(session.start(RayWorker) for _ in range(self.count - len(resting)))]:
            self._load(actor)

    def serve(
        self, stacks: Sequence[ClientStack], costs: Sequence[float], pool: SumRequest | None
    ) -> tuple[list[StackResult], RunningSum]:
        shares = [share for share in share_out(costs, self.count * _CHUNKS) if share]
        answers = self._carry_out(self._packed([[stacks[place] for place in share] for share in shares]), pool)
        results: dict[int, StackResult] = {}
        total = RunningSum()
        for share, answer in zip(shares, answers, strict=True):
            crate = ObjectBuffer(answer["arrays"])
            results |= zip(share, (unpack_served(values, crate) for values in answer["served"]), strict=True)
            total.add(answer["weight"], {name: crate.get(place) for name, place in answer["sums"].items()})
        return [results[place] for place in range(len(stacks))], total

    def close(self) -> None:
        """Actors that have nothing to do rest until the next run; the others are stopped."""
        if self.state_actors is not None and self._serving:
            self.state_actors.rests = False
        for actor in [*self._starting.values(), *(actor for actor, _ in self._serving.values())]:
            self.session.stop(actor)
        self.session.rest(self._idle)
        self._idle, self._starting, self._serving = [], {}, {}
        del self._run

    # -- inside

    def _packed(self, shares: Sequence[Sequence[ClientStack]]) -> list[_Chunk]:
        """What to send: arrays that several chunks point to are put into Ray's store once."""
        crate, stacks, touched = ObjectBuffer(), [], []
        for share in shares:
            stacks.append([pack_stack(stack, crate) | {"query": stack.query} for stack in share])
            touched.append(crate.touched)
            crate.touched = set()
        users = Counter(place for places in touched for place in places)
        common = {place: self.session.put(crate.arrays[place]) for place, count in users.items() if count > 1}
        return [
            _Chunk(
                mine,
                {place: crate.arrays[place] for place in places if place not in common},
                {place: common[place] for place in places if place in common},
            )
            for mine, places in zip(stacks, touched, strict=True)
        ]

    def _carry_out(self, chunks: Sequence[_Chunk], pool: SumRequest | None) -> list[dict[str, Any]]:
        """The chunks' answers, in their order, by whoever is free."""
        waiting, deaths = deque(range(len(chunks))), Counter[int]()
        answers: dict[int, dict[str, Any]] = {}
        if self.state_actors is not None:
            self.state_actors.ready()
        while len(answers) < len(chunks):
            while self._idle and waiting:
                place = waiting.popleft()
                self._send(self._idle.pop(), place, chunks[place], pool)
            done = self.session.first([*self._serving], [*self._starting])
            if done in self._starting:
                self._welcome(done)
                continue
            actor, place = self._serving.pop(done)
            came, answer = self.session.answer(done)
            if came:
                self._idle.append(actor)
            else:
                self._replace(actor)
            if answer is not None:
                answers[place] = answer
                continue
            if came and self.state_actors is not None:
                self.state_actors.mend()
            waiting.appendleft(place)
            deaths[place] += 1
            if deaths[place] == _DEATHS:
                raise RuntimeFault(
                    f"Ray actors died {_DEATHS} times over the same {len(chunks[place].stacks)} stacks of clients; "
                    "often memory ran out: continue with `piebald resume`, if need be with fewer workers on a node"
                )
        return [answers[place] for place in range(len(chunks))]

    def _send(self, actor: Any, place: int, chunk: _Chunk, pool: SumRequest | None) -> None:
        state_actors = [] if self.state_actors is None else self.state_actors.row.state_actors
        asked = actor.serve.remote(
            chunk.stacks, pool, state_actors, chunk.own, list(chunk.shared), *chunk.shared.values()
        )
        self._serving[asked] = (actor, place)

    def _load(self, actor: Any) -> None:
        self._starting[actor.load.remote(*self._run)] = actor

    def _welcome(self, done: Any) -> None:
        """An actor is ready, or died before it was."""
        actor = self._starting.pop(done)
        came, _ = self.session.answer(done)
        if came:
            self._stillborn = 0
            self._idle.append(actor)
            return
        self._stillborn += 1
        if self._stillborn > _DEATHS + self.count:
            raise RuntimeFault("Ray actors die before they are ready: look at Ray's logs, often memory ran out")
        self._replace(actor)

    def _replace(self, actor: Any) -> None:
        self.session.stop(actor)
        self._load(self.session.start(RayWorker))
