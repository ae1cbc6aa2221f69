"""APFL, pFedMe and Per-FedAvg, whose steps need several gradients, against their papers' algorithms."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import piebald
from piebald import recipes
from piebald.core.errors import SettingError
from piebald.data.partition import clients_from
from tests.regressions import (
    LR,
    ROUNDS,
    START,
    Pair,
    Train,
    along,
    classifier,
    federation,
    labelled,
    mean_of,
    moved,
    parts,
    runner,
    slope,
    two_layers,
)  # fmt: skip


@pytest.fixture
def run(tmp_path: Path) -> Train:
    return runner(tmp_path)


def apfl(alpha: float, steps: int) -> list[Pair]:
    """Deng et al. 2020, algorithm 1 and eq. 11, which is applied at the first step of each round."""
    w, own, mix = START, [START] * 3, [alpha] * 3
    for _ in range(ROUNDS):
        ends = []
        for k, rows in enumerate(federation()):
            here = w
            for step in range(steps):
                mixed = slope(*moved(own[k], here, 1 - mix[k]), rows)
                a, ahead = mix[k], slope(*here, rows)
                if step == 0:
                    inner = sum(((v - u) * g).sum() for v, u, g in zip(own[k], here, mixed, strict=True))
                    mix[k] = float(torch.clamp(a - LR * inner, 0, 1))
                own[k], here = along(own[k], mixed, -LR * a), along(here, ahead, -LR)
            ends.append(here)
        w = mean_of(ends)
    return [moved(v, w, 1 - a) for v, a in zip(own, mix, strict=True)]


def pfedme(lam: float, eta: float, inner: int, steps: int) -> list[Pair]:
    """Dinh et al. 2020, algorithm 1: the personal models of the last round."""
    w, personal = START, [START] * 3
    for _ in range(ROUNDS):
        ends = []
        for k, rows in enumerate(federation()):
            here = t = w
            for _ in range(steps):
                for _ in range(inner):
                    pull = along(slope(*t, rows), along(t, here, -1), lam)
                    t = along(t, pull, -LR)
                here = along(here, along(here, t, -1), -eta * lam)
            personal[k] = t
            ends.append(here)
        w = mean_of(ends)
    return personal


def per_fedavg(alpha: float, delta: float | None, steps: int) -> list[Pair]:
    """Fallah et al. 2020, algorithm 1, without a Hessian or with differences for it, then one step of each client."""
    w = START
    for _ in range(ROUNDS):
        ends = []
        for rows in federation():
            here = w
            for _ in range(steps):
                g = slope(*along(here, slope(*here, rows), -alpha), rows)
                if delta is None:
                    here = along(here, g, -LR)
                    continue
                up, down = (slope(*along(here, g, sign * delta), rows) for sign in (1, -1))
                here = along(here, along(g, along(up, down, -1), -alpha / (2 * delta)), -LR)
            ends.append(here)
        w = mean_of(ends)
    return [along(w, slope(*w, rows), -alpha) for rows in federation()]


ENVELOPE: dict[str, Any] = {"lam": 4.0, "eta": 0.2, "inner_steps": 3}
BY_HAND: dict[str, tuple[str, dict[str, Any], Callable[[], list[Pair]]]] = {
    "APFL": ("apfl", {"alpha": 0.3, "epochs": 3}, lambda: apfl(0.3, 3)),
    "pFedMe": ("pfedme", {**ENVELOPE, "epochs": 2}, lambda: pfedme(4.0, 0.2, 3, 2)),
    "Per-FedAvg (FO)": ("per_fedavg", {"alpha": 0.1, "epochs": 2}, lambda: per_fedavg(0.1, None, 2)),
    "Per-FedAvg (HF)": (
        "per_fedavg",
        {"alpha": 0.1, "hessian": "differences", "epochs": 2},
        lambda: per_fedavg(0.1, 0.01, 2),
    ),
}


@pytest.mark.parametrize("engine", ["sequential", "batched"])
@pytest.mark.parametrize("case", BY_HAND)
def test_models_are_those_of_the_papers_algorithm(run: Train, case: str, engine: str) -> None:
    name, settings, by_hand = BY_HAND[case]
    ended = run(name, engine, **settings)
    for client, expected in enumerate(by_hand()):
        for mine, theirs in zip(parts(ended.model(client)), expected, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=2e-6)


@pytest.mark.parametrize(
    ("name", "settings", "plain"),
    [
        ("apfl", {"alpha": 0.0, "adaptive": False}, {}),
        ("per_fedavg", {"alpha": 0.0}, {}),
        ("per_fedavg", {"alpha": 0.0, "hessian": "differences"}, {}),
        ("pfedme", {"lam": 4.0, "eta": 0.25, "inner_steps": 1, "steps": 1}, {"steps": 1}),
    ],
)
def test_settings_without_effect_leave_fedavg(run: Train, name: str, settings: dict[str, Any], plain: Any) -> None:
    """With batches of three rows: in the same order, and the last one shorter.  (pFedMe: the global model.)"""
    length = {} if "steps" in settings else {"epochs": 2}
    one, two = run(name, batch=3, **length, **settings), run("fedavg", batch=3, **length, **plain)
    for client in (None,) if name == "pfedme" else (None, 0, 1, 2):
        for mine, theirs in zip(parts(one.model(client)), parts(two.model(client)), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-7)


def test_the_own_model_of_apfl_with_all_the_weight_is_local_training(run: Train) -> None:
    more = {"batch": 3, "epochs": 2}
    mixed, alone = run("apfl", alpha=1.0, adaptive=False, **more), run("local", **more)
    for client in range(3):
        for mine, theirs in zip(parts(mixed.model(client)), parts(alone.model(client)), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-7)


def losses(models: list[Tensor]) -> float:
    """The sum of the clients' losses with a linear model each."""
    return sum(float((x @ w.T - y).square().mean()) for w, (x, y) in zip(models, federation(), strict=True))


