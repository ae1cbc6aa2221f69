"""Trials of a search, and when one is dropped: by successive halving, but not within one standard error of the best."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from piebald.advice.tuning.space import Cost, Point
from piebald.report.paired import Scores, difference

Sampler = Literal["tpe", "random", "grid"]
State = Literal["finished", "dropped", "failed"]


@dataclass(frozen=True, eq=False)
class Trial:
    """Settings that were tried.

    Attributes:
        label: of the recipe.
        number: of the trial, from 0.
        settings: the values that were tried, by name.
        rounds: server steps that each of its runs was trained for.
        score: the mean of the metric over clients' validation rows and seeds, None if it failed.
        state: "finished", "dropped" before the last rung, or "failed".
        why: in words, if it was dropped or failed.
        scores: of each seed and client after each rung that it reached.
        cost: what its runs cost.
    """

    label: str
    number: int
    settings: Point
    rounds: int
    score: float | None
    state: State
    why: str
    scores: Mapping[int, Scores]
    cost: Cost

    def row(self) -> dict[str, Any]:
        """As a row of a table, with plain values."""
        return {
            "label": self.label,
            "trial": self.number,
            **self.settings,
            "rounds": self.rounds,
            "score": self.score,
            "state": self.state,
            "why": self.why,
        }


def best_of(trials: Sequence[Trial], higher_is_better: bool) -> Trial | None:
    """The trial with the best mean among those that were trained longest, None if all failed."""
    scored = [trial for trial in trials if trial.score is not None and trial.state != "failed"]
    longest = max((trial.rounds for trial in scored), default=0)
    sign = 1 if higher_is_better else -1
    # scores after fewer rounds are lower for all settings alike
    complete = [trial for trial in scored if trial.rounds == longest]
    return max(complete, key=lambda trial: sign * (trial.score or 0.0), default=None)


def words(point: Point) -> str:
    """Return settings on one line.

    Examples:
        >>> words({"lr": 0.123456, "cohort": 10})
        'lr 0.1235, cohort 10'
    """
    shown = {name: f"{value:.4g}" if isinstance(value, float) else str(value) for name, value in point.items()}
    return ", ".join(f"{name} {value}" for name, value in shown.items()) or "as it is"


def lag_beyond_noise(best: Scores, other: Scores, higher_is_better: bool) -> tuple[float, float] | None:
    """Return the lag of a method behind another one and its standard error, None where it is within one of them.

    Methods are compared on the same validation rows of the same clients and seeds, so what makes a client hard for both
    drops out; what is left is the noise that a choice would be made under (Kuo et al. 2023, On noisy evaluation in
    federated hyperparameter tuning).  Where the standard error is unknown, with a single client, everything is within
    it.
    """
    lead = difference(best, other)
    if lead is None or lead.error is None:
        return None
    lag = lead.mean if higher_is_better else -lead.mean
    return (lag, lead.error) if lag > lead.error else None
