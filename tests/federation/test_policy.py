"""A site's policy: recipes and updates that would share more than it allows are refused; its noise is its own."""

from __future__ import annotations

import dataclasses
import functools
import json
from pathlib import Path
from typing import Any

import dp_accounting
import numpy as np
import pytest
import torch
from dp_accounting.pld.pld_privacy_accountant import PLDAccountant
from pydantic import ValidationError

from piebald.contracts import ClientContext, Task, TrainInput, TrainOutput, Update
from piebald.experiments.run_settings import RunSettings
from piebald.federation.site.gate import Gate
from piebald.federation.site.policy import Policy
from piebald.federation.site.site_rows import SiteClient
from piebald.federation.site.task_runner import TaskRunner
from piebald.methods.client_work import ClientWork
from piebald.methods.queries import Confusion, Evaluate
from piebald.methods.queries.row_scores import NaiveScores, TrainingTotals
from piebald.methods.queries.scores import Validate
from piebald.methods.queries.threshold_scores import ThresholdCounts
from piebald.methods.training import Sgd
from piebald.privacy.ledger import TRAINING, Limit, OverBudget, RowLedger
from piebald.runs.prepare import prepare

from .conftest import settings


def prepared(recipe: dict[str, Any]) -> Any:
    return _prepared(json.dumps(recipe))


@functools.cache
def _prepared(recipe: str) -> Any:
    plan = settings(json.loads(recipe)).plan()
    return prepare(next(iter(plan.recipes.values())), plan.clients, plan.model, RunSettings(seed=1))


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
        ({"noise": 1.5}, noisy(), "noise of 1 clips, this site demands at least 1.5"),
        ({"noise": 1.0}, noisy(where="server") | {"aggregation": {"kind": "equal_weighted"}}, "at the server"),
        ({"secure_aggregation": 3}, {"name": "fedavg"}, "only inside secure aggregation but the recipe has none"),
        ({"secure_aggregation": 5}, summed(), "sums could be of 3 clients, this site demands 5"),
        ({"secure_aggregation": 5}, summed(least=5), None),
        ({}, summed(least=2), "sums could be of 2 clients, this site demands 3"),
        ({}, summed(threshold=0.6), "a share of 0.6 of a key's shares opens a mask, this site demands 0.667"),
        ({"secure_aggregation": {"threshold": 0.6}}, summed(threshold=0.6), None),
        ({"secure_aggregation": {"neighbours": 40}}, summed(neighbours=20), "demands 40"),
        ({"noise": 1.0}, summed(*noisy()["transforms"]), None),
        ({"noise": 1.0}, summed(), "the recipe does not do that"),
    ],
    ids=str,
)
def test_what_a_policy_refuses(policy: dict[str, Any], recipe: dict[str, Any], says: str | None) -> None:
    reject_reason = Policy(**policy).reject_reason(work(recipe))
    assert reject_reason is None if says is None else reject_reason is not None and says in reject_reason


def update(policy: Policy, query: Any = None) -> tuple[Any, str | None]:
    plan = prepared(noisy())
    runner = TaskRunner(SiteClient(plan.work, plan.clients, 0), policy, "cpu")
    vectors = {"model": plan.work.initial[: plan.work.layout.shared]}
    made, failure, _ = runner.serve(Task(1, 0, 0, vectors, query), None)
    return made, failure


def test_queries_that_are_not_allowed_get_no_answer() -> None:
    policy = Policy(queries=["evaluate"])
    assert update(policy, Evaluate())[1] is None
    assert update(policy, Validate(classes=10)) == (None, "this site does not answer 'validate'")
    assert update(Policy(), Evaluate()) == (
        None,
        "this site answers no queries beside gaussian, unless its policy names them",
    )