def line(seed: int) -> nn.Module:
    module = nn.Linear(2, 1, bias=False)
    nn.init.constant_(module.weight, 0.5)
    return module


def test_the_mixtures_of_apfl_fit_their_clients_and_weights_stay_between_0_and_1(run: Train) -> None:
    ended = run("apfl", model=line, rounds=10, epochs=3)
    whole = [ended.model(client).weight.detach() for client in range(3)]
    assert losses(whole) < 0.7 * losses([ended.model().weight.detach()] * 3)
    for rate in (0.05, 0.2):  # with the larger one, a step of the weight would lead far beyond
        ended = run("apfl", model=line, rounds=4, lr=rate, epochs=3)
        weights = [float(ended._store.client_state(client)["alpha"]) for client in range(3)]
        assert len(set(weights)) == 3
        assert all(0 <= one <= 1 for one in weights)


@pytest.mark.full
def test_the_personal_models_of_pfedme_minimize_the_loss_near_the_global_one(run: Train) -> None:
    """Where t is best, grad f(t) + lam (t - w) = 0, with w the model before its last step; and lam keeps t near."""
    distances = []
    for lam in (2.0, 8.0):
        ended = run("pfedme", rounds=1, lam=lam, eta=0.01, inner_steps=100, steps=1, lr=0.1)
        for client, rows in enumerate(federation()):
            t = parts(ended.model(client))
            for gradient, away in zip(slope(*t, rows), along(t, START, -1), strict=True):
                torch.testing.assert_close(gradient, -lam * away, rtol=1e-3, atol=1e-4)
        distances.append(float(along(parts(ended.model(0)), START, -1)[0].norm()))
    assert distances[1] < 0.7 * distances[0]


