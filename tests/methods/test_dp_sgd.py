"""DP-SGD: which gradients are clipped, what noise is added, which rows are in a batch, and the same by opacus."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from piebald import recipes
from piebald.contracts import RowPrivacy, SgdConfig
from piebald.core.errors import SettingError
from piebald.engines.row_loader import batches
from piebald.methods.training import DpSgd
from tests.fakes import classified, federation, seeded, simulate

ROWS = 24
SIZE = 8


def convolutional() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * (SIZE - 2) ** 2, 3)
    )


class Recurrent(nn.Module):
    """A network that vmap cannot take."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.classifier = nn.LSTM(SIZE, 5, batch_first=True), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.classifier(self.lstm(x.squeeze(1))[0][:, -1])
        return made


def images(*sizes: int, seed: int = 3) -> Any:
    """Clients with small images of three classes."""
    draw = np.random.default_rng(seed)
    pairs = [(draw.normal(size=(n, 1, SIZE, SIZE)).astype(np.float32), draw.integers(0, 3, n)) for n in sizes]
    return federation(*pairs, classes=["a", "b", "c"])


def one_step(model: nn.Module, clients: Any, lr: float = 1.0, **settings: Any) -> Tensor:
    """What one step of DP-SGD changes in the first client's model [p]."""
    recipe = recipes.dp_sgd(lr=lr, steps=1, batch=ROWS, **settings)
    run = simulate(recipe, clients, model, rounds=1, seed=1)
    return run.work.layout.flatten(run.model()) - run.work.initial


@pytest.mark.parametrize("clip", [0.05, 0.5, 100.0])
def test_the_clipped_sum_is_that_of_opacus(clip: float) -> None:
    """On the same batch."""
    opacus = pytest.importorskip("opacus", reason="needs opacus: pip install '.[privacy]'")
    clients = images(ROWS)
    mine = one_step(seeded(convolutional), clients, clip=clip, noise=0.0)
    rows = clients.rows(0, "train")
    theirs = opacus.GradSampleModule(seeded(convolutional), loss_reduction="sum")
    nn.functional.cross_entropy(theirs(rows.x.requires_grad_()), rows.y, reduction="sum").backward()
    gradients = [parameter.grad_sample for parameter in theirs.parameters()]
    norms = torch.stack([gradient.flatten(1).norm(dim=1) for gradient in gradients]).norm(dim=0)
    share = (clip / norms).clamp(max=1.0)
    summed = torch.cat([torch.tensordot(share, gradient, 1).flatten() for gradient in gradients])
    torch.testing.assert_close(mine, -summed / ROWS, atol=1e-5, rtol=1e-4)


@pytest.mark.long
def test_models_that_vmap_cannot_take_give_the_same_one_row_at_a_time() -> None:
    model, clients = seeded(Recurrent), images(ROWS, 9)
    recipe = recipes.dp_sgd(lr=0.2, epochs=2, batch=5, clip=0.3, noise=0.5)
    ends = [
        simulate(recipe, clients, model, rounds=2, simulator={"engine": engine, "stack": stack})
        for engine, stack in (("reference", 1), ("sequential", 1), ("vmapped", 2))
    ]
    first, *others = (run.work.layout.flatten(run.model()) for run in ends)
    for other in others:
        torch.testing.assert_close(other, first, atol=1e-5, rtol=1e-4)


def test_one_row_moves_a_step_by_no_more_than_the_clip() -> None:
    """Other rows' gradients stay the same, and its own is at most as long as the clip."""
    model, clients = seeded(lambda: nn.Linear(4, 2)), classified(ROWS)
    before = one_step(model, clients, clip=0.2, noise=0.0)
    clients.x[5] = torch.tensor([1e4, -1e4, 3e3, 0.0])
    after = one_step(model, clients, clip=0.2, noise=0.0)
    assert 0 < float((after - before).norm()) * ROWS <= 0.2 * 2 + 1e-5  # it was there before, too


def test_noise_has_the_deviation_that_was_asked_for() -> None:
    """Of sigma * C / (q n) a step, on shared and private layers alike, and other noise in another step."""
    wide, clients = seeded(lambda: nn.Linear(5000, 2)), classified(ROWS, features=5000)
    quiet, loud = (one_step(wide, clients, clip=0.5, noise=noise) for noise in (0.0, 3.0))
    drawn = loud - quiet
    expected = 3.0 * 0.5 / ROWS
    assert abs(float(drawn.mean())) < 5 * expected / math.sqrt(len(drawn))
    assert abs(float(drawn.std()) - expected) < 5 * expected / math.sqrt(2 * len(drawn))
    recipe = recipes.dp_sgd(lr=1.0, steps=2, batch=ROWS, clip=0.5, noise=3.0)
    twice = simulate(recipe, clients, wide, rounds=1, seed=1)
    both = twice.work.layout.flatten(twice.model()) - twice.work.initial
    assert float(both.std()) == pytest.approx(expected * math.sqrt(2), rel=0.1)


