"""Settings of single clients: epochs, steps, batch, lr and shares of the average, by name or pattern."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import piebald
from piebald import recipes
from piebald.contracts import Update
from piebald.core.errors import SettingError
from piebald.experiments.file import ExperimentSettings
from piebald.experiments.run_settings import RunSettings
from piebald.federation.hub.run_terms import RunTerms, terms
from piebald.federation.site.work_limits import WorkLimits
from piebald.methods.aggregation.linear import Linear
from piebald.methods.recipe import Recipe
from piebald.runs.prepare import prepare
from tests.fakes import seeded, simulate

draw = np.random.default_rng(4)
SIZES = {"north": 12, "ward 1": 20, "ward 2": 8, "south": 16}
PAIRS = {name: (draw.normal(size=(size, 3)).astype(np.float32), np.arange(size) % 2) for name, size in SIZES.items()}
ROWS = {name: {"train": pair, "test": pair} for name, pair in PAIRS.items()}
TABLE = {"north": {"epochs": 3, "lr": 0.2}, "ward 1": {"steps": 5}, "ward *": {"batch": 4, "steps": 2}}
ENGINES: list[dict[str, Any]] = [
    {"engine": "sequential", "stack": 4},
    {"engine": "batched", "stack": 4},
    {"engine": "vmapped", "stack": 4},
    {"engine": "reference"},
    {"engine": "sequential", "workers": 2},
]


def model() -> nn.Module:
    return seeded(lambda: nn.Linear(3, 2))


def steps(run: piebald.Run) -> dict[str, int]:
    return {run.names[row["client"]]: row["steps"] for row in run.results}


@pytest.mark.parametrize("engine", ENGINES, ids=str)
def test_each_client_trains_as_its_table_says(engine: dict[str, Any]) -> None:
    """What a client sends is what it sends where the whole recipe has its settings."""
    recipe = recipes.fedavg(lr=0.1, batch=5).for_clients(TABLE)
    run = simulate(recipe, ROWS, model(), rounds=1, simulator=engine)
    assert steps(run) == {"north": 9, "ward 1": 5, "ward 2": 2, "south": 4}
    start = run.work.initial
    ends = [
        simulate(recipes.fedavg(**settings), {name: ROWS[name]}, model(), rounds=1).start()
        for name, settings in {
            "north": {"lr": 0.2, "batch": 5, "epochs": 3},
            "ward 1": {"lr": 0.1, "batch": 4, "steps": 5},
            "ward 2": {"lr": 0.1, "batch": 4, "steps": 2},
            "south": {"lr": 0.1, "batch": 5},
        }.items()
    ]
    sizes = np.array([row["examples"] for row in run.results], dtype=float)
    mean = sum(size * (end - start) for size, end in zip(sizes, ends, strict=True)) / sizes.sum()
    torch.testing.assert_close(run.start() - start, mean.float(), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", ["scaffold", "fedprox", "ditto", "fednova", "feddyn"])
def test_other_methods_take_the_table(name: str) -> None:
    recipe = recipes.make(name, lr=0.1, batch=5, clients=TABLE)
    assert steps(simulate(recipe, ROWS, model(), rounds=1))["ward 1"] == 5


def test_shares_are_what_was_agreed_also_in_partial_cohorts() -> None:
    table = {"north": {"share": 0.4}, "ward *": {"share": 0.2}, "*": {"share": 0.1}}
    recipe = recipes.fedavg(lr=0.1).for_clients(table)
    run = simulate(recipe, ROWS, model(), rounds=1)
    weights = {run.names[row["client"]]: row["weight"] for row in run.results}
    assert weights == pytest.approx({"north": 4 / 9, "ward 1": 2 / 9, "ward 2": 2 / 9, "south": 1 / 9})
    half = simulate(recipe.with_(scheduling={"kind": "synchronous", "cohort": 2}), ROWS, model(), rounds=4)
    agreed = {"north": 0.4, "ward 1": 0.2, "ward 2": 0.2, "south": 0.1}
    for version in range(1, 5):
        rows = {half.names[row["client"]]: row["weight"] for row in half.results if row["version"] == version}
        whole = sum(agreed[name] for name in rows)
        assert rows == pytest.approx({name: agreed[name] / whole for name in rows})


def test_shares_have_no_place_under_masks() -> None:
    """One of a billionth for all clients but one would leave that one's update in the sum."""
    recipe = recipes.fedavg(lr=0.1).for_clients({"north": {"share": 3.0}, "*": {"share": 1.0}})
    with pytest.raises(SettingError, match=r"aggregation\.shares says something of single clients"):
        recipe.with_(transforms=["secure_aggregation"])


