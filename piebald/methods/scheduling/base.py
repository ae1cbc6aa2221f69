"""The base class of schedulers, and what some of them do besides."""

from __future__ import annotations

from typing import Literal, NamedTuple, Protocol, runtime_checkable

from piebald.contracts.component import Component


class ServerView(NamedTuple):  # made for every result, and a tuple is made four times as fast as a frozen dataclass
    """What a scheduler decides on: numbers only, so that a million clients cost nothing.

    Attributes:
        version: server steps made.
        now: seconds on the runtime's clock;  stepped: when the last step was made.
        available: clients that are available now and not excluded, busy or not;  idle: of these, not busy.
        busy: clients with a task under way.
        requested: tasks sent since the last step;  outstanding: of these, still under way.
        waiting: updates that arrived and that no step has used.
        failed: tasks since the last step that ended without a usable update.
    """

    version: int
    now: float
    stepped: float
    available: int
    idle: int
    busy: int
    requested: int
    outstanding: int
    waiting: int
    failed: int


class Scheduler(Component):
    """When the server requests training, and when it steps.  Whom it asks is a seeded choice among idle clients.

    What some schedulers do besides is asked for by type: `StepsInRounds`, `HasDeadline`, `RejectsLate`.
    """

    axis = "scheduling"

    def num_to_request(self, view: ServerView) -> int:
        """How many clients to send a training task now."""
        raise NotImplementedError

    def expected_updates(self, known: int) -> float | None:
        """How many updates a step expects, whoever arrives; None where steps are no rounds that wait for everybody.

        Args:
            known: clients in the federation.
        """
        return None

    def inclusion(self, known: int) -> float | None:
        """With which probability each client is asked, independently of all others; None where `num_to_request` says
        how many are.
        """
        return None

    def should_step(self, view: ServerView) -> bool:
        """Whether to step with the updates that are waiting."""
        raise NotImplementedError


@runtime_checkable
class StepsInRounds(Protocol):
    """A scheduler that may step with updates of one request only."""

    def round_kind(self) -> Literal["complete", "partial"] | None:
        """Whether a step uses all updates of one request, or some of them; None where it may mix requests."""


@runtime_checkable
class HasDeadline(Protocol):
    """A scheduler that steps at a time, even if nothing arrives then."""

    def next_check(self, view: ServerView) -> float:
        """When `should_step` must be asked again."""


@runtime_checkable
class RejectsLate(Protocol):
    """A scheduler that does not use every update."""

    def reject_reason(self, staleness: int) -> str | None:
        """Why an update that missed so many steps is not used, or None."""


def round_kind(scheduler: Scheduler) -> Literal["complete", "partial"] | None:
    """The kind of rounds that a scheduler steps in, or None."""
    return scheduler.round_kind() if isinstance(scheduler, StepsInRounds) else None
