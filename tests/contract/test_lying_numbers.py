"""No number that a client tells stops a run of any recipe, bends the others' part of it, or breaks its report."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
import torch

import piebald
from piebald.cli import main
from piebald.contracts import Cohort, Result, ServerContext, Update
from piebald.core.tensor_store import TensorStore
from piebald.methods.aggregation.agnostic import on_simplex
from piebald.methods.aggregation.foolsgold import Foolsgold
from piebald.methods.aggregation.linear import ExampleWeighted
from piebald.methods.aggregation.q_fair import QFair
from piebald.methods.aggregation.tilted import Tilted
from piebald.methods.training.base import Trainer
from piebald.runtimes.simulation.simulation import Simulation
from piebald.server.cluster_models import ClusterModels
from piebald.server.cluster_state import Counted, ModelCache
from tests.contract.conftest import HERE, SIZES, TABLE, carry_out, federation, fitting, method

LIAR = 1
EXTREMES = [0.0, 1e-300, 3e38, math.inf, math.nan, -3e38, 7.0]


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What clients say in place of their numbers, by client: of updates, and of answers to questions."""
    says: dict[str, Any] = {"metric": {}}
    real = Simulation.next

    def heard(self: Simulation, until: float = math.inf) -> Result | None:
        result = real(self, until)
        if result is None or result.update is None or (client := result.task.client) not in says["metric"]:
            return result
        update = dataclasses.replace(
            result.update,
            metrics=dict.fromkeys(result.update.metrics, says["metric"][client]),
            examples=says.get("examples", result.update.examples),
            steps=says.get("steps", result.update.steps),
        )
        return dataclasses.replace(result, update=update)

    monkeypatch.setattr(Simulation, "next", heard)
    return says


def lied_to(name: str, **options: Any) -> piebald.Run:
    cohort = {} if name in ("fedasync", "fedbuff", "async_fedavg", "async_dvw", "adaptive_dvw") else {"cohort": 1.0}
    # with a limit of rows updates come one by one, as from sites, and are not summed where they are made
    return carry_out(method(name, **cohort), **{"rounds": 2, "evaluate_every": 1, "max_examples": 10**6} | options)


SOME = {"large": EXTREMES[:3], "none": EXTREMES[3:5], "out of bounds": EXTREMES[5:]}
SOME["ends of what a float holds"] = [1.7e308, 5e-324, -0.0, 1e154]


@pytest.mark.parametrize(  # each recipe by some of them in the tier that is always run, by all of them in the long one
    ("name", "numbers"),
    [
        pytest.param(
            name, SOME[kind], id=f"{name}-{kind}", marks=pytest.mark.long if (row + turn) % 3 else pytest.mark.full
        )
        for row, name in enumerate(sorted(TABLE))
        for turn, kind in enumerate(SOME)
    ],
)
def test_each_extreme_number_through_each_recipe(
    name: str, numbers: list[float], told: dict[str, Any], tmp_path: Path
) -> None:
    told |= {"metric": dict(enumerate(numbers, start=1))}
    run = lied_to(name, out=tmp_path / "run")
    assert bool(run.start().isfinite().all())
    others = [row for row in run.results if row["client"] not in told["metric"]]
    assert {row["status"] for row in others} == {"ok"}
    assert all(math.isfinite(row["weight"]) for row in run.results)
    assert main(["report", str(tmp_path / "run"), "--out", str(tmp_path / "page")]) in (None, 0)


@pytest.mark.parametrize(("name", "numbers"), [("fednova", {"steps": 1}), ("fednova", {"steps": 10**9})])
def test_steps_that_rows_do_not_allow_are_refused(name: str, numbers: dict[str, int], told: dict[str, Any]) -> None:
    """Before, one step in place of four gave a client of FedNova two thirds of the average."""
    told |= {"metric": {LIAR: 0.5}, **numbers}
    run = lied_to(name)
    (refused,) = [row for row in run.results if row["status"] == "refused"]
    assert refused["client"] == LIAR
    assert f"{SIZES[LIAR]} rows take at" in refused["reason"]


def test_a_score_beyond_its_bounds_is_in_no_mean(told: dict[str, Any]) -> None:
    told |= {"metric": {LIAR: 7.0}}
    run = lied_to("fedavg")
    assert LIAR not in run.per_client
    assert set(run.per_client) == {0, 2, 3, 4}
    assert "lies between 0 and 1" in {row["reason"] for row in run.failures}.pop()


