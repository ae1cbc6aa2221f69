"""State actors: Ray actors that keep client state, so that none of it passes through the driver.

    driver                               an actor that trains                  state actors
    whose state a stack needs       ->   reads it                         <-   state of client 7
                                         writes the new state             ->   new state held for task 52
    52 counts, or is dropped        ---------------------------------->        new state of client 7

A client's home is the actor with its number, modulo the count of actors; its state is there and on the next actor,
which is on another node where there is one.  An actor that dies is replaced and filled from these two neighbors.  The
driver knows which clients have state and which tasks are under way, so it need not ask; only for a checkpoint the state
that has changed comes to the driver.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, cast

from torch import Tensor

from piebald.contracts import Task
from piebald.core.errors import RuntimeFault
from piebald.core.parameters import nbytes
from piebald.core.tensor_store import TensorStore, by_client
from piebald.engines.stack import ClientStack, StackResult
from piebald.methods.client_work import ClientWork
from piebald.runtimes.ray.connection import RayConnection, as_array, as_tensor, imported
from piebald.runtimes.workers.state_store import ClientStateStore

_PIECE = 32 << 20  # bytes of client state that are moved between actors, or to the driver, at a time
_TRIES = 5  # to replace state actors that die again and again

Entries = Mapping[int, Mapping[str, Any]]  # by key: a client's number, or ~ID for the state held for a task


class StateKey(NamedTuple):
    """Placeholder for a tensor of a state actor, on its way to an actor that trains."""

    client: int
    name: str


class StateActor:
    """An actor that keeps client state."""

    def __init__(self) -> None:
        self.store = TensorStore(0)

    def begin(self, budget: int) -> None:
        """Forget everything, and keep `budget` bytes in RAM from now on."""
        self.store.close()
        self.store = TensorStore(budget)

    def give(self, keys: Sequence[int]) -> Entries:
        """Return entries as arrays; those that are not here are left out."""
        return {
            key: {name: as_array(tensor) for name, tensor in self.store.get(key).items()}
            for key in keys
            if key in self.store
        }

    def put(self, entries: Entries) -> None:
        """Store entries, copied out of Ray's object store."""
        for key, arrays in entries.items():
            self.store.set(key, {name: as_tensor(array).clone() for name, array in arrays.items()})

    def settle(self, outcomes: Sequence[tuple[int, int, bool]]) -> None:
        """Make the state held for tasks the clients' state, or discard it: (id, client, kept).  Repeating it changes
        nothing.
        """
        for id, client, counts in outcomes:
            if ~id in self.store:
                tensors = self.store.take(~id)
                if counts:
                    self.store.set(client, tensors)


class StateActorRing:
    """State actors in their order, for reading and writing."""

    def __init__(self, state_actors: Sequence[Any]) -> None:
        self.state_actors, self.ray = list(state_actors), imported()

    def home(self, client: int) -> int:
        """The first of the two actors that have a client's state."""
        return client % len(self.state_actors)

    def fill_in(self, arrays: Mapping[int, Any]) -> dict[int, Any]:
        """A message's arrays with client state in place of placeholders."""
        keys_by_place = {place: array for place, array in arrays.items() if isinstance(array, StateKey)}
        clients = {state_key.client for state_key in keys_by_place.values()}
        references = [self.state_actors[home].give.remote(keys) for home, keys in self.at_home((c, c) for c in clients)]
        entries: dict[int, Mapping[str, Any]] = {}
        for reply in self.ray.get(references):
            entries |= reply
        for state_key in keys_by_place.values():
            if state_key.name not in entries[state_key.client]:
                raise RuntimeFault(
                    f"a client was left without {state_key.name!r} in its state: a trainer that starts with it "
                    "(`initial_state`) must return it each time (`TrainOutput.state`)"
                )
        return {
            **arrays,
            **{place: entries[state_key.client][state_key.name] for place, state_key in keys_by_place.items()},
        }

    def store_results(self, stacks: Sequence[ClientStack], served: Sequence[StackResult]) -> None:
        """Write the new state of results to both state actors of their clients; returns when it is there."""
        entries, clients = {}, {}
        for stack, result in zip(stacks, served, strict=True):
            for row, (id, client) in enumerate(zip(stack.ids, stack.clients, strict=True)):
                clients[~id] = client
                entries[~id] = {name: rows[row] for name, rows in result.state.items()}
            result.state = {}
        self.ray.get(self.write(entries, clients))

    def write(self, entries: Entries, clients: Mapping[int, int]) -> list[Any]:
        """Write entries to both state actors; `clients` is the client of each key.  Returns the references."""
        receipts = []
        for home, keys in self.at_home((key, clients[key]) for key in entries):
            message = self.ray.put({key: {n: as_array(t) for n, t in entries[key].items()} for key in keys})
            receipts += [self.state_actors[place].put.remote(message) for place in (home, self.home(home + 1))]
        return receipts

    def at_home(self, keys: Iterable[tuple[int, int]]) -> list[tuple[int, list[int]]]:
        """Pairs of key and client, sorted by the client's home."""
        homes: dict[int, list[int]] = {}
        for key, client in keys:
            homes.setdefault(self.home(client), []).append(key)
        return sorted(homes.items())


