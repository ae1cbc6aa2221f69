"""How long the server of a federation waits for its sites."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Limits to the server's patience; see `Federation` for the fields.

    Attributes:
        wait_for: number of sites that must be present before the first task; "all" for every site; None waits for all
            that do not refuse, or for one after `patience`.
        patience: seconds of silence after which training at a site is given up.
        silence: seconds of silence after which a site gets no tasks, and its answers to queries are given up.
        task_timeout: seconds that a task may take at a site that is present.
    """

    wait_for: int | Literal["all"] | None
    patience: float
    silence: float
    task_timeout: float
