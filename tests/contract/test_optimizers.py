"""Every optimizer of clients, on every engine, ends where that of `torch.optim` ends (the engine "reference")."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from piebald.core.errors import SettingError

from .conftest import DISTINCT, assert_same, carry_out, federation, method, plain_network, reference, vector

CASES: dict[str, dict[str, Any]] = {
    "sgd, nesterov": {"optimizer": {"kind": "sgd", "nesterov": True}, "momentum": 0.9, "weight_decay": 0.01},
    "sgd, dampening": {"optimizer": {"kind": "sgd", "dampening": 0.3}, "momentum": 0.9},
    "adam": {"optimizer": "adam", "lr": 0.01, "weight_decay": 0.1},
    "adam, amsgrad": {"optimizer": {"kind": "adam", "amsgrad": True, "betas": [0.8, 0.9]}, "lr": 0.01},
    "adamw": {"optimizer": "adamw", "lr": 0.01, "weight_decay": 0.1},
    "rmsprop": {"optimizer": {"kind": "rmsprop", "centered": True}, "lr": 0.01, "momentum": 0.5},
    "adagrad": {"optimizer": {"kind": "adagrad", "lr_decay": 0.1, "initial_accumulator_value": 0.2}},
}
# What stands beside an optimizer: nothing, or a proximal term, clipping, groups and both kinds of schedules.
BESIDE: dict[str, dict[str, Any]] = {
    "alone": {},
    "with all": {
        "clip": 0.5,
        "parameter_groups": [{"layers": "*.bias", "weight_decay": 0.0, "lr": 0.02}],
        "step_schedule": {"kind": "cosine", "warmup": 0.3},
        "lr_schedule": {"kind": "exponential", "rate": 0.7},
    },
}


@pytest.mark.parametrize(
    "simulator",
    [
        {"engine": "sequential"},
        {"engine": "batched", "stack": 3},
        pytest.param({"engine": "vmapped", "stack": 3}, marks=pytest.mark.full),
        pytest.param({"engine": "batched", "stack": 2, "workers": 2}, marks=pytest.mark.full),
    ],
    ids=str,
)
@pytest.mark.parametrize(
    "state",
    ["fresh", pytest.param("kept", marks=pytest.mark.full), pytest.param("averaged", marks=pytest.mark.long)],
)
@pytest.mark.parametrize("beside", BESIDE)
@pytest.mark.parametrize("case", CASES)
def test_equals_torch(case: str, beside: str, state: str, simulator: dict[str, Any]) -> None:
    recipe = method("fedprox", optimizer_state=state, **CASES[case], **BESIDE[beside])
    expected = reference(recipe, model=plain_network(), rounds=2)
    assert_same(expected, carry_out(recipe, model=plain_network(), rounds=2, simulator=simulator))


def refuses(name: str) -> bool:
    """Whether a method is defined for plain SGD only."""
    return name in ("scaffold", "fednova", "pfedme", "fedrod", "apfl", "per_fedavg")


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "engine"),
    list(zip([name for name in DISTINCT if not refuses(name)], itertools.cycle(["sequential", "vmapped", "batched"]))),
)
def test_methods_with_adamw(name: str, engine: str) -> None:
    # a bias in front of batch norm has no gradient but rounding, which a small eps would blow up
    recipe = method(name, optimizer={"kind": "adamw", "eps": 0.1})
    assert_same(reference(recipe), carry_out(recipe, simulator={"engine": engine, "stack": 3}))


TORCH: dict[str, Any] = {
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "rmsprop": torch.optim.RMSprop,
    "adagrad": torch.optim.Adagrad,
}
ROUNDS, STEPS, RATE = 2, 3, 0.01


def smooth_network() -> nn.Module:
    """Without dropout, whose random numbers a loop of one's own has not."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))


