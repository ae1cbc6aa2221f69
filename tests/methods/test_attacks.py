"""Attacks: they strike whom they name, with what their papers say, and on every engine alike."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import piebald
from piebald import data, recipes
from piebald.contracts import Rows
from piebald.core.errors import SettingError
from piebald.core.metrics import AttackSuccess, accuracy
from piebald.core.objective import named_metrics
from piebald.data.partition import Backdoor, FlipPairs, Iid
from piebald.methods.attacks import Collusion, InnerProduct, LittleIsEnough, ModelReplacement, RandomUpdate, SignFlip
from piebald.methods.attacks.base import backdoor_success
from piebald.models import build_model
from tests.fakes import FakeMasking, classified, seeded, simulate

few = settings(max_examples=25, deadline=None, derandomize=True)
ALONE = [ModelReplacement(clients=(1, 3)), SignFlip(clients=(1, 3)), RandomUpdate(clients=(1, 3))]
TOGETHER = [InnerProduct(clients=(1, 3)), LittleIsEnough(clients=(1, 3))]


@pytest.mark.parametrize("attack", ALONE, ids=lambda attack: attack.kind)
@few
@given(order=st.permutations(range(5)), seed=st.integers(0, 99))
def test_only_the_updates_of_named_clients_change(attack: Any, order: list[int], seed: int) -> None:
    change = torch.from_numpy(np.random.default_rng(seed).normal(size=(5, 4)).astype(np.float32))
    other = torch.ones(5, 2)
    vectors = {"model": change[order], "control": other}
    sent = attack.on_client(vectors, order, order)
    straight = attack.on_client({"model": change}, range(5), range(5))["model"]
    assert torch.equal(sent["model"], straight[order])
    assert torch.equal(vectors["model"], change[order])  # what came is left alone
    assert sent["control"] is other
    for client in range(5):
        assert torch.equal(straight[client], change[client]) == (client not in (1, 3))


def test_what_each_sends() -> None:
    change = torch.tensor([[1.0, 2.0]])
    assert SignFlip(clients=(0,), scale=2).on_client({"model": change}, [1], [0])["model"].tolist() == [[-2, -4]]
    assert ModelReplacement(clients=(0,), scale=3).on_client({"model": change}, [1], [0])["model"].tolist() == [[3, 6]]
    cut = ModelReplacement(clients=(0,), scale=3, longest=1.0).on_client({"model": change}, [1], [0])["model"]
    assert float(cut.norm()) == pytest.approx(1.0)
    noise = RandomUpdate(clients=(0,), sigma=3.0).on_client({"model": torch.zeros(1, 40_000)}, [1], [0])["model"]
    assert abs(float(noise.std()) - 3) < 5 * 3 / math.sqrt(80_000)


def test_colluders_use_their_own_updates_only() -> None:
    changes = torch.tensor([[9.0, 9.0], [1.0, 0.0], [8.0, 8.0], [3.0, 4.0], [7.0, 7.0]])
    against = InnerProduct(clients=(1, 3), scale=0.5).collude(changes, range(5), 0)
    assert against[1].tolist() == against[3].tolist() == [-1.0, -1.0]
    little = LittleIsEnough(clients=(1, 3), z=2.0).collude(changes, range(5), 0)
    assert little[1].tolist() == pytest.approx([2 - 2 * math.sqrt(2), 2 - 2 * math.sqrt(8)])
    for result in (against, little):
        assert torch.equal(result[[0, 2, 4]], changes[[0, 2, 4]])
    assert float(changes[1, 0]) == 1.0


def test_the_reach_of_little_is_enough_is_the_papers() -> None:
    """The paper's example: n = 50 workers, 24 of them corrupted: s = 2, and z is the 92.3 % point, 1.43."""
    assert LittleIsEnough(clients=(0,)).reach(50, 24) == pytest.approx(1.426, abs=1e-3)
    assert math.isfinite(LittleIsEnough(clients=(0,)).reach(5, 4))
    assert math.isfinite(LittleIsEnough(clients=(0,)).reach(1, 1))


