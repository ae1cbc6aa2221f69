"""A limit to how much one update counts in a step, whatever its client says about itself."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from piebald.contracts import Cohort
from piebald.methods.aggregation.base import Aggregator
from piebald.methods.aggregation.linear import Linear


def capped(weights: Sequence[float], largest: float) -> list[float]:
    """Weights of which none has more than the share `largest` of their sum.

    The largest ones are lowered to one common value, the others stay.  Where that is not possible, because fewer than
    1 / `largest` weights are above 0, those become equal.
    """
    down = sorted(weights, reverse=True)
    positive = sum(weight > 0 for weight in down)
    if positive * largest <= 1:
        least = min((weight for weight in down if weight > 0), default=0.0)
        return [min(weight, least) for weight in weights]
    # summed from the smallest up, so that a huge weight does not swallow the others
    rests = [*itertools.accumulate(reversed(down))][::-1]
    for count, (weight, rest) in enumerate(zip(down, rests, strict=True)):  # so many are above the limit
        limit = largest * rest / (1 - count * largest)
        if weight <= limit * (1 + 1e-12):
            return [min(one, limit) for one in weights]
    raise AssertionError("of several weights, not all are above the limit")


def with_capped_examples(cohort: Cohort, largest: float) -> Cohort:
    """The updates with the numbers of rows of the largest clients lowered, for aggregators that go by them."""
    if largest >= 1 or cohort.updates[0].partial_sum is not None:
        return cohort
    limits = capped([float(update.examples) for update in cohort.updates], largest)
    pairs = zip(cohort.updates, limits, strict=True)
    updates = [dataclasses.replace(update, examples=min(update.examples, int(limit))) for update, limit in pairs]
    return dataclasses.replace(cohort, updates=updates)


def with_capped_shares(
    average: Tensor, shares: list[float], cohort: Cohort, aggregator: Aggregator, largest: float
) -> tuple[Tensor, list[float]]:
    """The average [s] and the shares [n] with none above `largest` of their sum, where an average is a weighted mean.

    Other aggregators, such as medians, do not depend on one update's weight.
    """
    total = sum(shares)
    weighted = isinstance(aggregator, Linear) and cohort.matrix is not None
    if largest >= 1 or not weighted or total <= 0 or max(shares) <= largest * total * (1 + 1e-9):
        return average, shares
    limited = capped(shares, largest)
    limited = [share * total / sum(limited) for share in limited]
    assert cohort.matrix is not None
    return torch.tensor(limited) @ cohort.matrix, limited
