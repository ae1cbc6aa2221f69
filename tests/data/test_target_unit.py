"""Targets of tables in their own unit: for losses of one's own, by [prepare], and the delta of the Huber loss."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.linear_model import PoissonRegressor
from torch import Tensor
from torch.nn import functional

import piebald
from piebald.core.errors import SettingError
from piebald.core.metrics import huber_loss
from piebald.data.clients.prepared import as_in_run
from piebald.experiments.file import ExperimentSettings
from piebald.experiments.run_settings import RunSettings
from piebald.models import build_model
from piebald.runs.prepare import PreparedRun, prepare

pd = pytest.importorskip("pandas")
RNG = np.random.default_rng(1)
X = RNG.normal(size=90).round(3)
FALLS = RNG.poisson(np.exp(2.5 + 0.5 * X)).astype(float)
TABLE = pd.DataFrame({"ward": ["a", "b", "c"] * 30, "x": X, "falls": FALLS})
MODEL = build_model("mlp", (1,), 1, hidden=[])


def counts(outputs: Tensor, targets: Tensor) -> Tensor:
    return functional.poisson_nll_loss(outputs.reshape(targets.shape), targets, reduction="none")


def planned(loss: Any, **asked: Any) -> PreparedRun:
    clients = piebald.clients_from(TABLE, client="ward", target="falls", regression=True, test=0.0, prepare=asked)
    return prepare("fedavg", clients, MODEL, RunSettings.of_call({"loss": loss, "rounds": 1, "evaluate_every": 0}))


def targets(plan: PreparedRun) -> np.ndarray[Any, Any]:
    return np.sort(np.concatenate([plan.clients.rows(client, "train").y.numpy() for client in range(3)]))


@pytest.mark.parametrize(
    ("loss", "asked", "own"),
    [
        (counts, {}, True),
        (counts, {"scale": {"falls": "standard"}}, False),
        ("regression", {}, False),
        ("l1", {"scale": {"falls": "none"}}, True),
        (None, {"scale": {"falls": "none", "x": "log"}}, True),
    ],
)
def test_a_loss_gets_the_target_in_the_unit_that_is_said(loss: Any, asked: dict[str, Any], own: bool) -> None:
    if asked.get("scale", {}).get("x") == "log":
        with pytest.raises(SettingError, match="no logarithm"):  # the target's scale is none of the columns'
            planned(loss, **asked)
        return
    plan = planned(loss, **asked)
    wanted = np.sort(FALLS) if own else (np.sort(FALLS) - FALLS.mean()) / FALLS.std()
    assert targets(plan) == pytest.approx(wanted, abs=1e-5)
    outputs = torch.linspace(-1.0, 1.0, 9)
    scores = torch.as_tensor(wanted[:9], dtype=torch.float32)
    shift, factor = (0.0, 1.0) if own else (FALLS.mean(), FALLS.std())
    told = plan.work.objective.metrics["absolute_error"](outputs, scores)
    assert told.numpy() == pytest.approx(np.abs(outputs.numpy() * factor + shift - np.sort(FALLS)[:9]), abs=1e-4)


@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("delta", [0.3, 10.0])
def test_delta_of_huber_is_in_the_unit_of_the_target(delta: float, own: bool) -> None:
    plan = planned({"name": "huber", "delta": delta}, scale={"falls": "none"} if own else {})
    shift, factor = (0.0, 1.0) if own else (FALLS.mean(), FALLS.std())
    scores = plan.clients.rows(0, "train").y
    outputs = torch.linspace(-2.0, 2.0, len(scores))
    wanted = huber_loss(outputs * factor + shift, scores * factor + shift, delta=delta)
    assert (plan.work.objective.loss(outputs, scores) * factor**2).numpy() == pytest.approx(wanted.numpy(), rel=1e-4)


def test_the_target_has_no_other_scale() -> None:
    with pytest.raises(SettingError, match=r"scale of the target 'falls'.*got 'log'"):
        planned(None, scale={"falls": "log"})


@pytest.mark.full
def test_a_run_with_a_loss_of_ones_own_predicts_its_outputs() -> None:
    clients = piebald.clients_from(TABLE, client="ward", target="falls", regression=True, test=0.0, prepare="federated")
    here = piebald.Simulator(engine="batched")
    recipe = piebald.recipes.fedavg(lr=0.02, epochs=5)
    run = piebald.run(recipe, clients, MODEL, rounds=40, loss=counts, runtime=here, evaluate_every=0)
    referee = PoissonRegressor(alpha=0).fit(X[:, None], FALLS).predict(X[:, None])
    predicted = run.predictor().predict(TABLE)["falls"].to_numpy()
    assert predicted == pytest.approx(np.log(referee), abs=0.05)
    scores = run.model()(clients.rows(0, "train").x).detach().numpy()
    assert scores[:, 0] == pytest.approx(predicted[::3], abs=1e-5)
    newcomers = piebald.clients_from(TABLE, client="ward", target="falls", regression=True, test=0.0, prepare={})
    assert run.meta["preparation"]["target"] == {
        "kind": "number", "name": "falls", "mean": 0.0, "deviation": 1.0, "scale": "none", "others": [],
    }  # fmt: skip

    assert as_in_run(newcomers, run.meta).rows(1, "train").y.tolist() == clients.unchanged.rows(1, "train").y.tolist()


def test_a_file_says_it_before_sites_agree(tmp_path: Path) -> None:
    TABLE.to_csv(tmp_path / "rows.csv", index=False)
    (tmp_path / "own.py").write_text("def counts(outputs, targets):\n    return (outputs[:, 0] - targets) ** 2\n")
    text = """
data = { source = "rows.csv", client = "ward", target = "falls", regression = true }
model = { name = "logistic" }
recipe = { name = "fedavg" }
"""
    for loss, scale in (('"own.py:counts"', "none"), ('"huber"', None)):
        (tmp_path / "case.toml").write_text(f"loss = {loss}\nrounds = 1{text}")
        settings = ExperimentSettings.load(tmp_path / "case.toml")
        assert settings.wanted.scale == ({"falls": scale} if scale else {})
        settings.plan()
        assert settings.table()["prepare"]["agreed"]["target"].get("scale") == scale
