"""Whom the server asks to train."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass

from piebald.methods.scheduling.base import Scheduler
from piebald.server.client_pool import ClientPool


@dataclass(frozen=True, slots=True, eq=False)
class Invitations:
    """Draws the clients of a request.

    Attributes:
        scheduler: says whether cohorts are Poisson samples.
        client_pool: the clients that can be asked.
        known: clients in the federation.
        seed: seed of the run.
        secret: Poisson samples come from the operating system and not from the seed, which sites know.
    """

    scheduler: Scheduler
    client_pool: ClientPool
    known: int
    seed: int
    secret: bool

    def draw(self, clients: Sequence[int], count: int, version: int) -> list[int]:
        """So many of these clients, or a Poisson sample of them, which may be empty."""
        share = self.scheduler.inclusion(self.known)
        if share is None:
            return self.client_pool.choose(clients, count, self.seed, version)
        seed = secrets.token_hex(32) if self.secret else self.seed
        return self.client_pool.sample(clients, self.known, share, seed, version)
