"""The Gaussian mechanism: what is clipped, where noise is added, and how much."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from piebald import recipes
from piebald.contracts import StepContext
from piebald.contracts.data import ModelSpec
from piebald.core.errors import SettingError
from piebald.core.objective import OBJECTIVES
from piebald.core.parameters import Layout
from piebald.methods.aggregation import EqualWeighted
from piebald.methods.attacks import RandomUpdate
from piebald.methods.transforms import Gaussian
from tests.fakes import classified, few, seeded, simulate

MANY = 40_000


def at_server(shares: list[float], rng_key: int) -> StepContext:
    """The context of a step whose updates have these shares."""
    return StepContext(arrived=len(shares), known=len(shares), version=0, shares=shares, rng_key=rng_key)


@few
@given(
    st.lists(st.lists(st.floats(-100, 100, width=32), min_size=3, max_size=3), min_size=1, max_size=4),
    st.floats(0.01, 50),
)
def test_every_update_is_scaled_to_the_largest_norm_allowed(rows: list[list[float]], clip: float) -> None:
    gaussian, numbers = Gaussian(clip=clip, noise=0.0), range(len(rows))
    sent = gaussian.on_client({"model": torch.tensor(rows)}, numbers, numbers)["model"]
    for row, came in zip(rows, sent.tolist(), strict=True):
        norm = math.sqrt(sum(x * x for x in row))
        factor = min(1.0, clip / norm) if norm else 1.0
        assert came == pytest.approx([factor * x for x in row], rel=1e-4, abs=1e-5)


def test_noise_at_the_client_has_the_right_spread() -> None:
    """Mean 0 and deviation noise * clip, within 5 standard errors of each at fixed keys; rows are independent."""
    gaussian = Gaussian(clip=2.0, noise=1.5, where="client")
    noise = gaussian.on_client({"model": torch.zeros(2, MANY)}, [1, 2], [0, 1])["model"]
    for row in noise:
        assert abs(float(row.mean())) < 5 * 3.0 / math.sqrt(MANY)
        assert abs(float(row.std()) - 3.0) < 5 * 3.0 / math.sqrt(2 * MANY)
    assert abs(float((noise[0] * noise[1]).mean())) < 5 * 9.0 / math.sqrt(MANY)


def test_noise_belongs_to_the_key_alone() -> None:
    gaussian = Gaussian(clip=1.0, where="client")
    zeros = torch.zeros(3, 10)
    one = gaussian.on_client({"model": zeros}, [7, 8, 9], [0, 1, 2])["model"]
    two = gaussian.on_client({"model": zeros}, [9, 7, 8], [0, 1, 2])["model"]
    assert torch.equal(one[[2, 0, 1]], two)
    assert not torch.equal(one[0], one[1])


@pytest.mark.parametrize("weights", [[0.25] * 4, [0.7, 0.2, 0.1], [1.0]])
def test_noise_at_the_server_is_proportional_to_the_largest_weight(weights: list[float]) -> None:
    """That is how far one client, clipped, can move the weighted mean."""
    gaussian = Gaussian(clip=2.0, noise=0.5)
    noise = gaussian.on_server(torch.zeros(MANY), at_server(weights, 3))
    wanted = 0.5 * 2.0 * max(weights)
    assert abs(float(noise.std()) - wanted) < 5 * wanted / math.sqrt(2 * MANY)
    assert torch.equal(noise, gaussian.on_server(torch.zeros(MANY), at_server(weights, 3)))
    assert not torch.equal(noise, gaussian.on_server(torch.zeros(MANY), at_server(weights, 4)))


def test_each_end_leaves_the_noise_to_the_other() -> None:
    short, average = torch.full((1, 4), 0.1), torch.ones(4)
    assert torch.equal(Gaussian(clip=1.0, where="server").on_client({"model": short}, [1], [0])["model"], short)
    assert torch.equal(Gaussian(clip=1.0, where="client").on_server(average, at_server([0.5, 0.5], 1)), average)
    assert torch.equal(Gaussian(clip=1.0, noise=0.0).on_server(average, at_server([0.5, 0.5], 1)), average)


@pytest.mark.parametrize(
    "fields", [{"clip": 0.0}, {"clip": -1.0}, {"clip": math.inf}, {}, {"clip": 1.0, "noise": -0.1}]
)
def test_bad_settings_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(SettingError, match="gaussian"):
        Gaussian(**fields)


def test_running_statistics_are_hidden_by_noise_that_reaches_them() -> None:
    """A clip alone hides nothing, and a transform that gets the statistics hides them itself."""

    class OfStatistics(Gaussian):
        takes_statistics = True

    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))
    spec = ModelSpec(model, Layout.of(model), torch.zeros(0), OBJECTIVES["classification"], 2, (6,), (3,))
    assert [Gaussian(clip=1.0, noise=noise).hides() for noise in (0.0, 1e-9)] == [False, True]
    assert Gaussian(clip=1.0, noise=0.0).unsupported_model(spec) is None
    assert "running statistics of the norm '1'" in str(Gaussian(clip=1.0, noise=1.0).unsupported_model(spec))
    assert OfStatistics(clip=1.0, noise=1.0).unsupported_model(spec) is None


@pytest.mark.parametrize("where", ["client", "server"])
def test_private_layers_get_no_noise(where: str) -> None:
    """With nothing but noise to learn from (a rate of almost nothing), only shared numbers move."""
    model = seeded(lambda: torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 2)))
    recipe = recipes.hdafl(lr=1e-9).with_(
        transforms=[{"kind": "gaussian", "clip": 1.0, "noise": 0.5, "where": where}], aggregation=EqualWeighted()
    )
    run = simulate(recipe, classified(6, 7), model, rounds=1)
    shared = run.model()
    assert torch.equal(shared[1].weight, model[1].weight)
    assert float((shared[0].weight - model[0].weight).detach().abs().min()) > 1e-6


def test_no_update_of_a_run_is_longer_than_the_clip() -> None:
    model = seeded(lambda: torch.nn.Linear(4, 2))
    free = simulate(recipes.fedavg(lr=0.5), classified(9, 12), model, rounds=2)
    clip = 0.5 * min(row["norm"] for row in free.results)
    gaussian = {"kind": "gaussian", "clip": clip, "noise": 0.0}
    run = simulate(recipes.fedavg(lr=0.5).with_(transforms=[gaussian]), classified(9, 12), model, rounds=2)
    assert [row["norm"] for row in run.results] == pytest.approx([clip] * 4, rel=1e-4)


def test_running_variances_stay_variances() -> None:
    """Clients that send any numbers would take batch norm's variances below zero and outputs to NaN."""
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 2))
    attacked = recipes.fedavg(lr=0.1).with_(transforms=[RandomUpdate(clients=(0, 1), sigma=5.0)])
    run = simulate(attacked, classified(20, 20, 20), model, rounds=4)
    assert float(run.model()[1].running_var.min()) >= 0.0
    assert all(math.isfinite(row["value"]) for row in run.scores)