class ByParity(Linear):
    """A weight of one's own, which is told whose update it is."""

    def weight(self, update: Update, staleness: int = 0) -> float:
        return 1.0 + update.client % 2


def test_a_weight_of_ones_own_is_told_whose_update_it_is() -> None:
    run = simulate(recipes.fedavg().with_(aggregation=ByParity()), ROWS, model(), rounds=1)
    assert [row["weight"] for row in sorted(run.results, key=lambda row: row["client"])] == pytest.approx(
        [1 / 6, 2 / 6, 1 / 6, 2 / 6]
    )


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: recipes.fedavg(clients={"west": {"epochs": 2}}), "clients has an entry for 'west', but no client has"),
        (lambda: recipes.fedavg().for_clients({"north": {"share": 0.5}}), "have none for client 'ward 1': name it"),
        (lambda: recipes.fedavg(clients={"*": {"epochs": 0}}), "'*': epochs must be at least 1, got 0"),
        (lambda: recipes.fedavg(clients={"*": {"pace": 2}}), "pace"),
        (lambda: recipes.fedavg(epochs=[1, 2, 1, 5]), "epochs must be one number for all clients"),
        (lambda: recipes.ditto(lr={"north": 0.1}), "or in recipe.for_clients"),
        (lambda: recipes.fedavg(clients={"*": {"epochs": 1, "steps": 2}}), "epochs and steps both say"),
        (lambda: recipes.fedavg().for_clients({"*": {"share": -1.0}}), "must be above 0"),
        (lambda: recipes.fedavg().with_(aggregation="median").for_clients({"*": {"share": 1.0}}), "leave share out"),
        (lambda: recipes.dp_sgd(clients={"*": {"epochs": 2}}), "states one privacy budget for all clients"),
    ],
)
def test_what_cannot_be_is_refused_in_words(make: Any, message: str) -> None:
    with pytest.raises(SettingError) as caught:
        simulate(make(), ROWS, model(), rounds=1)
    assert message in str(caught.value)


def test_a_file_has_the_table_and_a_resumed_run_goes_on_with_it(tmp_path: Path) -> None:
    text = """
rounds = 2
data = { name = "digits" }
partition = { kind = "iid", clients = 3, limit = 90 }
model = { name = "logistic" }
recipe = { name = "fedavg" }
[clients."0"]
steps = 4
share = 0.5
[clients."*"]
batch = 6
share = 0.25
"""
    (tmp_path / "run.toml").write_text(text)
    settings = ExperimentSettings.load(tmp_path / "run.toml")
    again = ExperimentSettings.of_table(settings.table(), "again")
    for read in (settings, again):
        recipe = read.plan().recipes["fedavg"]
        assert recipe.training.of_client("0").steps == 4
        assert recipe.training.of_client("2").batch == 6
        assert recipe.aggregation.shares == {"0": 0.5, "*": 0.25}
    rebuilt = recipes.rebuild(recipe.model_dump())
    assert rebuilt.model_dump() == recipe.model_dump()
    out = tmp_path / "run"
    simulate(recipe, read.clients(), read.plan().model, rounds=1, out=out).close()
    resumed = piebald.resume(out, read.clients(), read.plan().model, rounds=2)
    assert {row["steps"] for row in resumed.results if row["client"] == 0} == {4}
    assert {row["weight"] for row in resumed.results} == {0.5, 0.25}


def prepared(recipe: Recipe) -> Any:
    return prepare(recipe, ROWS, model(), RunSettings(rounds=1))


def test_a_site_learns_its_own_settings_alone_and_its_policy_caps_them() -> None:
    table = {"north": {"epochs": 3}, "*": {"batch": 4, "epochs": 9}, "s*": {"steps": 7}}
    plan = prepared(recipes.fedavg(lr=0.1, steps=5).for_clients(table))
    read = RunTerms.read(json.loads(terms(plan.work, {}, list(ROWS), list(ROWS))))  # where a table has no order
    north, south = read.of(0).training, read.of(3).training
    assert (north["epochs"], north["batch"], "steps" in north, "clients" in north) == (3, 4, False, False)
    assert (south["steps"], south["batch"], "clients" in south) == (7, 4, False)
    limits = WorkLimits(epochs=2)
    assert limits.terms_reject_reason(read.of(0)) == "the run's epochs are 3, this site allows at most 2"
    assert limits.terms_reject_reason(read.of(3)) is None
