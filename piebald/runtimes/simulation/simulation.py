"""The simulation: clients as data, and a virtual clock.

The inputs of a task are fixed when it is submitted, so nothing is computed until its result could matter: then all
outstanding tasks are begun together, and results are returned in the order of their virtual times.  While the server
takes results that are known, workers begin with what it sent meanwhile, a full stack at a time.  So which tasks are
computed together depends on the tasks alone, never on how fast they are computed.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor

from piebald import contracts
from piebald.contracts.data import lacked_inputs
from piebald.core.parameters import nbytes
from piebald.core.tensor_store import under
from piebald.engines.stack import PRIVATE, ClientStack, StackResult
from piebald.methods.client_work import ClientWork
from piebald.privacy.secure_aggregation import server_side
from piebald.privacy.secure_aggregation.key_queries import KeyQuery
from piebald.runtimes.simulation.device_times import Agenda, DeviceTimes, Due, Event, Instant
from piebald.runtimes.workers.pool import MIN_ARENA, InProcess, WorkerPool, failed_reason
from piebald.runtimes.workers.serialization import PARTS, ClientStateStore

LOST = "lost"
GONE = "the client went away before it was done"
_LARGE = 1 << 20  # parameters of a model whose weights engines avoid forming (`engines.factored`)


class SimulationSettings(Protocol):
    """The settings that a simulation reads, see `simulator.Simulated`."""

    @property
    def stack(self) -> int | None: ...
    @property
    def workers(self) -> int | None: ...
    @property
    def fleet(self) -> Any: ...
    @property
    def memory(self) -> int: ...
    def worker_pool(self, work: ClientWork, clients: contracts.Clients, room: tuple[int, int]) -> WorkerPool: ...


class Simulation:
    """A running simulation (`contracts.Runtime`).

    Args:
        settings: engine, workers and simulated devices.
        work: what clients do.
        clients: who holds what.
        secret: text that noise follows from in place of the run's seed, where nobody may make it again.
    """

    def __init__(
        self, settings: SimulationSettings, work: ClientWork, clients: contracts.Clients, secret: str = ""
    ) -> None:
        self.settings, self.work, self.federation, self._secret = settings, work, clients, secret
        self._known = len(clients)
        self.fleet: contracts.Fleet = settings.fleet or Instant()
        self._times = DeviceTimes(self.fleet, work, clients)
        self.state_store = ClientStateStore(work, settings.memory)
        self._now = 0.0
        self._due = Agenda()
        self._batches = 0
        self._waiting: list[Event] = []  # tasks that nobody has begun
        self._begun: dict[int, list[list[Event]]] = {}  # stacks by the number under which they were begun
        self._worker_pool: WorkerPool | None = None
        self._rows: dict[int, Mapping[contracts.Split, float]] = {}  # of clients that mask
        self._work_digest = "" if work.masking is None else work.digest
        self._secrets: dict[int, dict[str, Tensor]] = {}  # what clients keep from everybody, for secure aggregation

    # -- contracts.Runtime

    def submit(self, tasks: Sequence[contracts.Task], sum_request: contracts.SumRequest | None = None) -> None:
        """Send tasks, see `contracts.Runtime`.  They are due when the download ends, at the earliest; serving finds the
        true time.
        """
        self._batches += 1
        ahead = bool(self._due) and self._due.first().event.served  # the server has results to take meanwhile
        if sum_request is not None and any(self._times.leaves(task, self._now) is not None for task in tasks):
            sum_request = None  # a client that goes away meanwhile must not be in a sum already
        for task in tasks:
            event = Event(task, self._now, sum_request, self._batches)
            if not task.free:
                event.bytes_down = nbytes(self.work.cut(task).vectors)
                if self._times.drops_out(task):
                    event.served, event.failure = True, LOST
            self._due.put(Due(self._times.earliest(event), task.id, event))
            if not event.served:
                self._waiting.append(event)
        if ahead:
            self._begin_full_stacks()

    def next(self, until: float = float("inf")) -> contracts.Result | None:
        """The next result, see `contracts.Runtime`."""
        while self._due:
            due = self._due.first()
            if due.time > until:
                break
            if not due.event.served:
                if not due.event.begun:
                    self._begin_waiting(queries=due.event.task.query is not None)
                if due.event.begun:
                    self._collect(due.event.begun)
                continue
            self._due.pop()
            self._now = max(self._now, due.time)
            return self._deliver(due)
        if until < float("inf"):
            self._now = max(self._now, until)
        elif not self._due and not len(self.clients()):
            self._now = self._times.next_wake(self._now)
        return None

    def clients(self) -> Sequence[int]:
        return self.fleet.available(self._known, self._now)

    def now(self) -> float:
        return self._now

    def state(self) -> contracts.Checkpoint:
        """The clock, client state that has changed, and tasks under way with their results, if they are known."""
        tensors, events = self.state_store.changed(), []
        held = self.state_store.held([due.event.task for due in self._due if due.event.counts])
        for due in self._due:
            event = due.event
            row: dict[str, Any] = {"id": due.id, "time": due.time, "sent": event.sent, "failure": event.failure}
            row |= {"served": event.served, "bytes_down": event.bytes_down}
            row["begun"] = event.begun if event.sum_request is None else 0
            if event.update is not None:
                update = event.update
                row |= {"examples": update.examples, "steps": update.steps, "metrics": dict(update.metrics)}
                row |= {"norm": update.norm, "nbytes": update.nbytes}
                tensors |= {f"event/{due.id}/vectors/{name}": part for name, part in update.vectors.items()}
            tensors |= {f"secret/{event.task.client}/{n}": t for n, t in self._secrets_of(event.task).items()}
            if event.counts:
                row["counts"] = True
                tensors |= {f"event/{due.id}/state/{name}": part for name, part in held[due.id].items()}
            events.append(row)
        return contracts.Checkpoint(tensors, {"now": self._now, "events": events})

    def restore(self, checkpoint: contracts.Checkpoint, tasks: Mapping[int, contracts.Task]) -> None:
        """Restore what `state` returned."""
        self._now = float(checkpoint.values["now"])
        self.state_store.restore(checkpoint.tensors)
        for place, tensor in checkpoint.tensors.items():
            if place.startswith("secret/"):
                _, client, secret = place.split("/", 2)
                self._secrets.setdefault(int(client), {})[secret] = tensor
        together: dict[int, list[Event]] = {}
        for row in checkpoint.values["events"]:
            name = f"event/{row['id']}/"
            event = Event(tasks[row["id"]], row["sent"], None, 0, failure=row["failure"])
            event.served, event.bytes_down = row["served"], row["bytes_down"]
            if "examples" in row:
                vectors = under(checkpoint.tensors, f"{name}vectors/")
                event.update = contracts.Update(
                    vectors, row["examples"], row["steps"], row["metrics"], row["norm"], None, row["nbytes"]
                )
            if row.get("counts"):
                event.counts = True
                self.state_store.hold(event.task, under(checkpoint.tensors, f"{name}state/"))
            self._due.put(Due(row["time"], row["id"], event))
            if not event.served:
                together.setdefault(row.get("begun", 0), []).append(event)
        self._waiting = together.pop(0, [])
        for events in together.values():  # in the same stacks as before
            self._begin(events)

    def take_client_state(self, tensors: Mapping[str, Tensor]) -> None:
        """See `contracts.TakesClientState`."""
        self.state_store.adopt(tensors)

    @property
    def step_notes(self) -> Mapping[str, str]:
        """The steps on a GPU that are recorded, and the reasons why others are not, as far as this process trains."""
        return self._worker_pool.engine.notes if isinstance(self._worker_pool, InProcess) else {}

    def close(self) -> None:
        if self._worker_pool is not None:
            self._worker_pool.close()
            self._worker_pool = None
        self.state_store.close()

    # -- delivering

    def _deliver(self, due: Due) -> contracts.Result:
        event, task = due.event, due.event.task
        update, failure = event.update, event.failure
        if update is not None and self.work.is_masked(task.query):
            update, failure = server_side.masked(update, task, self.work, self._of(task))
        if event.counts:
            self.state_store.settle(task, kept=failure is None)
        up = 0 if update is None or task.free else update.nbytes
        return contracts.Result(task, update, event.sent, due.time, event.bytes_down, up, failure)

    # -- secrets

    def _of(self, task: contracts.Task) -> contracts.ClientSecrets:
        """The secrets of a task's client."""
        secrets = self._secrets.setdefault(task.client, {})
        name = self.federation.names[task.client]
        draw = server_side.repeatable(self.work.seed, name, task.rng_version)
        signer = server_side.SimulatedSigner(self.work.seed, task.client)
        if task.client not in self._rows:
            self._rows[task.client] = server_side.counted_rows(self.work, self.federation, task.client)
        rows = self._rows[task.client]
        return contracts.ClientSecrets(
            task.client, secrets, draw, signer, server_side.ANY_SUM, work=self._work_digest, rows=rows
        )

    def check_signature(self, client: int, text: bytes, signature: bytes) -> bool:
        return server_side.SimulatedSigner(self.work.seed, client).check(client, text, signature)

    def _secrets_of(self, task: contracts.Task) -> Mapping[str, Tensor]:
        """Secrets that a checkpoint needs: between two server steps only clients at work are part of a sum."""
        return self._secrets.get(task.client, {})

    def _reply(self, event: Event) -> None:
        event.update, event.failure = server_side.replied(event.task, self.work, self._of(event.task))
        event.served = True

    # -- serving

    def _begin_full_stacks(self) -> None:
        """Begin tasks that fill a stack, to train while the server takes results that are known."""
        size = 1 if self._apart else self.settings.stack or 1  # of a large model, each step sends another start
        trains = [event for event in self._waiting if event.task.query is None and event.sum_request is None]
        if len(trains) < size:
            return
        for stack in self._cut(range(len(trains)), trains):
            if len(stack) >= size:
                self._begin([trains[i] for i in stack])
        self._waiting = [event for event in self._waiting if not event.begun]

    def _begin_waiting(self, queries: bool) -> None:
        """Begin all tasks that wait, in as few stacks as there are kinds of work; clients agree on keys at once.

        Queries wait until one of them is due, so that they find the state of clients whose training ends before.
        """
        kinds: dict[tuple[int, str], list[Event]] = {}
        texts: dict[int, str] = {}  # of queries by their id, since one is sent to many clients
        begun = [event for event in self._waiting if queries or event.task.query is None]
        self._waiting = [event for event in self._waiting if not queries and event.task.query is not None]
        for event in begun:
            query = event.task.query
            if query is not None and id(query) not in texts:
                texts[id(query)] = query.model_dump_json() + query.kind
            kind = "" if query is None else texts[id(query)]
            # updates to be summed are summed by submission; others may be trained together whenever they were sent
            kinds.setdefault((event.batch if event.sum_request is not None else 0, kind), []).append(event)
        for events in kinds.values():
            if isinstance(events[0].task.query, KeyQuery):
                for event in events:
                    self._reply(event)
                self._set_times(events)
            else:
                self._begin(events)

    def _begin(self, events: list[Event]) -> None:
        """Give tasks to the workers: in one piece if their updates are summed, else stack by stack."""
        costs = [self._cost(event) for event in events]
        # clients of about as many rows share a stack, in which none waits long; ties by number, to repeat the stacks
        order = sorted(range(len(events)), key=lambda i: (-costs[i], events[i].task.client, events[i].task.id))
        stacks, sum_request = self._cut(order, events), events[0].sum_request
        for together in [stacks] if sum_request is not None else [[stack] for stack in stacks]:
            groups = [[events[i] for i in stack] for stack in together]
            loads = [sum(costs[i] for i in stack) for stack in together]
            number = self._workers().begin([self._stack(group) for group in groups], loads, sum_request)
            self._begun[number] = groups
            for event in itertools.chain(*groups):
                event.begun = number

    def _collect(self, number: int) -> None:
        """Wait for what was begun under a number."""
        groups = self._begun.pop(number)
        served, total = self._workers().collect(number)
        home = groups[0][0].task.vectors["model"].device  # of the server, which may be where they are already
        sums = {name: part.to(home) for name, part in total.vectors.items()}
        partial_sum = contracts.PartialSum(total.weight, sums) if groups[0][0].sum_request is not None else None
        for group, result in zip(groups, served, strict=True):
            for row, event in enumerate(group):
                self._settle(event, result, row, partial_sum)
        self._set_times(list(itertools.chain(*groups)))

    def _set_times(self, events: Sequence[Event]) -> None:
        """Set the true times of tasks that were served."""
        for event in events:
            due = self._due[event.task.id]
            self._due.put(due._replace(time=self._ends(due)))

    def _ends(self, due: Due) -> float:
        """Return when a task that was served ends, or is cut off because its client goes away."""
        event = due.event
        if event.failure in (LOST, GONE):
            return due.time
        finished, leaves = self._times.finished(event), self._times.leaves(event.task, event.sent)
        if leaves is None or finished <= leaves:
            return finished
        if event.counts:
            self.state_store.settle(event.task, kept=False)
        # the client's state was given up above as well: it goes on from where it was before the task
        event.failure, event.update, event.counts = GONE, None, False
        return leaves

    def _settle(self, event: Event, result: StackResult, row: int, partial_sum: contracts.PartialSum | None) -> None:
        event.served = True
        event.failure = result.failures[row]
        if failed_reason(result, row):
            self.state_store.settle(event.task, kept=False)
            return
        update = result.update(row, partial_sum)
        event.update = self.work.expanded(update, event.task) if event.task.query is None else update
        if event.task.query is None:
            self.state_store.hold(event.task, {name: _alone(rows[row]) for name, rows in result.state.items()})
            event.counts = event.failure is None and math.isfinite(update.norm)
            if not event.counts:  # a client whose update cannot count keeps its old state
                self.state_store.settle(event.task, kept=False)

    def _stack(self, events: list[Event]) -> ClientStack:
        tasks = [event.task for event in events]
        states, models = [self.state_store.recall(task) for task in tasks], dict[int, Tensor]()
        sent = [
            {n: p for n, p in a.vectors.items() if n not in ("model", PRIVATE) and not n.startswith(contracts.MASKING)}
            for a in tasks
        ]
        for task in tasks:  # what all of them share stays one tensor
            if id(task.vectors["model"]) not in models:
                models[id(task.vectors["model"])] = self.work.cut(task).vectors["model"]
        return ClientStack(
            clients=[task.client for task in tasks],
            versions=[task.version for task in tasks],
            rng_versions=[task.rng_version for task in tasks],
            committed=[task.committed for task in tasks],
            models=[models[id(task.vectors["model"])] for task in tasks],
            vectors={name: [vectors[name] for vectors in sent] for name in sent[0]},
            state={name: [state[name] for state in states] for name in states[0]},
            query=tasks[0].query,
            secret=self._secret,
        )

    def _cost(self, event: Event) -> float:
        client, query = event.task.client, event.task.query
        if client == contracts.SERVER_ID:
            return float(len(self.federation.common or ()))
        size = self.federation.size(client, "train" if query is None else "test")
        return 1.0 if size is None else float(size)

    @property
    def _apart(self) -> bool:
        """True if only clients that start from the same model are trained together."""
        return self.work.layout.size >= _LARGE

    def _cut(self, order: Sequence[int], events: list[Event]) -> list[list[int]]:
        """Split events into stacks, by number: of one model and trainer, and of a large model with the same start."""
        size, stacks = self._stack_size(events), dict[Any, list[list[int]]]()
        apart = self._apart and events[0].task.query is None
        for i in order:
            task = events[i].task
            number = self.work.number_of(task.client, task.version, task.query)
            trainer = id(self.work.trainer_of(task.client)) if self.work.own_trainers else 0
            lacked = lacked_inputs(self.federation, task.client)
            group = stacks.setdefault((number, trainer, lacked, id(task.vectors["model"]) if apart else 0), [[]])
            if len(group[-1]) == size:
                group.append([])
            group[-1].append(i)
        return [stack for group in stacks.values() for stack in group]

    def _stack_size(self, events: list[Event]) -> int:
        """Clients in a stack: as set for training; large stacks for queries about one model, a few for each worker."""
        query = events[0].task.query
        if query is None or query.trains or isinstance(self.work.trainer, contracts.Personalizes):
            return self.settings.stack or 1
        share = -(-len(events) // max(1, self.settings.workers or 1))
        return max(1, min(256, share, self._room()[1] if self.state_store.needed else 256))

    def _room(self) -> tuple[int, int]:
        """Bytes of shared memory, and how many clients' vectors fit into a part of it with two to spare."""
        vectors = 2 + len(self.state_store.fresh) + len(self.work.server_vectors())
        client = 4 * self.work.largest * vectors
        size = max(MIN_ARENA, 2 * client * ((self.settings.stack or 1) + 2))
        return size, max(1, size // PARTS // client - 2)

    def _workers(self) -> WorkerPool:
        """The workers, started when they are first needed."""
        if self._worker_pool is None:
            self._worker_pool = self.settings.worker_pool(self.work, self.federation, self._room())
        return self._worker_pool


def _alone(row: Tensor) -> Tensor:
    """A row that is no view of a stack, which it would keep in memory."""
    return row.clone() if row._is_view() else row
