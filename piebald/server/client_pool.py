"""The clients that can be asked, and the choice of those that are."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from piebald.contracts import Task
from piebald.core.noise import NoiseSource
from piebald.core.randomness import brief_generator, long_key, select
from piebald.methods.scheduling.base import Scheduler
from piebald.server.client_choice import ClientRecords

ADVICE = "a lower learning rate often helps, and inputs on one scale do (standardise = 'federated' in [data])"


class ClientPool:
    """The clients that are busy, excluded or initialized.  The cost of a choice grows with the clients that are chosen,
    not with those that are registered.

    Attributes:
        busy: the training task under way of each client at work, at most one each.
        excluded: why a client is not asked any more.
        initialized: clients that hold a first model.
    """

    def __init__(self) -> None:
        self.busy: dict[int, Task] = {}
        self.excluded: dict[int, str] = {}
        self.initialized: set[int] = set()
        self._free: set[int] | None = None  # kept from the first time that most of a range are taken
        self._range = 0

    def count(self, clients: Sequence[int]) -> tuple[int, int]:
        """Count the available clients that are not excluded, and how many of these are idle."""
        if isinstance(clients, range):
            offered = len(clients) - len(self.excluded)
            return offered, offered - len(self.busy)
        offered = sum(client not in self.excluded for client in clients)
        return offered, sum(client not in self.excluded and client not in self.busy for client in clients)

    def choose(self, clients: Sequence[int], count: int, *words: int | str) -> list[int]:
        """A seeded choice of idle clients, in increasing order."""
        unavailable = len(self.busy) + len(self.excluded)
        if not unavailable:
            return select(clients, count, *words)
        if not isinstance(clients, range):
            return select([c for c in clients if c not in self.busy and c not in self.excluded], count, *words)
        if 2 * (unavailable + count) <= len(clients):
            return self._draw(len(clients), count, *words)
        if self._free is None or self._range != len(clients):
            self._range = len(clients)
            self._free = {client for client in clients if client not in self.busy and client not in self.excluded}
        return select(sorted(self._free), count, *words)

    def sample(self, clients: Sequence[int], known: int, share: float, *words: int | str) -> list[int]:
        """A Poisson sample of idle clients: each one by itself with this probability, in increasing order.

        Who knows it gains nothing from clients being drawn by chance, so it is drawn as noise is.
        """
        # over all clients, also busy ones: a sample must not depend on who is idle
        drawn = np.flatnonzero(NoiseSource.repeatable(long_key("cohort", *words)).uniform(known) < share).tolist()
        here = clients if isinstance(clients, range) else set(clients)
        return [c for c in drawn if c in here and c not in self.busy and c not in self.excluded]

    def take(self, task: Task) -> None:
        """Mark a client as busy."""
        self.busy[task.client] = task
        if self._free is not None:
            self._free.discard(task.client)

    def release(self, client: int) -> None:
        """Mark a client as idle again."""
        self.busy.pop(client, None)
        if self._free is not None and client not in self.excluded and client < self._range:
            self._free.add(client)

    def exclude(self, client: int, reason: str) -> None:
        """Exclude a client: it is not asked any more."""
        self.excluded[client] = reason
        if self._free is not None:
            self._free.discard(client)

    def stuck_reason(self) -> str:
        """Return why no client can be asked although none is busy."""
        if not self.excluded:
            return "no client can be asked and none is under way: look at the devices' on intervals"
        return f"no client is left to ask: all {len(self.excluded)} were excluded because their {self._refusals()}"

    def no_update_reason(self, rounds: int) -> str:
        """Return why no update of so many rounds counted."""
        reason = (
            f"clients' {self._refusals()}" if self.excluded else "look at the reasons in the run's table of results"
        )
        return f"in {rounds} round{'' if rounds == 1 else 's'} no update counted: {reason}"

    def _refusals(self) -> str:
        last = list(self.excluded.values())[-1]
        return f"updates were refused, the last one as {last}; {ADVICE}"

    def _draw(self, total: int, count: int, *words: int | str) -> list[int]:
        """Draw until enough idle clients are found; most are idle, so this ends soon."""
        draw, chosen = brief_generator("select", *words), set[int]()
        while len(chosen) < count:
            for client in draw.integers(total, size=2 * (count - len(chosen))).tolist():
                if client not in self.busy and client not in self.excluded and len(chosen) < count:
                    chosen.add(client)
        return sorted(chosen)


@dataclass(frozen=True, slots=True, eq=False)
class Invitations:
    """Draws the clients of a request.

    Attributes:
        scheduler: says whether cohorts are Poisson samples.
        client_pool: the clients that can be asked.
        known: clients in the federation.
        seed: seed of the run.
        records: what is known of clients, by which the scheduler may choose.
        secret: Poisson samples come from the operating system and not from the seed, which sites know.
    """

    scheduler: Scheduler
    client_pool: ClientPool
    known: int
    seed: int
    secret: bool
    records: ClientRecords = field(default_factory=ClientRecords)

    def draw(self, clients: Sequence[int], count: int, version: int) -> list[int]:
        """So many of these clients, or a Poisson sample of them, which may be empty."""
        share = self.scheduler.inclusion(self.known)
        if share is None and self.scheduler.choose != "uniform":
            return self._chosen(clients, count, version)
        if share is None:
            return self.client_pool.choose(clients, count, self.seed, version)
        seed = secrets.token_hex(32) if self.secret else self.seed
        return self.client_pool.sample(clients, self.known, share, seed, version)

    def _chosen(self, clients: Sequence[int], count: int, version: int) -> list[int]:
        """So many of the idle clients, by what is known of them."""
        pool = self.client_pool
        idle = [client for client in clients if client not in pool.busy and client not in pool.excluded]
        count, words = min(count, len(idle)), (self.seed, version)
        if self.scheduler.choose == "size":
            return sorted(self.records.by_size(idle, count, *words))
        if self.scheduler.choose == "loss":
            return self.records.by_loss(idle, count, self.scheduler.candidates, *words)
        return self.records.by_utility(idle, count, version, *words)
