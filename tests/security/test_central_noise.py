"""Noise at the server: what a client can move, who is drawn, what sites know, and what the budget says."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from piebald import recipes
from piebald.contracts import Cohort, ServerContext, Task
from piebald.core.errors import SettingError
from piebald.experiments.run_settings import RunSettings
from piebald.methods.recipe import Recipe
from piebald.privacy.accounting import central, fixed_cohorts, of_recipe
from piebald.runs.prepare import prepare
from piebald.server.client_pool import ClientPool
from piebald.server.cluster_models import ClusterModels
from tests.fakes import FakeRuntime, classified, make_server, seeded, update

NOISE = {"kind": "gaussian", "clip": 1.0, "noise": 1.0, "where": "server"}
SILENT = NOISE | {"noise": 1e-12}  # so little that the mean can be read


def recipe(transform: Mapping[str, Any] = NOISE, **scheduling: Any) -> Recipe:
    return recipes.fedavg(lr=0.1).with_(
        transforms=[transform], aggregation="equal_weighted", scheduling={"kind": "synchronous", **scheduling}
    )


class Context:
    """What a step reads of a server's context."""

    def __init__(self, known: int, seed: int = 0) -> None:
        self.known, self.state, self.version = known, dict[str, Any](), 0
        self.spec = type("Spec", (), {"seed": seed})()

    def __call__(self, axis: str, cluster: int) -> ServerContext:
        return self  # type: ignore[return-value]


def moves(
    made: Recipe, known: int, changes: Sequence[Sequence[float]], count: int, secret: bool = False, seed: int = 0
) -> Iterator[Tensor]:
    """How steps with these clipped updates move a model, behind the noise."""
    models, make, clients = (
        ClusterModels(made, torch.zeros(2), secret=secret),
        Context(known, seed),
        range(len(changes)),
    )
    updates = [update(*one) for one in changes]
    for version in range(count):
        models.main.model = torch.zeros(2)
        models.step(
            Cohort(clients, [version] * len(clients), updates, None, version, [torch.zeros(2)] * len(clients)), make
        )
        yield models.main.model


def moved(made: Recipe, known: int, changes: Sequence[Sequence[float]], secret: bool = False) -> Tensor:
    """How the first step does."""
    return next(moves(made, known, changes, 1, secret))


@pytest.mark.parametrize("others", [1, 4, 9])
def test_one_client_moves_the_result_by_its_clip_over_a_fixed_number(others: int) -> None:
    """Before, the mean was over those who arrived: a client against all others moved it by nearly twice as much as the
    noise was made for, and its absence made the others weigh more.
    """
    made, rest = recipe(SILENT), [[1.0, 0.0]] * others
    known = others + 1
    here, gone = moved(made, known, [*rest, [-1.0, 0.0]]), moved(made, known, rest)
    assert float((here - gone).norm()) == pytest.approx(1 / known, rel=1e-5)
    whole = recipe(NOISE)
    drawn = torch.stack([*moves(whole, known, rest, 400)]) - gone
    assert float(drawn.std()) == pytest.approx(1 / known, rel=0.1)  # the multiplier is 1


def test_who_arrives_changes_neither_the_divisor_nor_the_noise() -> None:
    made = recipe(SILENT, cohort=4)
    for count in range(1, 5):
        assert moved(made, 8, [[1.0, 0.0]] * count)[0] == pytest.approx(count / 4, rel=1e-5)


def test_a_round_of_nobody_has_noise_as_well() -> None:
    """A model that stays as it is would tell that nobody took part."""
    assert float(moved(recipe(), 5, []).norm()) > 0
    assert float(moved(recipes.fedavg(lr=0.1), 5, []).norm()) == 0


def test_a_sites_knowledge_does_not_give_the_noise_of_a_real_server() -> None:
    """Before, the seed, which every site is told, gave the noise, and the mean came out to 9e-6."""
    made = recipe()
    simulated, again = moved(made, 3, [[1.0, 0.0]] * 3), moved(made, 3, [[1.0, 0.0]] * 3)
    assert torch.equal(simulated, again)
    real, once_more = (moved(made, 3, [[1.0, 0.0]] * 3, secret=True) for _ in range(2))
    assert float((real - simulated).norm()) > 1e-3
    assert float((real - once_more).norm()) > 1e-3  # a server that is resumed does not draw it again either


