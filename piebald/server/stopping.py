"""The end of a run: limits that stop it, and a warning when it stands still."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol, Self

from pydantic import Field, model_validator

from piebald.contracts import SERVER_ID, Component, Result
from piebald.core.errors import RuntimeFault, diverged, failure_kind
from piebald.server.client_pool import ADVICE
from piebald.server.cluster_state import Counted

_log = logging.getLogger(__name__)
_STEPS = 3  # server steps in a row


@dataclass(slots=True)
class RunTotals:
    """The totals of a run so far, and its best score.

    Attributes:
        updates: that counted.  nbytes: in both directions.  wall: real seconds, over all sittings.
        best: the best mean score so far.  since: measurements after it that were no better.
    """

    updates: int = 0
    nbytes: int = 0
    wall: float = 0.0
    best: float | None = None
    since: int = 0
    reached: bool = False

    def plain(self) -> dict[str, float | int | bool | None]:
        """As JSON values."""
        return asdict(self)


class StoppingCriteria(Component):
    """Stop at the first of these limits, or after the run's rounds.

    Attributes:
        updates: client updates that counted.
        seconds: of the runtime's clock.  wall_seconds: of the clock on the wall, over all sittings of a resumed run.
        bytes: sent in both directions.
        target: mean score on clients' own validation rows that is good enough.
        patience: measurements in a row without a better mean score on these rows.
        epsilon: privacy budget, above 0: the run ends before the round after which more were spent, in all runs that it
            goes on from together; of several budgets, each.  Refused where none is known.

    Examples:
        >>> stop = StoppingCriteria(updates=100, target=0.9)
        >>> stop.used_up(RunTotals(updates=100), now=0.0), stop.measures
        (True, True)
    """

    axis = "stop"

    updates: int | None = Field(default=None, ge=1)
    seconds: float | None = Field(default=None, gt=0)
    wall_seconds: float | None = Field(default=None, gt=0)
    bytes: int | None = Field(default=None, ge=1)
    target: float | None = None
    patience: int | None = Field(default=None, ge=1)
    epsilon: float | None = Field(default=None, gt=0)

    @model_validator(mode="after")
    def _check_some(self) -> Self:
        if not self.model_dump(exclude_none=True):
            raise ValueError(
                "must set at least one limit: updates, seconds, wall_seconds, bytes, target, patience or epsilon"
            )
        return self

    @property
    def measures(self) -> bool:
        """True if a limit depends on scores."""
        return self.target is not None or self.patience is not None

    def used_up(self, tally: RunTotals, now: float) -> bool:
        """Return whether a limit that needs no score has been met."""
        return (
            (self.updates is not None and tally.updates >= self.updates)
            or (self.seconds is not None and now >= self.seconds)
            or (self.wall_seconds is not None and tally.wall >= self.wall_seconds)
            or (self.bytes is not None and tally.nbytes >= self.bytes)
        )

    def note_means(self, tally: RunTotals, means: Mapping[str, float], metric: str, higher: bool) -> None:
        """Take the mean scores of an evaluation into account: those of personal models where there are some.

        Without any, which is said after the first evaluation, no score ends the run.
        """
        scores = [means[name] for name in (f"personal/{metric}", f"global/{metric}") if name in means]
        if scores and math.isfinite(scores[0]):
            self.note(tally, scores[0], higher)
        elif self.measures and not tally.updates:
            _log.warning("no client scores its model on validation rows, so that no score ends the run")

    def note(self, tally: RunTotals, score: float, higher: bool) -> None:
        """Take a new mean score into account."""
        sign = 1.0 if higher else -1.0
        if tally.best is None or sign * score > sign * tally.best:
            tally.best, tally.since = score, 0
        else:
            tally.since += 1
        good = self.target is not None and sign * score >= sign * self.target
        # once met, the target stays met, also where a later evaluation is worse
        tally.reached = tally.reached or good or (self.patience is not None and tally.since >= self.patience)


class ClientFailures:
    """Failures of single clients' own work: each is said once, and many alike end the run.

    Args:
        names: of the clients, by number.
        known: clients in the federation.
    """

    def __init__(self, names: Sequence[str], known: int) -> None:
        self._names, self._known = names, known
        self._said: set[tuple[int, str]] = set()

    def watch(self, failed: Sequence[tuple[Result, str]], asked: int, version: int) -> None:
        """Take note of tasks that ended without a result.

        Args:
            failed: their results, each with the reason.
            asked: clients that were asked together.
            version: the round.

        Raises:
            RuntimeFault: more than half of those that were asked failed alike.
        """
        kinds: dict[str, list[tuple[Result, str]]] = {}
        for result, reason in failed:
            if (kind := failure_kind(reason)) is None:
                continue
            kinds.setdefault(kind, []).append((result, reason))
            if (result.task.client, kind) not in self._said:
                self._said.add((result.task.client, kind))
                _log.warning("%s, round %d, %s: %s", self._name(result), version, _doing(result), reason)
        for alike in kinds.values():
            # one failure says nothing about the run where there are other clients to ask
            if 2 * len(alike) > asked and (len(alike) > 1 or self._known == 1):
                result, reason = alike[0]
                raise RuntimeFault(
                    f"{_doing(result)} failed on {len(alike)} of {asked} clients in round {version}, the first one is "
                    f"{self._name(result)}: {reason}{f'; {ADVICE}' if diverged(reason) else ''}"
                )

    def _name(self, result: Result) -> str:
        client = result.task.client
        if client == SERVER_ID:
            return "the common test set"
        return f"client {self._names[client] if 0 <= client < len(self._names) else client!r}"


def _doing(result: Result) -> str:
    return "training" if result.task.query is None else f"answering {result.task.query.kind!r}"


class TakesNotes(Protocol):
    """A taker of notes for the run folder: the server's loop."""

    def note(self, axis: str, cluster: int, name: str, value: Any) -> None: ...


