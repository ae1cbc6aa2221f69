"""How much each update counts and how the global model moves, against loops and formulas written out here."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from piebald.contracts import Cohort, PartialSum, StepContext, Update
from piebald.core import cohort_matrix
from piebald.core.cohort_matrix import add_weighted, divided, weighted_mean, weighted_sum
from piebald.core.errors import SettingError
from piebald.engines.stack import RunningSum
from piebald.methods.aggregation import EqualWeighted, ExampleWeighted, GradientNormWeighted
from piebald.methods.aggregation.base import Aggregator
from piebald.methods.server_optimizer import Adam, Momentum, ServerSgd, Yogi
from tests.fakes import few, update

NO_CONTEXT: Any = None  # these aggregators ask nothing of the server
AGGREGATORS = [ExampleWeighted(), EqualWeighted(), GradientNormWeighted()]
numbers = st.lists(st.floats(-4, 4, width=32), min_size=3, max_size=3)
cohorts = st.lists(st.tuples(numbers, st.integers(0, 50)), min_size=1, max_size=6)
aggregators = st.sampled_from(AGGREGATORS)


def cohort_of(updates: list[Update]) -> Cohort:
    summed = updates[0].partial_sum is not None
    matrix = None if summed else torch.stack([made.vectors["model"] for made in updates])
    return Cohort(list(range(len(updates))), [0] * len(updates), updates, matrix, 0)


def summed_early(updates: list[Update], aggregation: Aggregator) -> list[Update]:
    """The same updates, summed where they were made."""
    total = RunningSum()
    for made in updates:
        weight = aggregation.weight(made)
        total.add(weight, {"model": made.vectors["model"] * weight})
    whole = PartialSum(total.weight, total.vectors)
    return [Update({}, made.examples, made.steps, made.metrics, made.norm, whole, made.nbytes) for made in updates]


def naive(drawn: list[tuple[list[float], int]], aggregation: Aggregator) -> tuple[list[float], list[float]]:
    """The weighted mean and the shares, number by number."""
    if isinstance(aggregation, ExampleWeighted):
        weights = [float(examples) for _, examples in drawn]
    elif isinstance(aggregation, EqualWeighted):
        weights = [1.0 for _ in drawn]
    else:
        weights = [math.sqrt(sum(x * x for x in change)) for change, _ in drawn]
    whole = sum(weights)
    if whole == 0:
        return [0.0] * 3, [0.0] * len(drawn)
    shares = [weight / whole for weight in weights]
    mean = [0.0, 0.0, 0.0]
    for share, (change, _) in zip(shares, drawn, strict=True):
        for place, number in enumerate(change):
            mean[place] += share * number
    return mean, shares


@few
@given(cohorts, aggregators)
def test_the_mean_is_that_of_a_plain_loop(drawn: list[Any], aggregation: Aggregator) -> None:
    updates = [update(*change, examples=examples) for change, examples in drawn]
    average, weights = aggregation.aggregate(cohort_of(updates), NO_CONTEXT)
    mean, shares = naive(drawn, aggregation)
    assert average.tolist() == pytest.approx(mean, abs=1e-5)
    assert weights == pytest.approx(shares, abs=1e-5)
    assert sum(weights) == pytest.approx(1.0) or sum(shares) == 0


@few
@given(cohorts, aggregators)
def test_updates_summed_early_give_the_same_average(drawn: list[Any], aggregation: Aggregator) -> None:
    updates = [update(*change, examples=examples) for change, examples in drawn]
    one, weights = aggregation.aggregate(cohort_of(updates), NO_CONTEXT)
    two, same = aggregation.aggregate(cohort_of(summed_early(updates, aggregation)), NO_CONTEXT)
    torch.testing.assert_close(one, two, atol=1e-5, rtol=1e-5)
    assert weights == same


@few
@given(cohorts, aggregators, st.randoms(use_true_random=False))
def test_the_order_of_updates_does_not_matter(drawn: list[Any], aggregation: Aggregator, random: Any) -> None:
    order = list(range(len(drawn)))
    random.shuffle(order)
    updates = [update(*change, examples=examples) for change, examples in drawn]
    one, weights = aggregation.aggregate(cohort_of(updates), NO_CONTEXT)
    two, shuffled = aggregation.aggregate(cohort_of([updates[place] for place in order]), NO_CONTEXT)
    torch.testing.assert_close(one, two, atol=1e-5, rtol=1e-5)
    assert shuffled == pytest.approx([weights[place] for place in order])


@few
@given(numbers, st.lists(st.integers(1, 50), min_size=1, max_size=6), aggregators)
def test_the_mean_of_equal_changes_is_that_change(
    change: list[float], examples: list[int], aggregation: Aggregator
) -> None:
    average, _ = aggregation.aggregate(cohort_of([update(*change, examples=count) for count in examples]), NO_CONTEXT)
    assert average.tolist() == pytest.approx(change, abs=1e-5)


@pytest.mark.parametrize("side_by_side", [True, False])
@pytest.mark.parametrize("examples", [1, 3, 7, 999_999_937])
def test_the_mean_of_one_update_is_this_update_to_the_bit(examples: int, side_by_side: bool) -> None:
    """Also where numbers are as large and as small as float32 has them; and it is another tensor, to be written to."""
    wide = torch.randint(-(2**31), 2**31, (4096,), generator=torch.Generator().manual_seed(0)).to(torch.int32)
    change = torch.where((made := wide.view(torch.float32)).isfinite(), made, -0.0)
    updates = [dataclasses.replace(update(1.0, examples=examples), vectors={"model": change})]
    cohort = dataclasses.replace(cohort_of(updates), matrix=change.unsqueeze(0) if side_by_side else None)
    average, shares = ExampleWeighted().aggregate(cohort, NO_CONTEXT)
    whole = weighted_sum(change.unsqueeze(0), [float(examples)]) / float(examples)
    assert torch.equal(average.view(torch.int32), change.view(torch.int32))
    assert torch.equal(average.view(torch.int32), whole.float().view(torch.int32))
    assert shares == [1.0]
    average.zero_()
    assert change.any()


@pytest.mark.parametrize("early", [False, True])
def test_a_cohort_without_any_weight_stays_put(early: bool) -> None:
    updates = [update(1.0, 2.0, 3.0, examples=0), update(4.0, 5.0, 6.0, examples=0)]
    aggregation = ExampleWeighted()
    average, weights = aggregation.aggregate(
        cohort_of(summed_early(updates, aggregation) if early else updates), NO_CONTEXT
    )
    assert average.tolist() == [0.0, 0.0, 0.0]
    assert weights == [0.0, 0.0]


def test_weights_by_the_norm_of_the_gradient() -> None:
    """Norms 5 and 10 count 1 to 2, whatever the examples."""
    _, weights = GradientNormWeighted().aggregate(
        cohort_of([update(3, 4, examples=99), update(6, 8, examples=1)]), NO_CONTEXT
    )
    assert weights == pytest.approx([1 / 3, 2 / 3])


# --------------------------------------------------------------------------------------------------------- server steps


def adaptive(kind: str, changes: np.ndarray, lr: float, beta1: float, beta2: float, tau: float) -> np.ndarray:
    """Reddi et al. 2021, algorithm 2, in double precision."""
    x, m, v = np.zeros(changes.shape[1]), np.zeros(changes.shape[1]), np.full(changes.shape[1], tau**2)
    for delta in changes:
        m = beta1 * m + (1 - beta1) * delta
        if kind == "adam":
            v = beta2 * v + (1 - beta2) * delta**2
        else:
            v = v - (1 - beta2) * delta**2 * np.sign(v - delta**2)
        x = x + lr * m / (np.sqrt(v) + tau)
    return x


def walked(optimizer: Any, changes: np.ndarray) -> torch.Tensor:
    model = torch.zeros(changes.shape[1])
    state = optimizer.initial_state(model)
    for delta in changes:
        context = StepContext(1, 1, 0, [1.0], state=state)
        model, state = optimizer.step(model, torch.tensor(delta, dtype=torch.float32), context)
    return model


CHANGES = np.random.default_rng(3).normal(size=(6, 4))
CHANGES[2, 1] = 0.0  # the sign of v - 0
CHANGES[3] *= 1e-3  # smaller than the second moment, so that Yogi's moves the other way


@pytest.mark.parametrize(("kind", "optimizer"), [("adam", Adam), ("yogi", Yogi)])
@pytest.mark.parametrize("settings", [(0.01, 0.9, 0.99, 1e-3), (0.3, 0.0, 0.5, 0.1), (0.1, 0.5, 0.0, 1e-2)])
def test_adaptive_steps_are_the_papers_formulas(kind: str, optimizer: Any, settings: tuple[float, ...]) -> None:
    lr, beta1, beta2, tau = settings
    model = walked(optimizer(lr=lr, beta1=beta1, beta2=beta2, tau=tau), CHANGES)
    np.testing.assert_allclose(model.numpy(), adaptive(kind, CHANGES, lr, beta1, beta2, tau), rtol=1e-4)


def test_server_momentum() -> None:
    x = v = np.zeros(4)
    for delta in CHANGES:
        v = 0.8 * v + delta
        x = x + 0.5 * v
    np.testing.assert_allclose(walked(Momentum(lr=0.5, beta=0.8), CHANGES).numpy(), x, rtol=1e-4, atol=1e-6)


def test_plain_steps_add_the_changes_up() -> None:
    np.testing.assert_allclose(walked(ServerSgd(), CHANGES).numpy(), CHANGES.sum(0), rtol=1e-4, atol=1e-6)
    assert torch.equal(walked(ServerSgd(), CHANGES), walked(Momentum(beta=0.0), CHANGES))


def test_steps_leave_the_old_model_alone() -> None:
    """Tasks under way still hold it."""
    for optimizer in (ServerSgd(), Momentum(), Adam(), Yogi()):
        old = torch.ones(4)
        state = optimizer.initial_state(old)
        kept = {name: tensor.clone() for name, tensor in state.items()}
        optimizer.step(old, torch.ones(4), StepContext(1, 1, 0, [1.0], state=state))
        assert torch.equal(old, torch.ones(4))
        assert all(torch.equal(state[name], tensor) for name, tensor in kept.items())


@pytest.mark.parametrize(
    ("optimizer", "fields"),
    [
        (Adam, {"lr": 0.0}),
        (Adam, {"beta1": 1.0}),
        (Yogi, {"tau": 0.0}),
        (Yogi, {"beta2": -0.1}),
        (Momentum, {"beta": 1.0}),
    ],
)
def test_optimizers_refuse_what_cannot_work(optimizer: Any, fields: dict[str, float]) -> None:
    with pytest.raises(SettingError, match=next(iter(fields))):
        optimizer(**fields)


@pytest.mark.parametrize("whole", [3.0, 7.1, 1e-3, 60_000.0])
def test_a_sum_is_divided_in_float64_and_rounded_once(whole: float) -> None:
    random = torch.Generator().manual_seed(1)
    total = torch.randn(5000, dtype=torch.float64, generator=random) * 10.0 ** torch.randint(
        -45, 38, (5000,), generator=random
    )
    assert torch.equal(divided(total, whole), (total / whole).float())
    assert not torch.equal(divided(total, whole), total.float() / whole)  # so the test would notice


@pytest.mark.parametrize("rows", [1, 3])
def test_a_sum_that_grows_in_place_has_the_same_bits(rows: int) -> None:
    draw = torch.Generator().manual_seed(0)
    total = torch.randn(300_001, dtype=torch.float64, generator=draw)  # of several blocks
    matrix, weights = torch.randn(rows, 300_001, generator=draw), [1.7, 2.3, 0.1][:rows]
    expected = total + weighted_sum(matrix, weights)
    add_weighted(total, matrix, weights)
    assert torch.equal(total, expected)


@pytest.mark.parametrize("cached", [1 << 18, 2])  # the second one is less than a number of each row
@pytest.mark.parametrize("rows", [1, 3])
def test_a_mean_of_updates_one_piece_after_another_has_the_same_bits(
    rows: int, cached: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cohort_matrix, "_CACHED", cached)
    size = 600_001 if cached > 2 else 37  # several blocks of each of several pieces
    monkeypatch.setattr(cohort_matrix, "BUDGET", 1 << 24 if cached > 2 else 32 * 7)
    matrix, weights = torch.randn(rows, size, generator=torch.Generator().manual_seed(0)), [1.7, 2.3, 0.1][:rows]
    vectors = [{"model": row} for row in matrix]
    expected = divided(weighted_sum(matrix, weights), sum(weights))
    assert torch.equal(weighted_mean(vectors, "model", weights, sum(weights)), expected)
