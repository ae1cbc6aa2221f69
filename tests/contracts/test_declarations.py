"""What a component declares is enforced.  All components here are a user's: defined outside the package."""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import piebald
from piebald import recipes
from piebald.contracts import ClientContext, Cohort, ServerContext, TrainInput, TrainOutput, Update
from piebald.contracts.component import Component
from piebald.core.errors import PiebaldError, RuntimeFault, SettingError
from piebald.data.partition import clients_from
from piebald.methods.aggregation import Linear
from piebald.methods.training import Sgd
from piebald.server import ResultChecks
from tests import processes

FEW: dict[str, Any] = {"rounds": 2, "evaluate_every": 0, "seed": 1}


def federation() -> Any:
    draw = torch.Generator().manual_seed(0)
    rows = [(torch.randn(size, 3, generator=draw), torch.randn(size, 1, generator=draw)) for size in (4, 9, 20)]
    return clients_from(rows, test=0.0)


def model(seed: int) -> torch.nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return torch.nn.Linear(3, 1)


# ---------------------------------------------------------------------------------------- one kind, one definition


@pytest.mark.full
def test_a_second_definition_of_a_kind_names_both_modules(tmp_path: Path) -> None:
    (tmp_path / "mylab.py").write_text(
        textwrap.dedent("""
        from piebald.methods.aggregation import Linear

        class ExampleWeighted(Linear):
            def weight(self, update, staleness=0):
                return 1.0
        """)
    )
    code = "from piebald import recipes; import mylab"
    done = processes.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    last = done.stderr.strip().splitlines()[-1]
    assert "'example_weighted' is already defined" in last
    assert "piebald.methods.aggregation.linear" in last
    assert "mylab" in last


@pytest.mark.full
def test_a_definition_before_the_packages_own_is_found_too(tmp_path: Path) -> None:
    """The user's class comes first, as in a script that imports recipes late."""
    code = """
from piebald.methods.server_optimizer.base import ServerOptimizer
try:
    class Momentum(ServerOptimizer):
        pass
    from piebald.methods.catalog import recipes
except Exception as error:
    print(error)
"""
    done = processes.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert "'momentum' is already defined" in done.stdout
    assert "__main__" in done.stdout
    assert "piebald.methods.server_optimizer.momentum" in done.stdout


def test_a_refused_definition_changes_nothing() -> None:
    before = Component.registry["aggregation"]["example_weighted"]
    with pytest.raises(SettingError, match="already defined"):
        type("ExampleWeighted", (Linear,), {"__module__": "elsewhere", "__doc__": "Another."})
    assert Component.registry["aggregation"]["example_weighted"] is before


def test_a_module_that_runs_again_may_define_its_classes_again() -> None:
    for _ in range(2):  # a cell of a notebook

        class NotebookWeighted(Linear):
            """Every update counts the same."""

            def weight(self, update: Update, staleness: int = 0) -> float:
                return 1.0

    assert Component.registry["aggregation"]["notebook_weighted"] is NotebookWeighted


# --------------------------------------------------------------------------------------------- vectors are declared


class Smuggling(Sgd):
    """A trainer that sends a vector that it does not declare."""

    def train(self, inputs: TrainInput, context: ClientContext) -> TrainOutput:
        end = self.run_sgd(inputs, context)
        return self.output(end, vectors={"gradient_of_all_rows": end.model - inputs.model})


class Honest(Smuggling):
    """The same, declared."""

    def uploads(self) -> tuple[str, ...]:
        return ("gradient_of_all_rows",)


class Lazy(Sgd):
    """A trainer that declares a vector and does not send it."""

    def uploads(self) -> tuple[str, ...]:
        return ("something",)


@pytest.mark.parametrize("engine", ["reference", "sequential", "vmapped", "batched"])
@pytest.mark.parametrize("transforms", [(), ({"kind": "gaussian", "clip": 0.01, "noise": 0.0},)])
def test_an_undeclared_vector_is_refused_where_the_update_is_made(engine: str, transforms: Any) -> None:
    recipe = recipes.fedavg().with_(training=Smuggling(lr=0.1), transforms=transforms)
    with pytest.raises(PiebaldError, match=r"'gradient_of_all_rows'.*declare"):
        piebald.run(recipe, federation(), model, runtime=piebald.Simulator(engine=engine, workers=0), **FEW)


def test_an_undeclared_vector_is_refused_in_worker_processes() -> None:
    recipe = recipes.fedavg().with_(training=Smuggling(lr=0.1))
    with pytest.raises(PiebaldError, match=r"'gradient_of_all_rows'.*declare"):
        piebald.run(recipe, federation(), model, runtime=piebald.Simulator(engine="sequential", workers=2), **FEW)


def test_a_declared_vector_arrives_and_is_refused_beside_what_protects_the_model_only() -> None:
    recipe = recipes.fedavg().with_(training=Honest(lr=0.1))
    run = piebald.run(recipe, federation(), model, **FEW)
    assert all(row["bytes_up"] == 2 * 4 * 4 for row in run.results)
    with pytest.raises(SettingError, match="gradient_of_all_rows"):
        recipe.with_(transforms=[{"kind": "gaussian", "clip": 0.01, "noise": 0.0}])