@pytest.mark.parametrize("attack", [*ALONE, *TOGETHER], ids=lambda attack: attack.kind)
def test_a_run_under_attack_is_the_same_on_every_engine(attack: Any) -> None:
    model = seeded(lambda: nn.Linear(4, 2))
    ends = []
    for engine in ("sequential", "vmapped"):
        recipe = recipes.fedavg(lr=0.2).with_(transforms=[attack.table()])
        run = simulate(recipe, classified(9, 8, 12, 7), model, simulator={"engine": engine})
        ends.append(run.work.layout.flatten(run.model()))
    torch.testing.assert_close(*ends, atol=1e-5, rtol=1e-4)
    clean = simulate(recipes.fedavg(lr=0.2), classified(9, 8, 12, 7), model)
    assert not torch.allclose(ends[0], clean.work.layout.flatten(clean.model()), atol=1e-4)


def test_what_colluders_do_reaches_the_average() -> None:
    """All four collude to send minus their mean, so the model goes backwards by exactly as much."""
    model = seeded(lambda: nn.Linear(4, 2))
    clients = classified(8, 8, 8, 8)
    attack = {"kind": "inner_product", "clients": [0, 1, 2, 3], "scale": 1.0}
    honest, attacked = (
        simulate(recipes.fedavg(lr=0.2).with_(transforms=attacks), clients, model, rounds=1)
        for attacks in ([], [attack])
    )
    start = honest.work.initial
    forward, back = (run.work.layout.flatten(run.model()) - start for run in (honest, attacked))
    torch.testing.assert_close(back, -forward, atol=1e-6, rtol=1e-5)


def test_a_replaced_model_takes_over_the_average() -> None:
    """Scaled by the number of updates, the change of one attacker has its full length in the average."""
    model = seeded(lambda: nn.Linear(4, 2))
    clients = classified(8, 8, 8, 8)
    alone = simulate(recipes.fedavg(lr=0.2), classified(8, 8, 8, 8), model, rounds=1)
    attack = {"kind": "model_replacement", "clients": [0], "scale": 4.0}
    recipe = recipes.fedavg(lr=0.2).with_(transforms=[attack], aggregation="equal_weighted")
    run = simulate(recipe, clients, model, rounds=1)
    weights = [row["norm"] for row in run.results]
    assert weights[0] == pytest.approx(4 * alone.results[0]["norm"], rel=1e-5)
    assert weights[1:] == pytest.approx([row["norm"] for row in alone.results][1:], rel=1e-5)


@pytest.mark.parametrize("clients", [(), (-1,), (2, 2)])
def test_attackers_are_named_once(clients: tuple[int, ...]) -> None:
    with pytest.raises(SettingError, match="sign_flip"):
        SignFlip(clients=clients)


def test_colluders_are_refused_beside_secure_aggregation() -> None:
    with pytest.raises(SettingError, match="inner_product"):
        recipes.fedavg().with_(transforms=[FakeMasking(), InnerProduct(clients=(0,))])
    assert issubclass(InnerProduct, Collusion)


# -------------------------------------------------------------------------------------------------------------- success


def test_attack_success_is_the_mean_over_flipped_classes() -> None:
    metric = AttackSuccess.of_pairs(((0, 1),))
    predicted = torch.tensor([1, 1, 0, 0, 1, 2, 1])
    metric.update(nn.functional.one_hot(predicted, 3).float()[:4], torch.tensor([0, 0, 0, 1]))
    metric.update(nn.functional.one_hot(predicted, 3).float()[4:], torch.tensor([1, 2, 2]))
    assert float(metric.compute()) == pytest.approx((2 / 3 + 1 / 2) / 2)
    metric.reset()
    assert math.isnan(float(metric.compute()))


@pytest.mark.parametrize("flips", [{}, {1: 1}])
def test_flips_must_flip(flips: dict[int, int]) -> None:
    with pytest.raises(SettingError, match="flips"):
        AttackSuccess(flips)


