"""Shelves: Ray actors that keep what clients remember, so that none of it passes through the driver.

    driver                               an actor that trains                  state_actors
    whose memory a stack needs      ->   reads it                         <-   client 7 remembers ...
                                         writes what came of it           ->   task 52 came to ...
    52 counts, or is dropped        ---------------------------------->        client 7 remembers ...

A client's home is the actor of its number, counted around; everything lies there and on the next actor, on another node
where there is one.  A actor that dies is replaced and filled from these two neighbours.  Which clients are known and
which tasks are under way the driver knows, so state_actors need not be asked; only for a checkpoint what has changed
comes to the driver.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, cast

from torch import Tensor

from piebald.client_work import ClientWork
from piebald.contracts import Task
from piebald.errors import RuntimeFault
from piebald.parameters import nbytes
from piebald.runtimes.engines.serving import ClientStack, StackResult
from piebald.runtimes.ray.connection import RayConnection, as_array, as_tensor, imported
from piebald.runtimes.workers.state_store import ClientStateStore
from piebald.tensor_store import TensorStore, by_client

_PIECE = 32 << 20  # bytes of memory that are moved between state_actors, or to the driver, at a time
_TRIES = 5  # to replace state_actors that die over and over

Entries = Mapping[int, Mapping[str, Any]]  # by key: a client's number, or ~ID for what came of a task


class StateKey(NamedTuple):
    """What stands for a tensor that lies on a actor, on the way to an actor."""

    client: int
    name: str


class StateActor:
    """What a actor does."""

    def __init__(self) -> None:
        self.memory = TensorStore(0)

    def begin(self, budget: int) -> None:
        """Forget everything; `budget` is for the bytes kept in RAM from now on."""
        self.memory.close()
        self.memory = TensorStore(budget)

    def give(self, keys: Sequence[int]) -> Entries:
        """Entries as arrays; those that are not here are left out."""
        return {
            key: {name: as_array(tensor) for name, tensor in self.memory.get(key).items()}
            for key in keys
            if key in self.memory
        }

    def put(self, entries: Entries) -> None:
        """Take entries, copied out of Ray's store."""
        for key, arrays in entries.items():
            self.memory.set(key, {name: as_tensor(array).clone() for name, array in arrays.items()})

    def settle(self, moves: Sequence[tuple[int, int, bool]]) -> None:
        """Let clients remember what came of tasks, or forget that: (id, client, kept).  A second time changes
        nothing.
        """
        for id, client, kept in moves:
            if ~id in self.memory:
                tensors = self.memory.take(~id)
                if kept:
                    self.memory.set(client, tensors)


class StateActorRow:
    """Shelves in their order, as whoever reads from them and writes to them sees them."""

    def __init__(self, state_actors: Sequence[Any]) -> None:
        self.state_actors, self.ray = list(state_actors), imported()

    def home(self, client: int) -> int:
        """The actor that has a client's memory first."""
        return client % len(self.state_actors)

    def fill_in(self, arrays: Mapping[int, Any]) -> dict[int, Any]:
        """A message's arrays with what clients remember in place of what stood for it."""
        wanted = {place: one for place, one in arrays.items() if isinstance(one, StateKey)}
        clients = {one.client for one in wanted.values()}
        asked = [self.state_actors[home].give.remote(keys) for home, keys in self.at_home((c, c) for c in clients)]
        found: dict[int, Mapping[str, Any]] = {}
        for given in self.ray.get(asked):
            found |= given
        for one in wanted.values():
            if one.name not in found[one.client]:
                raise RuntimeFault(
                    f"a client was left without {one.name!r} in its memory: a rule that begins with it (`remember`) "
                    "must hand it out each time (`TrainOutput.state`)"
                )
        return {**arrays, **{place: found[one.client][one.name] for place, one in wanted.items()}}

    def hand_in(self, stacks: Sequence[ClientStack], served: Sequence[StackResult]) -> None:
        """What came of tasks, onto both state_actors of their clients; returns when it lies there."""
        entries, clients = {}, {}
        for stack, one in zip(stacks, served, strict=True):
            for row, (id, client) in enumerate(zip(stack.ids, stack.clients, strict=True)):
                clients[~id] = client
                entries[~id] = {name: rows[row] for name, rows in one.state.items()}
            one.state = {}
        self.ray.get(self.write(entries, clients))

    def write(self, entries: Entries, clients: Mapping[int, int]) -> list[Any]:
        """Both state_actors' receipts for entries; `clients` says by key whose they are."""
        receipts = []
        for home, keys in self.at_home((key, clients[key]) for key in entries):
            parcel = self.ray.put({key: {n: as_array(t) for n, t in entries[key].items()} for key in keys})
            receipts += [self.state_actors[place].put.remote(parcel) for place in (home, self.home(home + 1))]
        return receipts

    def at_home(self, keys: Iterable[tuple[int, int]]) -> list[tuple[int, list[int]]]:
        """Keys, each with its client, by their homes."""
        homes: dict[int, list[int]] = {}
        for key, client in keys:
            homes.setdefault(self.home(client), []).append(key)
        return sorted(homes.items())


