"""Adapting a finished run to a new client, and clients that are held out until the end."""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import piebald
from piebald import data, models, partition, recipes
from piebald.contracts import Rows
from piebald.core.errors import RunFolderError, SettingError
from piebald.methods.clustering.base import Clustering
from piebald.runs.adaptation import hold_out
from piebald.storage.store import RunStore

HERE = piebald.Simulator(engine="sequential", workers=0)
WORDS = {
    "private": "the model with fitted private layers",
    "head": "the model with a fitted last layer",
    "fine_tune": "the fine-tuned model",
    "mixed": "the mixed model",
    "local": "the model trained alone",
}


@pytest.fixture(scope="module")
def clients() -> partition.PooledClients:
    return partition.Dirichlet(clients=6, alpha=0.3, limit=500, validation=0.2).split(data.digits())


def gated(seed: int = 0) -> nn.Module:
    return models.build_model("gated_classifier", (1, 8, 8), 10, seed, units=(16,), dropout=0.2)


def normed(seed: int = 0) -> nn.Module:
    """With batch norm, whose statistics must not move where only the head is fitted."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Linear(12, 10))


@pytest.fixture(scope="module")
def finished(clients, tmp_path_factory) -> piebald.Run:
    folder = tmp_path_factory.mktemp("runs") / "cgau"
    return piebald.run(recipes.cgau(lr=0.5), clients, gated, rounds=8, runtime=HERE, unseen=1, out=folder)


def unseen_rows(run: piebald.Run, clients) -> tuple[torch.Tensor, torch.Tensor]:
    number = list(clients.names).index(run.newcomers[0]["client"])
    held = [clients.rows(number, split) for split in ("train", "validation")]
    return torch.cat([rows.x for rows in held]), torch.cat([rows.y for rows in held])


def test_every_method_fits_the_parameters_it_names_and_no_others(finished, clients, monkeypatch) -> None:
    from piebald.runs import adaptation

    tried: dict[frozenset[str], torch.Tensor] = {}
    real = adaptation._Trial.fit

    def seen(self, name, start, tensors, epochs):
        real(self, name, start, tensors, epochs)
        tried.setdefault(tensors, self.offer.models[name][0])  # all are fitted twice: the second time alone

    monkeypatch.setattr(adaptation._Trial, "fit", seen)
    made = piebald.adapt(finished, unseen_rows(finished, clients), epochs=3)
    layout, start = finished.work.layout, finished.start()
    assert [way.name for way in made.methods] == ["global", "private", "head", "fine_tune", "mixed", "local"]
    assert [way.fitted for way in made.methods if way.name != "mixed"] == [0, 2 * 16, 170, layout.size, layout.size]
    for names, vector in tried.items():
        moved = {s.name for s in layout.slots if not torch.equal(vector[s.start : s.stop], start[s.start : s.stop])}
        assert moved == names
    assert layout.private in tried
    torch.testing.assert_close(layout.flatten(made.model), made.vector)


def test_the_lowest_validation_loss_decides_where_nothing_is_shared_and_gains_are_over_the_global_model(
    finished, clients
) -> None:
    made = piebald.adapt(finished, unseen_rows(finished, clients), validation=0.3, test=0.2, epochs=5)
    ways = {way.name: way for way in made.methods}
    assert made.best == min(ways, key=lambda name: ways[name].loss)
    assert made.chosen is ways[made.best]
    assert ways["global"].gain == 0
    assert made.why == f"{WORDS[made.best]} has the lowest loss on its {made_rows(finished, clients)} validation rows"
    for way in made.methods:
        if way.name not in ("mixed", "local"):
            assert way.loss <= ways["global"].loss  # the start is one of the epochs to choose from
        assert way.gain == pytest.approx(way.validation - ways["global"].validation)
        assert way.test is not None
    assert made.table()["methods"][0]["name"] == "global"


def made_rows(run: piebald.Run, clients) -> int:
    x, y = unseen_rows(run, clients)
    return len(partition.clients_from([(x, y)], validation=0.3, test=0.2).rows(0, "validation"))


def test_a_newcomer_is_compared_with_training_alone_with_at_least_the_work_of_a_client(clients) -> None:
    run = piebald.run(recipes.fedavg(lr=0.3, epochs=2), clients, normed, rounds=6, runtime=HERE)
    own = partition.clients_from([(clients.rows(0, "train").x, clients.rows(0, "train").y)], validation=0.4, test=0.0)
    made = piebald.adapt(run, own, epochs=1)
    alone = next(way for way in made.methods if way.name == "local")
    assert 1 < alone.epochs <= 12  # of 6 tasks with 2 passes each
    from piebald.runs.adaptation import _Trial

    everything = frozenset(slot.name for slot in run.work.layout.slots if not slot.buffer)
    trial = _Trial(run, own, 0, 1, None)
    trial.fit("local", run.work.initial, everything, 12)
    expected = trial._score(trial.offer.models["local"][0], "validation")["loss"]
    assert alone.loss == expected


@pytest.mark.full
def test_a_shared_model_is_kept_unless_another_is_better_by_more_than_luck(clients) -> None:
    """With two thirds of all digits the global model is good for a newcomer, and its few rows prove nothing."""
    many = partition.Iid(clients=4, validation=0.2).split(data.digits())
    run = piebald.run(recipes.fedavg(lr=0.3), many, normed, rounds=6, runtime=HERE)
    x, y = many.rows(0, "test").x, many.rows(0, "test").y
    made = piebald.adapt(run, (x[:40], y[:40]), validation=0.2, epochs=2)
    assert made.best == "global"
    assert re.fullmatch(r"it has only \d validation rows, fewer than 10, so it keeps the global model", made.why)
    swapped = piebald.adapt(run, (x, 9 - y), validation=0.4, epochs=10)
    assert swapped.best != "global"
    assert "standard errors" in swapped.why


def test_batch_norm_is_left_alone_where_it_is_not_fitted(clients) -> None:
    run = piebald.run("fedavg", clients, normed, rounds=2, runtime=HERE)
    made = {}
    from piebald.runs.adaptation import _Trial, fitted_tensors

    one = partition.clients_from([(clients.rows(0, "train").x, clients.rows(0, "train").y)], validation=0.3, test=0.0)
    trial = _Trial(run, one, 0, 3, None)
    layout = run.work.layout
    for name, tensors in fitted_tensors(run.work).items():
        trial.fit(name, run.start(), tensors, 3)
        made[name] = trial.offer.models[name][0]
    statistics = [slot for slot in layout.slots if slot.buffer]
    assert statistics
    for slot in statistics:
        here = slice(slot.start, slot.stop)
        assert torch.equal(made["head"][here], run.start()[here])
        assert not torch.equal(made["fine_tune"][here], run.start()[here])


def test_hdafl_fits_the_head_as_its_private_layers(clients) -> None:
    run = piebald.run(recipes.hdafl(lr=0.3), clients, normed, rounds=5, runtime=HERE, unseen=2)
    assert [way["name"] for way in run.newcomers[0]["methods"]] == [
        "global", "private", "fine_tune", "mixed", "local"
    ]  # fmt: skip
    for newcomer in run.newcomers:
        shared, private, *_ = newcomer["methods"]
        assert private["loss"] < shared["loss"]  # an untrained head can only get better


class Parity(Clustering):
    """Even and odd clients, for the test of clusters."""

    def assign(self, cohort, known, context):
        return [client % 2 for client in cohort.clients]


@pytest.mark.full
def test_a_newcomer_finds_the_cluster_whose_data_are_like_its_own(monkeypatch) -> None:
    """Odd clients have all classes renamed; a newcomer with such data must start from their cluster model."""
    source = partition.Iid(clients=6, limit=700, validation=0.2).split(data.digits())
    pairs = []
    for client in range(6):
        rows = source.rows(client, "train")
        pairs.append((rows.x, rows.y if client % 2 == 0 else 9 - rows.y))
    there = partition.clients_from(pairs[:4], classes=list("0123456789"))
    run = piebald.run(recipes.fedavg(lr=0.3).with_(clustering=Parity()), there, gated, rounds=10, runtime=HERE)
    assert sorted(run.cluster_models) == [0, 1]
    for number, pair in ((0, pairs[4]), (1, pairs[5])):
        made = piebald.adapt(run, pair, validation=0.3)
        ways = {way.name: way for way in made.methods}
        assert made.cluster == number
        assert ways["cluster"].fitted == 0
        if number:
            assert ways["cluster"].gain > 0.2
    # a client's own model is that of its cluster
    flat = run.work.layout.flatten
    assert torch.equal(flat(run.model(1)), run.cluster_models[1])
    assert torch.equal(flat(run.model()), run.cluster_models[0])


def test_unseen_clients_take_no_part_and_are_scored_at_the_end(finished, clients) -> None:
    name = finished.newcomers[0]["client"]
    assert name not in [row["name"] for row in finished.clients]
    assert len(finished.clients) == 5
    assert {row["client"] for row in finished.results} == set(range(5))
    way = next(way for way in finished.newcomers[0]["methods"] if way["name"] == finished.newcomers[0]["best"])
    assert finished.final["unseen"] == way["test"]


def test_who_is_unseen_depends_on_the_seed_alone(clients) -> None:
    there, unseen = hold_out(clients, 0.5, seed=3)
    again, _ = hold_out(clients, 3, seed=3)
    assert list(there.names) == list(again.names)
    assert unseen is not None
    assert sorted([*there.names, *unseen.names]) == sorted(clients.names)
    assert there.counts(0, "train") == clients.counts(list(clients.names).index(there.names[0]), "train")
    assert hold_out(clients, 0, seed=3) == (clients, None)
    for client, rows in ((number, there.rows(number, "test")) for number in range(len(there))):
        assert len(rows) == there.size(client, "test")
        assert torch.equal(rows.x, there.pool().x[torch.from_numpy(there.indices(client, "test"))])


def test_lazy_clients_can_be_held_out(clients) -> None:
    run = piebald.run("fedavg", _Fetched(clients), normed, rounds=1, runtime=HERE, unseen=2)
    assert len(run.newcomers) == 2


class _Fetched:
    """Clients whose rows are not held in one array."""

    def __init__(self, clients) -> None:
        self._clients = clients
        self.names, self.classes, self.common = clients.names, clients.classes, None

    def __len__(self) -> int:
        return len(self._clients)

    def rows(self, client: int, split) -> Rows:
        return self._clients.rows(client, split)

    def size(self, client: int, split) -> int:
        return self._clients.size(client, split)

    def counts(self, client: int, split):
        return self._clients.counts(client, split)


def test_a_run_folder_gives_the_same_as_the_run(finished, clients) -> None:
    rows = unseen_rows(finished, clients)
    one = piebald.adapt(finished, rows, epochs=2)
    two = piebald.adapt(finished.path, rows, epochs=2, clients=clients, model=gated)
    assert torch.equal(one.vector, two.vector)
    assert one.methods == two.methods


@pytest.mark.full
@pytest.mark.parametrize(
    "runtime",
    [
        {"kind": "ray", "engine": "batched", "workers": 2, "address": "nowhere:1"},
        {"kind": "simulator", "engine": "vmapped", "stack": 8, "workers": 2, "device": "cuda"},
    ],
    ids=["ray", "gpu"],
)
def test_a_copy_of_a_run_folder_is_adapted_where_its_ray_or_gpu_is_not(
    runtime: dict[str, Any], finished, clients, tmp_path: Path, monkeypatch
) -> None:
    shutil.copytree(finished.path, tmp_path / "run")
    with RunStore.open(tmp_path / "run") as store:
        store.set_meta(runtime={**store.meta["runtime"], **runtime})
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    rows = unseen_rows(finished, clients)
    found = piebald.adapt(tmp_path / "run", rows, epochs=1, clients=clients, model=gated)
    assert torch.equal(found.vector, piebald.adapt(finished, rows, epochs=1).vector)


def test_a_client_whose_rows_are_at_its_site_is_refused(finished) -> None:
    """There is one blank row in their place, which is nobody's."""
    at_site = partition.Sites(clients=["north"], inputs=[1, 8, 8], classes=list("0123456789")).clients_elsewhere()
    with pytest.raises(SettingError, match=r"are at its site: give its rows \(x, y\) there.*keep = 'best_for_each'"):
        piebald.adapt(finished, at_site)


