"""Sites grow trees where their policy names the question; hostile answers and tasks are refused."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import piebald
from piebald import recipes
from piebald.contracts import Task, Update
from piebald.core.errors import PiebaldError
from piebald.data.partition import clients_from
from piebald.experiments.run_settings import RunSettings
from piebald.inference.queries.trees import TreesQuery
from piebald.inference.trees.boosted_trees import BoostedTrees, trees_in
from piebald.inference.trees.forest import TreeSettings
from piebald.inference.trees.site_clients import trees_at_sites
from piebald.models import Logistic
from piebald.runs.prepare import PreparedRun, prepare

pytest.importorskip("xgboost", reason="needs the extra: pip install '.[trees]'")

from piebald.federation.site.policy import Policy
from piebald.federation.site.site_rows import SiteClient
from piebald.federation.site.task_runner import TaskRunner
from tests.inference.test_at_sites import InProcess, put

ALLOWED = Policy(queries=["trees"], least_rows=1)
SETTINGS = TreeSettings(rounds=3, max_depth=3)
Change = Callable[[Update], Update]


def plan(classes: int = 2, recipe: Any = None) -> PreparedRun:
    rng = np.random.default_rng(5)
    rows = {}
    for name in "abc":
        x = rng.normal(0, 1, (40, 2))
        rows[name] = (x, (x[:, 0] + rng.normal(0, 0.5, 40) > 0).astype(int) + (x[:, 1] > 1) * (classes > 2))
    clients = clients_from(rows, test=0.25, validation=0.1)
    return prepare(recipe or recipes.fedavg(), clients, Logistic([2], classes), RunSettings(seed=1))


PLAN = plan()


def asked(policies: list[Policy], change: Change | None = None, settings: TreeSettings = SETTINGS, where: Any = PLAN,
          **more: Any) -> BoostedTrees:  # fmt: skip
    said: list[str] = []
    runtime = InProcess(where, policies, change)
    return trees_at_sites(runtime, where.work, where.clients, settings, say=said.append, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize("classes", [2, 3])
def test_sites_grow_the_trees_that_they_would_grow_here(classes: int) -> None:
    where = PLAN if classes == 2 else plan(3)
    settings = SETTINGS.model_copy(update={"subsample": 0.8, "balanced": True, "patience": 2})
    found = asked([ALLOWED] * 3, settings=settings, where=where)
    fields = {name: value for name, value in settings.table().items() if name != "kind"}
    here = piebald.trees(where.clients, **fields)
    assert found.xgboost_model() == here.xgboost_model()
    for mine, other in ((found.together, here.together), (found.alone, here.alone)):
        for one, two in zip(mine, other, strict=True):
            assert one == pytest.approx(two, rel=1e-6, nan_ok=True)


def test_a_site_answers_only_if_its_policy_names_trees(tmp_path: Path) -> None:
    found = asked(
        [ALLOWED, Policy(), Policy(queries=["statistics"], least_rows=1)], compare=False, out=tmp_path / "out"
    )
    assert found.clients == ["a"]
    assert [*found.left_out] == ["b", "c"]
    assert "only if its policy names it" in found.left_out["b"]
    assert trees_in(tmp_path / "out").left_out == found.left_out
    with pytest.raises(PiebaldError, match=r"no client grows trees, .*only if its policy names it"):
        asked([Policy()] * 3)
    with pytest.raises(PiebaldError, match="no queries that depend on its train rows"):
        asked([Policy(queries=["trees"], splits=["test"])] * 3)
    with pytest.raises(PiebaldError, match="no queries that depend on its train rows"):
        asked([Policy(queries=["trees"], noise=1.0)] * 3)  # no budget counts trees: where something protects, they stay


def test_leaves_about_few_rows_stay_at_the_site() -> None:
    careful = Policy(queries=["trees"], least_rows=12)
    with pytest.raises(PiebaldError, match="no client has grown a tree in round"):
        asked([careful] * 3)
    found = asked([careful] * 3, settings=SETTINGS.model_copy(update={"least_rows": 12}), compare=False)
    assert found.rounds == 3


def test_a_folder_goes_on_with_the_sites_that_are_there(tmp_path: Path) -> None:
    def interrupt(state: Any) -> None:
        if len(state.ends) == 2:
            raise KeyboardInterrupt

    whole = asked([ALLOWED] * 3, compare=False)
    with pytest.raises(KeyboardInterrupt):
        asked([ALLOWED] * 3, compare=False, out=tmp_path / "trees", done=interrupt)
    again = asked([ALLOWED] * 3, compare=False, out=tmp_path / "trees")
    assert again.xgboost_model() == whole.xgboost_model() == (tmp_path / "trees" / "trees.json").read_bytes()
    with pytest.raises(PiebaldError, match="has trees of other clients"):
        asked([ALLOWED, ALLOWED, Policy()], compare=False, out=tmp_path / "trees")


def told(change: Callable[[torch.Tensor], Any]) -> Change:
    def changed(update: Update) -> Update:
        if "forest" not in update.vectors:
            return update
        return dataclasses.replace(update, vectors={"forest": change(update.vectors["forest"].clone())})

    return changed


@pytest.mark.parametrize(
    "change",
    [
        told(put((0, 0, 0), 99.0)),
        told(put((0, 0, 0), -2.0)),
        told(put((0, 14, 0), 0.0)),
        told(put((0, 0, 1), float("nan"))),
        told(put((0, 0, 3), 7.0)),
        told(lambda table: table.double()),
        told(lambda table: table[:, :7]),
        told(lambda table: torch.zeros(400, 15, 4)),
        lambda update: dataclasses.replace(update, vectors={}) if "forest" in update.vectors else update,
        lambda update: dataclasses.replace(update, examples=10**9) if "forest" in update.vectors else update,
    ],
)  # fmt: skip
def test_hostile_trees_do_not_count(change: Change) -> None:
    """The trees are those that the other sites grow without the hostile one."""
    found = asked([ALLOWED] * 3, change, compare=False)
    assert found.boosted.ends == (2, 4, 6)
    assert np.isfinite(found.boosted.forest.table).all()


def test_a_site_may_be_held_to_the_largest_leaf() -> None:
    bounded = SETTINGS.model_copy(update={"max_delta_step": 0.5})
    assert asked([ALLOWED] * 3, settings=bounded, compare=False).boosted.ends == (3, 6, 9)

    def poison(table: torch.Tensor) -> torch.Tensor:
        table[:, :, 1] = torch.where(table[:, :, 0] == -1, 100.0, table[:, :, 1])
        return table

    assert asked([ALLOWED] * 3, told(poison), bounded, compare=False).boosted.ends == (2, 4, 6)


@pytest.mark.parametrize(
    ("place", "value"), [((0, 0, 0), 4e9), ((0, 0, 0), -2.0), ((0, 14, 0), 2.0), ((0, 0, 1), float("nan"))]
)
def test_a_site_checks_the_forest_that_a_server_sends(place: Any, value: float) -> None:
    grown = torch.from_numpy(asked([ALLOWED] * 3, compare=False).boosted.forest.sent)
    site = TaskRunner(SiteClient(PLAN.work, PLAN.clients, 0), ALLOWED, "cpu")
    query = TreesQuery(ask="grow", boosting=SETTINGS, objective="binary", classes=2, start=(0.0,))
    model = PLAN.work.initial[: PLAN.work.layout.shared]
    update, why, _ = site.serve(Task(0, 0, 0, {"model": model, "forest": grown}, query), None)
    assert why is None
    assert update is not None
    grown[place] = value
    update, why, _ = site.serve(Task(1, 0, 0, {"model": model, "forest": grown}, query), None)
    assert update is None
    assert "ValueError at the site" in str(why)


def test_two_forests_are_two_models_to_a_site() -> None:
    """A server that changes the forest and not the model asks about another model."""
    strict = Policy(queries=["trees"], models_per_version=1, least_rows=1)
    site = TaskRunner(SiteClient(PLAN.work, PLAN.clients, 0), strict, "cpu")
    forest = torch.from_numpy(asked([ALLOWED] * 3, compare=False).boosted.forest.sent)
    query = TreesQuery(ask="loss", boosting=SETTINGS, objective="binary", classes=2, start=(0.0,), split="test")
    model = PLAN.work.initial[: PLAN.work.layout.shared]
    answers = [
        site.serve(Task(number, 0, 0, {"model": model, "forest": one}, query), None)[1]
        for number, one in enumerate((forest, forest, forest[:1]))
    ]
    assert answers[:2] == [None, None]
    assert "1 of the models of one version" in str(answers[2])
