"""The clients that can be asked, and the choice of those that are: at random, or by what is known of them."""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from piebald.contracts import Result, Task
from piebald.core.randomness import NoiseSource, brief_generator, generator, long_key, select
from piebald.methods.scheduling.base import Scheduler

Floats = NDArray[np.float64]


# of Lai et al. 2021: the share of clients that were never asked, at first, in each round and at least; the exponent of
# the penalty for slow ones; and the share of the lowest utility chosen that others need to be drawn as well
_EXPLORE, _DECAY, _LEAST, _ALPHA, _CUTOFF = 0.9, 0.98, 0.2, 2.0, 0.95


class ClientRecords:
    """The last training result of each client, and the choice of clients by these.

    Nobody is asked for it: losses and numbers of rows came with updates, and times are those of the runtime's clock.

    Args:
        rows: the training rows of a client, None where they are not known before it has sent something.
    """

    def __init__(self, rows: Callable[[int], int | None] = lambda client: None) -> None:
        self._rows = rows
        self._last: dict[int, tuple[float, int, float, int]] = {}  # loss, rows, seconds and version

    def note(self, result: Result, version: int) -> None:
        """Take note of a training result that counts."""
        update = result.update
        if update is not None:
            loss = update.metrics.get("loss", 0.0)
            seconds = max(result.time - result.sent, 0.0)
            # a client whose training failed must not be the one with the largest loss from then on
            self._last[result.task.client] = (loss if math.isfinite(loss) else 0.0, update.examples, seconds, version)

    def by_size(self, clients: Sequence[int], count: int, *words: int | str) -> list[int]:
        """Return `count` of these clients, drawn without replacement with chances as their rows."""
        return self._drawn(clients, self._sizes(clients), count, generator("choose", *words))

    def by_loss(self, clients: Sequence[int], count: int, candidates: float, *words: int | str) -> list[int]:
        """Return those with the largest last training losses of some candidates, which are drawn by their rows.

        A client that has not trained yet has an infinite loss (Cho, Wang, Joshi 2022, "Towards understanding biased
        client selection in federated learning", power-of-choice in the form rpow-d, which asks nobody).

        Args:
            clients: that can be asked.
            count: how many are chosen.
            candidates: d / m of the paper: so many times the count are drawn first.
            words: of the random key.
        """
        drawn = self._drawn(clients, self._sizes(clients), math.ceil(candidates * count), generator("choose", *words))
        losses = {client: self._last[client][0] if client in self._last else math.inf for client in drawn}
        # `drawn` is in random order and sorting is stable, so equal losses are drawn by chance
        return sorted(sorted(drawn, key=lambda client: -losses[client])[:count])

    def by_utility(self, clients: Sequence[int], count: int, version: int, *words: int | str) -> list[int]:
        """Return clients that are useful and quick, and some that were never asked.

        The utility is the loss times the number of rows, less for clients that are slower than half of all, and more
        the longer a client was not asked (Lai et al. 2021, "Oort: efficient federated learning via guided participant
        selection", algorithm 1, with mean losses in place of the roots of mean squares, and the median as pace).
        """
        rng = generator("choose", *words)
        scored = [client for client in clients if client in self._last]
        fresh = [client for client in clients if client not in self._last]
        explored = min(len(fresh), round(count * max(_LEAST, _EXPLORE * _DECAY**version)))
        # where too few have trained, newcomers fill the cohort
        explored = max(explored, min(len(fresh), count - len(scored)))
        chosen = rng.choice(fresh, explored, replace=False).tolist() if explored else []
        count -= explored
        if not count or not scored:
            return sorted(chosen)
        loss, rows, seconds, asked = np.array([self._last[client] for client in scored], dtype=np.float64).T
        utility = loss * rows
        # the paper's bonus for clients not asked for long, in units of the largest utility, as losses have no scale
        utility = utility + utility.max() * np.sqrt(0.1 * math.log(version + 1) / np.maximum(asked, 1))
        pace = np.median(seconds)
        utility = utility * np.where(seconds > pace, (pace / np.maximum(seconds, 1e-12)) ** _ALPHA, 1.0)
        cutoff = _CUTOFF * np.sort(utility)[-min(count, len(scored))]
        good = [index for index, value in enumerate(utility.tolist()) if value >= cutoff]
        return sorted([*chosen, *self._drawn([scored[index] for index in good], utility[good].tolist(), count, rng)])

    def _sizes(self, clients: Sequence[int]) -> list[float]:
        """Return the rows of clients; the mean of the others where a client's are not known."""
        rows = [self._last[client][1] if client in self._last else self._rows(client) for client in clients]
        sizes = [size for size in rows if size is not None]
        mean = sum(sizes) / len(sizes) if sizes else 1.0
        return [mean if size is None else float(size) for size in rows]

    @staticmethod
    def _drawn(clients: Sequence[int], weights: Sequence[float], count: int, rng: np.random.Generator) -> list[int]:
        """Return clients that are drawn without replacement, each time with chances as the weights of those left."""
        # the order of exponential times with these rates is that of such draws, and those without weight come last
        times = rng.exponential(size=len(clients)) / np.maximum(np.array(weights, dtype=np.float64), 1e-300)
        return [clients[index] for index in np.argsort(times, kind="stable")[:count].tolist()]

    def state(self) -> list[list[float]]:
        """Return the records as JSON values."""
        return [[client, *record] for client, record in sorted(self._last.items())]

    def restore(self, values: Sequence[Sequence[Any]] | None) -> None:
        """Restore what `state` returned; None of a checkpoint that has nothing."""
        for client, loss, rows, seconds, version in values or ():
            self._last[int(client)] = (float(loss), int(rows), float(seconds), int(version))


