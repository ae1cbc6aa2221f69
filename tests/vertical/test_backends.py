"""Every backend computes the same integers; owners see uniform numbers; other keys and nonsense are noticed."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from piebald.contracts.component import build
from piebald.core.errors import SettingError
from piebald.vertical.encryption.backend import (
    FixedPointScale,
    InvalidMessage,
    exact_product,
    in_range,
    to_floats,
    to_integers,
    uniform,
)
from piebald.vertical.kernels import GaussianKernel, LinearKernel, PolynomialKernel, ProductSize
from piebald.vertical.loss_terms import AlignmentTerm, LabelTerm, PartyView
from piebald.vertical.protocol import ROLES

from .conftest import KERNELS, encrypted, unit

QUICK = (LinearKernel(), PolynomialKernel(c=0.7), GaussianKernel())  # one of each kind
ENCRYPTED = pytest.mark.parametrize("backend", [encrypted("bfv")])


def product(backend, size, matrix, constant, coefficients, changed=lambda masked: masked):
    """One whole product; `changed` sees the masked message."""
    if not size.inner:  # a constant, which nothing hides
        told = backend.told(constant, size)
        assert len(told) == 8 * size.rows * size.width
        return in_range(backend.heard(told, size), size, clamp=False)
    owner = backend.owner([size])
    evaluator = backend.evaluator(owner.announcement, [size])
    sealed = owner.encrypt(matrix, size)
    masked, mask = evaluator.multiply(sealed, evaluator.prepare(coefficients, size), size)
    opened = owner.decrypt(changed(masked), size, constant)
    for length, message in zip(backend.lengths(size), (sealed, masked, opened), strict=True):
        assert len(message) <= length.most
        assert not length.exact or len(message) == length.most
    announced = backend.announced([size])
    assert len(owner.announcement) <= announced.most
    return in_range(evaluator.unmask(opened, mask, size), size, clamp=False)


def both(table, size, matrix, constant, coefficients):
    return [product(build("backend", kind), size, matrix, constant, coefficients) for kind in (table, "fixed")]


@ENCRYPTED
@pytest.mark.parametrize(
    "kernel", [pytest.param(one, marks=() if one in QUICK else pytest.mark.full) for one in KERNELS], ids=str
)
@settings(max_examples=2, deadline=None, suppress_health_check=list(HealthCheck))
@given(seed=st.integers(0, 10**6), n=st.integers(2, 12), m=st.integers(1, 12), d=st.integers(2, 9))
def test_the_same_integers_for_every_kernel_and_shape(backend, kernel, seed, n, m, d):
    x, y = unit(seed, n, d), unit(seed + 1, m, d)
    for size, share, c in zip(kernel.sizes(n, d, 1.0), kernel.statistics(y), kernel.coefficients(x), strict=True):
        found, fixed = both(backend, size, share.matrix, share.constant, c)
        np.testing.assert_array_equal(found, fixed)
        np.testing.assert_allclose(fixed, c @ share.matrix + share.constant, atol=1e-4)


@pytest.mark.full
@ENCRYPTED
@settings(max_examples=3, deadline=None, suppress_health_check=list(HealthCheck))
@given(seed=st.integers(0, 10**6), n=st.integers(2, 12), d=st.integers(2, 9))
def test_the_same_integers_for_the_loss_on_co_occurring_rows_and_for_ftl(backend, seed, n, d):
    u, v, phi = (torch.from_numpy(unit(seed + place, n, d)) for place in range(3))
    labels = torch.sign(phi[:, 0] - phi[:, 0].median() + 1e-9)
    views = {"source": PartyView([], u, labels, phi[0]), "target": PartyView([], v)}
    for make in (lambda role: LabelTerm(role, n, d), lambda role: AlignmentTerm(role, 0.5, n, d)):
        terms = {role: make(role) for role in ROLES}
        for owner, asker in (ROLES, ROLES[::-1]):
            (size,), (share,) = terms[owner].owned, terms[owner].statistics(views[owner])
            assert terms[asker].requested == [size]
            (c,) = terms[asker].coefficients(views[asker])
            found, fixed = both(backend, size, share.matrix, share.constant, c)
            np.testing.assert_array_equal(found, fixed)
            np.testing.assert_allclose(fixed, c @ share.matrix + share.constant, atol=1e-4)


@ENCRYPTED
@pytest.mark.parametrize(
    ("rows", "inner", "width"),
    [
        (2, 2, 40),
        *(
            pytest.param(*shape, marks=pytest.mark.full)
            for shape in [(1, 200, 64), (130, 64, 64), (1, 1, 1), (5, 3, 40), (300, 64, 1), (3, 130, 2), (1, 30, 7)]
        ),
    ],
)
def test_the_same_integers_for_shapes_that_need_several_ciphertexts(backend, rows, inner, width):
    rng = np.random.default_rng(rows)
    matrix, c = rng.normal(size=(inner, width)), rng.normal(size=(rows, inner)) / inner
    constant = rng.normal(size=(rows, width))
    found, fixed = both(backend, ProductSize(rows, inner, width, 8.0), matrix, constant, c)
    np.testing.assert_array_equal(found, fixed)
    np.testing.assert_allclose(fixed, c @ matrix + constant, atol=1e-4)


@ENCRYPTED
def test_zero_coefficients_and_zero_statistics(backend):
    size = ProductSize(4, 5, 3, 1.0)
    for matrix, c in ((np.ones((5, 3)), np.zeros((4, 5))), (np.zeros((5, 3)), np.ones((4, 5)))):
        assert not product(build("backend", backend), size, matrix, np.zeros(3), c).any()


@ENCRYPTED
def test_negative_results_up_to_the_bound(backend):
    size = ProductSize(2, 1, 2, 3.0)
    found = product(build("backend", backend), size, np.array([[-1.0, 1.0]]), np.zeros(2), np.array([[2.9], [-2.9]]))
    np.testing.assert_allclose(found, [[-2.9, 2.9], [2.9, -2.9]], atol=1e-4)


@ENCRYPTED
def test_what_the_owner_opens_is_fresh_each_time_and_fills_its_range(backend):
    """The same product twice: what the owner sees has nothing in common, and its leading bits are even."""
    made = build("backend", backend)
    size = ProductSize(64, 2, 3, 1.0)
    owner = made.owner([size])
    evaluator = made.evaluator(owner.announcement, [size])
    sealed = owner.encrypt(np.full((2, 3), 0.25), size)
    prepared = [evaluator.prepare(np.full((64, 2), 0.5), size) for _ in range(2)]
    seen = [owner.decrypt(evaluator.multiply(sealed, one, size)[0], size, np.zeros(3)) for one in prepared]
    assert seen[0] != seen[1]
    if made.kind == "bfv":
        numbers = np.frombuffer(seen[0] + seen[1], dtype="<u8")
        assert len(np.unique(numbers)) == len(numbers)
        high = (numbers >> np.uint64(49)).astype(int)  # t is just below 2^50
        assert abs(high.mean() - 0.5) < 4 * 0.5 / math.sqrt(len(high))


@ENCRYPTED
def test_another_key_is_noticed(backend):
    made = build("backend", backend)
    size = ProductSize(6, 4, 3, 1.0)
    owners = [made.owner([size]) for _ in range(2)]
    evaluator = made.evaluator(owners[0].announcement, [size])
    sealed = owners[1].encrypt(np.ones((4, 3)), size)  # not the key that was announced

    def whole():
        masked, mask = evaluator.multiply(sealed, evaluator.prepare(np.ones((6, 4)) / 8, size), size)
        in_range(evaluator.unmask(owners[0].decrypt(masked, size, np.zeros(3)), mask, size), size, clamp=False)

    with pytest.raises(InvalidMessage, match=r"another key|not below its modulus"):
        whole()


@ENCRYPTED
def test_damaged_messages_are_refused_in_one_sentence(backend):
    made = build("backend", backend)
    size = ProductSize(3, 2, 2, 1.0)

    def spoil(masked):
        return masked[:40] + b"\xff" * 2000 + masked[2040:] if len(masked) > 4000 else b"\xff" * len(masked)

    with pytest.raises(InvalidMessage):
        product(made, size, np.ones((2, 2)), np.zeros(2), np.ones((3, 2)) / 4, spoil)
    length = made.announced([size])
    with pytest.raises(InvalidMessage):
        made.evaluator(b"\x07" * (length.most if length.exact else 5000), [size])


@ENCRYPTED
def test_a_constant_and_coefficients_that_are_no_numbers_are_refused(backend):
    made, size = build("backend", backend), ProductSize(2, 2, 2, 1.0)
    from piebald.core.errors import RuntimeFault

    with pytest.raises(RuntimeFault, match="training has diverged"):
        product(made, size, np.full((2, 2), np.nan), np.zeros(2), np.ones((2, 2)))


@pytest.mark.full
@pytest.mark.parametrize("backend", [encrypted("bfv", degree=16384)])
def test_the_larger_ring_computes_the_same(backend):
    rng = np.random.default_rng(0)
    found, fixed = both(
        backend, ProductSize(9, 20, 8, 4.0), rng.random((20, 8)), rng.random(8), rng.random((9, 20)) / 20
    )
    np.testing.assert_array_equal(found, fixed)


@pytest.mark.full
@pytest.mark.parametrize("backend", [encrypted("bfv")])
def test_noise_leaves_room_in_the_largest_product(backend):
    """Decryption fails without a word if noise eats the last bit: poly-3 has the most terms."""
    from piebald.vertical.encryption.bfv import split

    made = build("backend", backend)
    size = PolynomialKernel(degree=3).sizes(8, 64, 1.0)[0]
    owner = made.owner([size])
    evaluator = made.evaluator(owner.announcement, [size])
    rng = np.random.default_rng(0)
    sealed = owner.encrypt(rng.random((size.inner, 64)), size)
    masked, _ = evaluator.multiply(sealed, evaluator.prepare(rng.random((8, size.inner)) / 500, size), size)
    ciphertext = owner.he.ciphertext(split(masked, 1, "masked result")[0], "masked result", owner.he.last)
    assert owner._decryptor.invariant_noise_budget(ciphertext) >= 1


def test_digits_after_the_point_use_the_room_that_a_bound_leaves():
    for bound in (0.5, 1.0, 3.0, 64.0, 98304.0):
        scale = FixedPointScale.of(ProductSize(1, 1, 1, bound))
        assert math.ldexp(bound, scale.result) <= 2**48
    assert FixedPointScale.of(ProductSize(1, 1, 1, 1.0)) == FixedPointScale(18, 30)


def test_integers_are_exact_beyond_what_floating_point_holds():
    large, wide = np.array([[2**40, 1]]), np.array([[2**20], [1]])
    assert exact_product(large, wide).tolist() == [[2**60 + 1]]
    assert exact_product(np.array([[3, -4]]), np.array([[5], [6]])).tolist() == [[-9]]


@pytest.mark.parametrize("beyond", [1.01, -1.01, 1e30, math.inf, -math.inf, math.nan])
def test_a_result_beyond_its_bound_is_refused_or_clamped(beyond):
    size = ProductSize(1, 1, 2, 1.0)
    assert to_floats(np.array([[2**48, -(2**48)]]), size).tolist() == [[1.0, -1.0]]
    inside, outside = np.array([[1.0, -1.0]]), np.array([[beyond, 0.25]])
    for clamp in (False, True):
        assert in_range(inside, size, clamp).tolist() == inside.tolist()
    clamped = in_range(outside, size, clamp=True)
    assert np.abs(clamped[0, 0]) <= 1 + 1e-6
    assert clamped[0, 1] == 0.25
    with pytest.raises(InvalidMessage, match="outside its declared range"):
        in_range(outside, size, clamp=False)


def test_rounding_is_to_the_nearest():
    assert to_integers(np.array([0.25, -0.25, 0.125, 0.375]), 2).tolist() == [1, -1, 0, 2]


@given(st.integers(2, 2**64))
def test_uniform_numbers_stay_below(below):
    numbers = uniform(50, below)
    assert len(numbers) == 50
    assert all(int(number) < below for number in numbers)


def test_bounds_too_large_to_be_exact_are_refused_before_anything_runs():
    with pytest.raises(SettingError, match="leaves fewer than 16 binary digits"):
        build("backend", "fixed").check(ProductSize(1, 1, 1, 2.0**33))
