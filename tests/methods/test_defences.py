"""Robust aggregators: equal to slow references, independent of order, bounded under the attackers they tolerate."""

from __future__ import annotations

import itertools
import math
import statistics
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from piebald import recipes
from piebald.contracts import Cohort, Update
from piebald.contracts.component import Component
from piebald.core import cohort_matrix
from piebald.core.cohort_matrix import coordinates
from piebald.core.errors import SettingError
from piebald.methods import aggregation
from piebald.methods.aggregation.fltrust import trust
from piebald.methods.aggregation.foolsgold import confidence
from piebald.methods.aggregation.irls import repeated_median
from piebald.methods.aggregation.robust import Robust
from tests.fakes import FakeMasking

NO_CONTEXT: Any = None  # these ask nothing of the server
few = settings(max_examples=25, deadline=None, derandomize=True)

DEFENCES = {
    "median": aggregation.Median(),
    "trimmed_mean": aggregation.TrimmedMean(attackers=0.3),
    "krum": aggregation.Krum(attackers=0.3),
    "multi_krum": aggregation.MultiKrum(attackers=0.3),
    "bulyan": aggregation.Bulyan(attackers=0.2),
    "geometric_median": aggregation.GeometricMedian(),
    "norm_clipping": aggregation.NormClipping(),
    "irls": aggregation.Irls(),
    "gra": aggregation.Gra(groups=2),
    "gra, geometric median": aggregation.Gra(groups=2, inside="geometric_median"),
    "gra, trimmed mean": aggregation.Gra(groups=2, inside="trimmed_mean"),
    "credit": aggregation.Credit(steps=30),
}
TOLERANT = [name for name, aggregator in DEFENCES.items() if aggregator.tolerates(12) > 0]


def cohort(matrix: Tensor, examples: list[int] | None = None) -> Cohort:
    sizes = examples or [1] * len(matrix)
    updates = [Update({"model": row}, n, 1, {}, float(row.norm())) for row, n in zip(matrix, sizes, strict=True)]
    return Cohort(list(range(len(matrix))), [0] * len(matrix), updates, matrix, 0)


def merged(aggregator: Robust, matrix: Tensor, **more: list[int]) -> tuple[Tensor, list[float]]:
    return aggregator.aggregate(cohort(matrix, **more), NO_CONTEXT)


def matrices(least: int = 1, most: int = 12) -> st.SearchStrategy[Tensor]:
    def draw(arguments: tuple[int, int, int]) -> Tensor:
        rows, wide, seed = arguments
        return torch.from_numpy(np.random.default_rng(seed).normal(size=(rows, wide)).astype(np.float32))

    return st.tuples(st.integers(least, most), st.integers(1, 9), st.integers(0, 10_000)).map(draw)


# ---------------------------------------------------------------------------------------------------------- all of them


@pytest.mark.parametrize("name", DEFENCES)
@few
@given(matrix=matrices())
def test_shares_sum_to_one_and_the_result_is_finite(name: str, matrix: Tensor) -> None:
    average, shares = merged(DEFENCES[name], matrix)
    assert average.shape == matrix.shape[1:]
    assert bool(torch.isfinite(average).all())
    assert sum(shares) == pytest.approx(1.0)
    assert min(shares) >= 0


@pytest.mark.parametrize("name", [name for name in DEFENCES if "gra" not in name])
@few
@given(matrix=matrices(3), seed=st.integers(0, 1000))
def test_the_order_of_clients_does_not_matter(name: str, matrix: Tensor, seed: int) -> None:
    order = torch.from_numpy(np.random.default_rng(seed).permutation(len(matrix)))
    one, mine = merged(DEFENCES[name], matrix)
    two, theirs = merged(DEFENCES[name], matrix[order])
    torch.testing.assert_close(one, two, atol=2e-4, rtol=1e-3)
    assert theirs == pytest.approx([mine[i] for i in order.tolist()], abs=1e-3)


@pytest.mark.parametrize("inside", ["median", "geometric_median", "trimmed_mean"])
def test_gra_does_not_depend_on_the_order_of_clear_groups(inside: str) -> None:
    """K-means may cut one cloud in several ways, but it finds clear groups in any order."""
    draw = np.random.default_rng(0)
    centres = np.repeat([[9.0, 0, 0], [-9.0, 0, 0]], [4, 7], axis=0)
    matrix = torch.from_numpy((draw.normal(size=(11, 3)) + centres).astype(np.float32))
    order = torch.from_numpy(draw.permutation(11))
    aggregator = aggregation.Gra(groups=2, inside=inside)
    torch.testing.assert_close(
        merged(aggregator, matrix)[0], merged(aggregator, matrix[order])[0], atol=1e-4, rtol=1e-4
    )


