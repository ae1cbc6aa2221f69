"""Weighted means, whose weights are known from single updates, so that sums can be formed where the clients are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, ClassVar, TypeGuard

import torch
from pydantic import Field
from torch import Tensor

from piebald.contracts import Cohort, ServerContext, Update
from piebald.core.client_models import fitting_patterns, idle_pattern_reason
from piebald.core.cohort_matrix import divided, held_mask, held_mean, weighted_mean, weighted_sum
from piebald.methods.aggregation.base import Aggregator


class Linear(Aggregator):
    """Weighted mean of the changes; subclasses define the weight of one update."""

    axis = "aggregation"
    averages_rows: ClassVar[bool] = True

    def weight(self, update: Update, staleness: int = 0) -> float:
        """Return how much one update counts before weights are made to sum to one, from its numbers alone.

        `update.client` says whose it is.
        """
        raise NotImplementedError

    def undamped_weight(self, update: Update) -> float:
        """The weight that shares are measured against: the update's own, unless it is held back on purpose."""
        return self.weight(update)

    def aggregate(self, cohort: Cohort, context: ServerContext) -> tuple[Tensor, list[float]]:
        summed = cohort.updates[0].partial_sum
        if summed is not None and summed.masked:  # single weights are not known
            return summed.vectors["model"] / summed.weight, [1 / len(cohort.updates)] * len(cohort.updates)
        weights = [self.weight(u, stale) for u, stale in zip(cohort.updates, cohort.staleness, strict=True)]
        if cohort.matrix is not None and any(positions is not None for positions in cohort.held):
            return held_mean(cohort.matrix, held_mask(cohort.matrix, cohort.held), weights)
        # undamped: damped weights over their own sum would let a single update count in full, however stale it is
        whole = sum(self.undamped_weight(update) for update in cohort.updates)
        if whole <= 0:  # no update counts (no client has rows): the average is no change
            like = cohort.updates[0].vectors["model"] if summed is None else summed.vectors["model"]
            return torch.zeros_like(like, dtype=torch.float32), [0.0] * len(weights)
        shares = [weight / whole for weight in weights]
        # the sum has arrived, so dividing it is all that is left, and no single change is in memory
        if summed is not None:
            return divided(summed.vectors["model"], whole), shares
        if shares == [1.0]:  # an asynchronous step: the mean of one update is this update, to the bit
            only = cohort.updates[0].vectors["model"] if cohort.matrix is None else cohort.matrix[0]
            return only.clone(), shares  # an average may be written to, and an update lie in read-only memory
        # without a matrix the changes may lie in files, and are read a block at a time
        if cohort.matrix is None:
            return weighted_mean([update.vectors for update in cohort.updates], "model", weights, whole), shares
        return divided(weighted_sum(cohort.matrix, weights), whole), shares


class ExampleWeighted(Linear):
    """By training rows (McMahan et al. 2017; HDAFL, algorithm 1).

    Examples:
        >>> from piebald.contracts import Update
        >>> ExampleWeighted().weight(Update({}, examples=30, steps=3, metrics={}))
        30.0
    """

    on_device: ClassVar[bool] = True

    def weight(self, update: Update, staleness: int = 0) -> float:
        return float(update.counts)


class EqualWeighted(Linear):
    """Every update counts the same."""

    on_device: ClassVar[bool] = True

    def reads_data(self) -> bool:
        # a user's subclass may override any of these, and is then not trusted to weigh all alike
        methods = (EqualWeighted.weight, EqualWeighted.undamped_weight, EqualWeighted.aggregate, EqualWeighted.prepare)
        return self.overrides(*methods)

    def weight(self, update: Update, staleness: int = 0) -> float:
        return 1.0


