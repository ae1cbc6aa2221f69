"""What sites are asked besides training: nothing that no privacy budget counts, and nothing past transforms."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from piebald import recipes
from piebald.contracts import ClientContext, Query, ResultForm, Split, SumDemands, Task, TrainInput, TrainOutput, Trains
from piebald.contracts.data import ModelSpec
from piebald.core.errors import SettingError
from piebald.experiments.run_settings import RunSettings
from piebald.federation.site.policy import Policy
from piebald.federation.site.site_rows import SiteClient
from piebald.federation.site.task_runner import TaskRunner
from piebald.methods.queries import Evaluate
from piebald.methods.queries.scores import Validate
from piebald.methods.queries.server_rows import RootLoss, RootTraining
from piebald.methods.recipe import Recipe
from piebald.methods.training.lowest_loss import LowestLoss
from piebald.runs.prepare import PreparedRun, prepare
from tests.fakes import classified, seeded

NOISY = {"kind": "gaussian", "clip": 1.0, "noise": 1.0, "where": "client"}
CENTRAL = {"kind": "gaussian", "clip": 1.0, "noise": 1.0}
SUMMED = {"kind": "secure_aggregation"}
CLIENTS = classified(20, 30, 12, 40)


def plain(**fields: Any) -> Recipe:
    return recipes.fedavg(lr=0.1).with_(**fields)


PROTECTED = {
    "noise at clients": plain(transforms=[NOISY]),
    "noise at the server": plain(transforms=[CENTRAL], aggregation="equal_weighted"),
    "sums": plain(transforms=[SUMMED]),
    "DP-SGD": recipes.dp_sgd(lr=0.1),
}
DEMANDING = {
    "noise": Policy(noise=1.0),
    "clip": Policy(clip=1.0),
    "sums": Policy(secure_aggregation=3),
    "a table": Policy(secure_aggregation=SumDemands()),
}


def prepared(recipe: Recipe, **options: Any) -> PreparedRun:
    return prepare(
        recipe, CLIENTS, seeded(lambda: torch.nn.Linear(4, 2)), RunSettings.of_keywords({"seed": 1, **options})
    )


def runner(policy: Policy, recipe: Recipe | None = None, **work: Any) -> TaskRunner:
    plan = prepared(recipe or plain())
    return TaskRunner(SiteClient(dataclasses.replace(plan.work, **work), plan.clients, 0), policy, "cpu")


def ask(site: TaskRunner, query: Query | None, *, version: int = 0, step: float = 0.0, **more: Tensor) -> Any:
    """The answer and the reason why there is none; the model is the run's first one, moved along (1, 1, ...)."""
    model = site.work.initial[: site.work.layout.shared] + step
    return site.serve(Task(1, 0, version, {"model": model, **more}, query), None)[:2]


class Whole(Query):
    """A query whose answer is the trained model, which it does not declare."""

    kind = "whole"

    def answer(self, inputs: TrainInput, context: ClientContext, trainer: Trains) -> TrainOutput:
        end = trainer.train(inputs, context)
        return TrainOutput(inputs.model, torch.zeros(1), vectors={"told": end.model})


class Declared(Whole):
    """One that declares it."""

    kind = "declared"

    def answer_form(self, spec: ModelSpec, rows: Mapping[Split, int]) -> ResultForm:
        return ResultForm({"told": (spec.layout.size,)})


class Chatty(Query):
    """A query that hides a model in the names and values of many metrics."""

    kind = "chatty"

    def answer(self, inputs: TrainInput, context: ClientContext, trainer: Trains) -> TrainOutput:
        told = {f"w{place}": torch.ones(1) for place in range(100)}
        return TrainOutput(inputs.model, torch.zeros(1), metrics=told)


class Root(Query):
    """A question of a user's own for rows of the server."""

    kind = "root"
    asked_of = "server"


@pytest.mark.parametrize("query", [RootTraining(), RootLoss(), Root()], ids=lambda query: query.kind)
@pytest.mark.parametrize("policy", [Policy(), Policy(queries=["root_training", "root_loss", "root"])])
def test_questions_for_the_server_are_answered_by_no_site(query: Query, policy: Policy) -> None:
    """Before, a site whose policy named no queries answered `root_training` with its update, past all transforms."""
    answer, reason = ask(runner(policy), query)
    assert answer is None
    assert reason == f"{query.kind!r} is for rows of the server, and no site answers it"


@pytest.mark.full
@pytest.mark.parametrize("query", [Evaluate(), Evaluate(split="train"), Validate(classes=2), RootTraining()], ids=str)
def test_beside_any_protection_the_default_is_no_queries(query: Query) -> None:
    """Before, noise, sums and DP-SGD were passed by any question."""
    sites = [runner(Policy(), recipe) for recipe in PROTECTED.values()]
    sites += [runner(policy) for policy in DEMANDING.values()]
    for site in sites:
        answer, reason = ask(site, query)
        assert answer is None
        assert reason
    assert ask(runner(Policy()), Evaluate(split="train"))[1] is None  # without protection nothing changes


@pytest.mark.full
@pytest.mark.parametrize("case", PROTECTED)
def test_named_queries_are_answered_about_rows_that_the_policy_opens(case: str) -> None:
    site = runner(Policy(queries=["evaluate", "validate"]), PROTECTED[case])
    assert ask(site, Evaluate())[1] is None
    assert ask(site, Evaluate(split="train")) == (None, "this site answers no queries that depend on its train rows")
    site = runner(Policy(queries=["evaluate"], splits=["validation"]), PROTECTED[case])
    assert ask(site, Evaluate())[1] == "this site answers no queries that depend on its test rows"
    assert ask(site, Validate(classes=2))[1] == "this site does not answer 'validate'"
    site = runner(Policy(queries=["evaluate"], splits=["train"]), PROTECTED[case])
    assert ask(site, Evaluate(split="train"))[1] is None