def test_a_real_server_draws_whom_it_asks_from_what_nobody_knows() -> None:
    def asked(secret: bool) -> list[list[int]]:
        made = recipe(sampling="poisson", cohort=0.5)
        runtime = FakeRuntime(20, lambda task: update(0.1, 0.1, 0.1))
        server, _ = make_server(made, runtime, rounds=6, secret=secret)
        server.run()
        by_version: dict[int, list[int]] = {}
        for task in runtime.sent:
            by_version.setdefault(task.version, []).append(task.client)
        return [sorted(by_version[version]) for version in sorted(by_version)]

    assert asked(False) == asked(False)
    assert asked(True) != asked(False)
    assert asked(True) != asked(True)


def test_poisson_samples_ask_each_client_by_itself() -> None:
    pool, known, share = ClientPool(), 40, 0.2
    drawn = [pool.sample(range(known), known, share, 7, version) for version in range(3000)]
    counts = np.bincount(np.concatenate(drawn), minlength=known)
    assert (abs(counts - 600) < 5 * math.sqrt(3000 * share * (1 - share))).all()
    sizes = np.array([len(one) for one in drawn])
    assert sizes.var() == pytest.approx(known * share * (1 - share), rel=0.15)
    assert any(len(pool.sample(range(3), 3, 0.1, 7, version)) == 0 for version in range(20))
    pool.take(Task(1, drawn[0][0], 0, {}))
    pool.exclude(drawn[0][1], "why")
    assert pool.sample(range(known), known, share, 7, 0) == drawn[0][2:]  # others are drawn as they were
    assert pool.sample([*range(0, known, 2)], known, share, 7, 1) == [one for one in drawn[1] if one % 2 == 0]


def test_a_run_goes_on_through_rounds_of_nobody() -> None:
    made = recipe(sampling="poisson", cohort=0.1)
    server, recorder = make_server(made, FakeRuntime(3, lambda task: update(0.1, 0.1, 0.1)), rounds=30)
    server.run()
    arrived = [step["arrived"] for step in recorder.steps]
    assert len(arrived) == 30
    assert 0 in arrived
    assert max(arrived) > 0


# -- what the budget says


@pytest.mark.full
def test_fixed_cohorts_are_not_accounted_as_poisson_samples() -> None:
    """Before, noise 1, a share of 0.1 and 100 rounds were said to spend 7.05 for any cohort of that size."""
    (poisson,) = of_recipe(recipe(sampling="poisson", cohort=10), 100, 100)
    assert (
        poisson.epsilon_pld == pytest.approx(central(1.0, 0.1, 100, 1e-5).epsilon_pld) == pytest.approx(7.05, abs=0.01)
    )
    (fixed,) = of_recipe(recipe(cohort=10), 100, 100)
    assert fixed == fixed_cohorts(1.0, 10, 100, 100, 1e-5)
    assert fixed.epsilon_pld > 31.0  # what twice the sensitivity would spend if the samples were Poisson's
    assert "fixed size" in fixed.meaning


@pytest.mark.full
def test_budgets_are_those_of_dp_accounting() -> None:
    """The mechanism described to another program in its own terms: the events, and what neighbours are."""
    dp = pytest.importorskip("dp_accounting", reason="needs dp-accounting: pip install '.[privacy]'")
    from dp_accounting.pld.pld_privacy_accountant import PLDAccountant
    from dp_accounting.rdp.rdp_privacy_accountant import RdpAccountant

    once = dp.PoissonSampledDpEvent(0.2, dp.GaussianDpEvent(1.5))
    zero_out = PLDAccountant(dp.NeighboringRelation.REPLACE_SPECIAL)
    expected = zero_out.compose(dp.SelfComposedDpEvent(once, 12)).get_epsilon(1e-5)
    (poisson,) = of_recipe(recipe(NOISE | {"noise": 1.5}, sampling="poisson", cohort=4), 20, 12, 1e-5)
    assert poisson.epsilon_pld == pytest.approx(expected, rel=1e-3)
    replaced = RdpAccountant(neighboring_relation=dp.NeighboringRelation.REPLACE_ONE)
    drawn = dp.SampledWithoutReplacementDpEvent(100, 5, dp.GaussianDpEvent(4.0 / 2))
    expected = replaced.compose(dp.SelfComposedDpEvent(drawn, 50)).get_epsilon(1e-5)
    assert fixed_cohorts(4.0, 5, 100, 50, 1e-5).epsilon_rdp == pytest.approx(expected, rel=0.05)
    every_round = PLDAccountant().compose(dp.SelfComposedDpEvent(dp.GaussianDpEvent(4.0), 50)).get_epsilon(1e-5)
    open_cohorts = fixed_cohorts(4.0, 5, 100, 50, 1e-5, secret=False)
    assert open_cohorts.epsilon_pld == pytest.approx(every_round, rel=0.01)


