"""Noise that protects: what it is distributed like, and what cannot be found out from it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import stats

from piebald.privacy.noise import KEY, NoiseSource, grid_of


def test_the_distribution_is_gaussian() -> None:
    drawn = NoiseSource(bytes(KEY)).gaussian(400_001)
    assert len(drawn) == 400_001
    assert stats.kstest(drawn, "norm").pvalue > 1e-3
    products = np.multiply(*np.random.default_rng(0).normal(size=(2, 400_000)))
    assert stats.kstest(np.abs(drawn[:-1] * drawn[1:]), np.abs(products)).pvalue > 1e-3
    for lag in (1, 2, 200_000):  # halves of pairs lie side by side and far apart
        assert abs(np.corrcoef(drawn[:-lag], drawn[lag:])[0, 1]) < 0.01


def test_pieces_are_one_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory is bounded by making noise in pieces, of which no two repeat."""
    monkeypatch.setattr("piebald.privacy.noise._PIECE", 7)
    drawn = NoiseSource(bytes(KEY)).gaussian(1001)
    assert len(set(drawn.tolist())) == 1001
    assert stats.kstest(drawn, "norm").pvalue > 1e-3


def test_a_key_gives_the_same_noise_and_another_key_other_noise() -> None:
    one, two, three = (NoiseSource.repeatable(key).gaussian(100) for key in (5, 5, 6))
    assert np.array_equal(one, two)
    assert abs(np.corrcoef(one, three)[0, 1]) < 0.4
    source = NoiseSource.repeatable(5)
    assert not np.array_equal(source.gaussian(100), source.gaussian(100))  # a stream goes on


def test_fresh_noise_never_repeats() -> None:
    drawn = [NoiseSource.fresh().gaussian(4).tolist() for _ in range(50)]
    assert len({tuple(one) for one in drawn}) == 50


@pytest.mark.parametrize("deviation", [1e-6, 0.013, 1.0, 300.0])
def test_what_comes_out_lies_on_a_grid_that_does_not_depend_on_the_data(deviation: float) -> None:
    """Two neighbouring inputs reach exactly the same numbers: no low-order bit tells them apart."""
    grid = grid_of(deviation)
    assert grid <= deviation * 2.0**-20
    for value in (0.0, deviation / 3, 1.7 * deviation):
        noisy = NoiseSource.repeatable(3).add_to(torch.full((1000,), value, dtype=torch.float64), deviation)
        steps = noisy / grid
        assert bool((steps == steps.round()).all())
    plain = NoiseSource.repeatable(3).add_to(torch.zeros(20_000), deviation)
    assert plain.dtype == torch.float32
    assert float(plain.std()) == pytest.approx(deviation, rel=0.05)


def test_a_key_of_another_length_is_refused() -> None:
    with pytest.raises(ValueError, match="32 bytes"):
        NoiseSource(b"short")
