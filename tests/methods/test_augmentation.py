"""Augmentation: on training batches only, from the client's own stream, the same on every engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import piebald
from piebald.contracts import Rows
from piebald.core.errors import SettingError
from piebald.core.metrics import cross_entropy, for_training
from piebald.core.targets import Weighted
from piebald.methods.recipe import Recipe
from piebald.methods.recipes.dp_sgd import dp_sgd
from piebald.methods.recipes.fedavg import fedavg
from piebald.methods.training.augmentation import FunctionAugmentation, GaussianNoise, HorizontalFlip, MixUp, RandomCrop
from piebald.runs.finished_run import Run

ALL = ["horizontal_flip", {"kind": "random_crop", "padding": 1}, {"kind": "gaussian_noise", "deviation": 0.2}, "mix_up"]


def rng() -> torch.Generator:
    return torch.Generator().manual_seed(3)


def images(count: int, seed: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    made = np.random.default_rng(seed)
    y = made.integers(0, 2, count)
    return (made.normal(size=(count, 1, 4, 4)) + y[:, None, None, None]).astype(np.float32), y


def doubled(x: Tensor, y: Tensor, rng: torch.Generator) -> tuple[Tensor, Tensor]:
    return 2 * x, 1 - y


CLIENTS = {f"c{seed}": images(count, seed) for seed, count in enumerate((13, 7, 22))}


class Seeing(nn.Module):
    """A small network that notes which rows it sees in training mode and which in evaluation mode."""

    seen: dict[bool, list[Tensor]]

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(8, 2))

    def forward(self, x: Tensor) -> Tensor:
        type(self).seen[self.training].append(x.detach().clone())
        out: Tensor = self.inner(x)
        return out


def ran(recipe: Recipe, engine: str = "sequential", model: nn.Module | None = None, **options: Any) -> Run:
    torch.manual_seed(0)
    runtime = {"kind": "simulator", "engine": engine, "workers": options.pop("workers", 0)}
    made = piebald.clients_from(CLIENTS, test=0.3, validation=0.2)
    plain = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(8, 2))
    return piebald.run(recipe, made, model or plain, rounds=3, runtime=runtime, **options)


def vector(run: Run) -> Tensor:
    return run.work.layout.flatten(run.model())


def test_each_change_does_what_it_says() -> None:
    x = torch.arange(2 * 1 * 3 * 3, dtype=torch.float32).view(2, 1, 3, 3) + 1
    rows = Rows(x, torch.tensor([0, 1]))
    assert torch.equal(HorizontalFlip(probability=1.0).augment(rows, rng()).x, x.flip(-1))
    assert torch.equal(HorizontalFlip(probability=0.0).augment(rows, rng()).x, x)
    wide = nn.functional.pad(x, [2] * 4)
    cropped = RandomCrop(padding=2).augment(Rows(x.repeat(30, 1, 1, 1), rows.y.repeat(30)), rng()).x
    places = [[torch.equal(one, wide[n % 2, :, i : i + 3, j : j + 3]) for i in range(5) for j in range(5)]
              for n, one in enumerate(cropped)]  # fmt: skip
    assert all(sum(found) >= 1 for found in places)
    assert len({tuple(found) for found in places}) > 10
    noise = GaussianNoise(deviation=0.5).augment(Rows(torch.zeros(100, 1, 10, 10), torch.zeros(100)), rng()).x
    assert float(noise.std()) == pytest.approx(0.5, rel=0.05)
    mixed = MixUp(alpha=1.0).augment(rows, rng())
    share = float(mixed.y.share[0])  # type: ignore[union-attr]
    assert 0 < share < 1
    other = rows[torch.tensor([1, 0])] if not torch.equal(mixed.x, x) else rows
    torch.testing.assert_close(mixed.x, share * x + (1 - share) * other.x)
    scores = torch.tensor([[2.0, -1.0], [0.5, 0.1]])
    soft = share * nn.functional.one_hot(rows.y, 2) + (1 - share) * nn.functional.one_hot(other.y, 2)
    expected = nn.functional.cross_entropy(scores, soft, reduction="none")
    torch.testing.assert_close(for_training(cross_entropy)(scores, mixed.y), expected)
    assert torch.equal(rows.x, x)  # what the client holds stays as it is


@pytest.mark.full
@pytest.mark.parametrize("engine", ["vmapped", "batched", "reference"])
def test_every_engine_draws_the_same(engine: str) -> None:
    plain = ran(fedavg(batch=5))
    for recipe in (fedavg(batch=5, augmentation=ALL), dp_sgd(batch=5, noise=0.1, augmentation=ALL[:3])):
        one, two = ran(recipe), ran(recipe, engine)
        torch.testing.assert_close(vector(one), vector(two), atol=1e-5, rtol=1e-4)
        assert not torch.allclose(vector(one), vector(plain), atol=1e-3)


@pytest.mark.full
def test_runs_repeat_bit_for_bit_with_workers_and_after_a_resume(tmp_path: Path) -> None:
    recipe = fedavg(batch=5, augmentation=[*ALL, jitter])
    whole = ran(recipe)
    assert torch.equal(vector(whole), vector(ran(recipe, workers=2)))
    folder = tmp_path / "run"
    made = piebald.clients_from(CLIENTS, test=0.3, validation=0.2)
    runtime = {"kind": "simulator", "engine": "sequential", "workers": 0}
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(8, 2))
    first = piebald.run(recipe, made, model, rounds=1, runtime=runtime, out=folder)
    first.close()
    resumed = piebald.resume(folder, made, model, recipe=recipe, rounds=3)
    assert torch.equal(vector(whole), vector(resumed))


@pytest.mark.parametrize("engine", ["sequential", "batched", "reference"])
def test_augmentation_never_touches_rows_that_models_are_evaluated_on(engine: str) -> None:
    Seeing.seen = {True: [], False: []}
    ran(fedavg(batch=5, augmentation=["horizontal_flip", "gaussian_noise"]), engine, Seeing())
    held = torch.from_numpy(np.concatenate([x for x, _ in CLIENTS.values()])).flatten(1)

    def known(seen: list[Tensor]) -> Tensor:
        return (torch.cat([part.flatten(1) for part in seen]).unsqueeze(1) == held).all(2).any(1)

    assert bool(known(Seeing.seen[False]).all())
    trained = known(Seeing.seen[True])
    assert int(trained.sum()) < len(trained) / 2  # rows of the look at the model before the run are as they are held


def jitter(x: Tensor, y: Tensor, rng: torch.Generator) -> tuple[Tensor, Tensor]:
    return x.add_(torch.rand(len(x), 1, 1, 1, generator=rng)), y


def cut(x: Tensor, y: Tensor, rng: torch.Generator) -> tuple[Tensor, Tensor]:
    return x[:1], y[:1]


@pytest.mark.parametrize("by_row", [False, True])
def test_a_function_of_ones_own_gets_targets_without_weights_which_stay(by_row: bool) -> None:
    rows = Rows(torch.arange(6.0).view(3, 2), Weighted(torch.tensor([0, 1, 0]), torch.tensor([1.0, 2.0, 3.0])))
    changed = FunctionAugmentation(function=doubled, by_row=by_row).augment(rows, rng())
    assert changed.x.tolist() == (2 * rows.x).tolist()
    assert isinstance(changed.y, Weighted)
    assert (changed.y.targets.tolist(), changed.y.weights.tolist()) == ([1, 0, 1], [1.0, 2.0, 3.0])


def test_a_function_of_ones_own_is_named_and_changes_copies() -> None:
    recipe = fedavg(batch=5, augmentation=[f"{__name__}:jitter"])
    assert recipe.training == fedavg(batch=5, augmentation=[jitter]).training
    before = CLIENTS["c0"][0].copy()
    assert not torch.equal(vector(ran(recipe)), vector(ran(fedavg(batch=5))))
    assert np.array_equal(CLIENTS["c0"][0], before)
    private = dp_sgd(batch=5, noise=0.1, augmentation=[{"kind": "function", "function": jitter, "by_row": True}])
    torch.testing.assert_close(vector(ran(private)), vector(ran(private, "vmapped")), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: fedavg(augmentation="horizontal_flip"), "augmentation must be a list, got"),
        (lambda: fedavg(augmentation=["flip"]), "there is no augmentation 'flip'"),
        (lambda: fedavg(augmentation=[{"kind": "random_crop", "padding": 0}]), "padding"),
        (lambda: fedavg(augmentation=[lambda x, y, rng: (x, y)]), "lambda"),
        (lambda: ran(fedavg(augmentation=[cut])), "must return inputs and targets of the same rows and form"),
        (lambda: ran(dp_sgd(augmentation=["mix_up"])), "the augmentation 'mix_up' may mix rows"),
        (lambda: ran(dp_sgd(augmentation=[jitter])), "write by_row = true for a function"),
        (lambda: ran(fedavg(augmentation=[GaussianNoise(inputs=("words",))])), "there is no input 'words'"),
        (
            lambda: piebald.run(
                fedavg(augmentation=["random_crop"]), {"a": (np.ones((4, 3)), [0, 1, 0, 1])}, nn.Linear(3, 2), rounds=1
            ),
            "is for images",
        ),
    ],
)
def test_what_cannot_be_is_refused_in_one_sentence(make: Any, words: str) -> None:
    with pytest.raises(SettingError, match=words) as refused:
        make()
    assert "\n" not in str(refused.value)
