"""Settings of boosting over clients."""

from __future__ import annotations

import math
from typing import ClassVar, Literal, Self

from pydantic import Field, field_validator, model_validator

from piebald.contracts.component import Component

Objective = Literal["binary", "multiclass", "regression"]


class TreeSettings(Component):
    """Settings of boosted trees; those that xgboost has are named as there.

    Attributes:
        form: "bagging": in each round every client grows trees, which count together as one forest; "cyclic": in each
            round one client does, in turn; "histogram": in each round one tree (for more than two classes, one for
            each class) is grown from sums over all clients, level by level, as if their rows were in one place.
        secure: under "histogram", clients send their sums under masks, so that nobody learns more than totals.
        target_bounds: under "histogram", low and high of a regression's target, in whose units its derivatives are
            counted; a target outside counts as the nearer bound.
        rounds: rounds of boosting, at most.
        local_rounds: trees (for more than two classes, one for each class) that a client grows in a round, one after
            the other.
        weights: under "bagging", a client's trees count by its training "examples", or all clients' the same,
            "uniform".
        patience: rounds without a smaller loss on all clients' validation rows after which training ends; the rounds
            up to the best one are kept.  None for all rounds.
        balanced: weight rows so that all classes have the same weight over all clients.
        least_rows: training rows of each leaf, at least; splits with fewer on a side are taken back.
        missing: a number that stands for a gap, such as -9, besides NaN; None for none.
        max_depth: splits from the root to a leaf, at most.
        learning_rate: factor on the leaves of each round.
        min_child_weight: least sum of second derivatives of the loss in a leaf.
        reg_lambda, reg_alpha: L2 and L1 penalty of leaves.
        gamma: least decrease of the loss by a split.
        max_delta_step: largest leaf before the learning rate, 0 for any; what clients send is checked against it.
        subsample, colsample_bytree: share of rows, and of columns, that each tree sees.
        max_bin: thresholds of a column among which splits are chosen; under "histogram" quantiles of all clients' rows.

    Examples:
        >>> settings = TreeSettings(form="histogram", secure=True, max_depth=4)
        >>> settings.secure, settings.rounds, settings.learning_rate
        (True, 50, 0.3)
    """

    axis = "boosting"
    kind: ClassVar[str] = "trees"

    form: Literal["bagging", "cyclic", "histogram"] = "bagging"
    secure: bool = False
    target_bounds: tuple[float, float] | None = None
    rounds: int = Field(default=50, ge=1, le=2000)
    local_rounds: int = Field(default=1, ge=1, le=16)
    weights: Literal["examples", "uniform"] = "examples"
    patience: int | None = Field(default=None, ge=1)
    balanced: bool = False
    least_rows: int = Field(default=1, ge=1)
    missing: float | None = None
    max_depth: int = Field(default=6, ge=1, le=10)
    learning_rate: float = Field(default=0.3, gt=0, le=1)
    min_child_weight: float = Field(default=1.0, ge=0)
    reg_lambda: float = Field(default=1.0, ge=0)
    reg_alpha: float = Field(default=0.0, ge=0)
    gamma: float = Field(default=0.0, ge=0)
    max_delta_step: float = Field(default=0.0, ge=0)
    subsample: float = Field(default=1.0, gt=0, le=1)
    colsample_bytree: float = Field(default=1.0, gt=0, le=1)
    max_bin: int = Field(default=256, ge=2, le=4096)

    @field_validator("target_bounds")
    @classmethod
    def _check_bounds(cls, bounds: tuple[float, float] | None) -> tuple[float, float] | None:
        if bounds is not None and not (bounds[0] < bounds[1] and math.isfinite(bounds[1] - bounds[0])):
            raise ValueError(f"target_bounds must be a low and a higher number, got {bounds}")
        return bounds

    @model_validator(mode="after")
    def _check_form(self) -> Self:
        if self.form != "histogram":
            if self.secure:
                raise ValueError(f"masks hide sums, and form {self.form!r} has none: take "
                                 "form = 'histogram', or leave secure out")  # fmt: skip
            if self.target_bounds is not None:
                raise ValueError(f"target_bounds are for form 'histogram', got form {self.form!r}: leave them out")
        elif self.local_rounds != 1:
            raise ValueError(f"local_rounds must be 1 under form 'histogram', got {self.local_rounds}: trees are grown "
                             "from the sums of all, so give more rounds")  # fmt: skip
        return self
