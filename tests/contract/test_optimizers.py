"""Every optimizer of clients, on every engine, ends where that of `torch.optim` ends (the engine "reference")."""

from __future__ import annotations

from typing import Any

import pytest

from .conftest import DISTINCT, assert_same, carry_out, method, plain_network, reference

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
@pytest.mark.parametrize("state", ["fresh", pytest.param("kept", marks=pytest.mark.full), "averaged"])
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
@pytest.mark.parametrize("name", [name for name in DISTINCT if not refuses(name)])
def test_methods_with_adamw(name: str) -> None:
    # a bias in front of batch norm has no gradient but rounding, which a small eps would blow up
    recipe = method(name, optimizer={"kind": "adamw", "eps": 0.1})
    for engine in ("sequential", "vmapped", "batched"):
        assert_same(reference(recipe), carry_out(recipe, simulator={"engine": engine, "stack": 3}))
