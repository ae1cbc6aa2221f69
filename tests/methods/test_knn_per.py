"""kNN-Per beside a plain program of its equations; with every kind of model, resumed, and without effect."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import piebald
from piebald import recipes
from piebald.core.errors import PiebaldError, SettingError
from piebald.data.partition import clients_from
from piebald.models import NearestNeighbours
from piebald.runs import adaptation as choosing

SIZE, GRID = 60, {"k": [3, 7], "lam": [0.0, 0.3, 0.8]}


def pairs() -> list[tuple[Tensor, Tensor]]:
    """Four clients to whom the same inputs mean different classes, so that one model cannot serve them."""
    draw, made = torch.Generator().manual_seed(3), []
    for client in range(4):
        x = torch.randn(SIZE, 5, generator=draw)
        made.append((x, ((x[:, 0] > 0).long() + 2 * (x[:, 1] > 0.3).long() + client) % 4))
    return made


def clients() -> Any:
    return clients_from(pairs(), test=0.2, validation=0.3, classes=list("abcd"))


def network(seed: int = 0) -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 4))


def run(name: str = "fedavg", keep: Any = None, engine: str = "sequential", **options: Any) -> piebald.Run:
    recipe = recipes.make(name, lr=0.2, **options.pop("settings", {}))
    where = piebald.Simulator(engine=engine, workers=options.pop("workers", 0))  # type: ignore[arg-type]
    keep = {"kind": "knn_per", **GRID} if keep is None else keep
    return piebald.run(recipe, clients(), network, keep=keep, **{"rounds": 1, "runtime": where} | options)


@pytest.fixture(scope="module")
def near() -> piebald.Run:
    return run()


@pytest.fixture(scope="module")
def plain() -> piebald.Run:
    return run(keep="last")


def probabilities(model: nn.Sequential, row: Tensor, x: Tensor, y: Tensor, k: int, lam: float) -> list[float]:
    """One row's, a neighbour at a time."""
    z = model[:-1](row)
    apart = sorted(
        (math.dist(z.tolist(), model[:-1](one).tolist()), int(label)) for one, label in zip(x, y, strict=True)
    )
    votes = [0.0] * 4
    for distance, label in apart[:k]:
        votes[label] += math.exp(-distance)
    own = model(row).softmax(0).tolist()
    return [lam * vote / sum(votes) + (1 - lam) * p for vote, p in zip(votes, own, strict=True)]


@pytest.mark.full
@torch.no_grad()
def test_it_is_the_program_of_its_equations(near: piebald.Run) -> None:
    model: Any = near.model()
    for choice in near.choices:
        train, asked, test = (clients().rows(choice["client"], split) for split in ("train", "validation", "test"))
        losses = {
            (k, lam): sum(
                -math.log(probabilities(model, row, train.x, train.y, k, lam)[label])
                for row, label in zip(asked.x, asked.y.tolist(), strict=True)
            )
            / len(asked)
            for k in GRID["k"]
            for lam in GRID["lam"]
        }
        k, lam = min(losses, key=losses.__getitem__)
        assert choice["chosen"] == "neighbours"
        assert choice["neighbours"] == {"k": k, "lam": lam, "scale": 1.0}
        assert choice["candidates"]["neighbours"]["loss"] == pytest.approx(losses[k, lam], rel=1e-4)
        assert choice["candidates"]["global"]["loss"] == pytest.approx(losses[3, 0.0], rel=1e-4)
        expected = [probabilities(model, row, train.x, train.y, k, lam) for row in test.x]
        mine = near.model(choice["client"])
        assert isinstance(mine, NearestNeighbours)
        torch.testing.assert_close(mine(test.x).exp(), torch.tensor(expected), atol=1e-5, rtol=1e-4)
        right = [max(range(4), key=row.__getitem__) == label for row, label in zip(expected, test.y, strict=True)]
        assert near.per_client[choice["client"]] == pytest.approx(sum(right) / len(right))


def test_unlike_clients_gain_by_their_own_rows_and_send_nothing_for_it(near: piebald.Run, plain: piebald.Run) -> None:
    assert near.accuracy > plain.accuracy + 0.1
    assert near.cluster_models[0].equal(plain.cluster_models[0])
    sent = [[(row["kind"], row["bytes_up"], row["bytes_down"]) for row in one.results] for one in (near, plain)]
    assert sent[0] == sent[1]


def test_without_weight_the_model_stays_what_it_is(plain: piebald.Run) -> None:
    none = run(keep={"kind": "knn_per", "lam": [0.0]})
    assert {one["chosen"] for one in none.choices} == {"global"}
    assert none.per_client == plain.per_client
    assert all(none.work.layout.flatten(none.model(client)).equal(none.cluster_models[0]) for client in range(4))
    rows = clients().rows(0, "train")
    wrapped = NearestNeighbours(network(), rows.x, rows.y, lam=0.0)
    assert wrapped(rows.x).equal(network()(rows.x))