def _members(clients: Sequence[int]) -> Container[int]:
    """Return the clients as what tells quickly whether one is among them."""
    return set(clients) if isinstance(clients, list | tuple) else clients


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
            return offered, offered - len(self.busy.keys() - self.excluded.keys())
        here = _members(clients)
        offered = len(clients) - sum(client in here for client in self.excluded)
        return offered, offered - sum(client in here for client in self.busy.keys() - self.excluded.keys())

    def choose(self, clients: Sequence[int], count: int, *words: int | str) -> list[int]:
        """A seeded choice of idle clients, in increasing order."""
        unavailable = len(self.busy) + len(self.excluded)
        if not unavailable:
            return select(clients, count, *words)
        if not isinstance(clients, range):
            offered = np.asarray(clients, dtype=np.int64)  # increasing, so that those who are taken are found at once
            taken = np.array(sorted(self.busy.keys() | self.excluded.keys()), dtype=np.int64)
            places = np.searchsorted(offered, taken)
            there = places[offered[np.minimum(places, len(offered) - 1)] == taken] if len(offered) else places[:0]
            return select(np.delete(offered, there), count, *words)
        # at least half of the range is free then, so `_draw` needs about two draws for each client at most
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
        here = _members(clients)
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

    def set_excluded(self, excluded: dict[int, str]) -> None:
        """Exclude these clients, each with its reason, and no others."""
        self.excluded, self._free = excluded, None

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
        seed: what cohorts are drawn from: the run's seed, and more where they are a part of what protects.
        records: what is known of clients, by which the scheduler may choose.
        secret: Poisson samples come from the operating system and not from the seed, which sites know.
    """

    scheduler: Scheduler
    client_pool: ClientPool
    known: int
    seed: int | str
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
        """So many of the idle clients, or all of them, by what is known of them."""
        pool = self.client_pool
        idle = [client for client in clients if client not in pool.busy and client not in pool.excluded]
        words = self.seed, version
        if self.scheduler.choose == "size":
            return sorted(self.records.by_size(idle, count, *words))
        if self.scheduler.choose == "loss":
            return self.records.by_loss(idle, count, self.scheduler.candidates, *words)
        return self.records.by_utility(idle, count, version, *words)