@pytest.mark.parametrize("query", [Evaluate(), Validate(classes=2)], ids=str)
def test_scores_of_private_layers_depend_on_training_rows(query: Query) -> None:
    """They are scores of a model that only its training rows, without any noise, have made."""
    private = {"kind": "all_except", "private_layers": "bias"}
    recipe = plain(transforms=[CENTRAL], aggregation="equal_weighted", sharing=private)
    site = runner(Policy(queries=["evaluate", "validate"]), recipe)
    assert site.work.layout.private
    assert ask(site, query)[1] == "this site answers no queries that depend on its train rows"


def test_two_models_give_a_directional_derivative_and_the_second_is_not_examined() -> None:
    """Before, two questions gave it to 1 %."""
    site = runner(Policy(queries=["evaluate"]), PROTECTED["DP-SGD"])
    first, _ = ask(site, Evaluate())
    again, _ = ask(site, Evaluate())  # the server may have lost the answer
    assert first.metrics == again.metrics
    reason = "this site examines 1 of the models of one version on its test rows, and no more"
    assert ask(site, Evaluate(), step=0.01) == (None, reason)
    assert ask(site, Evaluate(personal=False), step=0.01)[0] is None
    assert ask(site, Evaluate(split="validation"))[1] is None
    assert ask(site, Evaluate(), version=1, step=0.01)[1] is None
    open_site = runner(Policy(queries=["evaluate"], models_per_version=2), PROTECTED["DP-SGD"])
    assert [ask(open_site, Evaluate(), step=step)[1] is None for step in (0.0, 0.1, 0.2)] == [True, True, False]


class Hinting(Query):
    """A query that tells a number which it does not declare."""

    kind = "hinting"

    def answer(self, inputs: TrainInput, context: ClientContext, trainer: Trains) -> TrainOutput:
        return TrainOutput(inputs.model, torch.zeros(1), metrics={"loss": torch.ones(1), "w0": torch.ones(1)})

    def answer_form(self, spec: ModelSpec, rows: Mapping[Split, int]) -> ResultForm:
        return ResultForm({}, ("loss",), rows["test"], 0)


@pytest.mark.parametrize("query", [Whole(), Chatty(), Hinting()], ids=lambda query: query.kind)
def test_no_answer_carries_more_than_its_query_declares(query: Query) -> None:
    """Before, whatever a query's code returned left the site, a whole model, too."""
    answer, reason = ask(runner(Policy()), query)
    assert answer is None
    assert "the answer carries" in reason or "which is not asked for" in reason


def test_an_answer_as_long_as_the_model_is_refused_beside_protection() -> None:
    assert ask(runner(Policy()), Declared())[1] is None
    site = runner(Policy(queries=["declared"], splits=["train"]), PROTECTED["sums"])
    assert ask(site, Declared()) == (
        None,
        "refused by the site's policy: the answer is as long as the model, beside secure_aggregation",
    )


def test_the_server_does_not_choose_how_long_an_answer_is() -> None:
    """A confusion matrix has as many classes as the model, whatever the query says."""
    answer, reason = ask(runner(Policy()), Validate(split="test", classes=5000))
    assert reason is None
    assert {name: tuple(part.shape) for name, part in answer.vectors.items()} == {"confusion": (4,)}


def test_metrics_do_not_leave_beside_noise() -> None:
    """Before, the mean training loss came with every noisy update."""
    assert ask(runner(Policy(), PROTECTED["noise at clients"]), None)[0].metrics == {}
    assert "loss" in ask(runner(Policy()), None)[0].metrics


CHOICES: dict[str, Mapping[str, Any]] = {
    "DVW": {"aggregation": "dvw"},
    "DVW behind staleness": {"aggregation": {"kind": "staleness_weighted", "base": {"kind": "dvw"}}},
    "steps that follow the validation loss": {"training": "adaptive_frequency"},
    "IFCA": {"training": "lowest_loss", "clustering": "ifca"},
    "a vote on clusters": {"clustering": {"kind": "distfl", "normal": "vote"}},
}


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("case", PROTECTED)
def test_recipes_whose_questions_no_budget_counts_are_refused(choice: str, case: str) -> None:
    """Before, all of these ran, and the budget that was printed did not count the answers."""
    recipe, fields = PROTECTED[case], dict(CHOICES[choice])
    if case == "DP-SGD" and "training" in fields:
        return  # it is another trainer
    with pytest.raises(SettingError) as caught:
        recipe.with_(**fields)
    reasons = (
        "which no privacy budget counts",
        "needs individual updates",
        "secure_aggregation hides",
        "equal weights",
    )
    assert any(reason in str(caught.value) for reason in reasons)


@pytest.mark.parametrize("case", PROTECTED)
def test_scores_on_training_rows_are_refused_in_simulations_too(case: str) -> None:
    with pytest.raises(SettingError, match="no privacy budget counts them: evaluate on split 'test' or 'validation'"):
        prepared(PROTECTED[case], evaluate_split="train")
    assert prepared(plain(), evaluate_split="train").rounds


@pytest.mark.parametrize("policy", DEMANDING)
def test_a_trainer_that_tells_more_is_refused_by_a_policy_that_protects(policy: str) -> None:
    """The server may leave out the recipe's own checks."""
    work = prepared(plain()).work
    choosing = dataclasses.replace(work, trainer=LowestLoss(lr=0.1))
    reason = DEMANDING[policy].reject_reason(choosing)
    assert reason is not None
    assert reason.startswith("the trainer would disclose which model has the lowest loss on their training rows")
    assert Policy().reject_reason(choosing) is None