@pytest.mark.full
def test_resumed_runs_hold_out_the_same(clients, tmp_path: Path, monkeypatch) -> None:
    whole = piebald.run("hdafl", clients, normed, rounds=3, runtime=HERE, unseen=2, out=tmp_path / "whole")
    real = RunStore.commit

    def cut(self, step, *more):
        if step["version"] == 2:
            raise KeyboardInterrupt
        real(self, step, *more)

    monkeypatch.setattr(RunStore, "commit", cut)
    with pytest.raises(KeyboardInterrupt):
        piebald.run("hdafl", clients, normed, rounds=3, runtime=HERE, unseen=2, out=tmp_path / "cut")
    monkeypatch.setattr(RunStore, "commit", real)
    resumed = piebald.resume(tmp_path / "cut", clients, normed)
    assert resumed.newcomers == whole.newcomers
    assert resumed.final["unseen"] == whole.final["unseen"]


def test_errors_are_one_sentence(finished, clients, tmp_path: Path) -> None:
    x, y = unseen_rows(finished, clients)
    cases = [
        (lambda: piebald.adapt(finished, (x, y), epochs=0), "epochs must be a whole number of at least 1, got 0"),
        (lambda: piebald.adapt(finished, (x, y), lr=-1.0), "lr must be a finite number above 0, got -1.0"),
        (lambda: piebald.adapt(finished, (x, y), validation=0.0), "has no validation rows: give it some"),
        (lambda: piebald.adapt(finished, [(x, y), (x, y)]), "one newcomer at a time, got 2 clients"),
        (lambda: piebald.adapt(finished, (x[:, :, :4], y)), "the model cannot be trained on these rows"),
        (lambda: hold_out(clients, 6, 0), "unseen = 6 leaves none of 6 clients"),
        (lambda: hold_out(clients, -1, 0), "unseen must be a number of clients"),
        (lambda: piebald.adapt(finished.path, (x, y)), "was started from Python"),
    ]
    for wrong, message in cases:
        with pytest.raises(SettingError, match=message):
            wrong()
    with pytest.raises(RunFolderError):
        piebald.adapt(tmp_path, (x, y))


