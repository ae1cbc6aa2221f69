"""What each side can infer, as the documentation says: these attacks work, so the claims must not be larger."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from piebald.vertical.kernels import GaussianKernel, LinearKernel, PolynomialKernel
from piebald.vertical.loss_terms import LabelTerm
from piebald.vertical.protocol import ROLES

from .conftest import cross_gradient, small, train_both, unit


def test_a_linear_gradient_is_the_other_partys_mean():
    x, y = unit(0, 4, 6), unit(1, 30, 6)
    np.testing.assert_allclose(cross_gradient(LinearKernel(), x, y)[0] * 4, y.mean(0))


def test_a_quadratic_gradient_gives_the_second_moments_from_as_many_rows_as_units():
    x, y = unit(0, 6, 6), unit(1, 30, 6)
    found = np.linalg.solve(x, cross_gradient(PolynomialKernel(), x, y) * 6 / 2)
    np.testing.assert_allclose(found, y.T @ y / 30, atol=1e-9)


def test_a_gaussian_gradient_gives_mean_and_second_moments_from_one_row_more():
    d, x, y = 4, unit(0, 12, 4), unit(1, 30, 4)
    # Unknowns: mean, second moments, cubic moment.  The gradient is linear in them; b = trace of the second moments.
    places = [(a, b) for a in range(d) for b in range(a, d)]

    def gradient(mean, second, cubic):
        squares = (x**2).sum(1, keepdims=True)
        far = (squares + np.trace(second) - 2 * x @ mean[:, None]) / 2
        return ((far - 1) * x - ((squares * mean + cubic - 2 * x @ second) / 2 - mean)) / len(x)

    def build(values):
        second = np.zeros((d, d))
        for value, (a, b) in zip(values[d:-d], places, strict=True):
            second[a, b] = second[b, a] = value
        return gradient(values[:d], second, values[-d:]).ravel()

    count = 2 * d + len(places)
    start = build(np.zeros(count))
    system = np.stack([build(one) - start for one in np.eye(count)], 1)
    found = np.linalg.lstsq(system, cross_gradient(GaussianKernel(), x, y).ravel() - start, rcond=None)[0]
    # On unit rows the trace is known to be 1, which the rank shows; second moments come out on top of it.
    np.testing.assert_allclose(build(found), cross_gradient(GaussianKernel(), x, y).ravel(), atol=1e-12)
    shift = np.zeros(count)
    shift[d : d + len(places)] = [float(a == b) for a, b in places]
    loose = np.linalg.matrix_rank(system, tol=1e-10)
    assert loose >= count - 2


def test_the_target_can_read_the_labels_of_co_occurring_rows_off_its_gradients():
    settings = small(backend="plain", steps=1)
    parties, _ = train_both(settings)
    for party in parties.values():
        party.done = 0
    source, target = (parties[role].view() for role in ROLES)
    terms = {role: LabelTerm(role, settings.overlap_batch, 8) for role in ROLES}
    (share,) = terms["source"].statistics(source)
    gradients = terms["target"].coefficients(target)[0] @ share.matrix + share.constant
    # every row is a multiple of Phi: its sign along any of them is the label, up to one sign for all
    guessed = np.sign(gradients @ gradients[0])
    agreed = (guessed == source.labels.numpy()).mean()
    assert max(agreed, 1 - agreed) == 1.0


def test_ftl_shows_each_party_the_others_hidden_rows():
    parties, _ = train_both(small(backend="plain", steps=1, method={"kind": "ftl"}))
    from piebald.vertical.loss_terms import AlignmentTerm

    views = {role: parties[role].view() for role in ROLES}
    share = AlignmentTerm("target", 0.5, 18, 8).statistics(views["target"])[0]
    seen = share.constant
    torch.testing.assert_close(torch.from_numpy(-seen), views["target"].common.detach())


def test_third_moments_of_few_rows_give_the_rows_away():
    """Jennrich's algorithm: slices of the third-moment tensor share eigenvectors, which are the rows."""
    rows = unit(3, 4, 6)
    tensor = np.einsum("na,nb,nc->abc", rows, rows, rows) / 4
    rng = np.random.default_rng(0)
    one, other = (np.tensordot(tensor, rng.normal(size=6), 1) for _ in range(2))
    values, vectors = np.linalg.eig(one @ np.linalg.pinv(other))
    found = np.real(vectors[:, np.argsort(-np.abs(values))[:4]])
    cosines = np.abs(rows @ found)
    assert cosines.max(axis=1) == pytest.approx(np.ones(4), abs=1e-6)