@pytest.mark.parametrize(
    ("components", "says"),
    [
        ({"scheduling": {"kind": "asynchronous"}}, "who arrives in time"),
        ({"scheduling": {"kind": "buffered", "buffer_size": 2}}, "who arrives in time"),
        ({"scheduling": {"kind": "deadline", "seconds": 1.0}}, "who arrives in time"),
        ({"scheduling": {"kind": "synchronous", "cohort": 2, "over_selection": 1.5}}, "who arrives in time"),
        ({"clustering": {"kind": "cfl"}}, "cfl forms clusters"),
    ],
    ids=["asynchronous", "buffered", "deadline", "over-selection", "clusters"],
)
def test_where_nothing_is_known_no_number_is_printed(components: dict[str, Any], says: str) -> None:
    (budget,) = of_recipe(recipe().with_(**components), 4, 3)
    assert budget.epsilon_pld == budget.epsilon_rdp == math.inf
    assert says in budget.meaning


def test_sites_that_know_who_takes_part_gain_nothing_from_the_draw() -> None:
    summed = recipe(sampling="poisson", cohort=2).with_(transforms=[NOISE, {"kind": "secure_aggregation"}])
    (budget,) = of_recipe(summed, 10, 3, 1e-5)
    assert budget.epsilon_pld == pytest.approx(central(1.0, 1.0, 3, 1e-5).epsilon_pld)
    (simulated,) = of_recipe(recipe(NOISE | {"noise": 4.0}, cohort=1), 50, 20, 1e-5)
    (real,) = of_recipe(recipe(NOISE | {"noise": 4.0}, cohort=1), 50, 20, 1e-5, simulated=False)
    assert simulated.epsilon_pld < real.epsilon_pld


def test_data_do_not_decide_how_far_a_client_moves_a_noisy_mean() -> None:
    """Before, weights by examples were accounted as equal: the largest weight was in the noise, for all to see."""
    for weights in ("example_weighted", "gradient_norm_weighted", "median", {"kind": "dvw"}):
        with pytest.raises(SettingError, match="set aggregation = 'equal_weighted'"):
            recipe().with_(aggregation=weights)
    recipe().with_(transforms=[NOISE | {"noise": 0.0}], aggregation="median")  # it only clips


def test_how_often_a_client_uploads_without_rounds_is_not_guessed() -> None:
    at_clients = recipes.fedasync(lr=0.1).with_(transforms=[NOISE | {"where": "client"}])
    (budget,) = of_recipe(at_clients, 4, 10)
    assert budget.epsilon_pld == math.inf
    assert "sends as often as it is done" in budget.meaning
    assert budget.unit == "updates"


def test_a_real_server_does_not_publish_a_step_twice() -> None:
    """One that goes back to an older checkpoint would, and two draws of noise on one sum average out."""
    clients, model = classified(8, 8), seeded(lambda: nn.Linear(4, 2))
    real = {"kind": "federation", "experiment": {}}
    with pytest.raises(SettingError, match="checkpoint_every must be 1 where gaussian adds noise at a real server"):
        prepare(recipe(), clients, model, RunSettings(rounds=2, runtime=real, checkpoint_every=5))
    assert prepare(recipe(), clients, model, RunSettings(rounds=2, runtime=real)).checkpoint_every == 1
    assert prepare(recipe(), clients, model, RunSettings(rounds=2, checkpoint_every=5)).checkpoint_every == 5
