"""Answers of a site with noise, audited from many with a canary and many without: sums, sums of models, scores.

What an attacker sees is an answer or a failure; the site is asked as a server asks it, under the policy "noise".
"""

from __future__ import annotations

import math
import random
import secrets
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from piebald import recipes
from piebald.contracts import Query, Task
from piebald.core.randomness import NoiseSource
from piebald.experiments.run_settings import RunSettings
from piebald.federation.site.policy import Policy
from piebald.federation.site.task_runner import SiteClient, TaskRunner
from piebald.inference.models.rows import ModelPlan
from piebald.inference.queries import columns
from piebald.inference.queries.columns import NoisyModelSumsQuery, NoisySumsQuery
from piebald.methods.queries import Evaluate
from piebald.models import Logistic
from piebald.privacy.accounting import gaussian_epsilon
from piebald.runs.prepare import prepare
from tests.fakes import federation

from .audits import FAILED, Scores, from_outcomes

pytest.importorskip("dp_accounting", reason="needs dp-accounting: pip install '.[privacy]'")

RUNS, MANY, ROWS, DELTA, NOISE = 600, 2000, 12, 0.01, 1.0
POLICY = Policy.model_validate(
    {"preset": "noise", "budget": {"epsilon": 6.0, "delta": 1e-6}, "questions": {"evaluate": 1}}
)
PLAN = ModelPlan(family="binomial", columns=(("0", None), ("1", None)), target=("2", None))
BOUNDS = ((-1.0, 1.0),) * 2
SUMS = NoisySumsQuery(bounds=BOUNDS, classes=2, noise=NOISE)
SCORES = NoisyModelSumsQuery(plan=PLAN, bounds=BOUNDS, noise=NOISE)
QUERIES: dict[str, Query] = {"sums": SUMS, "sums of models": SCORES, "scores": Evaluate(split="train")}


def site_of(canary: float | None) -> SiteClient:
    """A site of small rows, one of which may be a canary of the other class."""
    x, y = np.random.default_rng(1).uniform(-0.1, 0.1, (ROWS, 2)), np.zeros(ROWS, np.int64)
    x[0], y[1] = 0.9, 1
    if canary is not None:
        x[0], y[0] = canary, 1
    clients = federation((x.astype(np.float32), y), classes=["a", "b"])
    plan = prepare(recipes.fedavg(lr=0.1), clients, Logistic([2], 2), RunSettings(seed=1))
    return SiteClient(plan.work, plan.clients, 0)


def task_of(query: Query, site: SiteClient) -> Task:
    """The question about a model in which each row of the site's first class is right, with coefficients of 0."""
    weights = torch.zeros(site.work.layout.size)
    site.work.layout.views(weights)["classifier.bias"][0] = 1.0
    vectors = {"model": weights[: site.work.layout.shared]}
    return Task(1, 0, 0, {**vectors, "numbers": torch.zeros(3)} if query is SCORES else vectors, query)


def outcomes(query: Query, canary: float | None, runs: int = RUNS) -> list[Tensor | None]:
    """What a site answers, again and again, None where it fails."""
    try:
        site = site_of(canary)
    except Exception:  # a site that refuses tells as much as one that fails
        return [None] * runs
    runner, task = TaskRunner(site, POLICY, "cpu"), task_of(query, site)
    return [_answer(runner, replace(task, version=version)) for version in range(runs)]


def _answer(runner: TaskRunner, task: Task) -> Tensor | None:
    answer, _, _ = runner.serve(task, None)
    if answer is None:
        return None
    numbers = [vector.double() for vector in answer.vectors.values()]
    # accuracy, and nothing that is the same for all
    return torch.cat([*numbers, torch.tensor([answer.metrics[name] for name in sorted(answer.metrics)]).double()])


def audited(query: Query, canary: float) -> tuple[float, float]:
    """Lower bounds of epsilon at 95 % and at 99 %, from where answers lie between the mean ones of two halves."""
    answers = [outcomes(query, row) for row in (canary, None)]
    means = [torch.stack(sound).mean(0) if (sound := [a for a in half[::2] if a is not None]) else None
             for half in answers]  # fmt: skip
    direction = means[0] - means[1] if means[0] is not None and means[1] is not None else None
    # the direction is chosen by half of the answers, and the bound follows from the other half
    inside, outside = (np.array([_score(each, direction) for each in half[1::2]]) for half in answers)
    low, high = (from_outcomes(inside, outside, DELTA, doubt) for doubt in (0.05, 0.01))
    return low, high


