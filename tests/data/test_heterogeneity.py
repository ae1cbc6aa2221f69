"""Measures against slow references and closed forms; from statistics alone as from the pooled rows."""

from __future__ import annotations

import itertools
import os

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from threadpoolctl import threadpool_info, threadpool_limits

from piebald import data
from piebald.core.errors import SettingError
from piebald.core.moments import merged
from piebald.data.measures import heterogeneity
from piebald.data.measures.heterogeneity import (
    UNITS,
    Statistics,
    collect,
    frechet,
    frechet_to_rest,
    gini,
    measure,
    speed_ratio,
    total_variation,
    union,
    without,
)
from piebald.data.partition import Dirichlet, Iid, LazyClients


def covariance(rng: np.random.Generator, d: int, rows: int) -> np.ndarray:
    return np.atleast_2d(np.cov(rng.normal(size=(rows, d)) @ rng.normal(size=(d, d)), rowvar=False))


def slow_frechet(m1: np.ndarray, c1: np.ndarray, m2: np.ndarray, c2: np.ndarray) -> float:
    from scipy.linalg import sqrtm

    return float(np.sum((m1 - m2) ** 2) + np.trace(c1 + c2 - 2 * np.real(sqrtm(c1 @ c2))))


@pytest.mark.parametrize("d", [1, 2, 7, 40])
def test_frechet_is_the_slow_one(d: int) -> None:
    rng = np.random.default_rng(d)
    c1, c2 = covariance(rng, d, 4 * d + 3), covariance(rng, d, 3 * d + 3)
    m1, m2 = rng.normal(size=(2, d))
    assert frechet(m1, c1, m2, c2) == pytest.approx(slow_frechet(m1, c1, m2, c2), rel=1e-9)
    assert frechet(m2, c2, m1, c1) == pytest.approx(frechet(m1, c1, m2, c2), rel=1e-12)


def test_frechet_of_diagonals_has_a_closed_form() -> None:
    rng = np.random.default_rng(0)
    a, b, m = rng.uniform(0, 4, size=(3, 30))
    a[:10] = 0  # a degenerate direction is no trouble
    expected = (m**2).sum() + ((np.sqrt(a) - np.sqrt(b)) ** 2).sum()
    assert frechet(m, np.diag(a), np.zeros(30), np.diag(b)) == pytest.approx(expected, rel=1e-12)


@pytest.mark.full
def test_frechet_with_fewer_rows_than_dimensions() -> None:
    """Rows that are the same but turned and moved: the distance of two rank-3 covariances is known."""
    rng = np.random.default_rng(1)
    basis = np.linalg.qr(rng.normal(size=(1024, 6)))[0]
    spread = np.array([9.0, 4.0, 1e-6])
    first = (basis[:, :3] * spread) @ basis[:, :3].T
    second = (basis[:, 3:] * spread) @ basis[:, 3:].T
    zero = np.zeros(1024)
    assert frechet(zero, first, zero, first) == pytest.approx(0, abs=1e-9)
    assert frechet(zero, first, zero, second) == pytest.approx(2 * spread.sum(), rel=1e-6)  # no direction in common
    scaled = frechet(zero, first, zero, 4 * first)
    assert scaled == pytest.approx(spread.sum(), rel=1e-6)  # (2 - 1)^2 times the variances


@pytest.mark.full
def test_1024_dimensions_and_few_rows_are_finite() -> None:
    rng = np.random.default_rng(2)
    few = [Statistics.of(embedding=rng.normal(size=(n, 1024)).astype(np.float32) + 100) for n in (1, 2, 50)]
    everybody = merged([*few, Statistics.of(embedding=rng.normal(size=(300, 1024)) + 100)])
    distances = [frechet_to_rest(own, everybody) for own in few]
    assert np.isfinite(distances).all()
    assert min(distances) > 0


@pytest.mark.parametrize("embedded", [True, False])
@pytest.mark.parametrize("sizes", [[5], [3, 0, 4], [7, 1, 2, 9, 30]])
def test_the_union_is_what_merging_gives(sizes: list[int], embedded: bool) -> None:
    """Counts alone are added at once instead."""
    rng = np.random.default_rng(len(sizes))
    each = [Statistics.of(rng.integers(0, 4, n), 4, rng.normal(size=(n, 3)) if embedded else None) for n in sizes]
    made, expected = union(each), merged(each)
    assert made.rows == expected.rows == sum(sizes)
    np.testing.assert_array_equal(made.counts, expected.counts)
    assert (made.mean is None) == (not embedded)
    if embedded:
        np.testing.assert_array_equal(made.scatter, expected.scatter)


