"""Each client takes the model that is best on its own validation rows, with every recipe and wherever it runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import piebald
from piebald import data, models, partition, recipes
from piebald.contracts import Rows, TrainInput
from piebald.core.errors import SettingError
from piebald.core.metrics import accuracy, cross_entropy
from piebald.engines.client_context import EngineContext
from piebald.engines.engine_choice import make_engine
from piebald.engines.outgoing import train_input
from piebald.engines.stack import ClientStack
from piebald.methods.choice import FEWEST_ROWS, plain_sgd, train_alone
from piebald.methods.choice.candidates import ClientCandidates
from piebald.runs import adaptation as choosing
from piebald.storage.store import RunStore

HERE = piebald.Simulator(engine="sequential", workers=0)
COUNT = 4
OWN = {"fine_tuned", "mixed", "local"}

RECIPES: dict[str, tuple[dict[str, Any], set[str]]] = {
    "fedavg": ({}, {"global"} | OWN),
    "hdafl": ({}, {"personal"} | OWN),
    "ditto": ({}, {"global", "personal"} | OWN),
    "ifca": ({"k": 2}, {"global", "cluster"} | OWN),
    "distfl": ({"probes": 20}, {"global", "cluster"} | OWN),
    "fine_tuned": ({}, {"global", "personal"} | OWN),
    "fedasync": ({}, {"global"} | OWN),
    "local": ({}, {"local"}),
}


@pytest.fixture(scope="module")
def clients() -> partition.PooledClients:
    return partition.Dirichlet(clients=COUNT, alpha=0.3, limit=400, validation=0.25).split(data.digits())


def model(seed: int) -> torch.nn.Module:
    return models.build_model("mlp_bn", (1, 8, 8), 10, seed, hidden=(12,))


def chosen(name: str, clients: Any, out: Path | None = None, **more: Any) -> piebald.Run:
    options = {"rounds": 3, "runtime": HERE, "keep": "best_for_each"} | more
    recipe = recipes.make(name, lr=0.2, **RECIPES[name][0])
    return piebald.run(recipe, clients, model, out=out, **options)


def vectors(run: piebald.Run) -> list[torch.Tensor]:
    return [run.work.layout.flatten(run.model(client)) for client in range(len(run.choices))]


def same(one: piebald.Run, other: piebald.Run) -> bool:
    return one.choices == other.choices and all(map(torch.equal, vectors(one), vectors(other)))


@pytest.mark.parametrize(
    "name", [one if one in ("fedavg", "hdafl") else pytest.param(one, marks=pytest.mark.full) for one in RECIPES]
)
def test_every_recipe_offers_its_models_and_the_chosen_one_is_judged(name: str, clients, tmp_path: Path) -> None:
    run = chosen(name, clients, tmp_path / "run")
    assert [one["name"] for one in run.choices] == list(clients.names)
    assert sum(run.final["chosen"].values()) == COUNT
    worked = {row["client"] for row in run.results if row["kind"] == "train"}
    for one in run.choices:
        client, net = one["client"], run.model(one["client"])
        # a client that never trained has nothing alone, and the main cluster may be the only one left
        offered = RECIPES[name][1] - (set() if client in worked else {"local"})
        assert set(one["candidates"]) in (offered, offered - {"cluster"})
        for rows, scores in (
            (clients.rows(client, "validation"), one["candidates"][one["chosen"]]),
            (clients.rows(client, "test"), one["judged"]["chosen"]),
        ):
            with torch.no_grad():
                outputs = net(rows.x)
            assert float(cross_entropy(outputs, rows.y).mean()) == pytest.approx(scores["loss"], rel=1e-4)
            assert float(accuracy(outputs, rows.y).mean()) == pytest.approx(scores["accuracy"], abs=1e-6)
        assert run.per_client[client] == one["judged"]["chosen"]["accuracy"]
        least = min(scores["loss"] for scores in one["candidates"].values())
        if one["chosen"] in ("fine_tuned", "mixed"):  # all others may be one standard error worse
            assert one["candidates"][one["chosen"]]["loss"] == least
    assert same(run, chosen(name, clients))  # in memory
    assert same(run, piebald.resume(tmp_path / "run", clients, model))


def test_local_models_are_those_of_the_recipe_local(clients, tmp_path: Path) -> None:
    """With the same clients asked, the same learning rates and the same order of rows."""

    schedule = piebald.methods.training.schedules.Exponential(rate=0.7)
    options = {"lr": 0.2, "cohort": 2, "momentum": 0.9, "keep_momentum": True, "lr_schedule": schedule}
    run = piebald.run(recipes.ditto(**options), clients, model, rounds=5, runtime=HERE)
    alone = piebald.run(recipes.local(**options), clients, model, rounds=5, runtime=HERE, out=tmp_path / "alone")
    engine = make_engine("sequential", run.work, clients, torch.device("cpu"), bfloat16=False)
    initial = run.work.initial
    for client in range(COUNT):
        tasks = [str(row["sent_version"]) for row in run.results if row["client"] == client and row["kind"] == "train"]
        stack = ClientStack([client], [5], [5], [0], [initial], {}, {})
        count = torch.zeros(1, 1)
        inputs = TrainInput(initial.unsqueeze(0), len(initial), {}, {}, [5], count.double(), count, [client])
        made = train_alone(run.work.trainer, inputs, EngineContext(engine, stack), tasks, [1] * len(tasks))
        assert torch.equal(made[0], run.work.layout.flatten(alone.model(client)))


def test_alone_there_is_no_noise_and_no_pull(clients) -> None:
    for name in ("dp_sgd", "ditto", "fedprox", "scaffold"):
        plain = plain_sgd(recipes.make(name, lr=0.2, batch=7).training)
        assert (plain.kind, plain.lr, plain.batch, plain.protects) == ("sgd", 0.2, 7, False)


@pytest.mark.parametrize(
    "broken", [pytest.param("while models are written", marks=pytest.mark.full), "between two groups"]
)
def test_killed_while_clients_choose_and_resumed_to_the_same_bits(broken: str, clients, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(choosing, "GROUP", 2)
    whole = chosen("fine_tuned", clients, tmp_path / "whole")
    name = "write_chosen_model" if broken == "while models are written" else "_scores"
    real, calls = getattr(choosing, name), []

    def cut(*arguments: Any) -> Any:
        calls.append(1)
        if len(calls) == 3:  # of the second group
            raise KeyboardInterrupt
        return real(*arguments)

    monkeypatch.setattr(choosing, name, cut)
    with pytest.raises(KeyboardInterrupt):
        chosen("fine_tuned", clients, tmp_path / "cut")
    with RunStore.open_read_only(tmp_path / "cut") as store:
        assert len(store.rows("note")) == 2
    monkeypatch.setattr(choosing, name, real)
    resumed = piebald.resume(tmp_path / "cut", clients, model)
    assert same(resumed, whole)
    assert resumed.per_client == whole.per_client


@pytest.mark.full
def test_workers_choose_the_same(clients, tmp_path: Path) -> None:
    for name in ("hdafl", "ditto"):
        several = chosen(name, clients, tmp_path / name, runtime=piebald.Simulator(engine="sequential", workers=2))
        assert same(several, chosen(name, clients))


@pytest.mark.full
@pytest.mark.parametrize("engine", ["batched", "vmapped", "reference"])
def test_engines_choose_alike(engine: str, clients) -> None:
    one, other = chosen("ditto", clients), chosen("ditto", clients, runtime=HERE.model_copy(update={"engine": engine}))
    for mine, theirs in zip(one.choices, other.choices, strict=True):
        for name, scores in mine["candidates"].items():
            assert theirs["candidates"][name]["loss"] == pytest.approx(scores["loss"], rel=0.02)


class Some:
    """Clients of which the first have no, or few, validation rows, and the last has no test rows."""

    def __init__(self, clients: Any, validation: tuple[int, ...]) -> None:
        self._clients, self._validation = clients, validation
        self.names, self.classes, self.common = [f"site {n}" for n in range(COUNT)], clients.classes, None

    def __len__(self) -> int:
        return COUNT

    def rows(self, client: int, split: Any) -> Rows:
        rows = self._clients.rows(client, split)
        return Rows(rows.x[: self.size(client, split)], rows.y[: self.size(client, split)])

    def size(self, client: int, split: Any) -> int:
        full = len(self._clients.rows(client, split))
        if split == "validation" and client < len(self._validation):
            return self._validation[client]
        return 0 if split == "test" and client == COUNT - 1 else full

    def counts(self, client: int, split: Any) -> None:
        return None


def test_without_enough_validation_rows_the_shared_model_is_kept_and_said(clients) -> None:
    run = chosen("fedavg", Some(clients, (0, FEWEST_ROWS - 1)), metrics=["accuracy"])
    none, few, third, last = run.choices
    assert (none["chosen"], few["chosen"]) == ("global", "global")
    assert none["why"] == "it has no validation rows, so it keeps the global model"
    assert few["why"] == "it has only 9 validation rows, fewer than 10, so it keeps the global model"
    assert none["candidates"]["local"]["loss"] is None
    assert torch.equal(vectors(run)[0], run.work.layout.flatten(run.model()))
    assert none["judged"]["chosen"] == none["judged"]["shared"]
    assert "judged" in third
    assert "judged" not in last
    assert set(run.per_client) == {0, 1, 2}


def test_regression_and_a_loss_that_is_a_mean(tmp_path: Path) -> None:
    random = torch.Generator().manual_seed(0)
    pairs = []
    for client in range(3):
        x = torch.randn(80, 4, generator=random)
        pairs.append((x, x.sum(1, keepdim=True) * (1 - client)))  # the clients pull apart, so each needs its own
    there = partition.clients_from(pairs, test=0.3, validation=0.3)

    def linear(seed: int) -> torch.nn.Module:
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            return torch.nn.Linear(4, 1)

    made = [
        piebald.run(recipes.fedavg(lr=0.1), there, linear, rounds=6, runtime=HERE, keep="best_for_each", loss=loss)
        for loss in ("regression", lambda outputs, targets: (outputs - targets).square().mean())
    ]
    for run in made:
        assert {one["chosen"] for one in run.choices if one["client"] != 1} <= {"local", "fine_tuned", "mixed"}
        assert set(run.choices[0]["candidates"]["local"]) == {"loss", "absolute_error"}
        assert run.score.value < float(
            torch.tensor([one["judged"]["shared"]["absolute_error"] for one in run.choices]).mean()
        )
    assert [one["chosen"] for one in made[0].choices] == [one["chosen"] for one in made[1].choices]


def test_evaluations_that_are_not_wanted_open_no_test_rows(clients) -> None:
    run = chosen("fedavg", clients, evaluate_every=0)
    assert run.choices
    assert run.scores == []
    assert not any("judged" in one for one in run.choices)


def test_the_mixture_is_one_of_parameters(clients) -> None:
    run = chosen("fedavg", clients)
    engine = make_engine("sequential", run.work, clients, torch.device("cpu"), bfloat16=False)
    stack = ClientStack([0], [3], [3], [0], [run.cluster_models[0]], {}, {})
    offer = ClientCandidates(train_input(engine, stack), EngineContext(engine, stack), run.work.trainer, ["0"], [1])
    ((of, share),) = offer.mixture
    mixture = share * offer.models[of] + (1 - share) * offer.models["global"]
    torch.testing.assert_close(offer.models["mixed"], mixture)


def test_errors_are_one_sentence(clients) -> None:
    with pytest.raises(SettingError, match="'best_for_each' or 'knn_per' or a table, got 'best_for_all'"):
        chosen("fedavg", clients, keep="best_for_all")
    bare = partition.Iid(clients=2, limit=40).split(data.digits())
    with pytest.raises(SettingError, match="keep = 'best_for_each' needs validation rows but no client has any"):
        chosen("fedavg", bare)


def test_a_chosen_model_that_is_gone_is_said(clients, tmp_path: Path) -> None:
    run = chosen("fedavg", clients, tmp_path / "run")
    files = list((tmp_path / "run").glob("chosen-*.safetensors"))
    assert sorted(int(file.stem.removeprefix("chosen-")) for file in files) == [
        one["client"] for one in run.choices if one["chosen"] != "global"
    ]
    for file in files:
        file.unlink()
        with pytest.raises(piebald.PiebaldError, match="cannot be read"):
            run.model(int(file.stem.removeprefix("chosen-")))
