"""Subclasses from outside the package behave as what they derive from, and promise no more than their methods keep."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import piebald
from piebald import recipes
from piebald.contracts import ClientContext, Cohort, ServerContext, TrainInput, TrainOutput, Update
from piebald.contracts.component import Component
from piebald.core.errors import SettingError
from piebald.methods.aggregation import EqualWeighted, StalenessWeighted
from piebald.methods.choice import KnnPer, own_choice
from piebald.methods.clustering import SingleCluster
from piebald.methods.recipe import Recipe
from piebald.methods.scheduling import Asynchronous, Deadline, Synchronous
from piebald.methods.scheduling.base import ServerView
from piebald.methods.training import (
    AdaptiveFrequency,
    DynamicRegularization,
    InitialLoss,
    LowestLoss,
    NestedWidths,
    Sgd,
)
from piebald.methods.transforms import Gaussian
from piebald.privacy import SecureAggregation
from piebald.privacy.accounting import PrivacyBudget, of_recipe
from tests.fakes import classified, seeded, simulate

NOISE = Gaussian(clip=1.0, noise=2.0)
LOCAL = Gaussian(clip=1.0, noise=2.0, where="client")


@pytest.fixture(autouse=True)
def no_component_of_a_test_remains() -> Iterator[None]:
    yield
    for kinds in Component.registry.values():
        for kind in [kind for kind, component in kinds.items() if component.__module__ == __name__]:
            del kinds[kind]


def derived(base: type[Component], **members: Any) -> type[Any]:
    """A subclass of a component, defined here; without members it is no more than another name."""
    return type(f"Derived{base.__name__}", (base,), {"__module__": __name__, "__doc__": "A subclass.", **members})


def model() -> nn.Module:
    return seeded(lambda: nn.Linear(4, 2))


def final(recipe: Recipe, **options: Any) -> tuple[Tensor, piebald.Run]:
    """The last models of all clusters after a run on four clients, and the run."""
    run = simulate(recipe, classified(8, 10, 12, 14), model(), **options)
    return torch.cat([*run.cluster_models.values()]), run


def budget(recipe: Recipe) -> PrivacyBudget:
    return of_recipe(recipe, 10, 3)[0]


# -------------------------------------------------------------------------------------- what an empty subclass may do


def equal(kind: type[EqualWeighted]) -> Recipe:
    return recipes.fedavg(lr=0.1).with_(aggregation=kind(), transforms=[NOISE])


def equal_masked(kind: type[EqualWeighted]) -> Recipe:
    return recipes.fedavg(lr=0.1).with_(aggregation=kind(), transforms=[NOISE, SecureAggregation()])


def choosing(kind: type[LowestLoss]) -> Recipe:
    return recipes.ifca(k=2, lr=0.1).with_(training=kind(lr=0.1))


def with_local_noise(kind: type[Synchronous]) -> Recipe:
    return recipes.fedavg(lr=0.1).with_(scheduling=kind(cohort=3), transforms=[LOCAL])


def by_a_deadline(kind: type[Deadline]) -> Recipe:
    return recipes.fedavg(lr=0.1).with_(scheduling=kind(seconds=1.0), transforms=[LOCAL])


def one_cluster(kind: type[SingleCluster]) -> Recipe:
    return recipes.fedavg(lr=0.1).with_(clustering=kind(), aggregation="equal_weighted", transforms=[NOISE])


def normalized(kind: type[Sgd]) -> Recipe:
    return recipes.fednova(lr=0.1).with_(training=kind(lr=0.1))


def corrected(kind: type[DynamicRegularization]) -> Recipe:
    return recipes.feddyn(lr=0.1, alpha=0.1).with_(training=kind(lr=0.1, alpha=0.1))


def plain_mean(kind: type[EqualWeighted]) -> Recipe:
    return recipes.feddyn(lr=0.1).with_(aggregation=kind())


def fair(kind: type[InitialLoss]) -> Recipe:
    return recipes.qfedavg(lr=0.1).with_(training=kind(lr=0.1))


@pytest.mark.parametrize(
    ("recipe", "base"),
    [
        (equal, EqualWeighted),
        (equal_masked, EqualWeighted),
        (choosing, LowestLoss),
        (with_local_noise, Synchronous),
        (by_a_deadline, Deadline),
        (one_cluster, SingleCluster),
        (normalized, Sgd),
        (corrected, DynamicRegularization),
        (plain_mean, EqualWeighted),
        (fair, InitialLoss),
    ],
    ids=lambda value: value.__name__,
)
def test_a_subclass_that_adds_nothing_runs_as_its_base_to_the_bit(
    recipe: Callable[..., Recipe], base: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # the name of a class is a setting, and other settings have other noise
    monkeypatch.setattr("piebald.runs.prepare._noise_key", lambda *_: "the same")
    ours, run = final(recipe(base))
    theirs, other = final(recipe(derived(base)))
    assert torch.equal(ours, theirs)
    assert run.meta["privacy"] == other.meta["privacy"]
    assert [row["weight"] for row in run.results] == [row["weight"] for row in other.results]


def test_a_choice_of_the_users_is_a_kind_to_keep() -> None:
    mine = derived(KnnPer)
    choice = own_choice({"kind": mine.kind, "k": [3]}, "test")
    assert isinstance(choice, mine)
    assert choice.k == (3,)
    with pytest.raises(SettingError, match="version to keep called 'evaluate'"):
        own_choice({"kind": "evaluate"}, "test")


def test_narrow_networks_take_a_subclass_of_the_single_cluster() -> None:
    recipe = recipes.heterofl(widths=[1.0, 0.5]).with_(clustering=derived(SingleCluster)())
    assert recipe.clustering.is_single()
    assert isinstance(recipe.training, NestedWidths)


def test_a_subclass_is_refused_where_its_base_is() -> None:
    frequent = derived(AdaptiveFrequency)
    with pytest.raises(SettingError, match="goes by the steps of others"):
        recipes.fedavg().with_(training=frequent(), aggregation="equal_weighted", transforms=[SecureAggregation()])
    late = derived(Deadline)(seconds=1.0)
    for message, change in (
        ("max_staleness = 0", {"clustering": "regions"}),
        ("max_staleness = 0", {"aggregation": "equal_weighted", "transforms": [SecureAggregation()]}),
    ):
        with pytest.raises(SettingError, match=message):
            recipes.fedavg().with_(scheduling=late, **change)


# --------------------------------------------------------------------- what a subclass with methods of its own may not


def by_rows(self: EqualWeighted, update: Update, staleness: int = 0) -> float:
    return float(update.examples)


def largest(self: EqualWeighted, cohort: Cohort, context: ServerContext) -> tuple[Tensor, list[float]]:
    sizes = [update.examples for update in cohort.updates]
    return cohort.updates[sizes.index(max(sizes))].vectors["model"], [size / sum(sizes) for size in sizes]


def measured(self: EqualWeighted, cohort: Cohort, context: ServerContext) -> Cohort:
    return cohort


def all_rows(self: EqualWeighted, update: Update) -> float:
    return float(update.examples)


WAYS: Mapping[str, Any] = {
    "weight": by_rows,
    "aggregate": largest,
    "prepare": measured,
    "undamped_weight": all_rows,
}


@pytest.mark.parametrize("transforms", [[NOISE], [NOISE, SecureAggregation()]], ids=["noise", "noise in a sum"])
@pytest.mark.parametrize("method", WAYS)
@pytest.mark.parametrize("base", [EqualWeighted, StalenessWeighted])
def test_noise_on_a_mean_refuses_what_weighs_in_a_way_of_its_own(
    base: type[Component], method: str, transforms: list[Any]
) -> None:
    """Also by a class that is mixed in: what counts is the method that is called."""
    weighs = derived(base, **{method: WAYS[method]})
    mixed = type("Mixed", (type("Ways", (), {method: WAYS[method]}), base), {"__module__": __name__, "__doc__": "A."})
    for kind in (weighs, mixed):
        with pytest.raises(SettingError, match=r"lets a client's data decide|individual updates"):
            recipes.fedavg().with_(aggregation=kind(), transforms=transforms)


def test_a_damped_mean_of_what_weighs_by_rows_is_refused() -> None:
    weighs = derived(EqualWeighted, weight=by_rows)
    with pytest.raises(SettingError, match="lets a client's data decide"):
        recipes.fedavg().with_(aggregation=StalenessWeighted(base=weighs()), transforms=[NOISE])
    recipes.fedavg().with_(aggregation=StalenessWeighted(base=derived(EqualWeighted)()), transforms=[NOISE])


def greedy(self: Synchronous, view: ServerView) -> int:
    return view.idle


@pytest.mark.parametrize("base", [Synchronous, Deadline])
def test_no_budget_is_stated_where_a_client_may_be_asked_again(base: type[Any]) -> None:
    settings = {"seconds": 1.0} if base is Deadline else {}
    whole = recipes.fedavg().with_(transforms=[LOCAL])
    again = budget(whole.with_(scheduling=derived(base, num_to_request=greedy)(**settings)))
    assert again.epsilon_pld == float("inf")
    assert re.search("may send more than once between two steps|sends as often as it is done", again.meaning)
    assert budget(whole.with_(scheduling=base(**settings))).epsilon_pld < float("inf")
    assert budget(whole.with_(scheduling=Asynchronous())).epsilon_pld == float("inf")


def first(self: Synchronous, view: ServerView) -> bool:
    return view.waiting > 0


@pytest.mark.parametrize("members", [{"num_to_request": greedy}, {"should_step": first}], ids=["asks", "steps"])
def test_no_budget_of_a_mean_is_stated_where_rounds_are_others(members: dict[str, Any]) -> None:
    whole = recipes.fedavg().with_(transforms=[NOISE], aggregation="equal_weighted")
    other = whole.with_(scheduling=derived(Synchronous, **members)(cohort=4))
    assert budget(whole.with_(scheduling=Synchronous(cohort=4))).epsilon_pld < float("inf")
    assert budget(other).epsilon_pld == float("inf")
    assert other.expected_updates(10) is None


def halves(self: SingleCluster, cohort: Cohort, known: Mapping[int, int], context: ServerContext) -> list[int]:
    return [client % 2 for client in cohort.clients]


def test_no_budget_is_stated_where_a_single_cluster_is_several() -> None:
    whole = recipes.fedavg().with_(transforms=[NOISE], aggregation="equal_weighted")
    several = whole.with_(clustering=derived(SingleCluster, assign=halves)())
    assert budget(several).epsilon_pld == float("inf")
    assert not several.clustering.is_single()
    assert several.requires_individual_updates
    with pytest.raises(SettingError, match="needs individual updates"):
        several.with_(transforms=[SecureAggregation()])
    with pytest.raises(SettingError, match="takes every update as a change of the whole one"):
        recipes.heterofl(widths=[1.0, 0.5]).with_(clustering=derived(SingleCluster, assign=halves)())


def unhidden(self: Gaussian, vectors: Any, keys: Any, clients: Any) -> Any:
    return vectors


def test_no_budget_is_stated_for_noise_of_another_kind() -> None:
    quiet = derived(Gaussian, on_client=unhidden)(clip=1.0, noise=2.0, where="client")
    other = budget(recipes.fedavg().with_(transforms=[quiet]))
    assert other.epsilon_pld == float("inf")
    assert "in a way of its own" in other.meaning
    named = derived(Gaussian)(clip=1.0, noise=2.0, where="client")
    assert budget(recipes.fedavg().with_(transforms=[named])).epsilon_pld < float("inf")


def walk(self: Sgd, inputs: TrainInput, context: ClientContext) -> TrainOutput:
    return self.output(self.run_sgd(inputs, context, prox=0.1))


def test_steps_of_another_kind_are_no_plain_steps() -> None:
    with pytest.raises(SettingError, match="knows the steps of training = 'sgd' only"):
        normalized(derived(Sgd, train=walk))


# ------------------------------------------------------------------------------------------------------ the package


# what is compared by name though it is no component of ours, by file
NAMED = {
    "answer.py": {"interval"},  # how a difference was measured
    "evidence.py": {"interval"},
    "client_tables.py": {"Image", "DataFrame"},
    "owner.py": {"DataFrame"},  # classes of packages that are not imported for a look
    "prediction.py": {"classes", "labels", "places", "rates", "values"},  # what outputs are, and no others
    "pretrained_networks.py": {"Conv1D"},
    "table_files.py": {"OTU"},  # types of NumPy
    "verdict.py": {"interval"},
    "transformer.py": {"boolean"},  # a column of a preparation, of which there are no other kinds
    "transfer_settings.py": {"federation", "memory"},  # the table [runtime] says there what its own kind means
}


@pytest.mark.full
def test_nothing_is_decided_by_the_name_of_a_kind() -> None:
    """Components are asked what they do: a text that names a kind would shut out every subclass of it."""
    decided = []
    for path in sorted(Path(piebald.__file__).parent.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            sides = [node.left, *node.comparators] if isinstance(node, ast.Compare) else []
            values = [value for side in sides for value in getattr(side, "elts", [side])]
            names = [
                value for value in values if isinstance(value, ast.Attribute) and value.attr in ("kind", "__name__")
            ]
            texts = {
                value.value for value in values if isinstance(value, ast.Constant) and isinstance(value.value, str)
            }
            of_numbers = any(ast.unparse(name).endswith("dtype.kind") for name in names)
            if names and not of_numbers and texts - NAMED.get(path.name, set()):
                decided.append(f"{path.name}:{node.lineno} {ast.unparse(node)}")
    assert decided == []