def test_the_server_refuses_what_a_client_was_not_to_send() -> None:
    from piebald.contracts import Result, Task
    from piebald.core.parameters import Layout

    layout = Layout.of(model(0), frozenset())
    task = Task(1, 0, 0, {"model": torch.zeros(4)})
    check = ResultChecks()

    def reason(vectors: dict[str, Tensor], uploads: tuple[str, ...] = ()) -> str | None:
        return check.reject_reason(Result(task, Update(vectors, 1, 1, {}), 0.0, 0.0), layout, 1e3, uploads)

    assert reason({"model": torch.ones(4)}) is None
    assert "does not declare" in str(reason({"model": torch.ones(4), "more": torch.ones(4)}))
    assert reason({"model": torch.ones(4), "more": torch.ones(4)}, ("more",)) is None
    assert reason({"model": torch.ones(4)}, ("more",)) == "must send more, sent nothing"


def test_a_declared_vector_that_does_not_come_is_missed() -> None:
    with pytest.raises(RuntimeFault, match="declares 'something'"):
        piebald.run(recipes.fedavg().with_(training=Lazy(lr=0.1)), federation(), model, **FEW)


# ------------------------------------------------- secure aggregation, and sums that are formed where clients train


class Halved(Linear):
    """Aggregates in a way of its own."""

    def weight(self, update: Update, staleness: int = 0) -> float:
        return 1.0

    def aggregate(self, cohort: Cohort, context: ServerContext) -> tuple[Tensor, list[float]]:
        average, shares = super().aggregate(cohort, context)
        return average / 2, shares


class Damped(Linear):
    """Weights that are held back: shares sum to a half."""

    def weight(self, update: Update, staleness: int = 0) -> float:
        return 1.0

    def undamped_weight(self, update: Update) -> float:
        return 2.0


class Prepared(Linear):
    """Weighs by what it finds out at the server."""

    def prepare(self, cohort: Cohort, context: ServerContext) -> Cohort:
        for number, update in enumerate(cohort.updates):
            update.metrics["place"] = number + 1.0  # type: ignore[index]
        return cohort

    def weight(self, update: Update, staleness: int = 0) -> float:
        return update.metrics["place"]


class BySteps(Linear):
    """Weighs by what is known after training alone."""

    def weight(self, update: Update, staleness: int = 0) -> float:
        return float(update.steps)


class ByRoot(Linear):
    """A plain weighted mean of a user."""

    def weight(self, update: Update, staleness: int = 0) -> float:
        return update.examples**0.5


class Faint(Linear):
    """Weights of a thousandth of the rows."""

    def weight(self, update: Update, staleness: int = 0) -> float:
        return 0.001 * update.examples


MASKED = {"kind": "secure_aggregation", "range": 4.0, "bits": 64}


@pytest.mark.parametrize("aggregator", [Halved(), Damped(), Prepared()], ids=lambda one: one.kind)
def test_secure_aggregation_refuses_what_it_would_not_compute(aggregator: Linear) -> None:
    recipe = recipes.fedavg(lr=0.1).with_(aggregation=aggregator)
    with pytest.raises(SettingError, match=f"{aggregator.kind} needs individual updates"):
        recipe.with_(transforms=[MASKED])


def test_small_weights_are_not_rounded_away_in_masked_sums() -> None:
    """Weights are rounded in units of what members said before; the mean was off by about a hundredth."""
    recipe = recipes.fedavg(lr=0.1).with_(aggregation=Faint())
    plain = piebald.run(recipe, federation(), model, **FEW)
    masked = piebald.run(
        recipe.with_(transforms=[{"kind": "secure_aggregation", "largest_share": 0.9}]), federation(), model, **FEW
    )
    torch.testing.assert_close(masked.model().weight, plain.model().weight, atol=1e-5, rtol=0)


def test_secure_aggregation_refuses_weights_that_are_found_in_training() -> None:
    """They would let one client count a thousand times as much as the others."""
    for aggregation in (BySteps(), "gradient_norm_weighted"):
        recipe = recipes.fedavg(lr=0.1).with_(aggregation=aggregation)
        with pytest.raises(SettingError, match="weighs by more than rows"):
            recipe.with_(transforms=[MASKED])


def test_secure_aggregation_computes_a_users_weighted_mean() -> None:
    recipe = recipes.fedavg(lr=0.1, batch=4).with_(aggregation=ByRoot())
    plain, masked = (
        piebald.run(recipe.with_(transforms=transforms), federation(), model, **FEW).model()
        for transforms in ((), (MASKED,))
    )
    torch.testing.assert_close(masked.weight, plain.weight, atol=1e-6, rtol=0)


@pytest.mark.parametrize("aggregator", [Halved(), Damped(), Prepared(), BySteps()], ids=lambda one: one.kind)
@pytest.mark.parametrize("workers", [0, 2])
def test_sums_formed_early_are_what_the_aggregator_says(aggregator: Linear, workers: int) -> None:
    """Whether or not updates are summed where clients train: the same as with a clustering that sees each of them."""
    recipe = recipes.fedavg(lr=0.1, batch=4).with_(aggregation=aggregator)
    apart = recipe.with_(clustering={"kind": "cfl", "eps1": 1e-9, "eps2": 1e9})  # never splits, but looks at updates
    assert apart.requires_individual_updates
    one, two = (
        piebald.run(made, federation(), model, runtime=piebald.Simulator(engine="sequential", workers=workers), **FEW)
        for made in (recipe, apart)
    )
    torch.testing.assert_close(one.model().weight, two.model().weight, atol=1e-6, rtol=1e-5)