def test_what_does_not_fit_together_has_no_union() -> None:
    labels = np.array([0, 1])
    with pytest.raises(SettingError, match="at least one client"):
        union([])
    with pytest.raises(SettingError, match="count the same classes"):
        union([Statistics.of(labels, 2), Statistics.of(labels, 3)])
    with pytest.raises(SettingError, match="count the same classes"):
        union([Statistics.of(labels, 2), Statistics(2)])
    with pytest.raises(SettingError, match="embeddings of the same length"):
        union([Statistics.of(labels, 2), Statistics.of(labels, 2, np.ones((2, 3)))])
    assert union([Statistics(3), Statistics(4)]).rows == 7


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=6), st.integers(0, 99), st.sampled_from([0.0, 1e4]))
def test_merged_statistics_are_those_of_the_pool(sizes: list[int], seed: int, offset: float) -> None:
    rng = np.random.default_rng(seed)
    z = [rng.normal(size=(n, 4)) + offset for n in sizes]
    y = [rng.integers(0, 3, n) for n in sizes]
    each = [Statistics.of(label, 3, rows) for label, rows in zip(y, z, strict=True)]
    pooled = Statistics.of(np.concatenate(y), 3, np.concatenate(z))
    for whole in (merged(each), merged(each[::-1])):
        assert whole.rows == pooled.rows
        assert whole.counts.tolist() == pooled.counts.tolist()
        np.testing.assert_allclose(whole.mean if pooled.rows else pooled.mean, pooled.mean, rtol=1e-12, atol=1e-12)
        np.testing.assert_allclose(whole.scatter, pooled.scatter, rtol=1e-9, atol=1e-6)
    rest = without(merged(each), each[0])
    others = Statistics.of(np.concatenate([*y[1:], y[0][:0]]), 3, np.concatenate([*z[1:], z[0][:0]]))
    assert rest.counts.tolist() == others.counts.tolist()
    np.testing.assert_allclose(rest.scatter, others.scatter, rtol=1e-8, atol=1e-5)
    if others.rows:
        np.testing.assert_allclose(rest.mean, others.mean, rtol=1e-9, atol=1e-9)


def test_measures_from_statistics_equal_those_of_the_pooled_rows() -> None:
    clients = Dirichlet(clients=6, alpha=0.3, seed=1).split(data.digits())
    seen = measure(collect(clients, embed=lambda x: x.flatten(1)), seconds=[1, 1, 1, 2, 2, 3])
    z, y = clients.x.flatten(1).double().numpy(), clients.y.numpy()
    parts = [clients.indices(client, "train") for client in range(6)]
    every = np.concatenate(parts)
    shares = np.bincount(y[every], minlength=10) / len(every)
    for client, own in enumerate(parts):
        rest = np.setdiff1d(every, own)
        expected = slow_or_ours(z[own], z[rest])
        assert seen.frechet[client] == pytest.approx(expected, rel=1e-9)
        mine = np.bincount(y[own], minlength=10) / len(own)
        assert seen.earth_mover[client] == pytest.approx(np.abs(mine - shares).sum())
        assert seen.total_variation[client] == pytest.approx(np.abs(mine - shares).sum() / 2)
    assert seen.federation["frechet"] == pytest.approx(seen.frechet.mean())
    assert seen.federation["speed_ratio"] == 3
    assert set(seen.federation) <= set(UNITS)
    assert [row["rows"] for row in seen.table()] == [len(own) for own in parts]


def slow_or_ours(a: np.ndarray, b: np.ndarray) -> float:
    return frechet(a.mean(0), np.cov(a, rowvar=False), b.mean(0), np.cov(b, rowvar=False))


def test_iid_clients_are_nearly_alike_and_uneven_ones_are_not() -> None:
    digits, far = data.digits(), []
    for kind in (Iid(clients=5), Dirichlet(clients=5, alpha=1.0), Dirichlet(clients=5, alpha=0.05)):
        seen = measure(collect(kind.split(digits), embed=lambda x: x.flatten(1)))
        far.append((seen.federation["frechet"], seen.federation["total_variation"]))
    assert far == sorted(far)
    assert far[0][1] < 0.06
    assert far[2][1] > 0.5


@pytest.mark.skipif("PIEBALD_DATA" not in os.environ, reason="PIEBALD_DATA is not set")
def test_subjects_differ_more_than_a_random_deal() -> None:
    from piebald.data.partition import ByOwner

    har = data.har()
    distance = [
        measure(collect(kind.split(har), embed=lambda x: x.mean(2))).federation["frechet"]
        for kind in (ByOwner(owner="subject"), Iid(clients=21))
    ]
    assert distance[0] > 3 * distance[1]


def test_label_distance_ends() -> None:
    p = np.eye(3)
    assert total_variation(p[0], p[0]) == 0
    assert total_variation(p[0], p[1]) == 1
    assert total_variation(p[0], np.full(3, 1 / 3)) == pytest.approx(2 / 3)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=12))