def _score(answer: Tensor | None, direction: Tensor | None) -> float:
    if answer is None:
        return FAILED
    return 0.0 if direction is None else float(answer @ direction) / max(float(direction.norm()), 1e-300)


def stated(query: Query) -> float:
    """The epsilon of one answer."""
    return gaussian_epsilon(multiplier(query), DELTA)


def multiplier(query: Query) -> float:
    """The noise of an answer, in units of what one row may change."""
    return POLICY.score_noise(query) if isinstance(query, Evaluate) else NOISE


@pytest.fixture(autouse=True)
def seeded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Noise of a seed, in place of the operating system's."""
    draw = random.Random(7)
    monkeypatch.setattr(secrets, "token_bytes", draw.randbytes)
    monkeypatch.setattr(secrets, "token_hex", lambda count: draw.randbytes(count).hex())
    # one answer is audited, so none is counted
    monkeypatch.setattr(TaskRunner, "_count", lambda *_: None)


@pytest.mark.long
@pytest.mark.parametrize("canary", [-0.9, 1e30, math.nan, math.inf])
@pytest.mark.parametrize("name", QUERIES)
def test_no_row_is_told_by_more_than_is_stated(name: str, canary: float) -> None:
    """So few answers bound epsilon loosely; that the attack finds what is broken is shown below."""
    assert max(audited(QUERIES[name], canary)) <= stated(QUERIES[name])


def refused(*args: Any, **options: Any) -> Any:
    raise ValueError("a row is no number")


def known_to_the_attacker(name: str, less: float, monkeypatch: pytest.MonkeyPatch) -> float:
    """A lower bound of epsilon at 95 % of somebody who knows in which direction the worst row moves an answer.

    Args:
        name: of the question.
        less: what the noise is multiplied by.
    """
    sound, query = NoiseSource.gaussian, QUERIES[name]
    scaled = {"by": 1e-3 * less}
    monkeypatch.setattr(NoiseSource, "gaussian", lambda self, count: scaled["by"] * sound(self, count))
    means = [torch.stack([a for a in outcomes(query, row, 20) if a is not None]).mean(0) for row in (-1.0, None)]
    scaled["by"] = less
    direction = means[0] - means[1]
    inside, outside = (
        np.array([_score(each, direction) for each in outcomes(query, row, MANY)]) for row in (-1.0, None)
    )
    return from_outcomes(inside, outside, DELTA)


@pytest.mark.long
@pytest.mark.parametrize("name", ["sums", "scores"])
def test_the_audit_comes_near_to_what_so_many_answers_can_show(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """That is half of what is stated: the bound of numbers which are moved by all that the mechanism allows.

    A row moves sums of models by 0.6 of what bounds it, so that little can be shown of them.
    """
    draw = np.random.default_rng(1)
    most = from_outcomes(draw.normal(1 / multiplier(QUERIES[name]), 1, MANY), draw.normal(0, 1, MANY), DELTA)
    found = known_to_the_attacker(name, 1.0, monkeypatch)
    assert 0.7 * most < found <= stated(QUERIES[name])


@pytest.mark.long
@pytest.mark.parametrize(("name", "less"), [("sums", 0.5), ("sums of models", 0.25), ("scores", 0.5)])
def test_the_audit_finds_noise_that_is_too_small(name: str, less: float, monkeypatch: pytest.MonkeyPatch) -> None:
    assert known_to_the_attacker(name, less, monkeypatch) > stated(QUERIES[name])


@pytest.mark.full
@pytest.mark.parametrize("name", ["sums", "sums of models"])
def test_the_audit_finds_a_site_that_fails_at_one_row(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    function = "table_columns" if name == "sums" else "model_rows"
    sound = getattr(columns, function)

    def picky(*args: Any, **options: Any) -> Any:
        made = sound(*args, **options)
        numbers: Scores = next(iter(made.numbers.values())) if name == "sums" else made.x
        return made if len(numbers) == ROWS and np.isfinite(numbers).all() else refused()

    monkeypatch.setattr(columns, function, picky)
    assert min(audited(QUERIES[name], math.nan)) > stated(QUERIES[name])