class StateActors(ClientStateStore):
    """Client state on state actors, as the driver sees it.

    There is an actor for each node, and never fewer than two; they start when they are first needed.

    Args:
        work: see `ClientStateStore`.
        budget: bytes of client state kept in RAM on each node; each actor has a file for more.
        connect: connects to Ray.

    Attributes:
        reusable: False once something may still be on its way to the actors that the next run must not find there.
    """

    def __init__(self, work: ClientWork, budget: int, connect: Callable[[], RayConnection]) -> None:
        super().__init__(work, budget)
        self.reusable, self._connect = True, connect
        self._ring: StateActorRing | None = None
        self._begun = False  # whether all actors were alive once, so that there may be something on them
        self._nodes: dict[int, str] = {}  # the node of each actor
        self._known: set[int] = set()  # clients whose state is on state actors
        self._changed: set[int] = set()  # those of them whose state changed since the last checkpoint
        self._task_clients: dict[int, int] = {}  # clients by the ids of tasks for which state may be held there
        self._outcomes: list[tuple[int, int, bool]] = []  # of tasks, not yet sent to the actors (`StateActor.settle`)

    # -- called by a simulation

    def recall(self, task: Task) -> Mapping[str, Any]:
        first, client = self.first(task), task.client
        if task.query is None:
            self._task_clients[task.id] = client  # before it is served: an actor may have to be filled meanwhile
        return {name: StateKey(client, name) for name in first} if client in self._known else first

    def hold(self, task: Task, tensors: Mapping[str, Tensor]) -> None:
        """Hold state from a checkpoint; the state of other tasks is written by the actors that train."""
        if tensors:
            self.ready()
            self._task_clients[task.id] = task.client
            self._write({~task.id: tensors}, {~task.id: task.client})

    def settle(self, task: Task, kept: bool) -> None:
        if task.id not in self._task_clients:
            return
        self._outcomes.append((task.id, task.client, kept))
        if kept:
            self._known.add(task.client)
            self._changed.add(task.client)

    def held(self, tasks: Sequence[Task]) -> Mapping[int, Mapping[str, Tensor]]:
        clients = {~task.id: task.client for task in tasks if task.id in self._task_clients}
        entries = dict(self._read(clients))
        return {task.id: entries.get(~task.id, {}) for task in tasks}

    def changed(self) -> dict[str, Tensor]:
        if not self._changed:
            return {}
        self.ready()
        entries = self._read({client: client for client in sorted(self._changed)})
        tensors = {f"{self.kept.prefix}/{client}/{name}": t for client, entry in entries for name, t in entry.items()}
        self._changed.clear()
        return tensors

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        entries = by_client(tensors, self.kept.prefix)
        if entries:
            self.ready()
        self._known |= set(entries)
        for piece in self._pieces(sorted(entries)):
            self._write({client: entries[client] for client in piece}, {client: client for client in piece})

    def adopt(self, tensors: Mapping[str, Tensor]) -> None:
        self.restore(tensors)
        self._changed |= set(by_client(tensors, self.kept.prefix))

    def close(self) -> None:
        """Keep the actors for the next run, or stop them."""
        for place, actor in enumerate(self._ring.state_actors if self._ring is not None else ()):
            if self.reusable:
                actor.begin.remote(0)
                self._connection.rest_on(self._nodes[place], actor)
            else:
                self._connection.stop(actor)
        self._ring, self._begun = None, False

    # -- called by a worker pool

    def ready(self) -> StateActorRing:
        """The state actors, once all of them are alive and know which results count."""
        for _ in range(_TRIES):
            references = [actor.settle.remote(self._outcomes) for actor in self.ring.state_actors]
            if self._all_arrived(references):
                for id, _, _ in self._outcomes:
                    del self._task_clients[id]
                self._outcomes, self._begun = [], True
                return self.ring
            self.repair()
        raise _dying()

    @property
    def ring(self) -> StateActorRing:
        """The state actors, some of which may have died."""
        if self._ring is None:
            self._connection = self._connect()
            count = max(2, len(self._connection.nodes()))
            self._ring = StateActorRing([])
            for place in range(count):
                self._ring.state_actors.append(self._start(place, count))
        return self._ring

    def repair(self) -> None:
        """Replace state actors that died.

        Raises:
            RuntimeFault: state that was on one of them is on no other that is alive.
        """
        for _ in range(_TRIES):
            state_actors = self.ring.state_actors
            dead = [
                place for place, actor in enumerate(state_actors) if not self._all_arrived([actor.settle.remote([])])
            ]
            if not dead:
                return
            for home in dead:
                if self.ring.home(home + 1) in dead and self._keys(home):
                    raise RuntimeFault(
                        "two Ray actors that kept the same clients' state died at once: continue from the last "
                        "checkpoint with `piebald resume`; often memory ran out, or two nodes went away"
                    )
            for place in dead:
                self._replace(place)
        raise _dying()

    # -- internal

    def _replace(self, place: int) -> None:
        state_actors, count = self.ring.state_actors, len(self.ring.state_actors)
        self._connection.stop(state_actors[place])
        state_actors[place] = new = self._start(place, count)
        before = (place - 1) % count
        for home, source in ((place, (place + 1) % count), (before, before)):
            for piece in self._pieces(self._keys(home)):
                if not self._all_arrived([new.put.remote(state_actors[source].give.remote(piece))]):
                    self._connection.stop(new)  # an incomplete actor must not be taken for a complete one
                    return

    def _start(self, place: int, count: int) -> Any:
        """Start an actor, if possible on a node without its neighbors and with few others."""
        nodes = self._connection.nodes()
        self._nodes.pop(place, None)
        beside = [self._nodes.get((place + step) % count) for step in (-1, 1)]
        taken_nodes = list(self._nodes.values())
        node = min(nodes, key=lambda node: (beside.count(node), taken_nodes.count(node)))
        self._nodes[place] = node
        actor = self._connection.start_on(node, StateActor)
        actor.begin.remote(self.budget * min(len(nodes), count) // count)
        return actor

    def _keys(self, home: int) -> list[int]:
        """All keys whose clients have their home on an actor."""
        if not self._begun:  # an actor that was kept from an earlier run may have been dead already
            return []
        held_keys = [~id for id, client in self._task_clients.items() if self.ring.home(client) == home]
        return held_keys + [client for client in sorted(self._known) if self.ring.home(client) == home]

    def _pieces(self, keys: Sequence[int]) -> Iterator[Sequence[int]]:
        """Split keys into pieces that can be moved at a time."""
        private = self.work.layout.size - self.work.layout.shared
        size = max(1, _PIECE // max(1, nbytes(self.fresh) + 4 * private))
        for start in range(0, len(keys), size):
            yield keys[start : start + size]

    def _read(self, clients: Mapping[int, int]) -> Iterator[tuple[int, Mapping[str, Tensor]]]:
        """Entries by key, copied to this process; `clients` is the client of each key."""
        for home, keys in self.ring.at_home(clients.items()) if clients else ():
            for piece in self._pieces(keys):
                for key, arrays in self._fetched(home, piece).items():
                    yield key, {name: as_tensor(array).clone() for name, array in arrays.items()}

    def _fetched(self, home: int, keys: Sequence[int]) -> Entries:
        for _ in range(_TRIES):
            arrived, entries = self._connection.answer(self.ring.state_actors[home].give.remote(keys))
            if arrived:
                return cast(Entries, entries)
            self.repair()
        raise _dying()

    def _write(self, entries: Entries, clients: Mapping[int, int]) -> None:
        for _ in range(_TRIES):
            if self._all_arrived(self.ring.write(entries, clients)):
                return
            self.repair()
        raise _dying()

    def _all_arrived(self, answers: Sequence[Any]) -> bool:
        """Return whether all answers came."""
        return all([self._connection.answer(reference)[0] for reference in answers])


def _dying() -> RuntimeFault:
    return RuntimeFault(
        f"Ray actors that keep clients' state died {_TRIES} times in a row: look at Ray's logs, often memory ran out; "
        "`piebald resume` continues from the last checkpoint"
    )
