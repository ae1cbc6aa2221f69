"""When models are scored for the report, and what a run tells of its progress."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from piebald.contracts import Query


@dataclass(frozen=True, slots=True)
class EvaluationPlan:
    """When and on which clients models are scored for the report.

    Attributes:
        query: what clients are asked.
        every: server steps between evaluations; the last version is always evaluated.  0: never.
        clients: how many clients (a seeded choice), None for all.
        common: what the server asks of its own test set, None where it has none or no model can be used alone.
        higher: whether more is better of the score that matters, the first one that clients give.
        validate: the query that decides which version is the best, None where the last one is kept.
    """

    query: Query
    every: int = 1
    clients: int | None = None
    common: Query | None = None
    higher: bool = True
    validate: Query | None = None

    def is_due(self, version: int, rounds: int | None, last: bool) -> bool:
        """Whether a version is evaluated; `last` says that the run ends with it."""
        return bool(self.every) and (last or version % self.every == 0 or version == rounds)


@dataclass(frozen=True, slots=True)
class RoundProgress:
    """Progress after a server step: its version, and the newest mean scores by "model/metric"."""

    version: int
    scores: Mapping[str, float]