def test_a_private_layer_is_hidden_as_well(tmp_path: Path) -> None:
    """Gradients of shared layers are taken through it."""
    model, clients = seeded(lambda: nn.Sequential(nn.Linear(4, 300), nn.ReLU(), nn.Linear(300, 2))), classified(ROWS)
    recipe = recipes.dp_sgd(lr=1.0, steps=1, batch=ROWS, clip=1e-6, noise=1e6).with_(
        sharing={"kind": "all_except", "private_layers": "classifier"}
    )
    run = simulate(recipe, clients, model, rounds=1, out=tmp_path / "run")
    moved = run.work.layout.flatten(run.model(client=0)) - run.work.initial
    own = moved[run.work.layout.shared :]
    assert len(own) == 602
    assert float(own.std()) == pytest.approx(1 / ROWS, rel=0.2)


def test_batches_are_poisson_samples() -> None:
    """Each row by itself with probability batch / rows: sizes are binomial, and some batches are empty."""
    places, config = np.arange(100), SgdConfig(lr=0.1, batch=2, steps=4000, step=RowPrivacy(1.0, 1.0))
    drawn = list(batches(places, config, False, 1, "site", 0))
    sizes = np.array([len(batch) for batch in drawn])
    assert len(drawn) == 4000
    assert abs(sizes.mean() - 2) < 5 * math.sqrt(100 * 0.02 * 0.98 / 4000)
    assert sizes.var() == pytest.approx(100 * 0.02 * 0.98, rel=0.15)
    assert (sizes == 0).any()
    per_row = np.bincount(np.concatenate(drawn), minlength=100)
    assert (abs(per_row - 80) < 5 * math.sqrt(4000 * 0.02 * 0.98)).all()
    whole = batches(np.arange(5), SgdConfig(lr=0.1, batch=20, epochs=3, step=RowPrivacy(1.0, 1.0)), False, 1)
    assert [batch.tolist() for batch in whole] == [[0, 1, 2, 3, 4]] * 3


@pytest.mark.full
def test_clients_of_every_size_take_part_in_a_stack() -> None:
    """A client with one row, one with none, empty batches: the same numbers as one after another."""
    clients, model = classified(1, 40, 0, 7, 23), seeded(lambda: nn.Linear(4, 2))
    recipe = recipes.dp_sgd(lr=0.3, epochs=3, batch=2, noise=0.7, momentum=0.5, keep_momentum=True, mu=0.3)
    one_by_one, stacked = (
        simulate(recipe, clients, model, rounds=3, simulator={"engine": engine, "stack": 5})
        for engine in ("sequential", "vmapped")
    )
    one, two = (run.work.layout.flatten(run.model()) for run in (one_by_one, stacked))
    torch.testing.assert_close(one, two, atol=1e-5, rtol=1e-4)


def test_no_training_loss_leaves_the_client() -> None:
    run = simulate(recipes.dp_sgd(lr=0.1), classified(8, 9), seeded(lambda: nn.Linear(4, 2)), rounds=2)
    assert all(row["loss"] is None for row in run.results)
    assert {row["steps"] for row in run.results if row["kind"] == "train"} == {1}


@pytest.mark.full
def test_less_noise_learns_more() -> None:
    clients, model = classified(60, 60, 60), seeded(lambda: nn.Linear(4, 2))
    ends = [
        simulate(recipes.dp_sgd(lr=0.5, epochs=3, noise=noise), clients, model, rounds=8) for noise in (0.0, 1.0, 300.0)
    ]
    last = ([row["value"] for row in run.scores if row["version"] == 8 and row["metric"] == "accuracy"] for run in ends)
    none, some, much = map(np.mean, last)
    assert none > 0.7
    assert some > 0.7
    assert much < some


class Frozen(nn.BatchNorm1d):
    def train(self, mode: bool = True) -> Frozen:
        super().train(False)
        return self


def test_a_model_that_mixes_rows_is_refused() -> None:
    class Centred(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x - x.mean(0))

    clients, recipe = classified(8, 8), recipes.dp_sgd(lr=0.1)
    with pytest.raises(SettingError, match=r"'1' goes by many rows: take group norm \(nn.GroupNorm\)"):
        simulate(recipe, clients, nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2)))
    remembers = nn.Sequential(nn.Unflatten(1, (2, 2)), nn.InstanceNorm1d(2, track_running_stats=True), nn.Flatten())
    with pytest.raises(SettingError, match="goes by many rows"):
        simulate(recipe, clients, nn.Sequential(*remembers, nn.Linear(4, 2)))
    with pytest.raises(SettingError, match="mixes the rows of a batch"):
        simulate(recipe, clients, Centred(4, 2))
    simulate(recipe, clients, nn.Sequential(nn.Linear(4, 3), Frozen(3), nn.Linear(3, 2)))


@pytest.mark.parametrize("wrong", [{"clip": None}, {"clip": 0.0}, {"noise": -1.0}, {"mu": -0.1}, {"batches": "exact"}])
def test_bad_settings_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(SettingError, match=next(iter(wrong))):
        DpSgd(**wrong)


@pytest.mark.full
def test_the_fastest_engine_is_chosen() -> None:
    run = simulate(
        recipes.dp_sgd(lr=0.1, batch=4),
        classified(*[20] * 6),
        seeded(lambda: nn.Linear(4, 2)),
        rounds=1,
        simulator={"engine": "auto"},
    )
    assert run.meta["runtime"]["engine"] in ("sequential", "vmapped")
