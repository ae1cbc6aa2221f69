"""Runs whose rows are divided several times, and clients that only test."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

import piebald
from piebald import data, recipes
from piebald.core.errors import SettingError
from piebald.experiments.run_settings import RunSettings
from piebald.methods.aggregation.linear import EqualWeighted
from piebald.methods.transforms.gaussian import Gaussian
from piebald.runs.compare import compare
from piebald.runs.prepare import prepare

HERE = piebald.Simulator(engine="sequential")
ASKED = {"client": "site", "target": "ill", "features": ["a", "b"]}


def table(rows: int = 24) -> pd.DataFrame:
    """Three sites; at `west` the label is the other one."""
    rng = np.random.default_rng(0)
    site = np.array(["east", "north", "west"]).repeat(rows)
    frame = pd.DataFrame(rng.normal(size=(3 * rows, 2)), columns=["a", "b"]).assign(site=site)
    ill = (frame.a > 0) != (site == "west")
    return frame.assign(ill=np.where(ill, "yes", "no"), patient=np.arange(3 * rows) // 2)


def model() -> object:
    return piebald.models.build_model("logistic", (2,), 2)


def run(recipe: str = "fedavg", clients: object = None, **options: object) -> piebald.Run:
    return piebald.run(recipes.make(recipe), clients, model(), **{"rounds": 3, "runtime": HERE, **options})


@pytest.mark.parametrize(
    ("recipe", "setting"),
    [
        ("fedavg", "hold_out"),
        ("hdafl", "test_only"),
        *(
            pytest.param(recipe, "hold_out", marks=pytest.mark.full)
            for recipe in ("scaffold", "ifca", "fedbuff", "cfl")
        ),
    ],
)
def test_a_client_that_does_not_train_has_no_part_in_the_model(recipe: str, setting: str) -> None:
    """The model is that of a run without the client's rows, to the bit."""
    whole = table()
    other = whole.assign(a=whole.a.where(whole.site != "west", -whole.a))
    runs = [
        run(recipe, piebald.clients_from(frame, **ASKED, split={setting: ["west"], "test": 0.25}))
        for frame in (whole, other)
    ]
    assert all({row["client"] for row in ended.results if row["kind"] == "train"} == {0, 1} for ended in runs)
    assert torch.equal(runs[0].start(), runs[1].start())
    assert runs[0].per_client[2] != runs[1].per_client[2]


@pytest.mark.full
def test_scores_are_of_held_out_clients_and_of_all_that_only_test() -> None:
    held = run(clients=piebald.clients_from(table(), **ASKED, split={"hold_out": ["west"], "test": 0.25}))
    assert held.held_out == ["west"]
    assert held.final["mean"] == held.per_client[2]
    assert (held.final["untrained"], held.unscored) == (0, [])
    assert held.curve[-1]["mean"] == held.per_client[2]
    tested = run(clients=piebald.clients_from(table(), **ASKED, split={"test_only": ["west"], "test": 0.25}))
    assert tested.final["mean"] == pytest.approx(np.mean([*tested.per_client.values()]))
    assert tested.figures(untrained=False)["mean"] == tested.final["mean"]


@pytest.mark.full
def test_leaving_each_site_out_gives_one_score_for_each_and_their_interval(tmp_path: Path) -> None:
    """The interval is Student's t over the sites' scores."""
    clients = data.cross_validation(table(), {"hold_out": "each"}, **ASKED)
    compared = compare(["fedavg", "fedprox"], clients, model(), rounds=2, runtime=HERE, out=tmp_path)
    scores = [
        run(clients=piebald.clients_from(table(), **ASKED, split={"hold_out": [name]}), rounds=2).final["mean"]
        for name in ("east", "north", "west")
    ]
    level = compared.levels["fedavg"]
    assert compared.scores["fedavg"].values[np.eye(3, dtype=bool)].tolist() == scores
    assert (level.mean, level.kind) == (pytest.approx(np.mean(scores)), "interval")
    rows = compared.by_division()
    assert [row["division"] for row in rows] == ["without east", "without north", "without west"]
    assert [row["fedavg"] for row in rows] == scores
    assert compared.paired("fedavg")[0]["clients"] == 3
    assert sorted(folder.name for folder in tmp_path.iterdir()) == ["without-east", "without-north", "without-west"]
    again = compare(["fedavg", "fedprox"], clients, model(), rounds=2, runtime=HERE, out=tmp_path)
    assert [ended.final["wall"] for ended in again.runs] == [ended.final["wall"] for ended in compared.runs]


