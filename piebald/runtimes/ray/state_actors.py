"""Shelves: Ray actors that keep what clients remember, so that none of it passes through the driver.

    driver                               an actor that trains                  shelves
    whose memory a stack needs      ->   reads it                         <-   client 7 remembers ...
                                         writes what came of it           ->   assignment 52 came to ...
    52 counts, or is dropped        ---------------------------------->        client 7 remembers ...

A client's home is the shelf of its number, counted around; everything lies there and on the next shelf, on another node
where there is one.  A shelf that dies is replaced and filled from these two neighbours.  Which clients are known and
which assignments are under way the driver knows, so shelves need not be asked; only for a checkpoint what has changed
comes to the driver.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, cast

from torch import Tensor

from piebald.client_work import Work
from piebald.contracts import Assignment
from piebald.errors import RuntimeFault
from piebald.parameters import nbytes
from piebald.runtimes.engines.serving import Served, Stack
from piebald.runtimes.ray.connection import Session, as_array, as_tensor, imported
from piebald.runtimes.workers.state_store import Keeper
from piebald.tensor_store import Memory, by_client

_PIECE = 32 << 20  # bytes of memory that are moved between shelves, or to the driver, at a time
_TRIES = 5  # to replace shelves that die over and over

Entries = Mapping[int, Mapping[str, Any]]  # by key: a client's number, or ~ID for what came of an assignment


class Remembered(NamedTuple):
    """What stands for a tensor that lies on a shelf, on the way to an actor."""

    client: int
    name: str


class Shelf:
    """What a shelf does."""

    def __init__(self) -> None:
        self.memory = Memory(0)

    def begin(self, budget: int) -> None:
        """Forget everything; `budget` is for the bytes kept in RAM from now on."""
        self.memory.close()
        self.memory = Memory(budget)

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
        """Let clients remember what came of assignments, or forget that: (id, client, kept).  A second time changes
        nothing.
        """
        for id, client, kept in moves:
            if ~id in self.memory:
                tensors = self.memory.take(~id)
                if kept:
                    self.memory.set(client, tensors)


class Row:
    """Shelves in their order, as whoever reads from them and writes to them sees them."""

    def __init__(self, shelves: Sequence[Any]) -> None:
        self.shelves, self.ray = list(shelves), imported()

    def home(self, client: int) -> int:
        """The shelf that has a client's memory first."""
        return client % len(self.shelves)

    def fill_in(self, arrays: Mapping[int, Any]) -> dict[int, Any]:
        """A message's arrays with what clients remember in place of what stood for it."""
        wanted = {place: one for place, one in arrays.items() if isinstance(one, Remembered)}
        clients = {one.client for one in wanted.values()}
        asked = [self.shelves[home].give.remote(keys) for home, keys in self.at_home((c, c) for c in clients)]
        found: dict[int, Mapping[str, Any]] = {}
        for given in self.ray.get(asked):
            found |= given
        for one in wanted.values():
            if one.name not in found[one.client]:
                raise RuntimeFault(
                    f"a client was left without {one.name!r} in its memory: a rule that begins with it (`remember`) "
                    "must hand it out each time (`Learned.memory`)"
                )
        return {**arrays, **{place: found[one.client][one.name] for place, one in wanted.items()}}

    def hand_in(self, stacks: Sequence[Stack], served: Sequence[Served]) -> None:
        """What came of assignments, onto both shelves of their clients; returns when it lies there."""
        entries, clients = {}, {}
        for stack, one in zip(stacks, served, strict=True):
            for row, (id, client) in enumerate(zip(stack.ids, stack.clients, strict=True)):
                clients[~id] = client
                entries[~id] = {name: rows[row] for name, rows in one.memory.items()}
            one.memory = {}
        self.ray.get(self.write(entries, clients))

    def write(self, entries: Entries, clients: Mapping[int, int]) -> list[Any]:
        """Both shelves' receipts for entries; `clients` says by key whose they are."""
        receipts = []
        for home, keys in self.at_home((key, clients[key]) for key in entries):
            parcel = self.ray.put({key: {n: as_array(t) for n, t in entries[key].items()} for key in keys})
            receipts += [self.shelves[place].put.remote(parcel) for place in (home, self.home(home + 1))]
        return receipts

    def at_home(self, keys: Iterable[tuple[int, int]]) -> list[tuple[int, list[int]]]:
        """Keys, each with its client, by their homes."""
        homes: dict[int, list[int]] = {}
        for key, client in keys:
            homes.setdefault(self.home(client), []).append(key)
        return sorted(homes.items())