@pytest.mark.full
def test_per_fedavg_is_better_after_one_step_than_fedavg_is(run: Train) -> None:
    alpha, after = 0.2, {}
    for label, name, more in (
        ("FedAvg", "fedavg", {}),
        ("FO", "per_fedavg", {"alpha": alpha}),
        ("HF", "per_fedavg", {"alpha": alpha, "hessian": "differences"}),
    ):
        w = run(name, model=line, rounds=60, lr=0.2, **more).model().weight.detach()
        after[label] = losses([w - alpha * 2 * (x @ w.T - y).T @ x / len(x) for x, y in federation()])
    assert after["HF"] < after["FO"] < after["FedAvg"]  # the less of the gradient is left out, the better


def test_a_step_may_ask_for_batches_of_independent_orders(run: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each order passes over all rows, so gradients of an epoch have one mean, but its batches are others."""
    seen: list[list[Tensor]] = []

    def ask(_: Any, at: Any, slopes: Any) -> dict[str, Tensor]:
        seen.append([slopes(at["model"], batch).gradient for batch in (0, 1, 1, 2)])
        return {}

    monkeypatch.setattr("piebald.methods.training.meta_learning.MetaLearning.step", ask)
    run("per_fedavg", rounds=1, cohort=1, batch=4, hessian="differences")
    first, second = seen
    for batch in (1, 3):
        assert not torch.allclose(first[0], first[batch])
        torch.testing.assert_close(first[0] + second[0], first[batch] + second[batch])
    assert torch.equal(first[1], first[2])


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("apfl", {"alpha": 1.5}, "alpha must be at most 1"),
        ("apfl", {"momentum": 0.9}, "momentum cannot be used with mixed_models, whose steps are its own: leave it out"),
        ("pfedme", {"lam": 30.0}, "eta \\* lam must be at most 1"),
        ("pfedme", {"optimizer": "adamw"}, "optimizer cannot be used with moreau_envelope"),
        ("per_fedavg", {"hessian": "exact"}, "hessian must be"),
        ("per_fedavg", {"step_schedule": {"kind": "cosine"}}, "step_schedule cannot be used with meta_learning"),
        (
            "fedrod",
            {"parameter_groups": [{"layers": "*", "lr": 0.1}]},
            "parameter_groups cannot be used with two_heads",
        ),
    ],
)
def test_settings_that_cannot_work(name: str, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingError, match=message):
        recipes.make(name, **settings)


def test_rows_that_are_fetched_one_client_at_a_time_are_fetched_once_for_all_steps() -> None:
    asked: list[int] = []
    fetched: list[int] = []

    def load(client: int) -> Any:
        asked.append(client)
        return {"train": federation()[client]}

    settings: dict[str, Any] = {"rounds": 1, "evaluate_every": 0}
    where = piebald.Simulator(engine="batched", workers=0)
    for name in ("fedavg", "apfl"):
        lazy = piebald.LazyClients(3, load)
        one = piebald.run(recipes.make(name, batch=3, epochs=4), lazy, two_layers, runtime=where, **settings)
        fetched.append(len(asked))
    assert fetched[1] - fetched[0] <= fetched[0]  # not once more for each of the 12 steps
    whole = piebald.run(
        recipes.apfl(batch=3, epochs=4), clients_from(federation(), test=0.0), two_layers, runtime=where, **settings
    )
    assert all(torch.equal(a, b) for a, b in zip(parts(one.model()), parts(whole.model()), strict=True))


@pytest.mark.full
@pytest.mark.parametrize("name", ["fedrep", "fedbabu", "fedrod", "apfl", "pfedme", "per_fedavg"])
def test_a_newcomer_adapts_the_run_and_a_clients_model_is_exported(name: str, tmp_path: Path) -> None:
    held = clients_from(labelled(), test=0.3)
    run = piebald.run(recipes.make(name, lr=LR), held, classifier, rounds=1, out=tmp_path / "run")
    rows = held.rows(0, "train")
    assert "fine_tune" in [one.name for one in piebald.adapt(run, (rows.x, rows.y), epochs=1, validation=0.3).methods]
    written = run.save(tmp_path / "own.safetensors", client=1)
    own, stored = run.model(1).state_dict(), load_file(written)
    assert all(torch.equal(own[key], stored[key]) for key in own)
