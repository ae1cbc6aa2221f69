"""When models are evaluated for the report, and the progress of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from piebald.contracts import SERVER_ID, Query, Split
from piebald.core.randomness import select
from piebald.methods.queries.confusion import Confusion
from piebald.methods.queries.evaluate import Evaluate
from piebald.methods.queries.validate import Validate


@dataclass(frozen=True, slots=True)
class EvaluationPlan:
    """When and on which clients models are evaluated for the report.

    Attributes:
        query: what clients are asked.
        every: server steps between evaluations; the last version is always evaluated.  0: never.
        clients: how many clients (a seeded choice), None for all.
        common: what the server asks of its own test set, None where it has none or no model can be used alone.
        higher: whether more is better of the score that matters, the first one that clients give.
        count: what clients are asked about right and wrong answers by class, None for nothing.
        validate: the query that decides which version is the best, None where the last one is kept.
    """

    query: Query
    every: int = 1
    clients: int | None = None
    common: Query | None = None
    higher: bool = True
    validate: Query | None = None
    count: Confusion | None = None

    @property
    def asked(self) -> list[Query]:
        """All that clients may be asked."""
        every = (self.query, self.validate, self.count) if self.every else ()
        return [one for one in every if one is not None]

    def is_due(self, version: int, rounds: int | None, last: bool) -> bool:
        """Whether a version is evaluated; `last` says that the run ends with it."""
        return bool(self.every) and (last or version % self.every == 0 or version == rounds)

    def queries(self, known: int, seed: int) -> list[tuple[int, Query]]:
        """The clients that are asked at every evaluation out of `known`, each with its query."""
        clients = self._asked(known, seed)
        asked = [(client, self.query) for client in clients]
        if self.validate is not None and self.validate != self.query:
            asked += [(client, self.validate) for client in clients]
        return asked if self.common is None else [*asked, (SERVER_ID, self.common)]

    def counting(self, known: int, seed: int) -> list[tuple[int, Query]]:
        """The same clients, each with the query about classes; none where nothing is counted."""
        return [] if self.count is None else [(client, self.count) for client in self._asked(known, seed)]

    def _asked(self, known: int, seed: int) -> Sequence[int]:
        return range(known) if self.clients is None else select(range(known), self.clients, "measure", seed)


def split_of(query: Query | None) -> Split:
    """Which of a client's rows an evaluation is about."""
    return query.split if isinstance(query, Evaluate | Validate) else "test"


@dataclass(frozen=True, slots=True)
class RoundProgress:
    """Progress after a server step: its version, and the newest mean scores by "model/metric"."""

    version: int
    scores: Mapping[str, float]
