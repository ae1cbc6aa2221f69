"""When a run stops."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Self

from pydantic import Field, model_validator

from piebald.contracts.component import Component


@dataclass(slots=True)
class RunTotals:
    """What a run has used so far, and its best score.

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
        target: mean score on clients' own rows that is good enough.
        patience: measurements in a row without a better mean score.
    """

    axis = "stop"

    updates: int | None = Field(default=None, ge=1)
    seconds: float | None = Field(default=None, gt=0)
    wall_seconds: float | None = Field(default=None, gt=0)
    bytes: int | None = Field(default=None, ge=1)
    target: float | None = None
    patience: int | None = Field(default=None, ge=1)

    @model_validator(mode="after")
    def _check_some(self) -> Self:
        if not self.model_dump(exclude_none=True):
            raise ValueError("must set at least one limit: updates, seconds, wall_seconds, bytes, target or patience")
        return self

    @property
    def measures(self) -> bool:
        """Whether a limit depends on scores."""
        return self.target is not None or self.patience is not None

    def used_up(self, tally: RunTotals, now: float) -> bool:
        """Whether a limit that needs no score has been met."""
        return (
            (self.updates is not None and tally.updates >= self.updates)
            or (self.seconds is not None and now >= self.seconds)
            or (self.wall_seconds is not None and tally.wall >= self.wall_seconds)
            or (self.bytes is not None and tally.nbytes >= self.bytes)
        )

    def note_means(self, tally: RunTotals, means: Mapping[str, float], metric: str, higher: bool) -> None:
        """Take the mean scores of an evaluation into account: those of personal models where there are some."""
        found = [means[name] for name in (f"personal/{metric}", f"global/{metric}") if name in means]
        if found and math.isfinite(found[0]):
            self.note(tally, found[0], higher)

    def note(self, tally: RunTotals, score: float, higher: bool) -> None:
        """Take a new mean score into account."""
        sign = 1.0 if higher else -1.0
        if tally.best is None or sign * score > sign * tally.best:
            tally.best, tally.since = score, 0
        else:
            tally.since += 1
        good = self.target is not None and sign * score >= sign * self.target
        tally.reached = tally.reached or good or (self.patience is not None and tally.since >= self.patience)
