"""A time and an event of a table as the target of a network of survival."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import piebald
from piebald.cli import main
from piebald.core.errors import SettingError
from piebald.core.metrics import survival_loss, survival_terms
from piebald.experiments.file import ExperimentSettings
from piebald.models import build_model
from tests.fakes import simulate

pd = pytest.importorskip("pandas")
TARGET = {"time": "days", "event": "died"}


def lives(words: bool = False) -> Any:
    rng, n = np.random.default_rng(0), 150
    x = rng.normal(size=(n, 2)).round(3)
    table = pd.DataFrame({"site": np.resize(["a", "b", "c"], n), "x": x[:, 0], "z": x[:, 1]})
    table["days"] = (300 * rng.exponential(np.exp(-0.8 * x[:, 0] + 0.3 * x[:, 1]))).round() + 1
    died = rng.random(n) < 0.7
    return table.assign(died=np.where(died, "yes", "no") if words else died.astype(int))


def trained(table: Any, weights: str | None = None, **options: Any) -> Any:
    clients = piebald.clients_from(table, client="site", target=TARGET, test=0, weights=weights, **options)
    model = build_model("mlp", (2,), 1, hidden=[])
    recipe = piebald.recipes.fedavg(lr=1.0, steps=1, batch=1000)
    return simulate(recipe, clients, model, rounds=80, evaluate_every=0, simulator={"engine": "batched"})


def coefficients(run: Any) -> Any:
    return next(run.model().parameters()).detach().numpy()[0]


@pytest.mark.parametrize("weights", [None, "w"])
def test_full_batches_come_to_the_stratified_cox_model_of_all_rows(weights: str | None) -> None:
    table = lives().assign(w=np.random.default_rng(1).integers(1, 4, 150))
    names: Any = {"client": "site", "time": "days", "event": "died", "columns": ["x", "z"]}
    expected = piebald.cox(table, ties="breslow", stratified=True, weights=weights, **names)
    run = trained(table, weights, features=["x", "z"])
    assert coefficients(run) == pytest.approx(expected.coefficients.tolist(), abs=1e-3)


@pytest.mark.full
def test_times_of_a_file_stay_in_their_unit_and_words_are_events(tmp_path: Path) -> None:
    lives(words=True).to_csv(path := tmp_path / "lives.csv", index=False)
    run = trained(str(path))
    assert run.meta["target"] == ["days", "died"]
    assert list(run.predictor().predict(lives()[["x", "z"]])) == ["risk"]
    run = simulate(piebald.recipes.fedavg(lr=0.5), piebald.clients_from(str(path), client="site", target=TARGET),
                   build_model("mlp", (2,), 1, hidden=[]), rounds=8)  # fmt: skip
    assert run.score.name == "concordance"
    assert run.score.value > 0.6


def test_an_experiment_names_them_and_needs_no_loss(tmp_path: Path) -> None:
    lives().to_csv(path := tmp_path / "lives.csv", index=False)
    file = tmp_path / "experiment.toml"
    file.write_text(
        f'rounds = 3\ndata = {{ source = "{path}", client = "site", target = {{ time = "days", event = "died" }} }}\n'
        'model = { name = "mlp", hidden = [] }\nrecipe = { name = "fedavg", lr = 0.5 }\n'
    )
    settings = ExperimentSettings.load(file)
    clients = settings.clients()
    assert float(clients.rows(0, "train").y[:, 0].max()) > 100
    # as a run's folder keeps them, and as sites are told
    again = ExperimentSettings.of_table(settings.table(), "the run's settings")
    assert settings.table()["data"]["target"] == TARGET
    assert again.clients().rows(0, "train").y.tolist() == clients.rows(0, "train").y.tolist()
    file.write_text(file.read_text().replace("event =", "end ="))
    with pytest.raises(SettingError, match=r"target must be a column, a list of columns, or \{ time = "):
        ExperimentSettings.load(file)


def test_what_is_no_time_and_no_event_is_said_in_a_sentence() -> None:
    table = lives()
    with pytest.raises(SettingError, match=r"target must be a column, a list of columns, or \{ time = 'a column'"):
        piebald.clients_from(table, client="site", target={"time": "days"})
    with pytest.raises(SettingError, match="there is no column 'months'"):
        piebald.clients_from(table, client="site", target={"time": "months", "event": "died"})
    with pytest.raises(SettingError, match="must be finite times of at least 0"):
        trained(table.assign(days=table["days"].where(table.index != 4, -3)))
    with pytest.raises(SettingError, match="events of 0 or 1"):
        trained(table.assign(died=table["died"].where(table.index != 4, 2)))


def test_small_batches_of_few_events_are_no_impossible_claim() -> None:
    table = lives().assign(died=lambda rows: (rows.index % 9 == 0).astype(int))
    clients = piebald.clients_from(table, client="site", target=TARGET, test=0)
    for recipe in (piebald.recipes.fednova(lr=0.1, batch=5), piebald.recipes.fedavg(lr=0.1, batch=5)):
        run = simulate(recipe, clients, build_model("mlp", (2,), 1, hidden=[]), rounds=2, evaluate_every=0)
        assert {row["status"] for row in run.results} == {"ok"}


@pytest.mark.long  # processes of sites
def test_an_experiment_file_trains_one_output_and_alike_at_sites(tmp_path: Path) -> None:
    """Before, the network of a file had an output for the time and one for the event, and a site knew no such loss."""
    lives(words=True).to_csv(tmp_path / "lives.csv", index=False)
    (tmp_path / "experiment.toml").write_text(
        'rounds = 2\ndata = { source = "lives.csv", client = "site", target = { time = "days", event = "died" } }\n'
        'partition = { kind = "by_owner", owner = "site" }\n'
        'model = { name = "mlp", hidden = [] }\nrecipe = { name = "fedavg", lr = 0.5, steps = 2, batch = 1000 }\n'
    )
    scores = []
    for runtime in ("simulator", "federation"):
        words = ("--runtime", runtime, "--out", str(tmp_path / runtime), "--quiet")
        assert main(["run", str(tmp_path / "experiment.toml"), *words]) == 0
        scores.append(piebald.open(tmp_path / runtime).score)
    assert [score.name for score in scores] == ["concordance"] * 2
    assert scores[1].value == pytest.approx(scores[0].value, abs=1e-3)
    assert 0.6 < scores[0].value <= 1
    assert list(piebald.open(tmp_path / "simulator").predictor().predict(lives()[["x", "z"]])) == ["risk"]


def test_terms_of_events_add_up_to_the_loss_that_the_rules_of_a_site_look_at() -> None:
    rng = np.random.default_rng(3)
    time, event = torch.tensor(rng.integers(1, 9, 40).astype(np.float32)), torch.tensor(rng.random(40) < 0.6).float()
    outputs, weights = torch.tensor(rng.normal(size=40)).float(), torch.tensor(rng.integers(0, 3, 40)).float()
    targets = torch.stack([time, event], 1)
    for counts in (None, weights):
        terms = survival_terms(outputs, targets, counts)
        events = float((event if counts is None else event * counts).sum())
        assert float(terms.sum()) / events == pytest.approx(float(survival_loss(outputs, targets, counts)), rel=1e-5)
        assert not terms[event == 0].any()