class Shelves(Keeper):
    """Client memory on shelves, as the driver sees it.

    There is a shelf for each node, and never fewer than two; they start at the first need.

    Args:
        work: see `Keeper`.
        budget: bytes of client memory kept in RAM on each node; each shelf has a file of its own for more.
        session: connects to Ray.

    Attributes:
        rests: False once something may still be on its way to the shelves that the next run must not find there.
    """

    def __init__(self, work: Work, budget: int, session: Callable[[], Session]) -> None:
        super().__init__(work, budget)
        self.rests, self._connect = True, session
        self._row: Row | None = None
        self._begun = False  # whether all shelves lived once, and something may lie there
        self._nodes: dict[int, str] = {}  # of each shelf
        self._known: set[int] = set()  # clients whose memory lies on shelves
        self._changed: set[int] = set()  # of these since the last checkpoint
        self._tickets: dict[int, int] = {}  # clients by the ids of assignments of which something may lie there
        self._moves: list[tuple[int, int, bool]] = []  # what shelves have yet to be told (`Shelf.settle`)

    # -- what a simulation asks

    def recall(self, assignment: Assignment) -> Mapping[str, Any]:
        first, client = self.first(assignment), assignment.client
        if assignment.query is None:
            self._tickets[assignment.id] = client  # before it is served: a shelf may have to be filled meanwhile
        return {name: Remembered(client, name) for name in first} if client in self._known else first

    def hold(self, assignment: Assignment, tensors: Mapping[str, Tensor]) -> None:
        """From a checkpoint; what actors came to, they have handed in themselves."""
        if tensors:
            self.ready()
            self._tickets[assignment.id] = assignment.client
            self._write({~assignment.id: tensors}, {~assignment.id: assignment.client})

    def settle(self, assignment: Assignment, kept: bool) -> None:
        if assignment.id not in self._tickets:
            return
        self._moves.append((assignment.id, assignment.client, kept))
        if kept:
            self._known.add(assignment.client)
            self._changed.add(assignment.client)

    def held(self, assignments: Sequence[Assignment]) -> Mapping[int, Mapping[str, Tensor]]:
        clients = {~one.id: one.client for one in assignments if one.id in self._tickets}
        found = dict(self._read(clients))
        return {one.id: found.get(~one.id, {}) for one in assignments}

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
        for place, shelf in enumerate(self._row.shelves if self._row is not None else ()):
            if self.rests:
                shelf.begin.remote(0)
                self._session.rest_on(self._nodes[place], shelf)
            else:
                self._session.stop(shelf)
        self._row, self._begun = None, False

    # -- what a crew asks

    def ready(self) -> Row:
        """The shelves, once all of them live and know which results count."""
        for _ in range(_TRIES):
            asked = [shelf.settle.remote(self._moves) for shelf in self.row.shelves]
            if self._came(asked):
                for id, _, _ in self._moves:
                    del self._tickets[id]
                self._moves, self._begun = [], True
                return self.row
            self.mend()
        raise _dying()

    @property
    def row(self) -> Row:
        """The shelves, as far as they live."""
        if self._row is None:
            self._session = self._connect()
            count = max(2, len(self._session.nodes()))
            self._row = Row([])
            for place in range(count):
                self._row.shelves.append(self._start(place, count))
        return self._row

    def mend(self) -> None:
        """Replace shelves that died.

        Raises:
            RuntimeFault: what lay on one of them lay on no other that lives.
        """
        for _ in range(_TRIES):
            shelves = self.row.shelves
            dead = [place for place, shelf in enumerate(shelves) if not self._came([shelf.settle.remote([])])]
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
        shelves, count = self.row.shelves, len(self.row.shelves)
        self._session.stop(shelves[place])
        shelves[place] = new = self._start(place, count)
        before = (place - 1) % count
        for home, source in ((place, (place + 1) % count), (before, before)):
            for piece in self._pieces(self._keys(home)):
                if not self._came([new.put.remote(shelves[source].give.remote(piece))]):
                    self._session.stop(new)  # one that is not whole must not be taken for one that is
                    return

    def _start(self, place: int, count: int) -> Any:
        """A shelf, on a node where its neighbours are not, and few others, as far as there are such."""
        nodes = self._session.nodes()
        self._nodes.pop(place, None)
        beside = [self._nodes.get((place + step) % count) for step in (-1, 1)]
        others = list(self._nodes.values())
        node = min(nodes, key=lambda node: (beside.count(node), others.count(node)))
        self._nodes[place] = node
        shelf = self._session.start_on(node, Shelf)
        shelf.begin.remote(self.budget * min(len(nodes), count) // count)
        return shelf

    def _keys(self, home: int) -> list[int]:
        """Everything that may lie on a shelf as clients' home."""
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
            came, entries = self._session.answer(self.row.shelves[home].give.remote(keys))
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