def test_gini_is_half_the_relative_mean_difference(values: list[float]) -> None:
    x = np.array(values)
    if x.sum() == 0:
        assert gini(x) == 0
    else:
        expected = np.abs(x[:, None] - x).sum() / (2 * len(x) ** 2 * x.mean())
        assert gini(x) == pytest.approx(expected, abs=1e-9)


def test_gini_and_speed_ends() -> None:
    assert gini([3, 3, 3]) == 0
    assert gini([0, 0, 0, 8]) == pytest.approx(0.75)
    assert speed_ratio([0, 0]) == 1
    assert speed_ratio([0, 1]) == float("inf")


def test_clients_without_classes_or_counts() -> None:
    lazy = LazyClients(3, lambda client: (np.ones((4 + client, 2), np.float32), np.zeros(4 + client)), test=0.0)
    seen = measure(collect(lazy))
    assert seen.rows.tolist() == [4, 5, 6]
    assert seen.total_variation is None
    assert list(seen.federation) == ["size_gini"]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda: Statistics.of(), "need a label or an embedding of each row, got neither"),
        (lambda: Statistics.of(np.array([0, 3]), 3), "labels must be in 0..2, got 0..3"),
        (lambda: Statistics.of(embedding=np.array([[np.nan]])), "embeddings must be finite numbers"),
        (lambda: Statistics.of(np.array([0]), 1, np.zeros((2, 2))), "a row for each label, got"),
        (lambda: Statistics(3, np.array([1, 1])), "counts must add up to the 3 rows, got 2"),
        (lambda: Statistics(1, None, np.zeros(2), np.zeros((3, 3))), r"scatter must be \[2, 2\] like the mean"),
        (lambda: Statistics(1, [1]), r"counts must be a ndarray, got \[1\]"),
        (
            lambda: Statistics(1, np.array(1)),
            "counts must be an array of whole numbers with 1 dimension, got int64 with 0",
        ),
        (lambda: Statistics(1, None, np.zeros(1), np.zeros(1)), "with 2 dimensions, got float64 with 1"),
        (lambda: Statistics(1, np.array([1])).merge(Statistics(1)), "only if all count the same classes"),
        (lambda: measure([]), "at least one client, got none"),
        (lambda: measure([Statistics(1)], seconds=[1, 2]), "one number for each of 1 clients, got 2"),
        (lambda: without(Statistics(1), Statistics(2)), "must be among the overall rows"),
        (lambda: gini([-1.0]), "none below 0"),
    ],
)
def test_what_cannot_be_is_one_sentence(wrong, message: str) -> None:
    with pytest.raises(SettingError, match=message):
        wrong()


def test_rows_are_not_fetched_where_counts_are_known() -> None:
    class Counted:
        classes = ("a", "b")

        def __len__(self) -> int:
            return 2

        def counts(self, client: int, split: str) -> list[int]:
            return [client, 3]

        def rows(self, client: int, split: str) -> None:
            raise AssertionError("fetched")

        def size(self, client: int, split: str) -> None:
            raise AssertionError("asked")

    assert [own.rows for own in collect(Counted())] == [3, 4]


def steps(kind: type, source, embed, shares=(0.0, 0.25, 0.5, 0.75, 1.0), **settings) -> list[float]:
    """The average Fréchet distance as rows are shuffled, from regions (0) to no difference (1)."""
    return [
        measure(collect(kind(shuffle=share, **settings).split(source), embed=embed)).federation["frechet"]
        for share in shares
    ]


@pytest.mark.parametrize("seed", range(2))
def test_distance_falls_as_clients_are_shuffled(seed: int) -> None:
    """The shape of CGAU's table 1: the more rows are swapped between clients, the more alike these are."""
    from piebald.data.partition import ByEmbedding

    far = steps(ByEmbedding, data.digits(), lambda x: x.flatten(1), clients=3, seed=seed, limit=900)
    assert all(one > 1.1 * next_one for one, next_one in itertools.pairwise(far))
    assert far[0] > 5 * far[-1]


@pytest.mark.full
@pytest.mark.skipif("PIEBALD_DATA" not in os.environ, reason="PIEBALD_DATA is not set")
def test_distance_falls_on_features_of_photographs() -> None:
    from piebald.data.partition import ByEmbedding

    office = data.office_caltech10("squeezenet")
    far = steps(ByEmbedding, office, lambda x: x[:, :64], (0.0, 0.5, 1.0), clients=2, limit=1200)
    assert far == sorted(far, reverse=True)
    assert far[0] > 1.5 * far[-1]


def test_roots_are_computed_by_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    used = []

    def watched(own: Statistics, overall: Statistics) -> float:
        used.extend(one["num_threads"] for one in threadpool_info() if one["user_api"] == "blas")
        return 0.0

    monkeypatch.setattr(heterogeneity, "frechet_to_rest", watched)
    with threadpool_limits(2):
        measure([Statistics(2, None, np.zeros(2), np.eye(2))])
    assert set(used) == {1}
