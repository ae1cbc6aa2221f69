"""What recipes do where they could be taken for others: weights, private layers, replaced trainers, steps."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from piebald import recipes
from piebald.contracts import Cohort, QueryRequest, Update
from piebald.core.errors import SettingError
from piebald.core.objective import OBJECTIVES
from piebald.methods.aggregation import Dvw
from piebald.methods.recipe import Recipe
from piebald.methods.training import DpSgd, Sgd
from piebald.storage.store import RunStore
from tests.fakes import classified, client_work, seeded, simulate


def model() -> nn.Module:
    return seeded(lambda: nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)))


@pytest.mark.parametrize(("name", "setting"), [("qfedavg", {"q": 0.0}), ("afl", {"lambda_lr": 0.0})])
def test_weights_by_examples_make_fedavg_of_what_has_no_effect(name: str, setting: dict[str, Any]) -> None:
    clients = classified(5, 30, 12)
    by_rows, equal, fedavg, mean = (
        simulate(recipe, clients, model(), rounds=3).cluster_models[0]
        for recipe in (
            recipes.make(name, lr=0.3, weights="examples", **setting),
            recipes.make(name, lr=0.3, **setting),
            recipes.fedavg(lr=0.3),
            recipes.fedavg(lr=0.3).with_(aggregation="equal_weighted"),
        )
    )
    torch.testing.assert_close(by_rows, fedavg, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(equal, mean, rtol=1e-5, atol=1e-6)
    assert float((fedavg - mean).abs().max()) > 1e-3


@pytest.mark.parametrize("settings", [{"momentum": 0.9}, {"optimizer": "adam"}, {"step_schedule": {"kind": "cosine"}}])
def test_q_fedavg_refuses_steps_whose_constant_is_not_one_over_the_rate(settings: dict[str, Any]) -> None:
    with pytest.raises(SettingError, match="takes 1 / lr for a constant of plain SGD's steps: leave"):
        recipes.qfedavg(**settings)


@pytest.mark.parametrize(("name", "strength"), [("fedprox", "mu"), ("feddyn", "alpha")])
def test_terms_hold_private_layers_near_the_start_of_the_task(name: str, strength: str, tmp_path: Path) -> None:
    """A step without a gradient of the loss would not move; the second step of two is drawn back by the term."""
    clients = classified(20)
    ends = []
    for value in (1e-6, 2.0):
        recipe = recipes.make(name, lr=0.1, steps=2, batch=20, **{strength: value})
        recipe = recipe.with_(sharing={"kind": "all_except", "private_layers": "classifier"})
        folder = tmp_path / f"{value}"
        run = simulate(recipe, clients, model(), rounds=1, out=folder)
        private = RunStore.open(folder).client_state(0, 1)["private"]
        ends.append(private - run.work.initial[run.work.layout.shared :])
    free, held = ends
    # two steps of about the same gradient: the second is shorter by lr * strength times the first
    assert float(held.norm() / free.norm()) == pytest.approx(1 - 0.1 * 2.0 / 2, abs=0.02)


REPLACED = [
    (recipes.ditto(), "dp_sgd"),
    (recipes.ditto(lam=0.1), DpSgd()),
    (recipes.fedprox(), "sgd"),
    (recipes.fedprox(), "dp_sgd"),  # its mu is 0 unless it is said
    (recipes.dp_sgd(), "sgd"),
    (recipes.fedamp(), {"kind": "proximal", "mu": 0.1}),
    (recipes.scaffold(), "dp_sgd"),
    (recipes.per_fedavg(), "dp_sgd"),
]


@pytest.mark.parametrize(("recipe", "trainer"), REPLACED, ids=lambda value: getattr(value, "name", None))
def test_a_trainer_that_would_take_a_methods_place_is_refused(recipe: Recipe, trainer: Any) -> None:
    with pytest.raises(SettingError, match=r"would replace it|would have no effect|needs"):
        recipe.with_(training=trainer)


def test_what_composes_is_taken() -> None:
    private = recipes.fedprox(mu=0.5).with_(training=DpSgd(noise=2.0)).training
    assert isinstance(private, DpSgd)
    assert private.mu == 0.5
    assert recipes.fedavg().with_(training="ditto").with_(training="dp_sgd").training.kind == "dp_sgd"
    assert recipes.ditto(lam=0.3).with_(training={"kind": "ditto", "lr": 0.2}).training.table()["lam"] == 0.3
    assert recipes.distfl().with_(training="dp_sgd", clustering="cfl").training.kind == "dp_sgd"


def test_steps_and_epochs_are_one_or_the_other() -> None:
    for make in (lambda: recipes.fedavg(steps=10, epochs=1), lambda: recipes.fedavg(steps=10, epochs=2)):
        with pytest.raises(SettingError, match=r"steps .*instead of epochs.*: leave one of them out"):
            make()
    with pytest.raises(SettingError, match="steps = 10 takes so many steps instead of epochs = 3"):
        Sgd(steps=10, epochs=3)
    assert recipes.fedavg(steps=10).training.max_steps(20) == 10


class Evaluators:
    """A server context whose client 1 does not answer."""

    known, version, members = 3, 0, (0, 1, 2)

    def __init__(self, right: Sequence[Sequence[int]], silent: set[tuple[int, int]]) -> None:
        self.spec = client_work(model(), recipes.fedavg().training)
        object.__setattr__(self.spec, "outputs", (2,))
        object.__setattr__(self.spec, "objective", OBJECTIVES["classification"])
        self.right, self.silent = right, silent

    def query(self, requests: Sequence[QueryRequest]) -> list[Update | None]:
        answers = []
        for request in requests:
            row = int(request.vectors["model"][0])
            if (row, request.client) in self.silent:
                answers.append(None)
                continue
            right = float(self.right[row][request.client])
            answers.append(Update({"confusion": torch.tensor([right, 10.0 - right, 0.0, 0.0])}, 10, 0, {}))
        return answers


def scores(silent: set[tuple[int, int]]) -> list[float]:
    """The scores of two models; client 0 has easy rows and client 1 hard ones."""
    right = [[9, 3, 6], [10, 4, 7]]
    context: Any = Evaluators(right, silent)
    sent = [torch.zeros(1), torch.zeros(1)]
    updates = [Update({"model": torch.tensor([float(row)])}, 1, 1, {}) for row in range(2)]
    cohort = Cohort([3, 4], [0, 0], updates, None, 0, sent)
    prepared = Dvw().prepare(cohort, context)
    return [update.metrics["validation"] for update in prepared.updates]


def test_models_are_compared_on_the_same_evaluators() -> None:
    """The second model is better everywhere; before, it scored less as soon as an easy evaluator was lost for it."""
    assert scores(set()) == pytest.approx([0.6, 0.7])
    assert scores({(1, 0)}) == pytest.approx([0.45, 0.55])  # over the clients 1 and 2 only
    assert scores({(0, 1), (1, 0)}) == pytest.approx([0.6, 0.7])  # on the rows of client 2
    # nobody answered for both: each has what it has
    assert scores({(0, 1), (1, 0), (0, 2)}) == pytest.approx([0.9, 0.55])


def test_fedproto_predicts_by_prototypes_by_default() -> None:
    assert recipes.fedproto().training.kind == "nearest_prototype"
    assert recipes.fedproto(inference="classifier").training.kind == "prototypes"
