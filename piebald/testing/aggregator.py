"""The contract test of aggregators."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from piebald.contracts import Cohort, ServerContext, Update
from piebald.methods.aggregation.base import Aggregator
from piebald.methods.aggregation.linear import Linear
from piebald.testing.component import check_component, promises
from piebald.testing.recipe import check_runs, in_fedavg

_NO_CONTEXT = cast(ServerContext, None)


@promises(Aggregator, "an aggregator")
def check_aggregator(aggregator: Aggregator, *, recipe: bool = True, asks: bool = False, **options: Any) -> None:
    """Check that an aggregator treats updates alike, leaves them as they are, and averages.

    Alone: a weighted mean does not depend on the order of updates, the average of equal changes is that change (or a
    shorter one, for those that clip), shares are at least 0 and sum to at most 1, and nothing that it gets is changed.
    In FedAvg: see `check_recipe`, which takes the options.

    Args:
        aggregator: the aggregator.
        recipe: whether to check it in FedAvg as well.
        asks: whether it asks clients or the server's context anything, so that it cannot be called alone.
        options: those of `check_recipe`.

    Raises:
        AssertionError: it breaks one of these promises.

    Examples:
        >>> from piebald.methods.aggregation import Median
        >>> check_aggregator(Median(), recipe=False)
    """
    check_component(aggregator)
    if not asks and not aggregator.overrides(Aggregator.prepare):
        for seed in range(5):
            _check_alone(aggregator, seed)
    if recipe:
        check_runs(in_fedavg(aggregation=aggregator), **options)


def _check_alone(aggregator: Aggregator, seed: int) -> None:
    subject = f"aggregation {aggregator.kind!r}"
    draw = torch.Generator().manual_seed(seed)
    changes = torch.randn(8, 5, generator=draw)
    examples = torch.randint(1, 50, (8,), generator=draw).tolist()
    before = changes.clone()
    average, shares = aggregator.aggregate(_cohort(changes, examples), _NO_CONTEXT)
    assert torch.equal(changes, before), f"{subject}: it changes the updates that it gets"
    assert average.shape == (5,), (
        f"{subject}: the average must have the shape of a change, [5], got {list(average.shape)}"
    )
    assert bool(average.isfinite().all()), f"{subject}: the average of finite changes is not finite"
    assert len(shares) == 8, f"{subject}: there must be a share for each of 8 updates, got {len(shares)}"
    assert min(shares) >= 0, f"{subject}: shares must be at least 0, got {min(shares)}"
    assert sum(shares) <= 1 + 1e-5, f"{subject}: shares must sum to at most 1, got {sum(shares)}"
    order = torch.randperm(8, generator=draw).tolist()
    average_shuffled, shuffled = aggregator.aggregate(
        _cohort(changes[order], [examples[row] for row in order]), _NO_CONTEXT
    )
    if isinstance(aggregator, Linear):  # others may have to choose among equals
        torch.testing.assert_close(
            average_shuffled, average, atol=1e-5, rtol=1e-4, msg=f"{subject}: it depends on the order of updates"
        )
        torch.testing.assert_close(torch.tensor(shuffled), torch.tensor([shares[row] for row in order]))
    # a robust rule may shorten the mean of equal changes, but not turn it
    same = changes[:1].expand(8, 5).clone()
    average, shares = aggregator.aggregate(_cohort(same, [10] * 8), _NO_CONTEXT)
    length = float(average.norm() / same[0].norm())
    aligned = float(torch.nn.functional.cosine_similarity(average, same[0], dim=0)) if length > 0 else 0.0
    assert 0 < length <= 1 + 1e-4, f"{subject}: the average of equal changes has {length:.3g} times their length"
    assert aligned > 1 - 1e-4, f"{subject}: the average of equal changes points elsewhere"


def _cohort(changes: Tensor, examples: Sequence[int]) -> Cohort:
    updates = [
        Update({"model": change}, count, 1, {"loss": 1.0}, norm=float(change.norm()))
        for change, count in zip(changes, examples, strict=True)
    ]
    count, size = changes.shape
    return Cohort(list(range(count)), [0] * count, updates, changes, 0, [torch.zeros(size)] * count)
