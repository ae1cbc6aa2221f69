"""Comparisons: everything is checked before the first recipe trains, and recipes may have models of their own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import nn

import piebald
from piebald.core.errors import SettingError

HERE = {"kind": "simulator", "engine": "sequential"}


def network(seed: int = 0) -> nn.Module:
    return piebald.models.build_model("mlp", (4,), 3, seed, hidden=[5])


@pytest.fixture(scope="module")
def clients() -> Any:
    random = np.random.default_rng(0)
    rows = {name: (random.random((30, 4)).astype("float32"), random.integers(3, size=30)) for name in ("ann", "bob")}
    return piebald.clients_from(rows, classes=["x", "y", "z"])


def test_all_recipes_are_checked_before_the_first_trains(clients: Any, tmp_path: Path) -> None:
    good = piebald.methods.recipes.make("fedavg")
    for methods, options, words in (
        (
            {"plain": good, "weighted": piebald.methods.recipes.make("sync_dvw")},
            {},
            ["recipe 'weighted': ", "validation rows"],
        ),
        (
            {"plain": good, "greedy": piebald.methods.recipes.make("fedavg", cohort=9)},
            {},
            ["recipe 'greedy': cohort is 9"],
        ),
        ({"plain": good}, {"rounds": "two"}, ["rounds must be a whole number"]),
        ({"plain": good}, {"keep": "bst"}, ["keep must be"]),
    ):
        with pytest.raises(SettingError) as error:
            piebald.compare(methods, clients, network, out=tmp_path / "out", runtime=HERE, **options)
        assert all(word in str(error.value) for word in words), error.value
        assert not (tmp_path / "out").exists()  # nothing was trained
    assert "nothing was trained: correct" in _refused(clients)


@pytest.mark.parametrize("seeds", [(), (1, 1), [2, 0, 2]], ids=str)
def test_no_run_counts_twice(clients: Any, seeds: Any) -> None:
    """A seed given twice would pass for two repetitions, and narrow every interval."""
    with pytest.raises(SettingError, match=r"^seeds must be a list of different seeds, at least one, got \["):
        piebald.compare(["fedavg"], clients, network, seeds=seeds)


class _Wide(nn.Module):
    def __init__(self, width: int, depth: int) -> None:
        super().__init__()


@pytest.mark.parametrize("model", [nn.Linear, _Wide, lambda: nn.Linear(4, 3)], ids=["torch", "own", "function"])
def test_a_model_that_cannot_be_called_with_a_seed_is_one_sentence(clients: Any, model: Any) -> None:
    with pytest.raises(SettingError, match=r"cannot be called with a seed alone .*: call it yourself"):
        piebald.run("fedavg", clients, model, rounds=1, runtime=HERE)


def test_an_error_inside_a_function_that_makes_a_model_is_its_own(clients: Any) -> None:
    def broken(seed: int) -> nn.Module:
        raise TypeError("mine")

    with pytest.raises(TypeError, match=r"^mine$"):
        piebald.run("fedavg", clients, broken, rounds=1, runtime=HERE)


def _refused(clients: Any) -> str:
    with pytest.raises(SettingError) as error:
        piebald.compare([piebald.methods.recipes.make("fedavg", cohort=9)], clients, network)
    return str(error.value)


def test_recipes_may_have_models_of_their_own(clients: Any, tmp_path: Path) -> None:
    options: dict[str, Any] = {"rounds": 1, "runtime": HERE, "out": tmp_path}
    own = {"local": nn.Linear(4, 3), "fedavg": network}
    made = piebald.compare(["local", "fedavg"], clients, own, **options)
    assert {row["label"]: row["parameters"] for row in made.summary()} == {"local": 15, "fedavg": 5 * 5 + 6 * 3}
    again = piebald.compare(["local", "fedavg"], clients, own, **options)  # nothing is repeated, nothing refused
    assert [run.accuracy for run in again.runs] == [run.accuracy for run in made.runs]
    with pytest.raises(SettingError, match="has none for 'fedavg'"):
        piebald.compare(["local", "fedavg"], clients, {"local": network}, **options)
    with pytest.raises(SettingError, match="did you mean 'fedavg'"):
        piebald.compare(["local", "fedavg"], clients, {**own, "fedavgg": network}, **options)


def test_a_recipe_without_need_of_validation_rows_trains_on_them(tmp_path: Path) -> None:
    """FedAvg on all rows beside a recipe that holds some out, as in Metis; test rows stay, so that both pair."""
    clients = piebald.partition.Iid(clients=3, limit=150, validation=0.2, seed=0).split(piebald.data.digits())
    model = piebald.models.build_model("logistic", (1, 8, 8), 10)
    one = {"rounds": 1, "runtime": HERE, "out": tmp_path / "out"}
    made = piebald.compare(["fedavg", "sync_dvw"], clients, model, on_all_rows=["fedavg"], **one)
    splits = ("train", "validation", "test")
    held = {run.label: [[client[split] for split in splits] for client in run.clients] for run in made.runs}
    assert all(validation for _, validation, _ in held["sync_dvw"])
    assert held["fedavg"] == [[train + validation, 0, test] for train, validation, test in held["sync_dvw"]]
    both = clients.on_all_rows()
    for client in range(3):
        rows = {*clients.indices(client, "train").tolist(), *clients.indices(client, "validation").tolist()}
        assert set(both.indices(client, "train").tolist()) == rows
        assert both.counts(client, "train") == np.bincount(clients.y[sorted(rows)], minlength=10).tolist()


def test_only_recipes_of_the_comparison_train_on_all_rows(clients: Any) -> None:
    with pytest.raises(SettingError, match="there is no recipe of this comparison called 'local': choose"):
        piebald.compare(["fedavg"], clients, network, on_all_rows=["local"], rounds=1, runtime=HERE)
