"""FedMD beside a plain program of its algorithm, with unlike models; and who may have which model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import piebald
from piebald import data, partition, recipes
from piebald.data.partition import clients_from
from piebald.methods.recipe import Recipe
from tests.fakes import seeded

from .test_fedproto import UNLIKE, deep, sites, wide

LR, STEPS, ROUNDS = 0.2, 3, 3
PLAIN: dict[str, Any] = {"lr": LR, "steps": STEPS, "batch": 100}  # every batch is all rows
DIGEST: dict[str, Any] = {"digest_steps": 2, "digest_lr": 0.5}


def public_rows() -> tuple[Tensor, Tensor]:
    """Rows that all clients have."""
    draw = torch.Generator().manual_seed(9)
    return 2 * torch.randn(11, 5, generator=draw), torch.arange(11) % 4


def run(recipe: Recipe, model: Any = UNLIKE, engine: str = "sequential", **options: Any) -> piebald.Run:
    clients = clients_from(sites(), test=0.0, classes=list("abcd"), public_rows=options.pop("public", public_rows()))
    where = options.pop("where", {})
    there = piebald.Simulator(**{"engine": engine, "workers": 0, "stack": 3} | where)
    return piebald.run(
        recipe, clients, model, **{"rounds": ROUNDS, "evaluate_every": 0, "seed": 0, "runtime": there} | options
    )


def descend(model: nn.Module, lr: float, steps: int, loss: Callable[[], Tensor]) -> None:
    for _ in range(steps):
        model.zero_grad()
        loss().backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= lr * parameter.grad


def program(public_steps: int) -> list[nn.Module]:
    """Algorithm 1: transfer learning, then communicate, aggregate, distribute, digest and revisit."""
    models, (public, labels) = [wide(), deep(), deep()], public_rows()
    for model in models:
        descend(model, 0.5, public_steps, lambda model=model: functional.cross_entropy(model(public), labels))
    consensus: Tensor | None = None
    for _ in range(ROUNDS):
        for model, (x, y) in zip(models, sites().values(), strict=True):
            if consensus is not None:
                descend(model, 0.5, 2, lambda model=model, far=consensus: (model(public) - far).abs().mean())
            descend(model, LR, STEPS, lambda model=model, x=x, y=y: functional.cross_entropy(model(x), y))
        with torch.no_grad():
            consensus = sum(model(public) for model in models) / len(models)
    return models


def numbers(made: piebald.Run) -> list[Tensor]:
    with made:
        return [nn.utils.parameters_to_vector(made.model(client).parameters()).detach() for client in range(3)]


@pytest.mark.parametrize(
    ("engine", "public_steps"),
    [("sequential", 0), ("sequential", 3), ("batched", 3), ("vmapped", 3), ("reference", 3)],
)
def test_it_is_the_program_of_its_algorithm(engine: str, public_steps: int, tmp_path: Path) -> None:
    more = {"max_examples": 1000} if engine == "reference" else {}  # then updates reach the server one by one
    recipe = recipes.fedmd(public_steps=public_steps, **DIGEST, **PLAIN)
    with run(recipe, engine=engine, out=tmp_path / "run", **more) as made:
        rows = list(made.results)
        for found, expected in zip(numbers(made), program(public_steps), strict=True):
            wanted = nn.utils.parameters_to_vector(expected.parameters())
            torch.testing.assert_close(found, wanted, atol=2e-5, rtol=2e-5)
        assert [row["steps"] for row in rows] == [STEPS + public_steps] * 3 + [STEPS + 2] * 6
        for row in rows:  # 4 outputs for each of 11 rows; down, also whether there are any
            assert (row["bytes_up"], row["bytes_down"]) == (4 * 11 * 4, 4 * (11 * 4 + 1))


def test_without_digestion_clients_train_alone_to_the_bit(tmp_path: Path) -> None:
    more: dict[str, Any] = {"lr": 0.1, "batch": 4, "momentum": 0.5}
    mine, alone, taught = (
        numbers(run(recipe, out=tmp_path / str(place)))
        for place, recipe in enumerate(
            (recipes.fedmd(digest_steps=0, **more), recipes.local(**more), recipes.fedmd(**more))
        )
    )
    for one, other, third in zip(mine, alone, taught, strict=True):
        assert torch.equal(one, other)
        assert not torch.equal(one, third)


def test_outputs_for_public_rows_come_nearer_to_one_another(tmp_path: Path) -> None:
    def apart(digest_steps: int) -> float:
        recipe, x = recipes.fedmd(digest_steps=digest_steps, digest_lr=0.5, **PLAIN), public_rows()[0]
        with run(recipe, out=tmp_path / str(digest_steps)) as made:
            outputs = torch.stack([made.model(client)(x).detach() for client in range(3)])
        return float((outputs - outputs.mean(0)).abs().mean())

    assert apart(10) < 0.5 * apart(0)


def test_a_run_is_resumed_to_the_bit_and_only_with_its_public_rows(tmp_path: Path) -> None:
    recipe = recipes.fedmd(public_steps=2, momentum=0.5, lr=0.1, batch=4)
    run(recipe, rounds=1, out=tmp_path / "short").close()
    x, y = public_rows()
    made = {who: clients_from(sites(), test=0.0, classes=list("abcd"), public_rows=(x[order], y[order]))
            for who, order in (("same", slice(None)), ("turned", torch.arange(10, -1, -1)))}  # fmt: skip
    with pytest.raises(piebald.SettingError, match="the public rows are not those of the run"):
        piebald.resume(tmp_path / "short", made["turned"], UNLIKE, rounds=ROUNDS)
    with (
        run(recipe, out=tmp_path / "whole") as whole,
        piebald.resume(tmp_path / "short", made["same"], UNLIKE, rounds=ROUNDS) as resumed,
    ):
        assert all(map(torch.equal, numbers(whole), numbers(resumed)))


def test_sums_are_enough_for_the_consensus(tmp_path: Path) -> None:
    recipe = recipes.fedmd(**DIGEST, **PLAIN)
    masked = recipe.with_(transforms=[{"kind": "secure_aggregation", "least": 2}])
    ends = (numbers(run(one, wide, out=tmp_path / str(place))) for place, one in enumerate((masked, recipe)))
    for found, expected in zip(*ends, strict=True):
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


def test_public_rows_of_a_data_set_are_nobodys_own() -> None:
    digits = data.digits()
    made = partition.Iid(clients=4, public_rows=30, limit=200).split(digits)
    assert len(made.public_rows) == 30
    assert sum(made.size(client, split) for client in range(4) for split in ("train", "test")) == 170
    own = torch.cat([made.rows(client, "train").x for client in range(4)]).flatten(1)
    assert not bool((made.public_rows.x.flatten(1)[:, None] == own).all(2).any())


OTHER = seeded(lambda: nn.Linear(5, 3))
REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "no public rows": (lambda: run(recipes.fedmd(), public=None), "rows that all clients have, and there are none"),
    "other rows": (lambda: run(recipes.fedmd(), public=(torch.ones(3, 4), torch.ones(3).long())), "must look like"),
    "outputs": (lambda: run(recipes.fedmd(), {"north": wide, "*": OTHER}), "outputs of one shape"),
    "noise": (
        lambda: recipes.fedmd().with_(transforms=[{"kind": "gaussian", "clip": 1.0, "noise": 1.0}]),
        "gaussian protects only the model but public_distillation also sends 'outputs'",
    ),
    "regions": (
        lambda: recipes.fedmd().with_(clustering={"kind": "regions", "members": [[0, 1], [2]], "rounds": 1}),
        "regions",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_is_refused(case: str) -> None:
    make, words = REFUSED[case]
    with pytest.raises(piebald.SettingError, match=words):
        make()
