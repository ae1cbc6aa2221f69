"""Differences of accuracies for the clients at hand: the noise of their rows, and no other."""

from __future__ import annotations

import numpy as np
import pytest

from piebald.report.paired import Scores, difference
from piebald.report.row_noise import row_difference


def drawn(p: np.ndarray, q: np.ndarray, rows: int) -> tuple[Scores, Scores]:
    """Accuracies of two methods on the same rows of each client, both right on as many rows together as can be."""
    row = np.random.default_rng(0).random((1, len(p), rows))
    names = [f"c{client}" for client in range(len(p))]
    return tuple(Scores((row < right[None, :, None]).mean(2), names) for right in (p, q))  # type: ignore[return-value]


def test_clients_that_gain_differently_do_not_hide_a_gain() -> None:
    """Two clients of ten gain 30 points, the others nothing: that is a gain of these clients, not of others."""
    own, together = np.full(10, 0.6), np.array([0.9, 0.9, *[0.6] * 8])
    ours, alone = drawn(together, own, 200)
    across = difference(ours, alone)
    here = row_difference(ours, alone, {f"c{client}": 200 for client in range(10)})
    assert across is not None
    assert here is not None
    assert here.mean == pytest.approx(across.mean)
    assert here.p < 0.01 < 0.05 < across.p
    assert here.rows == 2000


@pytest.mark.parametrize("rows", [8, 60])
def test_equal_methods_are_called_different_in_at_most_one_case_of_twenty(rows: int) -> None:
    """Independent rows are the worst case: two methods that are right on the same rows differ less."""
    rng = np.random.default_rng(3)
    level = rng.uniform(0.5, 1.0, size=6)
    held, wrong = {f"c{client}": rows for client in range(6)}, 0
    for draw in range(600):
        both = [
            Scores(np.random.default_rng([draw, k]).binomial(rows, level)[None] / rows, list(held)) for k in range(2)
        ]
        found = row_difference(*both, held)
        wrong += found is not None and found.p < 0.05
    assert wrong <= 42  # 30 are expected; 42 is two standard errors more


def test_seeds_that_disagree_prove_nothing() -> None:
    held = {"a": 10_000, "b": 10_000}
    zero = np.full((3, 2), 0.7)
    apart = Scores(zero + np.array([[0.1], [-0.06], [0.02]]), list(held))
    three = row_difference(apart, Scores(zero, list(held)), held)
    assert three is not None
    assert three.p > 0.5
    rows = (0.7 * 0.3 + 0.72 * 0.28) / 10_000 / 2  # of the mean of two clients
    assert three.error == pytest.approx((rows + np.var([0.1, -0.06, 0.02], ddof=1) / 3) ** 0.5)
    two = row_difference(Scores(apart.values[:2], list(held)), Scores(zero[:2], list(held)), held)
    assert two is not None
    assert two.p == 1.0
    one = row_difference(Scores(apart.values[:1], list(held)), Scores(zero[:1], list(held)), held)
    assert one is not None
    assert one.p < 1e-6


def test_a_client_without_rows_or_scores_does_not_count() -> None:
    ours = Scores([[0.9, 0.5, np.nan]], ["a", "b", "c"])
    alone = Scores([[0.5, 0.9, 0.1]], ["a", "b", "c"])
    found = row_difference(ours, alone, {"a": 50, "b": 0, "c": 50})
    assert found is not None
    assert (found.clients, found.rows) == (1, 50)
    assert found.mean == pytest.approx(0.4)
    assert row_difference(ours, alone, {"b": 0}) is None
    perfect = row_difference(Scores([[1.0]], ["a"]), Scores([[1.0]], ["a"]), {"a": 5})
    assert perfect is not None
    assert perfect.error == pytest.approx(0.2)