def test_a_site_says_how_its_most_frequent_class_scores_and_nothing_of_single_rows() -> None:
    query, plan = NaiveScores(naive="classes", rows=True), prepared({"name": "fedavg"})
    task = Task(1, 0, 0, {"model": plan.work.initial[: plan.work.layout.shared]}, query)
    answer, _, _ = TaskRunner(SiteClient(plan.work, plan.clients, 0), Policy(), "cpu").serve(task, None)
    assert answer is not None
    trained, judged = (plan.clients.rows(0, split).y for split in ("train", "test"))  # type: ignore[arg-type]
    most = torch.bincount(trained, minlength=10).argmax()
    assert answer.metrics["naive/accuracy"] == pytest.approx(float((judged == most).float().mean()))
    assert not answer.vectors
    assert answer.examples == len(judged)
    for policy, says in (
        (Policy(queries=["evaluate"]), "does not answer"),
        (Policy(splits=["test"]), "its train rows"),
    ):
        refused = TaskRunner(SiteClient(plan.work, plan.clients, 0), policy, "cpu").serve(task, None)[1]
        assert says in (refused or "")
    right = (judged == most).double()
    assert answer.metrics["naive/standard_error"] == pytest.approx(float(right.std() / len(right) ** 0.5))
    hiding = TaskRunner(SiteClient(plan.work, plan.clients, 0), Policy(least_rows=2), "cpu").serve(task, None)[0]
    assert hiding is not None
    assert sorted(hiding.metrics) == ["naive/accuracy"]  # with noise, and nothing without
    assert hiding.metrics != {"naive/accuracy": answer.metrics["naive/accuracy"]}


def test_a_site_tells_the_rows_of_each_class_and_with_noise_where_it_hides_rows() -> None:
    query, plan = TrainingTotals.of("classes"), prepared({"name": "fedavg"})
    task = Task(1, 0, 0, {"model": plan.work.initial[: plan.work.layout.shared]}, query)
    runners = [
        TaskRunner(SiteClient(plan.work, plan.clients, 0), policy, "cpu")
        for policy in (Policy(least_rows=1), Policy(least_rows=2))
    ]
    (answer, *_), (hiding, *_) = (runner.serve(task, None) for runner in runners)
    held = torch.bincount(plan.clients.rows(0, "train").y, minlength=10)
    assert answer is not None
    assert answer.vectors["totals"].tolist() == held.tolist()
    assert hiding is not None
    assert hiding.vectors["totals"].tolist() != held.tolist()
    for told in (answer, hiding):
        assert query.answer_form(plan.work, runners[0].rows).reject_reason(told.vectors, told.examples, 0, {}) is None
    above = Policy(least_rows=int(held[held > 0].min()) + 1)
    assert "fewer than" in (TaskRunner(SiteClient(plan.work, plan.clients, 0), above, "cpu").serve(task, None)[1] or "")


def test_the_threshold_of_all_clients_names_the_classes_of_its_version_alone() -> None:
    plan = prepared({"name": "fedavg"})
    model = plan.work.initial[: plan.work.layout.shared]
    runner = TaskRunner(SiteClient(plan.work, plan.clients, 0), Policy(queries=["threshold_counts"]), "cpu")
    query = ThresholdCounts(criterion="pooled f1", chosen=0.3)
    assert runner.serve(Task(1, 0, 5, {"model": model}, query), None)[1] is None
    assert runner.threshold(5, model) == {"value": 0.3, "criterion": "pooled f1"}
    assert runner.threshold(6, model) is None