class StateActors(ClientStateStore):
    """Client memory on state_actors, as the driver sees it.

    There is a actor for each node, and never fewer than two; they start at the first need.

    Args:
        work: see `ClientStateStore`.
        budget: bytes of client memory kept in RAM on each node; each actor has a file of its own for more.
        session: connects to Ray.

    Attributes:
        rests: False once something may still be on its way to the state_actors that the next run must not find there.
    """

    def __init__(self, work: ClientWork, budget: int, session: Callable[[], RayConnection]) -> None:
        super().__init__(work, budget)
        self.rests, self._connect = True, session
        self._row: StateActorRow | None = None
        self._begun = False  # whether all state_actors lived once, and something may lie there
        self._nodes: dict[int, str] = {}  # of each actor
        self._known: set[int] = set()  # clients whose memory lies on state_actors
        self._changed: set[int] = set()  # of these since the last checkpoint
        self._tickets: dict[int, int] = {}  # clients by the ids of tasks of which something may lie there
        self._moves: list[tuple[int, int, bool]] = []  # what state_actors have yet to be told (`Shelf.settle`)

    # -- what a simulation asks

    def recall(self, task: Task) -> Mapping[str, Any]:
        first, client = self.first(task), task.client
        if task.query is None:
            self._tickets[task.id] = client  # before it is served: a actor may have to be filled meanwhile
        return {name: StateKey(client, name) for name in first} if client in self._known else first

    def hold(self, task: Task, tensors: Mapping[str, Tensor]) -> None:
        """From a checkpoint; what actors came to, they have handed in themselves."""
        if tensors:
            self.ready()
            self._tickets[task.id] = task.client
            self._write({~task.id: tensors}, {~task.id: task.client})

    def settle(self, task: Task, kept: bool) -> None:
        if task.id not in self._tickets:
            return
        self._moves.append((task.id, task.client, kept))
        if kept:
            self._known.add(task.client)
            self._changed.add(task.client)

    def held(self, tasks: Sequence[Task]) -> Mapping[int, Mapping[str, Tensor]]:
        clients = {~one.id: one.client for one in tasks if one.id in self._tickets}
        found = dict(self._read(clients))
        return {one.id: found.get(~one.id, {}) for one in tasks}

    def changed(self) -> dict[str, Tensor]:
        if not self._changed:
            return {}
        self.ready()
        found = self._read({client: client for client in sorted(self._changed)})
        tensors = {f"memory/{client}/{name}": t for client, entry in found for name, t in entry.items()}
        self._changed.clear()
        return tensors

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        found = by_client(tensors, "memory")
        if found:
            self.ready()
        self._known |= set(found)
        for piece in self._pieces(sorted(found)):
            self._write({client: found[client] for client in piece}, {client: client for client in piece})

    def close(self) -> None:
        """Shelves rest until the next run, or are stopped."""
        for place, actor in enumerate(self._row.state_actors if self._row is not None else ()):
            if self.rests:
                actor.begin.remote(0)
                self._session.rest_on(self._nodes[place], actor)
            else:
                self._session.stop(actor)
        self._row, self._begun = None, False

    # -- what a workers asks

    def ready(self) -> StateActorRow:
        """The state_actors, once all of them live and know which results count."""
        for _ in range(_TRIES):
            asked = [actor.settle.remote(self._moves) for actor in self.row.state_actors]
            if self._came(asked):
                for id, _, _ in self._moves:
                    del self._tickets[id]
                self._moves, self._begun = [], True
                return self.row
            self.mend()
        raise _dying()

    @property
    def row(self) -> StateActorRow:
        """The state_actors, as far as they live."""
        if self._row is None:
            self._session = self._connect()
            count = max(2, len(self._session.nodes()))
            self._row = StateActorRow([])
            for place in range(count):
                self._row.state_actors.append(self._start(place, count))
        return self._row

    def mend(self) -> None:
        """Replace state_actors that died.

        Raises:
            RuntimeFault: what lay on one of them lay on no other that lives.
        """
        for _ in range(_TRIES):
            state_actors = self.row.state_actors
            dead = [place for place, actor in enumerate(state_actors) if not self._came([actor.settle.remote([])])]
            if not dead:
                return
            for home in dead:
                if self.row.home(home + 1) in dead and self._keys(home):
                    raise RuntimeFault(
                        "two Ray actors that kept the same clients' memory died at once: continue from the last "
                        "checkpoint with `piebald resume`; often memory ran out, or two nodes went away"
                    )
            for place in dead:
                self._replace(place)
        raise _dying()

    # -- inside

    def _replace(self, place: int) -> None:
        state_actors, count = self.row.state_actors, len(self.row.state_actors)
        self._session.stop(state_actors[place])
        state_actors[place] = new = self._start(place, count)
        before = (place - 1) % count
        for home, source in ((place, (place + 1) % count), (before, before)):
            for piece in self._pieces(self._keys(home)):
                if not self._came([new.put.remote(state_actors[source].give.remote(piece))]):
                    self._session.stop(new)  # one that is not whole must not be taken for one that is
                    return

    def _start(self, place: int, count: int) -> Any:
        """A actor, on a node where its neighbours are not, and few others, as far as there are such."""
        nodes = self._session.nodes()
        self._nodes.pop(place, None)
        beside = [self._nodes.get((place + step) % count) for step in (-1, 1)]
        others = list(self._nodes.values())
        node = min(nodes, key=lambda node: (beside.count(node), others.count(node)))
        self._nodes[place] = node
        actor = self._session.start_on(node, StateActor)
        actor.begin.remote(self.budget * min(len(nodes), count) // count)
        return actor

    def _keys(self, home: int) -> list[int]:
        """Everything that may lie on a actor as clients' home."""
        if not self._begun:  # one that had rested may have been dead already
            return []
        mine = [~id for id, client in self._tickets.items() if self.row.home(client) == home]
        return mine + [client for client in sorted(self._known) if self.row.home(client) == home]

    def _pieces(self, keys: Sequence[int]) -> Iterator[Sequence[int]]:
        """Keys, in such numbers as can be moved at a time."""
        private = self.work.layout.size - self.work.layout.shared
        size = max(1, _PIECE // max(1, nbytes(self.fresh) + 4 * private))
        for start in range(0, len(keys), size):
            yield keys[start : start + size]

    def _read(self, clients: Mapping[int, int]) -> Iterator[tuple[int, Mapping[str, Tensor]]]:
        """Entries by key, copied to this process; `clients` says by key whose they are."""
        for home, keys in self.row.at_home(clients.items()) if clients else ():
            for piece in self._pieces(keys):
                for key, arrays in self._given(home, piece).items():
                    yield key, {name: as_tensor(array).clone() for name, array in arrays.items()}

    def _given(self, home: int, keys: Sequence[int]) -> Entries:
        for _ in range(_TRIES):
            came, entries = self._session.answer(self.row.state_actors[home].give.remote(keys))
            if came:
                return cast(Entries, entries)
            self.mend()
        raise _dying()

    def _write(self, entries: Entries, clients: Mapping[int, int]) -> None:
        for _ in range(_TRIES):
            if self._came(self.row.write(entries, clients)):
                return
            self.mend()
        raise _dying()

    def _came(self, answers: Sequence[Any]) -> bool:
        """Whether all of them came."""
        return all([self._session.answer(one)[0] for one in answers])


def _dying() -> RuntimeFault:
    return RuntimeFault(
        f"Ray actors that keep clients' memory died {_TRIES} times in a row: look at Ray's logs, often memory ran out; "
        "`piebald resume` continues from the last checkpoint"
    )
