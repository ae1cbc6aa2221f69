"""How long the server of a federation waits for its sites."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Limits to the server's patience; see `Federation` for the fields.

    Attributes:
        wait_for: number of sites that must be present before the first task; None waits for all of them, or for one
            after `patience`.
        patience: seconds of silence after which training at a site is given up.
        silence: seconds of silence after which a site gets no tasks, and its answers to queries are given up.
        longest: seconds that a task may take at a site that is present; None for no limit.
    """

    wait_for: int | None
    patience: float
    silence: float
    longest: float | None