def test_counts_by_class_leave_a_site_only_where_its_policy_names_them() -> None:
    query, plan = Confusion(classes=10), prepared({"name": "fedavg"})
    runner = TaskRunner(SiteClient(plan.work, plan.clients, 0), Policy(), "cpu")
    task = Task(1, 0, 0, {"model": plan.work.initial[: plan.work.layout.shared]}, query)
    assert runner.serve(task, None)[1] == (
        "this site answers 'confusion' only if its policy names it: queries = ['confusion', ...]"
    )
    runner = TaskRunner(SiteClient(plan.work, plan.clients, 0), Policy(queries=["confusion"], least_rows=1), "cpu")
    answer, _, _ = runner.serve(task, None)
    assert answer is not None
    held = torch.bincount(plan.clients.rows(0, "test").y, minlength=10)
    assert answer.vectors["confusion"].view(10, 10).sum(1).tolist() == held.tolist()
    assert query.reject_reason(answer, plan.work) is None
    for wrong in (answer.vectors["confusion"] * 2, answer.vectors["confusion"][:50], -answer.vectors["confusion"]):
        assert query.reject_reason(dataclasses.replace(answer, vectors={"confusion": wrong}), plan.work) is not None
    hiding = Policy(queries=["confusion"], least_rows=2)
    told, reason = Gate(hiding, plan.work, plan.clients, 0, hiding.disclosure()).checked(task, answer)
    assert told is None
    assert "the answer is about fewer than the 2 rows that this site demands" in (reason or "")


_declared: list[str] = []  # what `Leaking` declares; an engine asks for it after training


class Leaking(Sgd):
    """A trainer whose updates carry the client's own rows, which it may declare too late."""

    kind = "leaking"

    def uploads(self) -> tuple[str, ...]:
        return tuple(_declared)

    def train(self, inputs: TrainInput, context: ClientContext) -> TrainOutput:
        trained = super().train(inputs, context)
        rows = torch.full_like(inputs.model[:, :8], 7.0)
        return dataclasses.replace(trained, vectors={**trained.vectors, "rows": rows})


@pytest.mark.parametrize("late", [[], ["rows"]], ids=["undeclared", "declared late"])
def test_a_vector_that_the_trainer_did_not_declare_does_not_leave_the_site(late: list[str]) -> None:
    """It would be neither clipped nor noised, so the site's own policy refuses it, whatever the engine does."""
    plan, policy = prepared(noisy()), Policy(clip=1.0)
    work = dataclasses.replace(plan.work, trainer=Leaking(**plan.work.trainer.model_dump()))
    assert policy.reject_reason(work) is None
    runner = TaskRunner(SiteClient(work, plan.clients, 0), policy, "cpu")
    _declared[:] = late
    try:
        update, failure, state = runner.serve(Task(1, 0, 0, {"model": work.initial[: work.layout.shared]}), None)
    finally:
        _declared.clear()
    assert update is None
    assert state is None
    assert failure is not None
    if late:
        assert "the update carries 'rows', which was not declared" in failure


@pytest.mark.parametrize(
    ("longer", "says"),
    [
        ({"model": 0, "control": 0}, None),
        ({"model": 0, "control": 0, "rows": 0}, "carries 'rows', which was not declared"),
        ({"model": 1, "control": 0}, "numbers as model"),
        ({"model": 0, "control": 1}, "numbers as control"),
        ({"control": 0}, "numbers as model, sent nothing"),
    ],
    ids=str,
)
def test_updates_are_checked_before_they_leave(longer: dict[str, int], says: str | None) -> None:
    plan = prepared({"name": "scaffold"})
    size, control = plan.work.layout.shared, plan.work.server_vectors()["control"]
    task = Task(1, 0, 0, {"model": plan.work.initial[:size], "control": control})
    sizes = {"model": size, "control": len(control), "rows": 4}
    update = Update({name: torch.zeros(sizes[name] + more) for name, more in longer.items()}, 1, 1, {})
    left, reason = Gate(Policy(), plan.work, plan.clients, 0, Policy().disclosure()).checked(task, update)
    assert (left is None) == (reason is not None) == (says is not None)
    assert (says or "") in (reason or "")


