"""When the centre asks clients, and when it steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from pydantic import AfterValidator

from piebald.parts import Pace, View
from piebald.randomness import generator


def _cohort(cohort: float) -> float:
    if not 0 < cohort < float("inf") or (cohort > 1 and cohort != int(cohort)):
        raise ValueError(
            f"must be a number of clients (1, 2, ...) or a share of them (0.1, or 1.0 for all), got {cohort}"
        )
    return int(cohort) if cohort > 1 else cohort


CohortSize = Annotated[int | float, AfterValidator(_cohort)]


def cohort_size(cohort: float, known: int) -> int:
    """How many clients a cohort means: whole numbers count clients, a float up to 1.0 is a share of those that are
    there.
    """
    return min(int(cohort), known) if isinstance(cohort, int) else min(known, max(1, round(cohort * known)))


def select(clients: Sequence[int], count: int, *words: int | str) -> list[int]:
    """A seeded choice without repetition, in increasing order; depends on the clients offered and `words` alone."""
    if count >= len(clients):
        return list(clients)
    chosen = generator("select", *words).choice(len(clients), count, replace=False)
    return sorted(clients[int(place)] for place in chosen)


class Synchronous(Pace):
    """Ask a random cohort, wait for all of it, step (McMahan et al. 2017).

    The choice depends on the run's seed and the version alone, so recipes compared on one seed meet the same cohorts.

    Attributes:
        cohort: clients a round, a number (10) or a share of those that are there (0.1; 1.0 is all).
    """

    pools = True
    cohort: CohortSize = 1.0

    def ask(self, view: View, seed: int) -> Sequence[int]:
        if view.busy or view.waiting or view.failed:
            return ()
        return select(view.clients, cohort_size(self.cohort, len(view.clients)), seed, view.version)

    def ready(self, view: View) -> bool:
        return not view.busy and bool(view.waiting or view.failed)


class Asynchronous(Pace):
    """Step at every arrival; whoever is free gets the newest model at once (Metis).

    Attributes:
        cohort: clients that work at the same time, a number or a share.
    """

    cohort: CohortSize = 1.0

    def ask(self, view: View, seed: int) -> Sequence[int]:
        free = cohort_size(self.cohort, len(view.clients)) - len(view.busy)
        if view.waiting or free <= 0:
            return ()
        idle = [client for client in view.clients if client not in view.busy]
        return select(idle, free, seed, view.version)

    def ready(self, view: View) -> bool:
        return bool(view.waiting or view.failed)
