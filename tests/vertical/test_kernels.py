"""Moment forms against sums over all pairs, autograd and finite differences."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from piebald.vertical.kernels import (
    GaussianKernel,
    Kernel,
    LinearKernel,
    PolynomialKernel,
    mmd2,
    nodes,
    pairs,
)

from .conftest import KERNELS, cross_gradient, unit

named = pytest.mark.parametrize("kernel", KERNELS, ids=str)


def cross(kernel: Kernel, x: np.ndarray, y: np.ndarray) -> float:
    return float(kernel.expand(torch.from_numpy(x), torch.from_numpy(y)).mean())


@named
@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10**6), n=st.integers(1, 7), m=st.integers(1, 7), d=st.integers(1, 6))
def test_the_gradient_through_moments_is_that_of_the_sum_over_pairs(kernel, seed, n, m, d):
    x, y = unit(seed, n, d), unit(seed + 1, m, d)
    given_x = torch.from_numpy(x).requires_grad_()
    total = sum(
        kernel.expand(given_x[i : i + 1], torch.from_numpy(y[j : j + 1]))[0, 0] for i in range(n) for j in range(m)
    )
    (total / (n * m)).backward()
    np.testing.assert_allclose(cross_gradient(kernel, x, y), given_x.grad.numpy(), rtol=0, atol=1e-12)


@named
def test_the_gradient_agrees_with_finite_differences(kernel):
    x, y, step = unit(0, 5, 4), unit(1, 6, 4), 1e-6
    found = cross_gradient(kernel, x, y)
    for place in np.ndindex(*x.shape):
        shift = np.zeros_like(x)
        shift[place] = step
        slope = (cross(kernel, x + shift, y) - cross(kernel, x - shift, y)) / (2 * step)
        assert found[place] == pytest.approx(slope, abs=1e-8)


@named
def test_the_loss_can_be_had_from_gradients_along_the_way(kernel):
    x, y = unit(2, 9, 5), unit(3, 4, 5)
    parts = [w * (x * cross_gradient(kernel, t * x, y)).sum() for t, w in zip(*nodes(kernel), strict=True)]
    assert kernel.at_zero(y) + sum(parts) == pytest.approx(cross(kernel, x, y), abs=1e-13)


@named
def test_the_declared_bound_holds_and_is_not_idle(kernel):
    for normal in (True, False):
        x, y = (unit(seed, 50, 6) if normal else np.random.default_rng(seed).random((50, 6)) for seed in (1, 2))
        for size, share, c in zip(
            kernel.sizes(50, 6, 1.0 if normal else 6**0.5), kernel.statistics(y), kernel.coefficients(x), strict=True
        ):
            answer = c @ share.matrix + share.constant
            assert answer.shape == (size.rows, size.width)
            assert c.shape == (size.rows, size.inner)
            assert np.abs(answer).max() <= size.bound
            assert np.abs(answer).max() > size.bound / 100


@named
@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10**6), n=st.integers(1, 8))
def test_replacing_a_row_moves_the_shares_by_no_more_than_is_said(kernel, seed, n):
    rng = np.random.default_rng(seed)
    before = rng.normal(size=(n, 3))
    before *= 2 / np.maximum(np.linalg.norm(before, axis=1, keepdims=True), 2)
    before[0] *= 2 / np.linalg.norm(before[0])
    across = np.cross(before[0], rng.normal(size=3))
    for row in (-before[0], rng.normal(size=3) * 0.1, 2 * across / np.linalg.norm(across)):
        after = before.copy()
        after[0] = row
        moved = numbers(kernel, before) - numbers(kernel, after)
        assert np.linalg.norm(moved) <= kernel.sensitivity(2.0, n) * (1 + 1e-12)


def numbers(kernel: Kernel, y: np.ndarray) -> np.ndarray:
    """All statistics of a batch, one after the other."""
    return np.concatenate([np.append(part.matrix, part.constant) for part in kernel.statistics(y)])


@pytest.mark.parametrize("kernel", [LinearKernel(), *(PolynomialKernel(degree=degree) for degree in (2, 3))], ids=str)
def test_the_sensitivity_of_one_moment_is_reached(kernel):
    """An odd moment moves most where the row is reversed, an even one where it turns by a right angle."""
    row, others = np.array([0.0, 2.0, 0.0]), unit(0, 4, 3)
    worst = max(
        np.linalg.norm(numbers(kernel, np.vstack([row, others])) - numbers(kernel, np.vstack([other, others])))
        for other in (-row, row[[1, 0, 2]])
    )
    assert worst == pytest.approx(kernel.sensitivity(2.0, 5))


@named
@pytest.mark.parametrize("normal", [True, False])
def test_moments_are_the_numbers_that_differ(kernel, normal):
    """By the rank of the statistics of many batches.  Of degree 3 with c, rows of length 1 make some known that are
    counted all the same.
    """
    batches = [unit(seed, 1, 3) * (1 if normal else 1 + seed / 100) for seed in range(100)]
    table = np.stack([numbers(kernel, batch) for batch in batches])
    rank = np.linalg.matrix_rank(table - table.mean(0), tol=1e-9)
    if normal and kernel == PolynomialKernel(c=0.7, degree=3):
        assert rank < kernel.moments(3, normal)
    else:
        assert rank == kernel.moments(3, normal)


def test_mmd_is_zero_for_the_same_rows_and_positive_for_others():
    x, y = torch.from_numpy(unit(0, 30, 4)), torch.from_numpy(unit(1, 30, 4) * np.array([1, 1, 0.2, 0.1]))
    for kernel in KERNELS:
        assert float(mmd2(kernel, x, x)) == pytest.approx(0, abs=1e-14)
        assert float(mmd2(kernel, x, y)) > 1e-4


def test_the_expansion_is_the_second_order_one():
    x, y = torch.zeros(1, 2, dtype=torch.float64), torch.tensor([[0.3, 0.4]], dtype=torch.float64)
    u = 0.25 / 2
    assert float(GaussianKernel().value(x, y)) == pytest.approx(np.exp(-u))
    assert float(GaussianKernel().expand(x, y)) == pytest.approx(1 - u + u**2 / 2)
    assert float(GaussianKernel(sigma=2).expand(x, y)) == pytest.approx(1 - u / 4 + (u / 4) ** 2 / 2)


def test_the_expansion_repels_beyond_its_range_and_says_how_much_lies_there():
    y = torch.zeros(1, 1, dtype=torch.float64)
    near, far = (torch.tensor([[place]], dtype=torch.float64, requires_grad=True) for place in (1.0, 2.0))
    for x in (near, far):
        GaussianKernel().expand(x, y).sum().backward()
    assert near.grad.item() < 0  # moving away makes it less alike
    assert far.grad.item() > 0  # u = 2: moving away makes it "more alike"
    assert GaussianKernel().outside(torch.tensor([[0.0], [2.0]], dtype=torch.float64)) == 0.5


def test_pairs_are_all_products_of_two_coordinates_once():
    assert pairs(np.array([[2.0, 3.0, 5.0]])).tolist() == [[4, 6, 10, 9, 15, 25]]