@pytest.mark.parametrize("name", ["accuracy", "mae", "r2"])
def test_a_metric_of_the_users_own_has_no_bounds(name: str) -> None:
    """Before, a share in percent called accuracy was refused from all but those where it was 0."""

    def percent(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return 300.0 * (outputs.argmax(1) == targets).float() - 100

    recipe = method("fedavg", cohort=1.0)
    run = piebald.run(
        recipe, federation(), fitting(recipe), rounds=1, metrics={name: percent}, runtime=piebald.Simulator(**HERE)
    )
    assert set(run.per_client) == set(range(len(SIZES)))
    assert not run.failures


def test_the_learning_rate_is_the_servers(told: dict[str, Any]) -> None:
    """Before, a rate of 1e-300 that one site told froze q-FedAvg."""
    update = Update({"model": torch.ones(1)}, 10, 1, {"initial_loss": 1.0, "lr": 1e-300}, 1.0)
    trainer = method("qfedavg").training
    assert trainer.known_metrics(0) == {"lr": 0.1}  # type: ignore[union-attr]
    assert QFair(q=1.0).undamped_weight(update) > 1e290  # what it would come to
    told |= {"metric": {LIAR: 1e-300}}
    run = lied_to("qfedavg")
    shares = [row["weight"] for row in run.results if row["client"] != LIAR]
    assert min(shares) > 1e-3


@pytest.mark.parametrize("loss", EXTREMES)
@pytest.mark.parametrize("aggregator", [QFair(q=10.0), QFair(q=0.0), QFair(q=0.5), Tilted(t=5.0), Tilted(t=-5.0)])
def test_weights_by_losses_are_finite(aggregator: Any, loss: float) -> None:
    """Before, a loss of 3e38 ended q-FedAvg with q = 10."""
    update = Update({}, 10, 1, {"initial_loss": loss, "lr": 0.1}, 1.0)
    for weight in (aggregator.weight(update), aggregator.undamped_weight(update)):
        assert 0 <= weight < 1e200


@pytest.mark.parametrize("q", [0.0, 0.5, 1.0, 3.0])
def test_the_weights_of_honest_losses_are_those_of_the_paper(q: float) -> None:
    update = Update({}, 10, 1, {"initial_loss": 2.5, "lr": 0.1}, 1.5)
    assert QFair(q=q).weight(update) == pytest.approx(2.5**q)
    assert QFair(q=q).undamped_weight(update) == pytest.approx(2.5**q + q * 2.5 ** (q - 1) * 1.5**2 / 0.1)


@pytest.mark.parametrize("claim", [3e38, -3e38, 1e18, 0.0])
def test_the_simplex_keeps_its_sum(claim: float) -> None:
    """Before, weights of agnostic federated learning were [0, 0, 0, 0, 1e18] from then on."""
    point = torch.tensor([0.2, 0.3, 0.1, 0.2, 0.2 + claim], dtype=torch.float64)
    nearest = on_simplex(point)
    assert float(nearest.sum()) == pytest.approx(1.0)
    back = on_simplex(nearest + torch.tensor([5.0, 0, 0, 0, 0], dtype=torch.float64))
    assert float(back[0]) == pytest.approx(1.0)  # and others count again


@pytest.mark.parametrize("name", ["term", "fednova", "qfedavg"])
def test_no_share_is_above_the_one_that_is_allowed(name: str, told: dict[str, Any]) -> None:
    told |= {"metric": {LIAR: 3e38}}
    run = lied_to(name, max_weight=0.4)
    for version in (1, 2):
        shares = [row["weight"] for row in run.results if row["version"] == version]
        assert max(shares) <= 0.4 * sum(shares) * (1 + 1e-6)


class Fragile(ExampleWeighted):
    """Fails with an update whose loss is not what it likes."""

    alone: bool = True

    def aggregate(self, cohort: Cohort, context: ServerContext) -> tuple[torch.Tensor, list[float]]:
        context.note("seen", len(cohort.updates))
        if not self.alone or any(update.metrics["loss"] > 1e30 for update in cohort.updates):
            context.state["broken"] = True
            raise OverflowError("a number too large")
        assert "broken" not in context.state  # of the attempt that failed nothing is left
        return super().aggregate(cohort, context)


class Accusing(ExampleWeighted):
    """Excludes another client where one claims a large loss, and then fails."""

    def aggregate(self, cohort: Cohort, context: ServerContext) -> tuple[torch.Tensor, list[float]]:
        if any(update.metrics["loss"] > 1e30 for update in cohort.updates):
            context.exclude_client(0, "it was there")
            raise OverflowError("a number too large")
        return super().aggregate(cohort, context)


def what_weighs() -> dict[str, str]:
    """What the table of the threat model says weighs an update, by recipe."""
    text = (Path(__file__).parents[2] / "docs" / "explanation" / "threat-model.md").read_text()
    rows = [line.split("|") for line in text.partition("What one false number can do")[2].splitlines() if "|" in line]
    return {name: row[2].strip() for row in rows for name in row[1].replace("`", "").replace(" ", "").split(",")}


def test_the_table_names_each_recipe() -> None:
    assert what_weighs().keys() >= TABLE.keys()


@pytest.mark.full
@pytest.mark.parametrize(
    # each step of the two that are left out has a single update
    "name", sorted(
        name for name in TABLE.keys() - {"async_fedavg", "fedasync"}
        if what_weighs().get(name, "").startswith(("rows, as", "all alike"))
    )
)  # fmt: skip
def test_a_false_number_of_rows_weighs_as_the_table_says(name: str, told: dict[str, Any]) -> None:
    def share() -> float:
        rows = [row for row in lied_to(name, rounds=1, evaluate_every=0).results if row["kind"] == "train"]
        (own,) = [row for row in rows if row["client"] == LIAR][:1]
        return float(own["weight"] / sum(row["weight"] for row in rows if row["cluster"] == own["cluster"]))

    honest, more, trainer = share(), 20 * SIZES[LIAR], method(name).training
    assert isinstance(trainer, Trainer)
    told |= {"metric": {LIAR: 0.5}, "examples": more, "steps": max(1, trainer.min_steps(more))}
    lied, alone = share(), honest > 1 - 1e-6  # of its cluster, or of a step
    assert alone or (lied > 1.2 * honest) == what_weighs()[name].startswith("rows")


@pytest.mark.parametrize("alone", [True, False])
def test_a_component_that_fails_by_one_update_goes_on_without_it(alone: bool, told: dict[str, Any]) -> None:
    """Before, the run of everybody ended with the error."""
    told |= {"metric": {LIAR: 3e38}}
    recipe = method("fedavg", cohort=1.0).with_(aggregation=Fragile(alone=alone))
    options: dict[str, Any] = {"rounds": 2, "seed": 1, "runtime": piebald.Simulator(**HERE)}
    if not alone:
        with pytest.raises(piebald.PiebaldError, match=r"also without any single one of its 5 updates"):
            piebald.run(recipe, federation(), fitting(recipe), **options)
        return
    run = piebald.run(recipe, federation(), fitting(recipe), **options)
    (refused,) = [row for row in run.results if row["status"] == "refused"]
    assert (refused["client"], refused["version"]) == (LIAR, 1)
    assert "OverflowError" in refused["reason"]
    assert [note["value"] for note in run.notes if note["name"] == "seen"] == [4, 4]


@pytest.mark.parametrize("name", [*sorted(TABLE), "foolsgold"])
def test_a_step_that_is_undone_leaves_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before, the sums of FoolsGold and the weights of regions counted twice."""
    recipe = method("fedavg").with_(aggregation=Foolsgold()) if name == "foolsgold" else method(name)
    once, real, undone = carry_out(recipe), ClusterModels.step, list[int]()

    def twice(self: ClusterModels, cohort: Cohort, make_context: Any) -> list[Counted]:
        if undone:  # a step without idle clients is a step as well
            return real(self, cohort, make_context)
        undone.append(cohort.version)
        back = self.mark()
        real(self, cohort, make_context)
        back()
        counted = real(self, cohort, make_context)
        undone.clear()
        return counted

    monkeypatch.setattr(ClusterModels, "step", twice)
    again = carry_out(recipe)
    for number, model in once.cluster_models.items():
        torch.testing.assert_close(again.cluster_models[number], model, atol=1e-6, rtol=1e-5)
    trained = [
        [(row["client"], row["cluster"]) for row in run.results if row["kind"] == "train"] for run in (once, again)
    ]
    assert trained[0] == trained[1]
    shares = [[row["weight"] for row in run.results if row["kind"] == "train"] for run in (once, again)]
    assert shares[0] == pytest.approx(shares[1])


def test_a_cluster_that_a_client_left_has_it_again() -> None:
    store = TensorStore()
    left, joined = ModelCache(1, store), ModelCache(1, store)
    for client in (1, 2):
        left.swap(client, 2.0, torch.tensor([float(client)]))
    before = left.sums.tolist(), left.whole, dict(left.weights)
    backs = left.mark(), joined.mark()
    left.drop(1, None)
    left.swap(2, 1e30, torch.tensor([9.0]))
    joined.swap(1, 5.0, torch.tensor([7.0]))
    for new in (True, False):
        for back in backs:
            back(new)
    assert (left.sums.tolist(), left.whole, left.weights) == before
    assert (joined.sums.tolist(), joined.whole, joined.weights) == ([0.0], 0.0, {})


def test_clients_that_a_failed_attempt_excluded_are_asked_again(told: dict[str, Any]) -> None:
    told |= {"metric": {LIAR: 3e38}}
    recipe = method("fedavg", cohort=1.0).with_(aggregation=Accusing())
    run = piebald.run(recipe, federation(), fitting(recipe), rounds=2, seed=1, runtime=piebald.Simulator(**HERE))
    asked = {row["client"] for row in run.results if row["version"] == 2 and row["kind"] == "train"}
    assert asked == set(range(len(SIZES))) - {LIAR}
    accused = [row["client"] for note in run.notes if note["name"] == "refused" for row in note["value"]]
    assert set(accused) == {LIAR}