class FixedShares(Linear):
    """By shares that were agreed on, whatever a client has or sends.

    A step divides by the sum of the shares of those that take part in it.

    Attributes:
        shares: of each client, above 0, by its name or by a pattern, like {"north": 0.4, "ward *": 0.2}; each client
            that a pattern fits has all of its share, and its name counts before longer and shorter patterns.
        by_number: the same by clients' numbers, which follow from the clients of a run.

    Examples:
        >>> FixedShares(shares={"north": 3.0, "*": 1.0}).of_clients(["north", "east", "west"]).by_number
        (3.0, 1.0, 1.0)
    """

    on_device: ClassVar[bool] = True

    shares: dict[str, Annotated[float, Field(gt=0, allow_inf_nan=False)]] = Field(min_length=1)
    by_number: tuple[float, ...] = ()

    def unsupported_clients(self, names: Sequence[str]) -> str | None:
        if (missing := next((name for name in names if not fitting_patterns(self.shares, name)), None)) is not None:
            return f"shares of {self.kind} have none for client {missing!r}: name it, or give '*' for all others"
        return idle_pattern_reason(self.shares, names, f"shares of {self.kind}")

    def of_clients(self, names: Sequence[str]) -> FixedShares:
        """Return the aggregator with the shares of these clients by number."""
        patterns = [fitting_patterns(self.shares, name) for name in names]
        # the first pattern is the most particular
        by_number = tuple(self.shares[fitting[0]] if fitting else 0.0 for fitting in patterns)
        return FixedShares(shares=self.shares, by_number=by_number)

    def weight(self, update: Update, staleness: int = 0) -> float:
        return self.by_number[update.client]


class GradientNormWeighted(Linear):
    """By the norm of the gradient, which HDAFL names as another choice without a formula.

    Our reading: the gradient summed over the local steps, |w_t - w_k| / lr; the learning rate cancels in the shares.
    """

    on_device: ClassVar[bool] = True

    def weight(self, update: Update, staleness: int = 0) -> float:
        return update.norm


def is_plain_mean(aggregator: object) -> bool:
    """Return whether every update counts the same in a mean, whatever its client has, sends or missed.

    Examples:
        >>> is_plain_mean(EqualWeighted()), is_plain_mean(ExampleWeighted())
        (True, False)
    """
    return isinstance(aggregator, EqualWeighted) and not aggregator.reads_data()


def computes_from_sum(aggregator: Aggregator) -> TypeGuard[Linear]:
    """Return whether the aggregator's result follows from the weighted sum of the changes and from each update's
    numbers.

    True for a `Linear` that neither aggregates in a way of its own nor prepares cohorts.
    """
    return isinstance(aggregator, Linear) and not aggregator.overrides(Linear.aggregate, Linear.prepare)


def weighs_by_examples(aggregator: object) -> bool:
    """Return whether the weight of an update follows from its number of rows, and from nothing found in training."""
    # the method and not the class: a subclass with a weight of its own is none of these
    from_rows = (ExampleWeighted.weight, EqualWeighted.weight)
    return isinstance(aggregator, Linear) and type(aggregator).weight in from_rows


def follows_rows(aggregator: Linear) -> bool:
    """Return whether the weight of an update follows from its number of rows, whatever else it has, and grows with it.

    It is found out by trial, since the weight may be a user's function.

    Examples:
        >>> follows_rows(ExampleWeighted()), follows_rows(GradientNormWeighted())
        (True, False)
    """

    def weights(of: float) -> list[float]:
        return [
            aggregator.weight(Update({}, rows, round(of * rows), {"loss": of}, of, client=round(of)))
            for rows in (1, 2, 10, 1000)
        ]

    try:
        first, second = weights(1.0), weights(3.0)
    except Exception:  # whatever the function of a user lacks, it reads more than rows
        return False
    return first == second and first == sorted(first) and first[0] > 0


def computes_from_masked_sum(aggregator: Aggregator) -> bool:
    """Return whether the aggregator's result follows from the weighted sum and the sum of weights alone.

    That is all that a server learns under secure aggregation, so an aggregator with damped weights is refused as well.
    """
    return computes_from_sum(aggregator) and not aggregator.overrides(Linear.undamped_weight)
