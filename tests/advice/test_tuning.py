"""The search for settings: it goes on after a kill, sees no test row, drops nothing inside the noise."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import piebald
from piebald import models, partition, recipes
from piebald.advice.tuning import Budget, Choices, Range, SearchSpace, Tuning, tune, with_settings
from piebald.advice.tuning.search import claim
from piebald.advice.tuning.space import rungs_of
from piebald.advice.tuning.trial_runs import VALIDATION, lag_beyond_noise, without_test_rows
from piebald.cli import main
from piebald.core.errors import RunFolderError, SettingError
from piebald.data.clients.view import ClientsView
from piebald.data.partition import PooledClients
from piebald.report.paired import Scores
from piebald.storage.store import RunStore

SPACE = {"lr": {"low": 0.01, "high": 1.0, "log": True}, "lam": [0.1, 1.0]}
FORK = multiprocessing.get_context("fork")


def federation(validation: float = 0.2) -> PooledClients:
    split = partition.Dirichlet(clients=4, alpha=0.5, validation=validation, test=0.2, limit=300)
    return split.split(piebald.data.digits())


def network(seed: int) -> Any:
    return models.build_model("mlp", (1, 8, 8), 10, seed, hidden=(8,))


def search(out: Path | None = None, clients: Any = None, **more: Any) -> Tuning:
    options: dict[str, Any] = {"rounds": 4, "budget": 10, "rungs": 2, "factor": 2, "space": SPACE, "out": out} | more
    return tune(["fedavg", "ditto"], clients or federation(), network, **options)


def timeless(found: Tuning) -> Mapping[str, Any]:
    table = found.plain()
    for row in table["summary"]:
        del row["minutes"]
    return table


@pytest.mark.full
def test_each_recipe_has_the_same_budget_and_its_best_settings() -> None:
    found = search()
    assert {row["label"]: row["rounds"] for row in found.table()} == {"fedavg": 10, "ditto": 10}
    for label, best in found.chosen.items():
        own = [trial for trial in found.trials if trial.label == label and trial.rounds == 4]
        assert best.score == max(trial.score for trial in own if trial.score is not None)
        assert found.recipes[label] == with_settings(recipes.make(label), best.settings)
        assert own[0].settings["lr"] == recipes.make(label).training.lr  # its own settings are tried, too
    assert "lam" not in found.chosen["fedavg"].settings
    behind = [(trial.label, trial.why) for trial in found.trials if " behind " in trial.why]
    assert behind
    assert all(f" behind {label} lr " in why for label, why in behind)  # what it was compared with, by its settings


@pytest.mark.full
@pytest.mark.parametrize("call", [9, *(pytest.param(call, marks=pytest.mark.long) for call in (3, 15))])
def test_a_search_that_was_killed_ends_as_one_that_was_not(call: int, tmp_path: Path) -> None:
    def child() -> None:
        calls, real = [0], RunStore.commit

        def commit(self: RunStore, *args: Any, **kwargs: Any) -> None:
            calls[0] += 1
            if calls[0] == call:
                os.kill(os.getpid(), signal.SIGKILL)
            real(self, *args, **kwargs)

        RunStore.commit = commit  # type: ignore[method-assign]
        search(tmp_path / "killed")

    process = FORK.Process(target=child)
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert timeless(search(tmp_path / "killed")) == timeless(search(tmp_path / "whole"))


@pytest.mark.full
def test_test_rows_change_nothing() -> None:
    def poisoned(clients: PooledClients) -> PooledClients:
        held = np.concatenate([clients.indices(client, "test") for client in range(len(clients))])
        x, y = clients.x.clone(), clients.y.clone()
        x[held], y[held] = 1e6, (y[held] + 1) % 10
        parts = {split: clients.lists(split) for split in ("train", "validation", "test")}
        return PooledClients(x, y, parts, classes=clients.classes, common=held)  # type: ignore[arg-type]

    assert timeless(search(clients=poisoned(federation()))) == timeless(search())


class Fetched(ClientsView):
    """Clients whose rows are fetched one by one."""

    def in_memory(self) -> bool:
        return False


@pytest.mark.parametrize("pooled", [True, False])
def test_clients_of_a_search_have_no_test_rows(pooled: bool) -> None:
    clients: Any = federation(validation=0.0)
    if not pooled:
        clients = Fetched(clients)
    seen = without_test_rows(clients)
    assert seen.held_out
    assert seen.common is None
    for client in range(4):
        whole = len(clients.rows(client, "train"))
        assert len(seen.rows(client, "test")) == seen.size(client, "test") == 0
        assert len(seen.rows(client, "validation")) == seen.size(client, "validation") == round(VALIDATION * whole)
        assert len(seen.rows(client, "train")) + len(seen.rows(client, "validation")) == whole
        assert sum(seen.counts(client, "train") or ()) == seen.size(client, "train")


def test_nothing_is_dropped_inside_one_standard_error() -> None:
    best = Scores(np.array([[0.9, 0.8, 0.7, 0.8]]), list("abcd"))
    noisy = Scores(np.array([[0.5, 0.9, 0.8, 0.9]]), list("abcd"))  # 2.5 points behind, give or take 12.5
    clear = Scores(np.array([[0.8, 0.69, 0.61, 0.7]]), list("abcd"))  # 10 points behind, give or take 0.4
    assert lag_beyond_noise(best, noisy, True) is None
    assert lag_beyond_noise(best, clear, True) == pytest.approx((0.1, 0.0041), abs=1e-4)
    assert lag_beyond_noise(best, clear, False) is None  # of a loss, the smaller one is better
    assert lag_beyond_noise(clear, best, False) == lag_beyond_noise(best, clear, True)
    one = Scores(np.array([[0.9]]), ["a"]), Scores(np.array([[0.1]]), ["a"])
    assert lag_beyond_noise(*one, True) is None  # a single client says nothing about noise


def test_rungs() -> None:
    assert rungs_of(9, 3, 3) == (1, 3, 9)
    assert rungs_of(20, 3, 3) == (2, 6, 20)
    assert rungs_of(2, 3, 3) == (2,)
    assert rungs_of(7, 1, 3) == (7,)


@pytest.mark.parametrize("name", recipes.names())
def test_every_recipe_takes_a_learning_rate(name: str) -> None:
    assert with_settings(recipes.make(name), {"lr": 0.3}) == recipes.make(name, lr=0.3)


def test_settings_reach_the_components_that_hold_them() -> None:
    feddyn = with_settings(recipes.feddyn(), {"alpha": 0.5})  # held by two components
    assert (feddyn.training.alpha, feddyn.server_optimizer.alpha) == (0.5, 0.5)  # type: ignore[attr-defined]
    made = recipes.fedavgm(lr=0.1).with_(
        training={"kind": "proximal", "mu": 0.2}, transforms=[{"kind": "sign_flip", "clients": [0]}]
    )
    changed = with_settings(made, {"lr": 0.3, "server_optimizer.lr": 0.5})
    assert (changed.training.lr, changed.training.mu, changed.server_optimizer.lr) == (0.3, 0.2, 0.5)  # type: ignore[attr-defined]
    assert changed.transforms == made.transforms
    assert recipes.rebuild(changed.model_dump()) == changed
    assert "lr = 0.3" in recipes.toml(changed)


def test_settings_reach_a_recipe_whose_components_are_valid_beside_one_another_alone() -> None:
    noise = {"kind": "gaussian", "clip": 1.0, "noise": 1.0, "delta": 1e-5}
    made = recipes.fedavg(lr=0.1).with_(aggregation="equal_weighted", transforms=[noise])
    changed = with_settings(made, {"lr": 0.3, "training.epochs": 2})
    assert (changed.training.lr, changed.training.epochs) == (0.3, 2)  # type: ignore[attr-defined]
    assert (changed.aggregation, changed.transforms) == (made.aggregation, made.transforms)


BAD: dict[str, tuple[Any, str]] = {
    "ends the wrong way": ({"lr": {"low": 1, "high": 0.1}}, "space of lr: low must be below high, got 1 and 0.1"),
    "log of zero": ({"lr": {"low": 0, "high": 1, "log": True}}, "space of lr: low must be above 0 where log is true"),
    "no end": ({"lr": {"low": 0.1}}, "space of lr: a range needs high, like"),
    "a strange key": (
        {"lr": {"low": 0.1, "high": 1, "lgo": True}},
        "space of lr: there is no key of a range called 'lgo'",
    ),
    "text as a number": ({"lr": {"low": "a", "high": 1}}, "space of lr: low must be a finite number, got 'a'"),
    "infinite": ({"lr": {"low": 0.1, "high": float("inf")}}, "space of lr: high must be a finite number"),
    "one choice": ({"lr": [0.1]}, "space of lr: choices must be a list of at least two values"),
    "a choice twice": ({"lr": [0.1, 0.1]}, "space of lr: choices must be different"),
    "a number": ({"lr": 3}, "space of lr: choices must be a list"),
    "no setting": ({}, "space must be a table"),
    "a setting of nobody": ({"lrr": [1, 2]}, "no setting of recipe 'fedavg' called 'lrr'.*'lr'"),
    "what the recipe refuses": ({"lr": [0.1, -1.0]}, "space of recipe 'fedavg'.*lr must be above 0, got -1.0"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_space_is_refused_in_one_sentence(case: str) -> None:
    space, why = BAD[case]
    with pytest.raises(SettingError, match=why) as error:
        tune("fedavg", federation(), network, space=space)
    assert "\n" not in str(error.value)


OPTIONS: dict[str, tuple[dict[str, Any], str]] = {
    "no budget": ({"budget": 0}, "budget: rounds must be a whole number of at least 1, got 0"),
    "a strange unit": ({"budget": {"hours": 1}}, "no unit of a budget called 'hours'"),
    "two units": ({"budget": {"rounds": 1, "minutes": 1}}, "budget must be a number of rounds, or a table with one of"),
    "half a round": ({"budget": {"rounds": 1.5}}, "rounds must be a whole number"),
    "an endless grid": ({"sampler": "grid"}, "so lr needs a list of values"),
    "a strange sampler": ({"sampler": "tpee"}, "sampler must be 'tpe' or 'random' or 'grid', got 'tpee'"),
    "factor one": ({"factor": 1}, "factor must be at least 2"),
    "a seed twice": ({"seeds": [1, 1]}, "seeds must be a list of different seeds"),
    "a split": ({"evaluate_split": "test"}, "no argument of tune called 'evaluate_split'"),
    "a recipe that does not fit": ({"methods": ["fedavg", "fedbn"]}, "recipe 'fedbn': .*batch"),
}


@pytest.mark.parametrize("case", OPTIONS)
def test_a_bad_option_is_refused_in_one_sentence(case: str) -> None:
    options, why = OPTIONS[case]
    methods = options.get("methods", "fedavg")
    with pytest.raises(SettingError, match=why):
        tune(methods, federation(), network, **{name: value for name, value in options.items() if name != "methods"})


def test_a_grid_is_all_combinations() -> None:
    space = SearchSpace({"lr": Choices((0.1, 0.2)), "epochs": Range(1, 3)})
    assert space.grid() == [{"lr": lr, "epochs": epochs} for lr in (0.1, 0.2) for epochs in (1, 2, 3)]
    assert SearchSpace.of(space.plain()) == space


def test_a_grid_ends_when_all_was_tried() -> None:
    found = tune("fedavg", federation(), network, space={"lr": [0.05, 0.3]}, sampler="grid", rounds=1, budget=50)
    assert sorted(trial.settings["lr"] for trial in found.trials) == [0.05, 0.3]


@pytest.mark.full
def test_a_folder_of_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("mine")
    with pytest.raises(RunFolderError, match="is not empty and holds no search"):
        search(tmp_path / "full")
    tune("fedavg", federation(), network, rounds=1, budget=1, out=tmp_path / "one")
    with pytest.raises(RunFolderError, match="holds a search with another budget"):
        tune("fedavg", federation(), network, rounds=1, budget=2, out=tmp_path / "one")


def test_a_search_that_was_killed_as_it_took_its_folder_can_begin(tmp_path: Path) -> None:
    (tmp_path / "search.json.part").write_text("{")
    claim(tmp_path, {"budget": "1 round"})
    assert [path.name for path in tmp_path.iterdir()] == ["search.json"]


def test_budget_in_words() -> None:
    assert (str(Budget(2000)), str(Budget(1.5, "minutes"))) == ("2,000 rounds", "1.5 minutes")
    assert Budget.of("900 rounds") == Budget.of("900") == Budget.of(900) == Budget(900)
    assert Budget.of("1.5 minutes") == Budget.of({"minutes": 1.5})
    with pytest.raises(SettingError, match="like '300 rounds' or '10 minutes', got 'much'"):
        tune("fedavg", federation(), network, budget="much")


FILE = """\
rounds = 2
data = { name = "digits" }
model = { name = "mlp", hidden = [8] }
partition = { kind = "dirichlet", clients = 4, alpha = 0.5, limit = 300, validation = 0.2 }

