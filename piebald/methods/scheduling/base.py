"""The base class of schedulers, and the cohort of a round."""

from __future__ import annotations

import math
from typing import Annotated, ClassVar, Literal, NamedTuple, Protocol, Self, runtime_checkable

from pydantic import AfterValidator, Field, model_validator

from piebald.contracts.component import Component, RecipeComponents


class ServerView(NamedTuple):  # made for every result, and a tuple is made four times as fast as a frozen dataclass
    """The state that a scheduler decides on: numbers only, so that a million clients cost nothing.

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
    """The decision when the server requests training, and when it steps.  Whom it asks is chosen by a seed.

    Attributes:
        choose: how clients are chosen out of those that can be asked: "uniform"; by "size", with chances as their
            rows; by "loss", those with the largest last training losses of some candidates (power-of-choice, Cho et al.
            2022); by "speed", those whose last loss and rows promise much in little time (Oort, Lai et al. 2021).  Only
            "uniform" goes with noise or masks.
        candidates: with "loss", draw this many times the cohort first.
        rounds_setting: a setting with which steps are rounds, as it is advised, where they need not be.
    """

    axis = "scheduling"
    rounds_setting: ClassVar[str] = ""

    choose: Literal["uniform", "loss", "speed", "size"] = "uniform"
    candidates: float = Field(default=2.0, ge=1, allow_inf_nan=False)

    @model_validator(mode="after")
    def _check_choice(self) -> Self:
        if self.choose != "loss" and self.candidates != 2.0:
            raise ValueError(f"candidates would have no effect with choose = {self.choose!r}: leave it out")
        if self.choose != "uniform" and self.inclusion(1) is not None:
            raise ValueError(
                f"choose = {self.choose!r} and sampling = 'poisson' both say who is asked: leave one of them out"
            )
        return self

    def incompatible_with(self, recipe: RecipeComponents) -> str | None:
        # amplification by sampling is counted for draws by chance alone
        hiding = next((part.kind for part in (recipe.training, *recipe.transforms) if part.protects), None)
        if self.choose == "uniform" or hiding is None:
            return None
        return (
            f"choose = {self.choose!r} takes clients by what they sent, and {hiding} hides that or counts on clients "
            "that are drawn by chance: choose 'uniform', or drop it"
        )

    def num_to_request(self, view: ServerView) -> int:
        """Return how many clients to send a training task now."""
        raise NotImplementedError

    def should_step(self, view: ServerView) -> bool:
        """Return whether to step with the updates that are waiting."""
        raise NotImplementedError

    def deadline(self, view: ServerView) -> float:
        """Return when `should_step` must be asked again even if nothing arrives, infinite for never."""
        return math.inf

    def reject_reason(self, staleness: int) -> str | None:
        """Return why an update that missed so many steps is not used, or None."""
        return None

    def round_kind(self) -> Literal["complete", "partial"] | None:
        """Return whether a step uses all updates of one request, or some of them; None where it may mix requests."""
        return None

    def asks_once(self) -> bool:
        """Return whether no client is asked more than once between two steps.

        Privacy budgets are stated by it, so a subclass that requests in another way must say so anew.
        """
        return False

    def expected_updates(self, known: int) -> float | None:
        """Return how many updates a step expects, whoever arrives; None where steps do not wait for everybody.

        Args:
            known: clients in the federation.
        """
        return None

    def inclusion(self, known: int) -> float | None:
        """Return the probability with which each client is asked, independently of all others.

        None where `num_to_request` says how many are asked.
        """
        return None

    @property
    def rounds_advice(self) -> str:
        """Advice for getting steps that are rounds."""
        setting = f", or set its {self.rounds_setting}" if self.rounds_setting else ""
        return f"choose scheduling = 'synchronous'{setting}"


def _cohort(cohort: float) -> float:
    # 1.5 is neither a share nor a number of clients
    if not 0 < cohort < float("inf") or (cohort > 1 and cohort != int(cohort)):
        raise ValueError(
            f"must be a number of clients (1, 2, ...) or a share of them (0.1, or 1.0 for all), got {cohort}"
        )
    return int(cohort) if cohort > 1 else cohort


CohortSize = Annotated[int | float, AfterValidator(_cohort)]


@runtime_checkable
class HasCohort(Protocol):
    """A scheduler with a cohort: clients per round, or clients that work at the same time."""

    @property
    def cohort(self) -> int | float: ...


def cohort_size(cohort: float, known: int) -> int:
    """The number of clients in a cohort; a whole number counts clients, a float up to 1.0 is a share of `known`.

    Examples:
        >>> cohort_size(10, known=7), cohort_size(0.1, known=50)
        (7, 5)
    """
    # the type decides, as 1 is one client and 1.0 all of them
    return min(int(cohort), known) if isinstance(cohort, int) else min(known, max(1, round(cohort * known)))