def by_hand(kind: str, method: str) -> Tensor:
    """Three steps of each client on all its rows in two rounds, as one would write them with torch.

    "fedprox": a proximal term of 0.5, clipping to 0.3, biases with 2 * RATE and without decay, rates that fall within
    the task and over rounds.  "dp_sgd": rows clipped to 0.2, no noise.  "feddyn": algorithm 1 of Acar et al. 2021.
    """
    clients, model, alpha = federation(), smooth_network(), 0.3
    rows_of = [clients.rows(client, "train") for client in range(len(clients))]
    held = [(one.x, one.y) for one in rows_of]
    zeros = {name: torch.zeros_like(one) for name, one in model.named_parameters()}
    own, total = [copy.deepcopy(zeros) for _ in held], copy.deepcopy(zeros)
    for turn in range(ROUNDS):
        ended = []
        for client, (x, y) in enumerate(held):
            here, sent = copy.deepcopy(model), dict(model.named_parameters())
            named = dict(here.named_parameters())
            groups = [{"params": [one]} for one in named.values()]
            optimizer = TORCH[kind](groups, lr=RATE, weight_decay=0.1)
            for step in range(STEPS):
                gradients = {name: torch.zeros_like(one) for name, one in named.items()}
                for rows in [slice(row, row + 1) for row in range(len(x))] if method == "dp_sgd" else [slice(None)]:
                    loss = nn.functional.cross_entropy(here(x[rows]), y[rows])
                    found = torch.autograd.grad(loss, list(named.values()))
                    length = torch.cat([one.flatten() for one in found]).norm()
                    share = min(1.0, 0.2 / float(length)) / len(x) if method == "dp_sgd" else 1.0
                    for name, one in zip(named, found, strict=True):
                        gradients[name] += share * one
                for name, one in named.items():
                    away = one.detach() - sent[name].detach()
                    more = {"fedprox": 0.5 * away, "feddyn": alpha * away - own[client][name]}
                    one.grad = gradients[name] + more.get(method, torch.zeros(()))
                if method == "fedprox":
                    nn.utils.clip_grad_norm_(named.values(), 0.3)
                    for name, group in zip(named, optimizer.param_groups, strict=True):
                        bias = name.endswith("bias")
                        group["lr"] = RATE * (2 if bias else 1) * (1 - step / STEPS) * 0.5**turn
                        group["weight_decay"] = 0.0 if bias else 0.1
                optimizer.step()
            for name, one in named.items():
                own[client][name] -= alpha * (one.detach() - sent[name].detach())
            ended.append({name: one.detach() for name, one in named.items()})
        weights = [1.0] * len(held) if method == "feddyn" else [float(len(x)) for x, _ in held]
        with torch.no_grad():
            for name, one in model.named_parameters():
                mean = sum(w * each[name] for w, each in zip(weights, ended, strict=True)) / sum(weights)
                total[name] -= alpha * (mean - one)
                one.copy_(mean - total[name] / alpha if method == "feddyn" else mean)
    return torch.cat([one.detach().flatten() for one in model.parameters()])


SETTINGS: dict[str, dict[str, Any]] = {
    "fedprox": {
        "mu": 0.5,
        "clip": 0.3,
        "parameter_groups": [{"layers": "*.bias", "weight_decay": 0.0, "lr": 2 * RATE}],
        "step_schedule": "linear",
        "lr_schedule": {"kind": "exponential", "rate": 0.5},
    },
    "dp_sgd": {"clip": 0.2, "noise": 1e-9},
    "feddyn": {"alpha": 0.3},
}


@pytest.mark.parametrize(
    ("kind", "name"),
    [("adam", "fedprox"), ("adagrad", "fedprox"), ("adamw", "feddyn"), ("adamw", "dp_sgd"), ("rmsprop", "dp_sgd")],
)
def test_equals_a_loop_of_torch_written_by_hand(kind: str, name: str) -> None:
    fields = {"optimizer": kind, "lr": RATE, "weight_decay": 0.1, "steps": STEPS, "batch": 1000, "cohort": 1.0}
    recipe, where = method(name, **fields, **SETTINGS[name]), {"engine": "batched", "stack": 3}
    run = carry_out(recipe, model=smooth_network(), rounds=ROUNDS, simulator=where, evaluate_every=0)
    torch.testing.assert_close(vector(run), by_hand(kind, name), rtol=1e-4, atol=3e-6)


@pytest.mark.full
def test_kept_state_is_no_state_of_a_model_of_another_width() -> None:
    recipe = method("heterofl", optimizer={"kind": "adamw", "eps": 0.1}, optimizer_state="kept")
    assert_same(reference(recipe, rounds=2), carry_out(recipe, rounds=2, simulator={"engine": "batched", "stack": 3}))


@pytest.mark.parametrize("name", ["local", "fedproto"])
def test_nothing_is_averaged_where_nothing_is_shared(name: str) -> None:
    with pytest.raises(SettingError, match="has no average where nothing is shared: choose 'kept'"):
        carry_out(method(name, optimizer="adam", optimizer_state="averaged"))