def test_clients_that_cannot_be_adapted_are_refused_before_training(clients, tmp_path: Path) -> None:
    """Before, the run trained to its end, and failed there."""
    rows = {name: (np.zeros((20, 1, 8, 8)), np.arange(20) % 10) for name in ("ann", "bob", "cid")}
    with pytest.raises(SettingError, match=r"^unseen holds out the client '.*', which needs validation rows"):
        piebald.run("fedavg", rows, normed, rounds=1, runtime=HERE, unseen=1, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_run_that_is_not_finished_is_refused(clients, tmp_path: Path, monkeypatch) -> None:
    real = RunStore.commit

    def cut(self, step, *more):
        if step["version"] == 2:
            raise KeyboardInterrupt
        real(self, step, *more)

    monkeypatch.setattr(RunStore, "commit", cut)
    with pytest.raises(KeyboardInterrupt):
        piebald.run("fedavg", clients, normed, rounds=3, runtime=HERE, out=tmp_path / "cut")
    with pytest.raises(RunFolderError, match="is not finished: finish it with piebald resume"):
        piebald.adapt(tmp_path / "cut", (np.zeros((4, 1, 8, 8)), np.zeros(4)), clients=clients, model=normed)


@pytest.mark.full
def test_a_report_has_a_column_for_unseen_clients(clients, tmp_path: Path) -> None:
    compared = piebald.compare(
        ["fedavg", "hdafl"], clients, normed, rounds=2, runtime=HERE, unseen=2, out=tmp_path / "runs"
    )
    rows = {row["label"]: row for row in compared.summary()}
    for run in compared.runs:
        assert rows[run.label]["unseen"] == run.final["unseen"]
    page = piebald.write_report([tmp_path / "runs"], tmp_path / "report")[0].read_text("utf-8")
    assert "Unseen" in page
    with pytest.raises(SettingError, match="holds a run with another unseen"):
        piebald.compare(["fedavg"], clients, normed, rounds=2, runtime=HERE, out=tmp_path / "runs")