@pytest.mark.full
def test_training_ends_before_the_task_that_would_exceed_a_sites_budget(tmp_path: Path) -> None:
    """Over all runs of the site together: the ledger is a file, and another run begins with what one has spent."""
    plan = prepared({"name": "dp_sgd", "lr": 0.1, "noise": 2.0, "batch": 20, "steps": 2})
    size, delta = plan.clients.size(0, "train") or 0, 1e-6

    def spent(tasks: int) -> float:
        event = dp_accounting.PoissonSampledDpEvent(20 / size, dp_accounting.GaussianDpEvent(2.0))
        accountant = PLDAccountant().compose(dp_accounting.SelfComposedDpEvent(event, 2 * tasks))
        return float(accountant.get_epsilon(delta))

    policy = Policy(training={"epsilon": (spent(3) + spent(4)) / 2, "delta": delta})
    vectors = {"model": plan.work.initial[: plan.work.layout.shared]}
    failures = []
    for run in range(2):
        site = SiteClient(plan.work, plan.clients, 0)
        runner = TaskRunner(site, policy, "cpu", ledger=site.ledger(tmp_path))
        failures += [runner.serve(Task(number, 0, number, vectors), None)[1] for number in range(2 * run, 2 * run + 2)]
    assert failures[:3] == [None] * 3
    assert failures[3] is not None
    assert failures[3].startswith("refused by the site's policy: epsilon would be ")
    assert site.ledger(tmp_path).spent(delta, TRAINING) == pytest.approx(spent(3), rel=2e-3)


@pytest.mark.parametrize(
    ("recipe", "says"),
    [
        ({"name": "fedavg"}, "the recipe adds no noise here"),
        (noisy(where="server") | {"aggregation": {"kind": "equal_weighted"}}, "the recipe adds no noise here"),
        ({"name": "dp_sgd", "noise": 0.0, "batch": 500}, "the recipe adds no noise here"),
        ({"name": "dp_sgd", "batch": 500}, None),
        (noisy(), None),
    ],
    ids=str,
)
def test_a_site_with_a_budget_for_training_takes_part_in_noisy_runs_only(recipe: Any, says: str | None) -> None:
    reason = Policy(training={"epsilon": 8.0, "delta": 1e-6}).reject_reason(work(recipe))
    assert reason is None if says is None else reason is not None and says in reason


def test_absurd_noise_is_refused_at_once(tmp_path: Path) -> None:
    ledger = RowLedger(np.ones(1, dtype=np.uint64), [tmp_path])
    for noise, releases in ((1e-3, 1), (1.0, 10**9)):
        with pytest.raises(OverBudget, match="the ledger allows 8"):
            ledger.spend(TRAINING, noise, 0.5, releases, Limit(8.0, 1e-6))
    assert ledger.spent(1e-6) == 0


def test_a_query_or_recipe_that_there_is_not_is_refused_unless_a_plugin_may_bring_it() -> None:
    with pytest.raises(ValidationError, match="there is no query 'evalute': did you mean 'evaluate'"):
        Policy(queries=["evalute"])
    with pytest.raises(ValidationError, match="there is no recipe 'fedavgg': did you mean 'fedavg'"):
        Policy(accept=["ask", "fedavgg"])
    with pytest.raises(ValidationError, match="there is no recipe 'aks': did you mean 'ask'"):
        Policy(accept=["fedavg", "aks"])
    allowed = Policy(queries=["evalute"], accept=["fedavgg"], plugins=["mylab"])
    assert (allowed.queries, allowed.accept) == (["evalute"], ["fedavgg"])


@pytest.mark.parametrize("counts", [[0, 0, 0, 0], [0.2, 0, 0, 0.1], [-0.4, 0.1, 0, 0], [0, 0, 0, 3]])
def test_a_median_of_all_sites_has_ends_whatever_noise_leaves_of_the_counts(counts: list[float]) -> None:
    query = TrainingTotals(naive="median", edges=(0.0, 1.0, 2.0))
    low, high = query._ends(torch.tensor(counts, dtype=torch.float64))
    assert low in query.edges
    assert high in query.edges