def test_attack_success_has_a_name_that_a_run_folder_keeps(tmp_path: Path) -> None:
    x, y = torch.eye(3).repeat(8, 1), torch.arange(3).repeat(8)
    clients = piebald.clients_from({"a": (x, y), "b": (x, y)}, test=0.5)
    metrics = ["accuracy", {"name": "attack_success", "pairs": [[0, 1]]}]
    model = build_model("mlp", (3,), 3)
    run = piebald.run(recipes.fedavg(lr=0.5), clients, model, rounds=1, metrics=metrics, out=tmp_path / "run")
    run = piebald.resume(tmp_path / "run", clients, model, rounds=2)
    rates = [row["value"] for row in run.scores if row["metric"] == "attack_success" and row["version"] == 2]
    predicted = run.model()(x).argmax(1)
    swapped = {0: 1, 1: 0}
    assert set(rates) == {np.mean([float((predicted[y == a] == b).float().mean()) for a, b in swapped.items()])}
    assert run.metric == "accuracy"


@pytest.mark.parametrize(
    ("metric", "message"),
    [
        ("attack_success", "metric attack_success needs settings: write"),
        ({"name": "attack_success"}, "metric attack_success needs pairs"),
        ({"name": "attack_success", "pairs": [[1, 1]]}, "flips must say what each flipped class became"),
        ({"name": "attack_success", "pairs": [1]}, "metric attack_success needs pairs"),
        ({"name": "attack", "pairs": [[0, 1]]}, "metric with settings.*'attack'"),
        ({"pairs": [[0, 1]]}, "metric with settings"),
    ],
)
def test_a_metric_with_wrong_settings_is_told(metric: Any, message: str) -> None:
    with pytest.raises(SettingError, match=message):
        named_metrics(["accuracy", metric], "classification")


@pytest.mark.full
def test_label_flipping_on_digits_shows_in_the_rate() -> None:
    pairs = ((0, 4), (1, 5))
    rates = {}
    for attackers in (0.0, 0.8):
        changes = (FlipPairs(share=attackers, pairs=pairs),) if attackers else None
        clients = Iid(clients=5, changes=changes).split(data.digits())
        run = piebald.run(
            recipes.fedavg(lr=0.2, epochs=3), clients, build_model("mlp", (1, 8, 8), 10), rounds=6,
            metrics={"accuracy": accuracy, "attack_success": AttackSuccess.of_pairs(pairs)}, evaluate_every=6,
        )  # fmt: skip
        rates[attackers] = [
            row["value"] for row in run.scores if row["split"] == "common" and row["metric"] == "attack_success"
        ][-1]
    assert rates[0.0] < 0.05
    assert rates[0.8] > 0.7


@pytest.mark.full
def test_a_backdoor_marks_the_last_corner_and_is_learnt() -> None:
    trigger = Backdoor(target=7, size=2, fraction=0.5)
    clients = Iid(clients=4, changes=(trigger,)).split(data.digits())
    clean = Iid(clients=4).split(data.digits())
    train, before = clients.rows(0, "train"), clean.rows(0, "train")
    marked = (train.x[:, :, -2:, -2:] == 1).flatten(1).all(1)
    assert 0.3 < float(marked.float().mean()) < 0.7
    assert bool((train.y[marked] == 7).all())
    assert torch.equal(train.x[~marked], before.x[~marked])
    assert torch.equal(train.y[~marked], before.y[~marked])
    assert torch.equal(clients.rows(0, "test").x, clean.rows(0, "test").x)
    assert torch.equal(trigger.mark(torch.zeros(2, 9)), torch.tensor([[0.0] * 7 + [1.0] * 2] * 2))
    model = build_model("mlp", (1, 8, 8), 10)
    run = piebald.run(recipes.fedavg(lr=0.2, epochs=3), clients, model, rounds=5, evaluate_every=0)
    honest = piebald.run(recipes.fedavg(lr=0.2, epochs=3), clean, model, rounds=5, evaluate_every=0)
    assert backdoor_success(run.model(), clean.common, trigger) > 0.9
    assert backdoor_success(honest.model(), clean.common, trigger) < 0.3
    assert math.isnan(backdoor_success(run.model(), Rows(train.x[marked], train.y[marked]), trigger))
