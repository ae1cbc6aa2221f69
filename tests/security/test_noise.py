"""Noise that protects: what it is distributed like, and what cannot be found out from it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import stats
from torch import nn

from piebald.contracts import StepContext
from piebald.core.parameters import Layout
from piebald.core.randomness import KEY, NoiseSource, grid_of, long_key
from piebald.engines.row_gradients import noised
from piebald.methods.transforms import Gaussian


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
    monkeypatch.setattr("piebald.core.randomness._PIECE", 7)
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


# What protects draws from there.

APART = [21_891, 110_051]  # keys that come to the same 32 bits of torch's seed, found in a second


def test_the_noise_of_an_update_is_not_that_of_a_seed_of_32_bits() -> None:
    """Before, both rows had the same noise, so 2^32 trials gave it for any upload."""
    sent = Gaussian(clip=1.0, where="client").on_client({"model": torch.zeros(2, 50)}, APART, [0, 1])["model"]
    assert abs(np.corrcoef(*sent.numpy())[0, 1]) < 0.6
    assert on_grid(sent, 1.0)


def test_the_noise_of_a_mean_is_not_that_of_a_seed_of_32_bits() -> None:
    gaussian = Gaussian(clip=1.0, where="server")
    contexts = [StepContext(4, 4, 0, [0.25] * 4, rng_key=key) for key in APART]
    one, two = (gaussian.on_server(torch.zeros(50), context) for context in contexts)
    assert abs(np.corrcoef(one, two)[0, 1]) < 0.6
    assert on_grid(one, 0.25)


def test_the_noise_of_a_step_of_dp_sgd_is_rounded_and_its_key_is_long() -> None:
    """Before, it was torch's normal numbers, added in float32 to what it should hide."""
    model = nn.Linear(9, 5)
    layout = Layout.of(model, ())
    zeros = {name: torch.zeros(2, *parameter.shape) for name, parameter in model.named_parameters()}
    keys = [("secret", 1), ("another", 1)]
    made, again, later = (noised(zeros, layout, 1.0, [1.0, 1.0], step, keys) for step in (0, 0, 1))
    assert all(on_grid(part, 1.0) for part in made)
    assert all(torch.equal(*parts) for parts in zip(made, again, strict=True))
    assert not torch.equal(made[0], later[0])
    one, two = torch.cat([part.flatten(1) for part in made], 1)
    assert abs(np.corrcoef(one, two)[0, 1]) < 0.6


def test_a_secret_counts_with_all_its_bits() -> None:
    """Whole numbers are words modulo 2^64, so secrets are text."""
    assert long_key("hide", 1 << 64) == long_key("hide", 0)
    made = {long_key("hide", secret) for secret in ("0" * 64, "1" + "0" * 63)}
    assert len(made) == 2
    assert max(made) >= 1 << 64


def test_an_update_that_is_not_finite_counts_as_no_change() -> None:
    """Its refusal in the open would tell that its client took part."""
    rows = torch.tensor([[torch.nan, 1.0], [torch.inf, 0.0], [3e38, 3e38]])
    sent = Gaussian(clip=1.0, noise=0.0).on_client({"model": rows}, [1, 2, 3], [0, 1, 2])["model"]
    assert sent[:2].tolist() == [[0.0, 0.0], [0.0, 0.0]]
    assert float(torch.linalg.vector_norm(sent[2])) == pytest.approx(1.0, rel=1e-5)


def on_grid(vector: torch.Tensor, deviation: float) -> bool:
    steps = vector.double() / grid_of(deviation)
    return bool((steps == steps.round()).all())
