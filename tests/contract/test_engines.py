"""Every recipe, on every engine, gives the numbers of the plain reference."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from piebald import recipes
from piebald.data.partition import FastSlow

from .conftest import TABLE, VARIANTS, assert_same, carry_out, method, network, plain_network, reference, tier


def full(parameter: object) -> Any:
    """A parameter of the full tier."""
    return pytest.param(parameter, marks=pytest.mark.full)


QUICK = [{"engine": "sequential"}, {"engine": "batched", "stack": 3}]
FULL = [{"engine": "vmapped", "stack": 3}, {"engine": "sequential", "workers": 2}]
# One of these for each recipe in the full tier, all of them in the long one.
IN_TURN = [
    {"engine": "sequential", "stack": 3},
    {"engine": "vmapped", "stack": 1},
    {"engine": "vmapped", "stack": 8},
    {"engine": "batched", "stack": 2, "workers": 2},
    {"engine": "vmapped", "stack": 2, "workers": 2},
]
CASES = [
    *(  # in the quick tier each recipe on one of these, by turns
        (name, engine, () if place % len(QUICK) == turn else pytest.mark.full)
        for place, name in enumerate(TABLE)
        for turn, engine in enumerate(QUICK)
    ),
    *((name, engine, tier(name)) for name in TABLE for engine in FULL),
    *(
        (name, engine, pytest.mark.full if (place - turn) % len(IN_TURN) == 0 else pytest.mark.long)
        for place, name in enumerate(TABLE)
        for turn, engine in enumerate(IN_TURN)
    ),
]
# (networks of every kind run on the batched engine in test_batched.py)
MANY = [full({"engine": "sequential"}), {"engine": "vmapped", "stack": 3}]


def test_the_table_has_every_recipe() -> None:
    assert sorted(TABLE) == recipes.names()


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "simulator"), [pytest.param(*case, marks=marks, id=f"{case[0]}-{case[1]}") for *case, marks in CASES]
)
def test_equals_the_reference(name: str, simulator: dict[str, object]) -> None:
    assert_same(reference(method(name)), carry_out(method(name), simulator=simulator))


@pytest.mark.full
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(
    "base", ["fedavg", full("fedprox"), full("ditto"), full("dp_sgd"), full("fine_tuned"), full("hdafl")]
)
@pytest.mark.parametrize("simulator", MANY, ids=str)
def test_settings_of_training(base: str, variant: str, simulator: dict[str, object]) -> None:
    recipe = method(base, **VARIANTS[variant])
    assert_same(reference(recipe), carry_out(recipe, simulator=simulator))


OWN_NORM_AND_HEAD = {"kind": "all_except", "private_layers": ["classifier", "1"]}  # noise refuses norms that are shared

# Components on several axes at once, which no single paper has together.
COMPOSED = {
    "private heads, asynchronous, noise at the client": method("hdafl").with_(
        sharing=OWN_NORM_AND_HEAD,
        scheduling={"kind": "asynchronous", "cohort": 3},
        transforms=[{"kind": "gaussian", "clip": 0.1, "where": "client"}],
    ),
    "private batch norm, momentum at the server, noise there": method("fedbn").with_(
        server_optimizer={"kind": "momentum", "beta": 0.5},
        transforms=[{"kind": "gaussian", "clip": 0.1, "noise": 0.5}],
        aggregation="equal_weighted",
    ),
    "Ditto with private heads, by gradient norm": method("ditto").with_(
        sharing={"kind": "all_except", "private_layers": "classifier"}, aggregation={"kind": "gradient_norm_weighted"}
    ),
    "private conditioning, asynchronous, noise at the client": method("cgau").with_(
        sharing={"kind": "all_except", "private_layers": ["conditioning", "1"]},
        scheduling={"kind": "asynchronous", "cohort": 3},
        transforms=[{"kind": "gaussian", "clip": 0.1, "where": "client"}],
    ),
    "private conditioning, asynchronous, weighted by validation": method("async_dvw").with_(
        sharing={"kind": "all_except", "private_layers": "conditioning"}
    ),
    "SCAFFOLD with a private head, its variates in a secure aggregation": method("scaffold").with_(
        sharing={"kind": "all_except", "private_layers": "classifier"}, transforms=[{"kind": "secure_aggregation"}]
    ),
    "hidden rows, a proximal term, a private head, momentum, asynchronous": method(
        "dp_sgd", mu=0.5, momentum=0.5
    ).with_(
        sharing={"kind": "all_except", "private_layers": "classifier"}, scheduling={"kind": "asynchronous", "cohort": 3}
    ),
    "private heads, asynchronous, noise at the client, the largest tenth": method("hdafl").with_(
        sharing=OWN_NORM_AND_HEAD,
        scheduling={"kind": "asynchronous", "cohort": 3},
        transforms=[{"kind": "gaussian", "clip": 0.1, "where": "client"}, {"kind": "top_k", "share": 0.1}],
    ),
    "DistFL, where clients vote": method("distfl", normal="vote"),
    "SCAFFOLD, asynchronous, with a private head": method("scaffold").with_(
        sharing={"kind": "all_except", "private_layers": "classifier"}, scheduling={"kind": "asynchronous", "cohort": 3}
    ),
}


@pytest.mark.full
@pytest.mark.parametrize("case", [case if place % 2 else full(case) for place, case in enumerate(COMPOSED)])
@pytest.mark.parametrize("simulator", [full({"engine": "sequential", "workers": 2}), MANY[1]], ids=str)
def test_components_compose(case: str, simulator: dict[str, object]) -> None:
    fleet = FastSlow(fast=1.0, slow_factor=2.5, share_slow=0.4)
    expected = reference(COMPOSED[case], rounds=6, simulator={"fleet": fleet})
    assert_same(expected, carry_out(COMPOSED[case], rounds=6, simulator={**simulator, "fleet": fleet}))


@pytest.mark.parametrize("model", [plain_network, network])
def test_short_batches_are_neither_dropped_nor_counted_twice(model: object) -> None:
    recipe = method("fedavg", batch=9)
    assert_same(
        reference(recipe, model=model), carry_out(recipe, model=model, simulator={"engine": "vmapped", "stack": 5})
    )


def test_a_model_that_draws_its_own_noise_runs_one_by_one_and_repeats() -> None:
    import torch

    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x + (0.1 * torch.randn_like(x) if self.training else 0))

    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Noisy()
    one = carry_out(method("fedavg"), model=model, simulator={"engine": "vmapped", "stack": 3})
    two = carry_out(method("fedavg"), model=model, simulator={"engine": "sequential"})
    assert_same(one, two)


def test_auto_chooses_an_engine_that_a_resumed_run_will_use() -> None:
    run = carry_out(method("fedavg"), simulator={"engine": "auto", "workers": None})
    assert run.meta["runtime"]["engine"] in ("sequential", "vmapped", "batched")
    assert run.meta["runtime"]["workers"] is not None
    assert_same(reference(method("fedavg")), run)


def test_bfloat16_stays_near() -> None:
    full = carry_out(method("fedavg"))
    half = carry_out(method("fedavg"), simulator={"bfloat16": True})
    assert half.rounds[-1]["loss"] == pytest.approx(full.rounds[-1]["loss"], rel=0.05)
    assert half.rounds[-1]["loss"] != full.rounds[-1]["loss"]