@pytest.mark.parametrize("name", DEFENCES)
def test_updates_that_agree_are_their_average(name: str) -> None:
    row = torch.tensor([0.5, -2.0, 3.0, 0.0])
    average, _ = merged(DEFENCES[name], row.repeat(9, 1))
    torch.testing.assert_close(average, row, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", TOLERANT)
@few
@given(seed=st.integers(0, 10_000), size=st.sampled_from([1.0, 30.0, 1e4, 1e6]), count=st.integers(11, 20))
def test_tolerated_attackers_do_not_move_the_result_far(name: str, seed: int, size: float, count: int) -> None:
    """Whatever the tolerated number of attackers send, the result stays near the honest updates."""
    aggregator = DEFENCES[name]
    bad = aggregator.tolerates(count)
    if hasattr(aggregator, "expected"):
        aggregator = type(aggregator)(attackers=bad)
    draw = np.random.default_rng(seed)
    honest = draw.normal(size=(count - bad, 6))
    evil = draw.normal(size=(bad, 6)) * size + draw.normal(size=6) * size
    matrix = torch.from_numpy(np.concatenate([honest, evil]).astype(np.float32))
    average, _ = merged(aggregator, matrix)
    middle, reach = honest.mean(0), np.linalg.norm(honest - honest.mean(0), axis=1).max()
    # just above half of the points being honest, the geometric median may lie far out, but never with the attackers
    bound = 2 * (count - bad) / (count - 2 * bad) * (reach + np.linalg.norm(middle)) + reach
    assert np.linalg.norm(average.numpy() - middle) <= bound


@pytest.mark.parametrize("name", DEFENCES)
def test_memory_is_bounded_by_blocks(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same numbers when a block is a handful of cohort_matrix."""
    matrix = torch.from_numpy(np.random.default_rng(3).normal(size=(11, 57)).astype(np.float32))
    whole, shares = merged(DEFENCES[name], matrix)
    monkeypatch.setattr(cohort_matrix.blocks, "__defaults__", (1, 200))
    monkeypatch.setattr("piebald.methods.aggregation.irls.BUDGET", 1)
    assert len(list(cohort_matrix.blocks(matrix, copies=4))) > 10
    small, again = merged(DEFENCES[name], matrix)
    torch.testing.assert_close(whole, small, atol=1e-4, rtol=1e-4)
    assert shares == pytest.approx(again, abs=1e-4)


@pytest.mark.parametrize("name", DEFENCES)
def test_recipes_find_it_by_its_kind(name: str) -> None:
    aggregator = DEFENCES[name]
    assert Component.registry["aggregation"][aggregator.kind] is type(aggregator)
    made = recipes.fedavg().with_(aggregation=aggregator.table())
    assert made.aggregation == aggregator
    assert made.requires_individual_updates


@pytest.mark.parametrize("name", DEFENCES)
@few
@given(matrix=matrices(2))
def test_the_sign_of_the_updates_does_not_matter(name: str, matrix: Tensor) -> None:
    """What is done to x is done to -x."""
    one, shares = merged(DEFENCES[name], matrix)
    two, same = merged(DEFENCES[name], -matrix)
    torch.testing.assert_close(two, -one, atol=2e-4, rtol=1e-3)
    assert same == pytest.approx(shares, abs=1e-3)


@pytest.mark.parametrize("name", ["median", "trimmed_mean", "bulyan", "irls"])
def test_neither_order_nor_sign_matter_where_clients_send_equal_numbers(name: str) -> None:
    """Of a few values that many clients share, as of weights that did not move."""
    draw = np.random.default_rng(0)
    for rows in (7, 8, 12, 13):
        matrix = torch.from_numpy(draw.integers(-2, 3, size=(rows, 40)).astype(np.float32))
        order = torch.from_numpy(draw.permutation(rows))
        aggregator = aggregation.Bulyan(attackers=1) if name == "bulyan" else DEFENCES[name]
        average = merged(aggregator, matrix)[0]
        torch.testing.assert_close(merged(aggregator, -matrix)[0], -average, atol=1e-5, rtol=1e-5)
        if name != "bulyan":  # Krum, which chooses before, has ties of its own
            torch.testing.assert_close(merged(aggregator, matrix[order])[0], average, atol=1e-5, rtol=1e-5)


EQUIVARIANT = [
    "median", "trimmed_mean", "krum", "multi_krum", "bulyan", "irls", "gra", "gra, trimmed mean",
]  # fmt: skip


@pytest.mark.parametrize("name", EQUIVARIANT)
@few
@given(matrix=matrices(4))
def test_a_shift_of_all_updates_shifts_the_result(name: str, matrix: Tensor) -> None:
    """Of those that have no origin; lengths, and so norm clipping, RFA's first step and Credit, count from 0."""
    shift = torch.linspace(-2.0, 2.0, matrix.shape[1])
    shifted = merged(DEFENCES[name], matrix + shift)[0] - shift
    torch.testing.assert_close(shifted, merged(DEFENCES[name], matrix)[0], atol=1e-3, rtol=1e-3)


def test_bulyan_is_not_biased_on_even_cohorts() -> None:
    """Before, it took the lower of two middle values: -0.10 on average on updates that are symmetric about 0."""
    draw = np.random.default_rng(0)
    matrix = torch.from_numpy(draw.normal(size=(12, 20_000)).astype(np.float32))
    middle = float(merged(aggregation.Bulyan(attackers=1), matrix)[0].mean())
    assert abs(middle) < 0.02  # five standard errors


def test_bulyan_is_not_moved_by_far_values_of_different_sizes() -> None:
    """What counts as equally near must not depend on how far away an attacker's number is."""
    honest = torch.linspace(-1, 1, 10)[:, None]
    from piebald.methods.aggregation.krum import near_the_median

    for far in (1e3, 1e8, 1e20):
        matrix = torch.cat([honest, torch.tensor([[far], [far**0.5]])])
        assert float(near_the_median(matrix, 8)[0].abs()) < 1


# ------------------------------------------------------------------------------------------------ slow plain references


def rows_of(matrix: Tensor) -> list[list[float]]:
    return [[float(x) for x in row] for row in matrix]


@few
@given(matrix=matrices())
def test_median(matrix: Tensor) -> None:
    wanted = [statistics.median(column) for column in zip(*rows_of(matrix), strict=True)]
    assert merged(aggregation.Median(), matrix)[0].tolist() == pytest.approx(wanted, abs=1e-5)


@few
@given(matrix=matrices(3))
def test_trimmed_mean(matrix: Tensor) -> None:
    cut = min(math.ceil(0.3 * len(matrix) - 1e-9), math.ceil(len(matrix) / 2) - 1)
    wanted = [
        statistics.fmean(sorted(column)[cut : len(column) - cut]) for column in zip(*rows_of(matrix), strict=True)
    ]
    assert merged(aggregation.TrimmedMean(attackers=0.3), matrix)[0].tolist() == pytest.approx(wanted, abs=1e-5)


def krum_scores(rows: list[list[float]], bad: int) -> list[tuple[float, float]]:
    """Each with its sum of all distances, which decides between two that are each other's nearest."""
    found = []
    for i, own in enumerate(rows):
        away = sorted(math.dist(own, other) ** 2 for j, other in enumerate(rows) if j != i)
        found.append((sum(away[: max(1, len(rows) - bad - 2)]), sum(away)))
    return found


@few
@given(matrix=matrices(7))
def test_krum_and_multi_krum(matrix: Tensor) -> None:
    rows, bad = rows_of(matrix), 2
    score = krum_scores(rows, bad)
    best = min(range(len(rows)), key=score.__getitem__)
    average, shares = merged(aggregation.Krum(attackers=bad), matrix)
    assert torch.equal(average, matrix[best])
    assert shares[best] == 1
    kept = sorted(range(len(rows)), key=score.__getitem__)[:3]
    wanted = [statistics.fmean(rows[i][k] for i in kept) for k in range(len(rows[0]))]
    assert merged(aggregation.MultiKrum(attackers=bad, keep=3), matrix)[0].tolist() == pytest.approx(wanted, abs=1e-5)


@few
@given(matrix=matrices(7, 15))
def test_bulyan(matrix: Tensor) -> None:
    rows, bad = rows_of(matrix), 1
    left, chosen = list(rows), []
    for _ in range(len(rows) - 2 * bad):
        score = krum_scores(left, bad)
        best = min(range(len(left)), key=score.__getitem__)
        chosen.append(left.pop(best))
    wanted = []
    for column in zip(*chosen, strict=True):
        middle = statistics.median(column)
        wanted.append(statistics.fmean(sorted(column, key=lambda x: abs(x - middle))[: len(chosen) - 2 * bad]))
    assert merged(aggregation.Bulyan(attackers=bad), matrix)[0].tolist() == pytest.approx(wanted, abs=1e-4)


@few
@given(matrix=matrices(1, 9))
def test_the_geometric_median_has_the_least_sum_of_distances(matrix: Tensor) -> None:
    average, _ = merged(aggregation.GeometricMedian(iterations=500), matrix)
    rows = matrix.double()
    found = float((rows - average.double()).norm(dim=1).sum())
    others = [*rows, rows.mean(0), *(average.double() + 0.01 * torch.eye(rows.shape[1], dtype=torch.float64))]
    assert found <= min(float((rows - other).norm(dim=1).sum()) for other in others) * (1 + 1e-4)


def test_examples_can_count_in_the_geometric_median() -> None:
    rows = torch.tensor([[0.0, 0.0], [1.0, 0.0], [0.0, 1.0]])
    average, _ = merged(aggregation.GeometricMedian(weighting="examples"), rows, examples=[1, 10, 1])
    assert average.tolist() == pytest.approx([1.0, 0.0], abs=1e-3)  # more than half of the weight lies there


def test_norm_clipping_by_hand() -> None:
    """Only what is longer than the bound is scaled; what has its length, or less, stays as it is."""
    rows = torch.tensor([[3.0, 4.0], [0.0, 1.0], [0.5, 0.0]])
    assert merged(aggregation.NormClipping(bound=1.0), rows)[0].tolist() == pytest.approx([1.1 / 3, 1.8 / 3])
    assert merged(aggregation.NormClipping(), rows)[0].tolist() == pytest.approx([1.1 / 3, 1.8 / 3])  # the median is 1


@few
@given(values=st.lists(st.floats(-50, 50, width=32), min_size=3, max_size=9))
def test_the_repeated_median_line(values: list[float]) -> None:
    y = sorted(values)
    inner = [statistics.median((y[j] - y[i]) / (j - i) for j in range(len(y)) if j != i) for i in range(len(y))]
    slope = repeated_median(torch.tensor([y]), torch.arange(len(y)).float())
    assert float(slope) == pytest.approx(statistics.median(inner), abs=1e-3)


def irls_slowly(rows: list[list[float]], medians: bool = True) -> tuple[list[float], list[float]]:
    """Fu et al., one parameter and one client after another; the intercept from medians as in the authors' program, or
    as the median residual.
    """
    width, threshold = 2.0, 0.1
    count = len(rows)
    total, mended = [0.0] * count, []
    for column in zip(*rows, strict=True):
        order = sorted(range(count), key=column.__getitem__)
        rank = {client: place for place, client in enumerate(order)}
        y = [column[client] for client in order]
        slope = statistics.median(
            statistics.median((y[j] - y[i]) / (j - i) for j in range(count) if j != i) for i in range(count)
        )
        residual = statistics.median(y[i] - slope * i for i in range(count))
        intercept = statistics.median(y) - slope * statistics.median(range(count)) if medians else residual
        line = [intercept + slope * rank[client] for client in range(count)]
        residuals = [column[client] - line[client] for client in range(count)]
        spread = statistics.median(sorted(abs(r) for r in residuals)[1:])
        scale = 1.4826 * (1 + 5 / (count - 1)) * spread + 1e-7
        squares = sum((i - (count - 1) / 2) ** 2 for i in range(count))
        confidence = []
        for client in range(count):
            leverage = 1 / count + (rank[client] - (count - 1) / 2) ** 2 / squares
            root = math.sqrt(1 - leverage)
            e, bound = residuals[client] / scale, width * math.sqrt(2 / count)
            confidence.append(1.0 if e == 0 else root / e * max(-bound, min(bound, e / root)))
        deviation = statistics.stdev(confidence)
        total = [t + c * deviation for t, c in zip(total, confidence, strict=True)]
        mended.append([column[k] if confidence[k] >= threshold else line[k] for k in range(count)])
    if max(total) <= 0:
        total = [1.0] * count
    shares = [(t / max(total)) ** 2 for t in total]
    shares = [share / sum(shares) for share in shares]
    return [sum(s * v for s, v in zip(shares, values, strict=True)) for values in mended], shares


@few
@given(matrix=matrices(4, 10))
def test_irls(matrix: Tensor) -> None:
    for intercept in ("medians", "residuals"):
        wanted, their_shares = irls_slowly(rows_of(matrix), intercept == "medians")
        average, shares = merged(aggregation.Irls(intercept=intercept), matrix)
        assert average.tolist() == pytest.approx(wanted, abs=2e-3)
        assert shares == pytest.approx(their_shares, abs=2e-3)


def test_irls_tolerates_as_many_as_leave_its_spread_alone() -> None:
    """The median of all residuals but the smallest, which is an honest one's, as that of the largest is not."""

    def spread(count: int, bad: int) -> float:
        return statistics.median([1.0] * (count - bad - 1) + [1e9] * bad)

    for count in range(4, 30):
        assert aggregation.Irls().tolerates(count) == max(n for n in range(count - 1) if spread(count, n) == 1.0)
    assert [aggregation.Irls().tolerates(count) for count in range(4)] == [0] * 4


def test_irls_leaves_attackers_less_weight_than_with_median_residuals() -> None:
    """Before, the intercept was the median residual: 12 attackers of 30 kept a third of the weight."""
    draw = np.random.default_rng(0)
    honest = draw.normal(size=(18, 500))
    evil = draw.normal(size=(12, 500)) + 6 * np.sign(draw.normal(size=500))
    matrix = torch.from_numpy(np.concatenate([honest, evil]).astype(np.float32))
    medians, residuals = (merged(aggregation.Irls(intercept=way), matrix)[1] for way in ("medians", "residuals"))
    assert sum(medians[18:]) < 0.6 * sum(residuals[18:])


@few
@given(matrix=matrices(2))
def test_coordinates_keep_all_distances(matrix: Tensor) -> None:
    torch.testing.assert_close(
        torch.cdist(coordinates(matrix), coordinates(matrix)),
        torch.cdist(matrix.double(), matrix.double()),
        atol=1e-5,
        rtol=1e-4,
    )
    torch.testing.assert_close(
        cohort_matrix.squared_distances(matrix),
        torch.cdist(matrix.double(), matrix.double()) ** 2,
        atol=1e-6,
        rtol=1e-6,
    )


def test_gra_averages_groups_by_size() -> None:
    rows = torch.tensor([[0.0], [1.0], [5.0], [100.0], [101.0], [102.0], [103.0], [104.0]])
    average, _ = merged(aggregation.Gra(groups=2), rows)
    assert average.tolist() == pytest.approx([3 / 8 * 1.0 + 5 / 8 * 102.0])


@pytest.mark.parametrize(("trim", "cut"), [(0.3, 2), (0.2, 1), (0.09, 0), (0.49, 2)])
def test_gra_cuts_off_a_share_rounded_to_the_nearest_number(trim: float, cut: int) -> None:
    matrix = torch.from_numpy(np.random.default_rng(0).normal(size=(5, 4)).astype(np.float32))
    gra = aggregation.Gra(groups=1, inside="trimmed_mean", trim=trim)
    torch.testing.assert_close(merged(gra, matrix)[0], merged(aggregation.TrimmedMean(attackers=cut), matrix)[0])


def test_credit_finds_the_odd_one() -> None:
    """Twenty updates of a common direction with small differences, one that goes elsewhere, one scaled up."""
    draw = np.random.default_rng(1)
    common = draw.normal(size=300)
    matrix = torch.from_numpy((common + 0.3 * draw.normal(size=(20, 300))).astype(np.float32))
    matrix[4] = torch.from_numpy(draw.normal(size=300).astype(np.float32))
    matrix[9] *= 10
    _, shares = merged(aggregation.Credit(), matrix)
    honest = [share for client, share in enumerate(shares) if client not in (4, 9)]
    assert max(shares[4], shares[9]) < 0.5 * min(honest)


def test_credit_without_power_is_the_mean() -> None:
    matrix = torch.from_numpy(np.random.default_rng(2).normal(size=(6, 5)).astype(np.float32))
    torch.testing.assert_close(merged(aggregation.Credit(power=0.0), matrix)[0], matrix.mean(0))


# --------------------------------------------------------------------------------------------------- FLTrust, FoolsGold


def test_fltrust_by_hand() -> None:
    own = torch.tensor([2.0, 0.0])
    matrix = torch.tensor([[5.0, 0.0], [-9.0, 0.0], [3.0, 3.0]])
    average, shares = trust(matrix, own)
    slant = 1 / math.sqrt(2)
    whole = 1 + slant
    assert shares.tolist() == pytest.approx([1 / whole, 0.0, slant / whole])
    assert average.tolist() == pytest.approx([(2 + slant * 2 * slant) / whole, slant * 2 * slant / whole])


@few
@given(seed=st.integers(0, 1000), size=st.sampled_from([0.1, 1.0, 1e5]))
def test_fltrust_never_moves_further_than_the_server_update(seed: int, size: float) -> None:
    """However many attack: that is why it tolerates 80 %."""
    draw = np.random.default_rng(seed)
    own = torch.from_numpy(draw.normal(size=8).astype(np.float32))
    matrix = torch.from_numpy((draw.normal(size=(10, 8)) * size).astype(np.float32))
    average, shares = trust(matrix, own)
    assert float(average.norm()) <= float(own.norm()) * (1 + 1e-5)
    assert float(average @ own) >= -1e-6
    assert shares.sum() == pytest.approx(1.0) or not average.any()


def foolsgold_slowly(rows: list[list[float]]) -> list[float]:
    """Fung et al., algorithm 1, entry by entry, with the diagonal of 0 that the authors' program has."""
    count = len(rows)
    cosine = {}
    for i, j in itertools.permutations(range(count), 2):
        inner = sum(a * b for a, b in zip(rows[i], rows[j], strict=True))
        cosine[i, j] = inner / (math.hypot(*rows[i]) * math.hypot(*rows[j]))
    most = [max(0.0, *(cosine[i, j] for j in range(count) if j != i)) for i in range(count)]
    alpha = []
    for i in range(count):
        pardoned = [cosine[i, j] * (most[i] / most[j] if most[j] > most[i] else 1.0) for j in range(count) if j != i]
        alpha.append(min(1.0, max(0.0, 1 - max(pardoned))))
    top = max(alpha)
    found = []
    for value in alpha:
        value = value / top
        stretched = math.inf if value >= 1 else -math.inf if value <= 0 else math.log(value / (1 - value)) + 0.5
        found.append(min(1.0, max(0.0, stretched)))
    return found


@few
@given(seed=st.integers(0, 1000))
def test_foolsgold(seed: int) -> None:
    history = np.random.default_rng(seed).normal(size=(6, 9))
    assert confidence(torch.from_numpy(history)).tolist() == pytest.approx(foolsgold_slowly(history.tolist()), abs=1e-6)


def test_foolsgold_believes_the_client_that_is_unlike_all_others() -> None:
    assert confidence(torch.tensor([[1.0, 0.01], [0.0, 1.0], [-1.0, -1.0]])).tolist()[2] == 1.0


@pytest.mark.parametrize("size", [2**24 + 4, 25_557_032])
def test_a_few_numbers_of_a_long_update_are_all_in_it(size: int) -> None:
    """Places that are worked out in float32 would end beyond it."""
    update = torch.ones(1).expand(3, size)  # of no memory
    assert aggregation.Credit().surrogates(update).shape == (3, 2000)


def test_foolsgold_gives_sybils_no_weight() -> None:
    draw = np.random.default_rng(0)
    honest, sybil = draw.normal(size=(5, 200)), draw.normal(size=200)
    history = np.concatenate([honest, sybil + 1e-3 * draw.normal(size=(7, 200))])
    found = confidence(torch.from_numpy(history))
    assert float(found[:5].min()) > 0.9
    assert float(found[5:].max()) == 0.0


# ------------------------------------------------------------------------------------------------------------ bad input


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("krum", {"attackers": 0.5}),
        ("bulyan", {"attackers": 0.25}),
        ("trimmed_mean", {"attackers": -1}),
        ("norm_clipping", {"bound": 0.0}),
        ("gra", {"inside": "mean"}),
        ("irls", {"threshold": 1.5}),
    ],
)
def test_bad_settings_are_refused(kind: str, fields: dict[str, object]) -> None:
    with pytest.raises(SettingError, match=kind):
        recipes.fedavg().with_(aggregation={"kind": kind, **fields})


def test_robust_aggregators_are_refused_beside_secure_aggregation() -> None:
    with pytest.raises(SettingError, match="median needs individual updates"):
        recipes.fedavg().with_(transforms=[FakeMasking()], aggregation=aggregation.Median())
