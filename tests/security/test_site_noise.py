"""Noise at a site: fresh for each task, known to nobody else, and never drawn twice for the same bytes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from piebald import recipes
from piebald.contracts import Task
from piebald.engines.engine_choice import make_engine
from piebald.engines.outgoing import serve
from piebald.engines.stack import ClientStack
from piebald.experiments.run_settings import RunSettings
from piebald.federation.site.policy import Policy
from piebald.federation.site.site_rows import SiteClient
from piebald.federation.site.task_runner import TaskRunner
from piebald.methods.recipe import Recipe
from piebald.runs.prepare import PreparedRun, prepare
from tests.fakes import classified, seeded

NOISE = {"kind": "gaussian", "clip": 0.5, "noise": 1.0, "where": "client"}
CLIENT = recipes.fedavg(lr=0.1).with_(transforms=[NOISE])
ROWS = recipes.dp_sgd(lr=1.0, clip=0.5, noise=1.0, batch=12)


def planned(recipe: Recipe) -> PreparedRun:
    return prepare(recipe, classified(24, 24), seeded(lambda: nn.Linear(4, 2)), RunSettings(rounds=1))


def site(recipe: Recipe, policy: Policy | None = None) -> TaskRunner:
    """A site of a run, as after each start of its process."""
    plan = planned(recipe)
    return TaskRunner(SiteClient(plan.work, plan.clients, 0), policy or Policy(), "cpu")


def upload(runner: TaskRunner, version: int = 3) -> Tensor:
    """What the site would send for a version that the server picks."""
    task = Task(1, 0, version, {"model": runner.work.initial[: runner.work.layout.shared]})
    made, failure, _ = runner.serve(task, None)
    assert made is not None, failure
    return made.vectors["model"]


@pytest.mark.full
@pytest.mark.parametrize(
    ("recipe", "policy"),
    [(CLIENT, Policy()), (CLIENT, Policy(noise=0.5)), (ROWS, Policy())],
    ids=["gaussian", "gaussian that the policy demands", "dp_sgd"],
)
def test_two_uploads_of_one_version_do_not_share_their_noise(recipe: Recipe, policy: Policy) -> None:
    """Before, two uploads subtracted gave the difference of two updates to 4.6e-6, since both had the same noise."""
    first, again = upload(site(recipe, policy)), upload(site(recipe, policy))
    assert float((first - again).abs().max()) > 0.01
    in_one_process = site(recipe, policy)
    assert float((upload(in_one_process) - upload(in_one_process)).abs().max()) > 0.01


@pytest.mark.parametrize("recipe", [CLIENT, pytest.param(ROWS, marks=pytest.mark.full)], ids=["gaussian", "dp_sgd"])
def test_the_server_cannot_make_the_noise_from_what_it_knows(recipe: Recipe) -> None:
    """It knows the seed, the client's name, the version and the model.  Before, all of the noise of `gaussian` followed
    from these unless the site's policy named noise: a simulation of the task gave the upload to the last bit.
    """
    work, client = planned(recipe).work, planned(recipe).clients
    engine = make_engine("sequential", work, client, torch.device("cpu"), False)
    model = work.initial[: work.layout.shared]
    one, two = (serve(engine, ClientStack([0], [3], [3], [0], [model], {}, {})).vectors["model"][0] for _ in range(2))
    assert torch.equal(one, two)  # in the simulator it repeats
    assert float((upload(site(recipe)) - one).abs().max()) > 0.01


@pytest.mark.full
def test_noise_at_a_site_has_the_deviation_that_was_stated() -> None:
    runner = site(recipes.fedavg(lr=1e-9).with_(transforms=[NOISE]))
    drawn = torch.cat([upload(runner) for _ in range(300)])
    assert float(drawn.std()) == pytest.approx(0.5, rel=0.05)
    assert abs(np.corrcoef(drawn[:-10], drawn[10:])[0, 1]) < 0.1


def test_a_site_without_noise_computes_what_the_simulator_does() -> None:
    """Fresh randomness is for what protects: batches of a recipe without noise still follow from the run's seed."""
    assert torch.equal(upload(site(recipes.fedavg(lr=0.1))), upload(site(recipes.fedavg(lr=0.1))))


@pytest.mark.parametrize("drawn", ["batches", "augmentation", "dropout"])
def test_what_is_drawn_for_hidden_rows_is_known_to_the_site_alone(drawn: str) -> None:
    """Who knows which rows are in a batch gains nothing from their being drawn: without noise the gradients tell.

    With known augmentation or dropout, one row more would change in a known way what becomes of those behind it.
    """
    fields = {"batch": 6} if drawn == "batches" else {"batch": 24}  # then each row is in each batch
    change = ["gaussian_noise"] if drawn == "augmentation" else []
    recipe = recipes.dp_sgd(lr=1.0, clip=0.5, noise=0.0, steps=1, augmentation=change, **fields)
    layers = [nn.Dropout(0.5)] if drawn == "dropout" else []

    def again() -> Tensor:
        model = seeded(lambda: nn.Sequential(*layers, nn.Linear(4, 2)))
        plan = prepare(recipe, classified(24, 24), model, RunSettings(rounds=1))
        return upload(TaskRunner(SiteClient(plan.work, plan.clients, 0), Policy(), "cpu"))

    assert not torch.equal(again(), again())