class StalledSteps:
    """Counts server steps in a row in which no update had a share of the average, in any mode of scheduling.

    Where the scheduler does not work in rounds, a step is often one client's, so that as many steps say little: then
    every client that sent something must have sent three times on average.

    Attributes:
        told: whether the warning was given; it is given once in a run.
    """

    def __init__(self, in_rounds: bool) -> None:
        self.told = False
        self._in_rounds = in_rounds
        self._steps = self._updates = 0
        self._clients: set[int] = set()

    def watch(self, results: Sequence[Result], counted: Sequence[Counted], notes: TakesNotes) -> None:
        """Take note of a step; warn on the terminal and in the run folder where it is due.

        Args:
            results: the updates that arrived in time and passed the checks, none where all tasks failed.
            counted: how each of them counted.
            notes: where the warning is recorded.
        """
        if any(count.share > 0 for count in counted):
            self._steps = self._updates = 0
            self._clients.clear()
            return
        self._steps += 1
        self._updates += len(results)
        self._clients.update(result.task.client for result in results)
        waits = not self._in_rounds and self._updates < _STEPS * len(self._clients)
        if self.told or self._steps < _STEPS or waits:
            return
        self.told = True
        cause = f"all {self._updates} updates had weight 0" if self._updates else "every task failed"
        text = (
            f"no update has counted in the last {self._steps} server steps ({cause}), so they have not moved the "
            "model: look at the weights and reasons in the run's results, or choose another aggregation or score"
        )
        _log.warning("%s", text)
        notes.note("aggregation", 0, "stalled", text)

    def state(self) -> dict[str, Any]:
        """JSON values."""
        return {"told": self.told, "steps": self._steps, "updates": self._updates, "clients": sorted(self._clients)}

    def restore(self, values: dict[str, Any]) -> None:
        """Restore what `state` returned."""
        self.told, self._clients = bool(values["told"]), set(values["clients"])
        self._steps, self._updates = int(values["steps"]), int(values["updates"])