KINDS: dict[str, tuple[dict[str, Any], set[str]]] = {
    "ifca": ({"k": 2}, {"global", "cluster"}),
    "fedrep": ({}, {"personal"}),
    "ditto": ({}, {"personal"}),
    "local": ({}, {"local"}),
    "fedproto": ({"inference": "classifier"}, {"local"}),
}


@pytest.mark.parametrize(
    "name", [name if name == "fedrep" else pytest.param(name, marks=pytest.mark.full) for name in KINDS]
)
def test_the_model_is_what_the_recipe_gives_the_client(name: str, tmp_path: Path) -> None:
    settings, bases = KINDS[name]
    with (
        run(name, settings=settings, out=tmp_path / "near") as near,
        run(name, settings=settings, keep="last", out=tmp_path / "plain") as plain,
    ):
        for choice in near.choices:
            assert set(choice["candidates"]) - {"neighbours"} < bases | {"neighbours"}
            mine = near.model(choice["client"])
            inner = mine.module if isinstance(mine, NearestNeighbours) else mine
            layout = near.work.layout
            assert layout.flatten(inner).equal(layout.flatten(plain.model(choice["client"])))


@pytest.mark.full
@pytest.mark.parametrize("engine", ["batched", "vmapped", "reference"])
def test_engines_choose_alike(engine: str, near: piebald.Run) -> None:
    for mine, theirs in zip(near.choices, run(engine=engine).choices, strict=True):
        assert mine["neighbours"] == theirs["neighbours"]
        assert mine["judged"]["chosen"]["loss"] == pytest.approx(theirs["judged"]["chosen"]["loss"], rel=1e-3)


def test_killed_while_clients_choose_and_resumed_to_the_same_choices(
    near: piebald.Run, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setattr(choosing, "GROUP", 2)
    real, groups = choosing._recorded, []

    def cut(*arguments: Any) -> Any:
        groups.append(1)
        if len(groups) == 2:
            raise KeyboardInterrupt
        return real(*arguments)

    with monkeypatch.context() as patched:
        patched.setattr(choosing, "_recorded", cut)
        with pytest.raises(KeyboardInterrupt):
            run(out=tmp_path / "cut")
    with piebald.resume(tmp_path / "cut", clients(), network) as resumed:
        assert resumed.meta["keep"] == {"kind": "knn_per", **GRID}
        assert resumed.choices == near.choices
        assert resumed.per_client == near.per_client
        assert not list((tmp_path / "cut").glob("chosen-*"))  # the run has the model, and the client the rows


def test_a_client_with_few_rows_keeps_its_model_and_rows_without_a_class_are_no_neighbours() -> None:
    (x, y), *others = pairs()
    few = clients_from([(x[:20], y[:20]), *others], test=0.2, validation=0.3, classes=list("abcd"))
    made = piebald.run("fedavg", few, network, rounds=1, keep="knn_per")
    assert made.choices[0]["chosen"] == "global"
    assert "only 6 validation rows, fewer than 10" in made.choices[0]["why"]
    unknown = torch.where(torch.arange(SIZE) < 20, y, -100)
    remembering, asked = NearestNeighbours(network(), x, unknown, k=5), pairs()[1][0]
    assert remembering(asked).equal(NearestNeighbours(network(), x[:20], y[:20], k=5)(asked))


X, Y = pairs()[0]
REFUSED: dict[str, tuple[Any, str]] = {
    "name": (lambda: run(keep="knn"), "'best_for_each' or 'knn_per' or a table, got 'knn'"),
    "kind": (lambda: run(keep={"kind": "knn"}), "no version to keep called 'knn'"),
    "setting": (lambda: run(keep={"kind": "knn_per", "k": [0]}), "k.0 must be at least 1, got 0"),
    "not the user's": (lambda: run(keep={"kind": "knn_per", "split": "train"}), "keep cannot set split"),
    "no features": (
        lambda: piebald.run("fedavg", clients(), nn.Linear(5, 4), rounds=1, keep="knn_per"),
        "no layer before",
    ),
    "no classes": (lambda: run(loss=lambda out, y: out.square().sum(1)), "needs classification with one label"),
    "k": (lambda: NearestNeighbours(network(), X, Y, k=0), "k must be a whole number of at least 1"),
    "one layer": (lambda: NearestNeighbours(nn.Linear(5, 4), X, Y), "must end with a linear layer"),
    "nothing": (lambda: NearestNeighbours(network(), X, Y - 10), "nothing can be remembered"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_is_refused_in_one_sentence(case: str) -> None:
    make, words = REFUSED[case]
    with pytest.raises((PiebaldError, SettingError), match=words):
        make()
