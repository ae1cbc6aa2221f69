"""What holds for every recipe: no effect where a setting is zero, no order, no private number on its way."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import piebald
from piebald import recipes
from piebald.contracts import Device, Result, SumRequest, Task
from piebald.core.errors import SettingError
from piebald.data.partition.devices import Devices
from piebald.engines.stack import PRIVATE
from piebald.methods.recipe import Recipe
from piebald.runtimes.simulation.simulation import Simulation

from .conftest import SIZES, TABLE, assert_same, carry_out, federation, in_turn, method, vector

# What must come to the same as FedAvg when its own setting has no effect.
NO_EFFECT = {
    "fedprox, mu 0": recipes.fedprox(cohort=4, lr=0.1, batch=10, mu=0.0),
    "hdafl, nothing private": recipes.hdafl(cohort=4, lr=0.1, batch=10, private=()),
    "cgau, nothing private": recipes.cgau(cohort=4, lr=0.1, batch=10, private=()),
    "lg_fedavg, all shared": recipes.lg_fedavg(cohort=4, lr=0.1, batch=10, shared="*"),
    "moon, mu 0": recipes.moon(cohort=4, lr=0.1, batch=10, mu=0.0),
    "fedlc, tau 0": recipes.fedlc(cohort=4, lr=0.1, batch=10, tau=0.0),
    "feddecorr, beta 0": recipes.feddecorr(cohort=4, lr=0.1, batch=10, beta=0.0),
    "fedsam, rho 0": recipes.fedsam(cohort=4, lr=0.1, batch=10, rho=0.0),
    "silobn, nothing private": recipes.silobn(cohort=4, lr=0.1, batch=10, private=()),
    "cfl, which never cuts": recipes.cfl(cohort=4, lr=0.1, batch=10, eps1=1e-9, eps2=1e9),
    "fedavgm, no momentum": recipes.fedavgm(cohort=4, lr=0.1, batch=10, beta=0.0),
    "clipping at a huge norm, no noise": recipes.fedavg(cohort=4, lr=0.1, batch=10).with_(
        transforms=[{"kind": "gaussian", "clip": 1e9, "noise": 0.0}]
    ),
    "a constant schedule": recipes.fedavg(cohort=4, lr=0.1, batch=10, lr_schedule={"kind": "exponential", "rate": 1.0}),
    "sgd clipping at a huge norm": recipes.fedavg(cohort=4, lr=0.1, batch=10, clip=1e9),
}
# Recipes whose global model is FedAvg's, with something for each client beside it.
BESIDE = {"fine_tuned": {}, "ditto": {"lam": 0.3}, "fedala": {"weight_lr": 0.0}, "fedphp": {"lam": 0.0}}
# What comes to the same global model as another recipe: both, and the options of both runs.
EQUAL = recipes.fedavg(cohort=4, lr=0.1, batch=10).with_(aggregation="equal_weighted")
LARGE = {"beta1": 0.0, "beta2": 1 - 1e-9, "tau": 1e6, "server_lr": 2e6}  # v stays tau^2, so the step is the change
SAME_MODEL: dict[str, tuple[Recipe, Recipe, dict[str, Any]]] = {
    "scaffold, without variates yet": (method("scaffold"), EQUAL, {"rounds": 1}),
    "fednova, equal numbers of steps": (method("fednova", steps=5), method("fedavg", steps=5), {}),
    "fedadam, tau above all changes": (method("fedadam", **LARGE), method("fedavg"), {}),
    "fedyogi, tau above all changes": (method("fedyogi", **LARGE), method("fedavg"), {}),
}  # fmt: skip


@pytest.mark.parametrize("case", NO_EFFECT)
def test_settings_without_effect_equal_fedavg(case: str) -> None:
    assert_same(carry_out(method("fedavg")), carry_out(NO_EFFECT[case]))


@pytest.mark.parametrize("case", BESIDE)
def test_personal_models_leave_the_global_model_alone(case: str) -> None:
    torch.testing.assert_close(vector(carry_out(method("fedavg"))), vector(carry_out(method(case, **BESIDE[case]))))


@pytest.mark.parametrize("case", SAME_MODEL)
def test_settings_without_effect_leave_the_global_model(case: str) -> None:
    one, two, options = SAME_MODEL[case]
    found, wanted = (vector(carry_out(recipe, **options)) for recipe in (one, two))
    torch.testing.assert_close(found, wanted, atol=2e-5, rtol=1e-4)


def test_ditto_without_lam_is_local_training() -> None:
    """With whole batches, whose order does not matter, the personal models are those of Local."""
    model = nn.Linear(6, 4)
    ditto, local = (
        carry_out(method(name, cohort=1.0, batch=64, lr=0.01, **more), model=model)
        for name, more in (("ditto", {"lam": 0.0}), ("local", {}))
    )
    mine, theirs = (
        {
            (row["version"], row["client"], row["metric"]): row["value"]
            for row in run.scores
            if row["model"] == "personal"
        }
        for run in (ditto, local)
    )
    assert len(mine) == 4 * 5 * 2
    assert mine == pytest.approx(theirs, abs=1e-5)


class SiteSpeeds(Devices):
    """Every site has a speed of its own, whatever its number is: no two arrive at the same instant."""

    order: tuple[int, ...]

    def device(self, client: int) -> Device:
        return Device(seconds_per_step=(1.0, 1.13, 1.29, 1.47, 1.71)[self.order[client]])


@pytest.mark.full
@in_turn(0)
def test_a_cohort_of_everybody_needs_no_order(name: str) -> None:
    """Clients renumbered: the same global model, and each client keeps its own results under its name."""
    order = (3, 1, 4, 0, 2)
    one = carry_out(method(name, cohort=1.0), rounds=6, simulator={"fleet": SiteSpeeds(order=tuple(range(5)))})
    renumbered = [[order.index(client) for client in members] for members in TABLE[name].get("regions", ())]
    more: dict[str, Any] = {"regions": renumbered} if renumbered else {}
    if "widths" in TABLE[name]:
        more["widths"] = [TABLE[name]["widths"][client] for client in order]
    if "ranks" in TABLE[name]:
        more["ranks"] = [TABLE[name]["ranks"][client] for client in order]
    two = carry_out(
        method(name, cohort=1.0, **more), federation(order), rounds=6, simulator={"fleet": SiteSpeeds(order=order)}
    )
    torch.testing.assert_close(vector(one), vector(two), atol=1e-5, rtol=1e-4)
    mine = {(SITE[row["client"]], *_what(row)): row["value"] for row in one.scores if row["client"] is not None}
    theirs = {
        (SITE[order[row["client"]]], *_what(row)): row["value"] for row in two.scores if row["client"] is not None
    }
    assert mine.keys() == theirs.keys()
    for key, value in mine.items():
        assert theirs[key] == pytest.approx(value, abs=1e-4)


SITE = [f"site {client}" for client in range(len(SIZES))]


def _what(row: dict[str, Any]) -> tuple[Any, ...]:
    return row["version"], row["model"], row["metric"]


class Backwards(Simulation):
    """Submits in reverse and listens to everything that passes the seam."""

    def __init__(self, *settings: Any) -> None:
        super().__init__(*settings)
        self.heard: list[Result] = []
        self.private: set[float] = set()

    def submit(self, tasks: Sequence[Task], sum_request: SumRequest | None = None) -> None:
        super().submit(list(reversed(tasks)), sum_request)

    def next(self, until: float = float("inf")) -> Result | None:
        result = super().next(until)
        if result is not None:
            self.heard.append(result)
            for client in self.state_store.kept:
                self.private |= set(self.state_store.kept.get(client).get(PRIVATE, torch.empty(0)).tolist())
        return result


@pytest.fixture
def listening(monkeypatch: pytest.MonkeyPatch) -> list[Backwards]:
    opened: list[Backwards] = []

    def listen(self: piebald.Simulator, work: Any, clients: Any) -> Backwards:
        opened.append(Backwards(self, work, clients))
        return opened[-1]

    monkeypatch.setattr(piebald.Simulator, "open", listen)
    return opened


@in_turn(1)
def test_the_order_of_submission_changes_nothing(name: str, listening: list[Backwards]) -> None:
    backwards = carry_out(method(name))
    listening.clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(piebald.Simulator, "open", lambda self, work, clients: Simulation(self, work, clients))
        forwards = carry_out(method(name))
    assert torch.equal(vector(backwards), vector(forwards))


@in_turn(2)
@pytest.mark.parametrize("aggregation", ["example_weighted", "equal_weighted"])
def test_no_private_number_is_in_a_result(name: str, aggregation: str, listening: list[Backwards]) -> None:
    """Listen at the seam: everything sent fits the shared slice, or has the shape that its trainer declares, and no
    value of a private layer is in it.
    """
    try:
        recipe = method(name).with_(aggregation={"kind": aggregation}, scheduling={"kind": "asynchronous", "cohort": 4})
    except SettingError as error:
        pytest.skip(str(error))
    carry_out(recipe, rounds=6)
    simulation = listening[0]
    shared, size = simulation.work.layout.shared, simulation.work.layout.size
    assert bool(simulation.private) == (size > shared)
    trainer = simulation.work.trainer
    declared = trainer.upload_shapes(simulation.work)
    sent = [result for result in simulation.heard if result.task.query is None]
    assert len(sent) >= 6
    for result in sent:
        assert result.update is not None
        for part, sent_vector in result.update.vectors.items():
            assert sent_vector.shape == declared[part] if part in declared else sent_vector.numel() <= shared
            plain = {0.0, 1.0} if part in declared else {0.0}  # which classes there are
            assert not simulation.private & set(sent_vector.flatten().tolist()) - plain


@in_turn(3)
def test_a_personal_model_scores_what_the_run_said(name: str, tmp_path: Path) -> None:
    """The modules that a user takes home are the ones that were measured."""
    clients = federation()
    run = carry_out(method(name), clients, out=tmp_path / "run")
    judged = "personal" if any(row["model"] == "personal" for row in run.scores) else "global"
    for client in range(len(clients)):
        rows = clients.rows(client, "test")
        with torch.no_grad():
            right = (run.model(client)(rows.x).argmax(1) == rows.y).float().mean()
        said = [
            row["value"]
            for row in run.scores
            if (row["client"], row["version"], row["model"], row["metric"]) == (client, 3, judged, "accuracy")
        ]
        assert said == [pytest.approx(float(right))]


def test_a_recipe_survives_its_toml(name: str) -> None:
    made = recipes.fedbuff(lr=0.1) if name == "fedbuff" else method(name)  # its buffer would have no effect below
    rounds, none = {"kind": "deadline", "seconds": 5.0, "max_staleness": 0}, {"kind": "asynchronous", "cohort": 2}
    other = rounds if name == "hierfavg" else none
    recipe = recipes.make(name, **made.fields, lr_schedule={"kind": "step_decay", "every": 3}).with_(scheduling=other)
    document = tomllib.loads(recipes.toml(recipe))["recipe"]
    components = {axis: document.pop(axis) for axis in recipe.axes if axis in document}
    assert recipes.make(document.pop("name"), **document).with_(**components).model_dump() == recipe.model_dump()