[[recipes]]
name = "fedavg"

[[recipes]]
name = "local"

[tune]
budget = { rounds = 4 }
space.recipe.lr = [0.05, 0.3]
"""


@pytest.mark.full
def test_a_comparison_of_tuned_recipes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("experiment.toml").write_text(FILE)
    assert main(["compare", "experiment.toml", "--tune", "--out", "runs", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    for label, chosen in found["tuning"]["chosen"].items():
        with piebald.report.tables.History(Path("runs") / label / "seed-0") as history:
            assert history.meta["recipe"]["fields"]["lr"] == chosen["lr"]
    assert main(["resume", "runs-tuning", "--json"]) == 0  # the search is finished: the same is said again
    assert json.loads(capsys.readouterr().out)["chosen"] == found["tuning"]["chosen"]


@pytest.mark.parametrize(
    ("flag", "why"),
    [
        ("tune.space.lr=[1, 2]", "space can vary settings of the recipe, like 'recipe.lr', got 'lr'"),
        ("tune.budget.rounds=0", "experiment.toml:13: budget: rounds must be a whole number of at least 1, got 0"),
        ("stop.updates=3", "stop does not fit a search"),
    ],
)
def test_a_bad_file_is_refused(
    flag: str, why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("experiment.toml").write_text(FILE)
    assert main(["tune", "experiment.toml", "--set", flag]) == 2
    assert why in capsys.readouterr().err.replace("--set tune.budget.rounds", "experiment.toml:13")
