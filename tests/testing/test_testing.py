"""The contract tests that are shipped: our own components pass them, and components that break a promise do not."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import piebald
from piebald import data, recipes, testing
from piebald.contracts import ClientContext, Cohort, ServerContext, StepContext, TrainInput, TrainOutput, Update
from piebald.contracts.component import Component
from piebald.data.partition import Partition
from piebald.methods.aggregation.base import Aggregator
from piebald.methods.aggregation.linear import Linear
from piebald.methods.clustering.base import Clustering
from piebald.methods.recipe import Recipe
from piebald.methods.server_optimizer.base import ServerOptimizer
from piebald.methods.training import Sgd
from piebald.methods.transforms.base import Transform
from piebald.testing.components import in_fedavg

# Settings that a component needs.
NEEDED: dict[str, dict[str, Any]] = {
    "gaussian": {"clip": 1.0, "noise": 0.5, "where": "client"},
}


def every(axis: str) -> list[Component]:
    """A component of each kind on an axis that is ours and can be made."""
    found = []
    for kind, made in sorted(Component.registry[axis].items()):
        if made.__module__.startswith("piebald."):
            try:
                found.append(made(**NEEDED.get(kind, {})))
            except piebald.SettingError:  # it needs settings: another component, a layer, ...
                continue
    return found


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    """Components that a test defines are gone after it."""
    yield
    for kinds in Component.registry.values():
        for kind in [kind for kind, made in kinds.items() if made.__module__ == __name__]:
            del kinds[kind]


@pytest.mark.parametrize("axis", Recipe.axes)
def test_our_components_are_values(axis: str) -> None:
    made = every(axis)
    assert len(made) >= 2
    for component in made:
        testing.check_component(component)


@pytest.mark.parametrize("aggregator", every("aggregation"), ids=lambda made: made.kind)
def test_our_aggregators(aggregator: Any) -> None:
    asks = aggregator.overrides(Aggregator.prepare) or aggregator.needs_server_rows() or aggregator.kind in ASKING
    testing.check_aggregator(aggregator, recipe=False, asks=asks)


# they keep something in the server's context, or need losses or the places of layers
ASKING = {"agnostic", "foolsgold", "product_average", "qfair"}


@pytest.mark.parametrize("transform", every("transforms"), ids=lambda made: made.kind)
def test_our_transforms(transform: Any) -> None:
    testing.check_transform(transform, recipe=False)


def test_our_data_sets() -> None:
    testing.check_data_set(data.digits)
    testing.check_data_set(data.breast_cancer)


@pytest.mark.long
@pytest.mark.parametrize("recipe", ["fedavg", "scaffold", "hdafl", "dp_sgd"])
def test_our_recipes(recipe: str) -> None:
    testing.check_recipe(recipes.make(recipe, cohort=4, lr=0.1, batch=10))


# -------------------------------------------------------------------------------------- components that break a promise


def test_client_code_that_looks_at_the_whole_stack() -> None:
    class Stacked(Sgd):
        """SGD whose result depends on who else is in the stack."""

        def train(self, inputs: TrainInput, context: ClientContext) -> TrainOutput:
            made = self.output(self.run_sgd(inputs, context))
            return replace(made, model=made.model * 0.9 + made.model.mean(0, keepdim=True) * 0.1)

    with pytest.raises(AssertionError, match="and the plain reference differ: write client code for one client"):
        testing.check_trainer(Stacked(lr=0.1, batch=10))


def test_an_undeclared_vector() -> None:
    class Chatty(Sgd):
        """SGD that sends more than it declares."""

        def train(self, inputs: TrainInput, context: ClientContext) -> TrainOutput:
            made = self.output(self.run_sgd(inputs, context))
            return replace(made, vectors={"more": made.model})

    with pytest.raises(piebald.PiebaldError, match="'more'"):
        testing.check_trainer(Chatty(lr=0.1, batch=10))


def test_state_that_is_kept_in_the_component() -> None:
    class Counting(ServerOptimizer):
        """Steps that shrink with every call, wherever it comes from."""

        def step(self, model: Tensor, average: Tensor, context: StepContext) -> tuple[Tensor, dict[str, Tensor]]:
            CALLS.append(1)
            return model + average / len(CALLS), {}

    with pytest.raises(AssertionError, match="and the plain reference differ"):
        testing.check_server_optimizer(Counting())


CALLS: list[int] = []


@pytest.mark.full
def test_state_that_is_not_in_checkpoints() -> None:
    class Forgetful(ServerOptimizer):
        """Momentum that is kept beside the state, from version 0 on."""

        def step(self, model: Tensor, average: Tensor, context: StepContext) -> tuple[Tensor, dict[str, Tensor]]:
            KEPT["velocity"] = average + (KEPT["velocity"] * 0.9 if context.version else 0)
            return model + KEPT["velocity"], {}

    with pytest.raises(AssertionError, match="interrupted and resumed, it ends with other numbers"):
        testing.check_server_optimizer(Forgetful(), rounds=4)


KEPT: dict[str, Tensor] = {}


@pytest.mark.parametrize(
    ("method", "message"),
    [
        (lambda cohort: (cohort.matrix.mul_(0.5).mean(0), [0.125] * 8), "changes the updates"),
        (lambda cohort: (cohort.matrix.mean(0) * 2, [0.125] * 8), "has 2 times their length"),
        (lambda cohort: (cohort.matrix.mean(0), [0.25] * 8), "sum to at most 1, got 2"),
        (lambda cohort: (cohort.matrix.mean(0), [0.2] * 5), "a share for each of 8 updates, got 5"),
        (lambda cohort: (cohort.matrix.mean(0) / 0, [0.125] * 8), "is not finite"),
        (lambda cohort: (cohort.matrix.mean(1), [0.125] * 8), r"must have the shape of a change, \[5\], got \[8\]"),
    ],
)
def test_aggregators(method: Any, message: str) -> None:
    class Broken(piebald.methods.aggregation.base.Aggregator):  # type: ignore[attr-defined,name-defined,misc]
        """An aggregator that breaks a promise."""

        def aggregate(self, cohort: Cohort, context: ServerContext) -> tuple[Tensor, list[float]]:
            return method(cohort)  # type: ignore[no-any-return]

    with pytest.raises(AssertionError, match=message):
        testing.check_aggregator(Broken(), recipe=False)


def test_a_weighted_mean_that_depends_on_the_order() -> None:
    class First(Linear):
        """The first update counts double."""

        def weight(self, update: Update, staleness: int = 0) -> float:
            return 1.0

        def aggregate(self, cohort: Cohort, context: ServerContext) -> tuple[Tensor, list[float]]:
            assert cohort.matrix is not None
            weights = torch.tensor([2.0, *[1.0] * (len(cohort.matrix) - 1)])
            shares = weights / weights.sum()
            return shares @ cohort.matrix, shares.tolist()

    with pytest.raises(AssertionError, match="depends on the order"):
        testing.check_aggregator(First(), recipe=False)


@pytest.mark.parametrize(
    ("method", "message"),
    [
        (lambda vectors, keys: {"model": vectors["model"].mul_(2)}, "changes the vectors"),
        (lambda vectors, keys: {"other": vectors["model"]}, "keep the names"),
        (lambda vectors, keys: {"model": vectors["model"][:, :3]}, r"keep the shape \[3, 50\], got \[3, 3\]"),
        (lambda vectors, keys: {"model": vectors["model"] - vectors["model"].mean(0)}, "depends on the other clients"),
        (lambda vectors, keys: {"model": vectors["model"] + torch.rand(1)}, "draw from the keys alone"),
        (lambda vectors, keys: {"model": vectors["model"] / 0}, "finite numbers infinite"),
    ],
)
def test_transforms(method: Any, message: str) -> None:
    class Broken(Transform):
        """A transform that breaks a promise."""

        def on_client(
            self, vectors: Mapping[str, Tensor], keys: Sequence[int], clients: Sequence[int]
        ) -> Mapping[str, Tensor]:
            return method(vectors, keys)  # type: ignore[no-any-return]

    with pytest.raises(AssertionError, match=message):
        testing.check_transform(Broken(), recipe=False)


@pytest.mark.parametrize(
    ("deal", "message"),
    [
        (lambda rows: np.random.default_rng().integers(0, 2, len(rows)), "draw from self.seed alone"),
        (lambda rows: np.where(np.arange(len(rows)) % 7 == 0, -1, 0), "rows are lost"),
        (lambda rows: np.arange(len(rows)) % 3, "must number clients from 0 to 0, as many as names, got 0..2"),
        (lambda rows: np.zeros(3, dtype=int), r"a whole number for each of \d+ rows, got int64 \[3\]"),
    ],
)
def test_partitions(deal: Any, message: str) -> None:
    class Broken(Partition):
        """A partition that breaks a promise."""

        def deal(self, data: Any, rows: Any) -> Any:
            return deal(rows), ["a", "b"] if "seed" in message else ["a"]

    with pytest.raises((AssertionError, piebald.SettingError), match=message):
        testing.check_partition(Broken())


@pytest.mark.parametrize(
    ("found", "message"),
    [
        ([0], r"for each of 4 updates, got \[0\]"),
        ([-1] * 4, "at least 0"),
        ([0.5] * 4, "whole number"),
        (None, "got None"),
    ],
)
def test_clusterings(found: Any, message: str) -> None:
    """Too few were taken for the first updates before, and the others were lost."""

    class Broken(Clustering):
        """A clustering that breaks a promise."""

        def assign(self, cohort: Cohort, known: Mapping[int, int], context: ServerContext) -> list[int]:
            return found  # type: ignore[no-any-return]

    with pytest.raises(piebald.SettingError, match=f"clustering 'broken' must return a cluster.*{message}"):
        testing.check_clustering(Broken(), rounds=1)


def test_something_else_than_a_component() -> None:
    class Unfinished(Partition):
        """A partition that deals nothing."""

    for check, given, message in (
        (testing.check_aggregator, Sgd(), "an aggregator must be an instance of Aggregator, got Sgd"),
        (testing.check_trainer, Sgd, "a trainer must be an instance of Trainer, got .*: make one of it first"),
        (testing.check_recipe, "fedavg", "a recipe must be an instance of Recipe, got 'fedavg'"),
        (testing.check_data_set, data.digits(), "must be a function without arguments"),
        (testing.check_data_set, lambda: 1 / 0, "ZeroDivisionError: division by zero"),
        (testing.check_partition, Unfinished(), "a partition, Unfinished: it has no method 'deal'"),
    ):
        with pytest.raises(AssertionError, match=message):
            check(given)  # type: ignore[operator]


def test_data_sets() -> None:
    def another() -> data.DataSet:
        return data.DataSet("rows", torch.rand(40, 3), torch.arange(40) % 2, ["a", "b"])

    with pytest.raises(AssertionError, match="loaded twice, its rows differ"):
        testing.check_data_set(another)
    with pytest.raises(AssertionError, match="inputs must be float32"):
        testing.check_data_set(lambda: data.DataSet("rows", torch.zeros(40, 3).double(), torch.zeros(40)))
    with pytest.raises(AssertionError, match="must be a DataSet, got int"):
        testing.check_data_set(lambda: 3)  # type: ignore[arg-type,return-value]


def test_components_without_words() -> None:
    class Silent(Linear):
        weight_of: float = 1.0

        def weight(self, update: Update, staleness: int = 0) -> float:
            return 1.0

    with pytest.raises(AssertionError, match="needs a docstring"):
        testing.check_component(Silent())
    assert in_fedavg(aggregation=Silent()).aggregation == Silent()