@pytest.mark.full
def test_folds_are_paired_fold_by_fold() -> None:
    clients = data.cross_validation(table(), {"folds": 3, "group": "patient"}, **ASKED)
    compared = compare(["fedavg", "local"], clients, model(), rounds=1, seeds=(0, 1), runtime=HERE)
    assert len(compared.runs) == 12
    assert compared.paired("local")[0]["seeds"] == 6  # three folds with each of two seeds
    assert len(compared.by_division()) == 3


def test_what_clients_are_not_divided_for_is_refused(tmp_path: Path) -> None:
    clients = piebald.clients_from(table(), **ASKED)
    with pytest.raises(SettingError, match=r"clients in a list must be those of piebald\.data\.cross_validation"):
        compare(["fedavg"], [clients], model(), rounds=1)
    run(clients=piebald.clients_from(table(), **ASKED, split={"hold_out": ["east"]}), out=tmp_path / "run").close()
    with pytest.raises(SettingError, match="the division of rows does not fit the run"):
        piebald.resume(tmp_path / "run", clients, model(), rounds=4)


def test_unseen_clients_can_be_named() -> None:
    clients = piebald.clients_from(table(), **ASKED, split={"validation": 0.2})
    ended = run(clients=clients, unseen=["north"], keep="last")
    assert [newcomer["client"] for newcomer in ended.newcomers] == ["north"]
    assert {row["client"] for row in ended.results if row["kind"] == "train"} == {0, 1}
    with pytest.raises(SettingError, match=r"no client \(unseen\) 'nort': did you mean 'north'"):
        run(clients=clients, unseen=["nort"])


def test_privacy_is_that_of_the_clients_that_train() -> None:
    """A client that is never drawn hides nobody: two of four are drawn, not two of six."""
    pytest.importorskip("dp_accounting")
    rng, noise = np.random.default_rng(0), Gaussian(noise=1.0, clip=1.0)
    recipe = recipes.fedavg(cohort=2).with_(aggregation=EqualWeighted()).with_(transforms=(noise,))
    rows = {str(number): (rng.normal(size=(8, 2)), [0, 1] * 4) for number in range(6)}
    options = RunSettings(rounds=5)
    apart = prepare(recipe, piebald.clients_from(rows, split={"test_only": ["4", "5"]}), model(), options)
    few = prepare(recipe, piebald.clients_from({name: rows[name] for name in "0123"}), model(), options)
    assert apart.meta["privacy"] == few.meta["privacy"]
    with pytest.raises(SettingError, match="cohort is 5 but there are 4 clients that train"):
        prepare(recipes.fedavg(cohort=5), piebald.clients_from(rows, split={"hold_out": ["4", "5"]}), model(), options)


@pytest.mark.parametrize("keep", ["best", "best_for_each"])
@pytest.mark.parametrize("workers", [0, 2])
def test_held_out_clients_go_with_every_way_to_end(keep: str, workers: int) -> None:
    clients = piebald.clients_from(table(), **ASKED, split={"hold_out": ["west"], "validation": 0.25})
    ended = run("ditto", clients, keep=keep, runtime=piebald.Simulator(engine="vmapped", workers=workers))
    assert ended.final["status"] == "finished"
    assert set(ended.final["per_client"]) == {2}
