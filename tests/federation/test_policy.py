"""A site's policy: recipes that would share more than it allows are refused, with the reason; noise is its own."""

from __future__ import annotations

import functools
import json
from typing import Any

import pytest
import torch

from piebald.client_work import ClientWork
from piebald.contracts import Task
from piebald.prepare import Options, prepare
from piebald.queries import Evaluate
from piebald.queries.validate import Validate
from piebald.runtimes.federation.policy import Policy
from piebald.runtimes.federation.task_runner import SiteClient, TaskRunner

from .conftest import settings


def prepared(recipe: dict[str, Any]) -> Any:
    return _prepared(json.dumps(recipe))


@functools.cache
def _prepared(recipe: str) -> Any:
    plan = settings(json.loads(recipe)).plan()
    return prepare(next(iter(plan.recipes.values())), plan.clients, plan.model, Options(seed=1))


def work(recipe: dict[str, Any]) -> ClientWork:
    return prepared(recipe).work  # type: ignore[no-any-return]


def noisy(**more: Any) -> dict[str, Any]:
    return {"name": "fedavg", "transforms": [{"kind": "gaussian", "clip": 1.0, "noise": 1.0, "where": "client"} | more]}


def summed(*before: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"name": "fedavg", "transforms": [*before, {"kind": "secure_aggregation", **fields}]}


@pytest.mark.parametrize(
    ("policy", "recipe", "says"),
    [
        ({}, {"name": "fedavg"}, None),
        ({"private": ["classifier"]}, {"name": "hdafl"}, None),
        ({"private": ["classifier"]}, {"name": "fedavg"}, "must stay at this site"),
        ({"uploads": ["model"]}, {"name": "fedavg"}, None),
        ({"uploads": ["model"]}, {"name": "scaffold"}, "'control'"),
        ({"clip": 1.0}, {"name": "fedavg"}, "the recipe does not do that"),
        ({"clip": 1.0}, noisy(), None),
        ({"clip": 0.5}, noisy(), "clipped to norm 1, this site allows at most 0.5"),
        ({"noise": 1.0}, noisy(), None),
        ({"noise": 1.5}, noisy(), "noise of 1 clips, this site asks for at least 1.5"),
        ({"noise": 1.0}, noisy(where="server"), "at the server"),
        ({"secure_aggregation": 3}, {"name": "fedavg"}, "only inside secure aggregation but the recipe has none"),
        ({"secure_aggregation": 3}, summed(), "sums could be of 2 clients, this site asks for 3"),
        ({"secure_aggregation": 3}, summed(least=3), None),
        ({"noise": 1.0}, summed(*noisy()["update"]), None),
        ({"noise": 1.0}, summed(), "the recipe does not do that"),
    ],
    ids=str,
)
def test_what_a_floor_refuses(policy: dict[str, Any], recipe: dict[str, Any], says: str | None) -> None:
    reject_reason = Policy(**policy).reject_reason(work(recipe))
    assert reject_reason is None if says is None else reject_reason is not None and says in reject_reason


def update(policy: Policy, secret: int, query: Any = None) -> tuple[Any, str | None]:
    plan = prepared(noisy())
    runner = TaskRunner(SiteClient(plan.work, plan.clients, 0), policy, "cpu", secret)
    vectors = {"model": plan.work.initial[: plan.work.layout.shared]}
    made, failure, _ = runner.serve(Task(1, 0, 0, vectors, query), None)
    return made, failure


def test_noise_that_is_asked_for_comes_from_what_only_the_site_knows() -> None:
    def change(policy: Policy, secret: int) -> torch.Tensor:
        return update(policy, secret)[0].vectors["model"]  # type: ignore[no-any-return]

    assert torch.equal(change(Policy(), 11), change(Policy(), 12))  # the server could make it again
    demanding = Policy(noise=1.0)
    assert not torch.allclose(change(demanding, 11), change(Policy(), 11), atol=0.1)
    assert not torch.allclose(change(demanding, 11), change(demanding, 12), atol=0.1)


def test_questions_that_are_not_allowed_get_no_answer() -> None:
    policy = Policy(questions=["evaluate"])
    assert update(policy, 0, Evaluate())[1] is None
    assert update(policy, 0, Validate(classes=10)) == (None, "this site does not answer 'validate'")
