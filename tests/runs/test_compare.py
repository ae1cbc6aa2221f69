"""Comparisons: everything is checked before the first recipe trains, and recipes may have models of their own."""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
import torch
from torch import nn

import piebald
from piebald.contracts import Rows
from piebald.core.errors import SettingError
from piebald.data.clients.prepared import gathered_bytes, rows_of_recipe, standardised
from piebald.data.partition import Lists, PooledClients
from piebald.models import embedded

HERE = {"kind": "simulator", "engine": "sequential"}


def network(seed: int = 0) -> nn.Module:
    return piebald.models.build_model("mlp", (4,), 3, seed, hidden=[5])


@pytest.fixture(scope="module")
def clients() -> Any:
    random = np.random.default_rng(0)
    rows = {name: (random.random((30, 4)).astype("float32"), random.integers(3, size=30)) for name in ("ann", "bob")}
    return piebald.clients_from(rows, classes=["x", "y", "z"])


def test_all_recipes_are_checked_before_the_first_trains(clients: Any, tmp_path: Path) -> None:
    good = piebald.recipes.make("fedavg")
    for methods, options, words in (
        (
            {"plain": good, "weighted": piebald.recipes.make("sync_dvw")},
            {},
            ["recipe 'weighted': ", "validation rows"],
        ),
        (
            {"plain": good, "greedy": piebald.recipes.make("fedavg", cohort=9)},
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
        piebald.compare([piebald.recipes.make("fedavg", cohort=9)], clients, network)
    return str(error.value)


@pytest.mark.full
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


@pytest.mark.full
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


def _two_of_twenty_rows(**more: Any) -> PooledClients:
    """Two clients with ten rows of three classes each; inputs take two values."""
    places, row = np.arange(10), np.arange(20)
    parts = {"train": Lists.of(places // 5, 2, places), "test": Lists.of(places // 5, 2, places + 10)}
    x = torch.from_numpy((np.outer(row, [1, 2, 3, 5]) % 7 < 3).astype("float32"))
    return PooledClients(x, torch.from_numpy(row % 3), parts, names=["ann", "bob"], classes=["x", "y", "z"], **more)


@pytest.mark.full
def test_communication_gain_is_bytes_of_all_rows_over_bytes_sent() -> None:
    """Table 5 of HDAFL's paper, by hand: 25 shared and 18 private numbers of 4 bytes, two clients, two rounds."""
    clients, options = _two_of_twenty_rows(), {"runtime": HERE, "rounds": 2, "seeds": (0, 1), "pooled": ["centre"]}
    made = piebald.compare({"centre": "fedavg", "fedavg": "fedavg", "hdafl": "hdafl"}, clients, network, **options)
    rows = sum(len(zlib.compress(part.tobytes())) for part in (clients.x[:10].numpy(), np.arange(10) % 3))
    sent = {
        ("fedavg", 1): 2 * 2 * 43 * 4, ("fedavg", 2): 2 * 2 * 2 * 43 * 4,
        ("hdafl", 1): 2 * (43 + 25) * 4,  # the first model has a classifier to begin with
        ("hdafl", 2): 2 * (43 + 3 * 25) * 4,
    }  # fmt: skip
    told = made.against_pooled()
    assert {(row["label"], row["rounds"]): 1e6 * row["mb"] for row in told} == sent
    assert [row["gain"] for row in told] == [rows / (1e6 * row["mb"]) for row in told]
    assert {run.gathered_bytes for run in made.by_label["centre"]} == {rows}
    [central] = [row for row in made.summary() if row["label"] == "centre"]
    assert (central["mb_up"], central["mb_down"], central["untrained"]) == (rows / 1e6, 0, 0)
    assert [point["bytes"] for point in made.by_label["centre"][0].curve] == [0, rows, rows]
    for row in told:
        runs = zip(made.by_label["centre"], made.by_label[row["label"]], strict=True)
        lost = [centre.curve[-1]["mean"] - run.curve[row["rounds"]]["mean"] for centre, run in runs]
        assert row["lost"] == sum(lost) / 2
        assert row["seeds"] == 2


def test_rows_in_one_place_train_the_model_of_one_client_that_has_them() -> None:
    clients = _two_of_twenty_rows()
    gathered = clients.in_one_place()
    assert [gathered.size(client, "train") for client in range(2)] == [10, 0]
    assert gathered.counts(0, "train") == [4, 3, 3]
    assert gathered.lists("test") is clients.lists("test")
    assert clients.gathered_bytes is None
    alone = PooledClients(clients.x, clients.y, {"train": Lists(np.arange(10), np.array([0, 10]))}, classes=list("xyz"))
    kept = {"rounds": 2, "runtime": HERE}
    made = piebald.run("fedavg", gathered, network, **kept)
    same = piebald.run("fedavg", alone, network, evaluate_every=0, **kept).model()
    assert all(torch.equal(*pair) for pair in zip(made.model().parameters(), same.parameters(), strict=True))
    assert {row["client"]: row["examples"] for row in made.results} == {0: 10, 1: 0}
    assert len(made.per_client) == len(made.judged) == 2


def test_rows_are_sent_as_places_among_few_values_where_that_is_less() -> None:
    """As packet sizes and pictures are: seven different numbers take a byte each before they are compressed."""
    draw = np.random.default_rng(0)
    places = draw.integers(7, size=(400, 9))
    values = np.sort(draw.random(7, dtype="float32"))
    pictures, targets = draw.integers(256, size=(400, 9), dtype="uint8"), draw.random(400, dtype="float32")
    inputs = {"sizes": torch.from_numpy(values[places]), "pictures": torch.from_numpy(pictures)}
    parts = {"train": Lists(np.arange(400), np.array([0, 100, 400]))}
    gathered = PooledClients(inputs, torch.from_numpy(targets), parts).in_one_place().gathered_bytes
    sent = [values, places.astype("uint8"), pictures, targets]
    assert gathered == sum(len(zlib.compress(part.tobytes())) for part in sent)
    assert len(zlib.compress(values[places].tobytes())) > sum(len(zlib.compress(part.tobytes())) for part in sent[:2])


@pytest.mark.parametrize(
    ("recipe", "more", "options", "message"),
    [
        ("local", {}, {}, "give all clients one model, and this recipe leaves parts at clients: choose"),
        ("hdafl", {}, {}, "give all clients one model"),
        ("fedavg", {}, {"unseen": 1}, "are those of all clients: hold none out"),
        ("fedavg", {"lacking": {1: frozenset({"x"})}}, {}, "needs clients that all have the same inputs"),
    ],
    ids=str,
)
def test_rows_in_one_place_are_refused_where_clients_differ(recipe: str, more: Any, options: Any, message: str) -> None:
    with pytest.raises(SettingError, match=message):
        piebald.compare([recipe], _two_of_twenty_rows(**more), network, pooled=[recipe], runtime=HERE, **options)


def _table(**prepare: Any) -> Any:
    random = np.random.default_rng(3)
    frame = pandas.DataFrame(random.normal(50, 9, size=(40, 3)), columns=["age", "dose", "days"])
    frame["ward"], frame["site"] = random.choice(list("abc"), 40), np.repeat(["ann", "bob"], [25, 15])
    frame["ill"] = random.choice(["no", "yes"], 40)
    return piebald.clients_from(frame, client="site", target="ill", test=0.2, validation=0.25, prepare=prepare)


def _three_parts() -> PooledClients:
    return piebald.partition.Iid(clients=2, limit=60, validation=0.2, seed=0).split(piebald.data.digits())


@pytest.mark.full
@pytest.mark.parametrize(
    "changed",
    [_table, lambda: standardised(_three_parts()), lambda: standardised(embedded(_three_parts(), nn.Flatten()))],
    ids=["table", "standard scores", "standardised embeddings"],
)
def test_inputs_of_all_rows_are_those_of_the_other_recipes(changed: Any) -> None:
    """Before, a table or standard scores had no centralised model, and no recipe beside DVW that trains on all rows."""
    clients = changed()
    whole, both = rows_of_recipe(clients, on_all_rows=False, pooled=True), rows_of_recipe(clients, True, False)
    parts = [clients.rows(client, "train") for client in range(2)]
    assert torch.equal(whole.rows(0, "train").x, torch.cat([part.x for part in parts]))
    assert torch.equal(whole.rows(0, "train").y, torch.cat([part.y for part in parts]))
    assert (whole.size(1, "train"), gathered_bytes(clients), gathered_bytes(both)) == (0, None, None)
    for client in range(2):
        held = clients.rows(client, "validation")
        assert len(held)
        assert torch.equal(both.rows(client, "train").x, torch.cat([parts[client].x, held.x]))
        assert both.size(client, "validation") == 0
        for other in (whole, both):
            assert torch.equal(other.rows(client, "test").x, clients.rows(client, "test").x)
    model = piebald.models.build_model("logistic", parts[0].x.shape[1:], len(clients.classes))
    sets = {"on_all_rows": ["fedprox"], "pooled": ["fedavg"]}
    made = piebald.compare(["fedprox", "fedavg", "sync_dvw"], clients, model, rounds=1, runtime=HERE, **sets)
    [central] = made.by_label["fedavg"]
    assert [run.gathered_bytes for run in made.runs if run is not central] == [None, None]
    assert central.gathered_bytes == gathered_bytes(whole)
    assert len({json.dumps([run.meta["preparation"], run.meta["standardise"]]) for run in made.runs}) == 1
    assert len(made.against_pooled()) == 2


def test_clients_own_constants_keep_rows_where_they_are() -> None:
    clients = _table(harmonise="combat")
    assert rows_of_recipe(clients, on_all_rows=True, pooled=False).size(1, "validation") == 0
    with pytest.raises(SettingError, match=r"harmonise in \[prepare\] takes each client's own constants: leave one"):
        piebald.compare(["fedavg"], clients, nn.Linear(3, 2), pooled=["fedavg"], runtime=HERE)


def test_only_rows_in_memory_are_brought_to_one_place(clients: Any) -> None:
    class Elsewhere:
        names, classes, common = clients.names, clients.classes, None
        size, counts = clients.size, clients.counts

        def __len__(self) -> int:
            return 2

        def rows(self, client: int, split: Any) -> Rows:
            return clients.rows(client, split)

    with pytest.raises(
        SettingError, match=r"all rows are in one place \(pooled = true\) only where rows are in memory"
    ):
        piebald.compare(["fedavg"], Elsewhere(), network, pooled=["fedavg"], runtime=HERE)


def test_only_recipes_of_the_comparison_train_on_all_rows(clients: Any) -> None:
    with pytest.raises(SettingError, match="there is no recipe of this comparison called 'local': choose"):
        piebald.compare(["fedavg"], clients, network, on_all_rows=["local"], rounds=1, runtime=HERE)
