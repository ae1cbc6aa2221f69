"""Scores: several models on rows that are fetched once, values of all clients' rows at once, means without a matrix."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from piebald.contracts import Cohort
from piebald.core import pytree
from piebald.core.objective import METRICS, OBJECTIVES, has_value_for_each
from piebald.data.partition import Lists, PooledClients
from piebald.engines import scoring
from piebald.engines.engine_choice import make_engine
from piebald.experiments.run_settings import RunSettings
from piebald.methods.aggregation.linear import Linear
from piebald.methods.recipe import Recipe
from piebald.runs.prepare import prepare

from .conftest import assert_same, carry_out, federation, method, network, vector

CLIENTS = [3, 0, 2, 4, 1]
MODELS = 3


@pytest.fixture(scope="module")
def clients() -> PooledClients:
    """The clients of all tests here, of whom client 2 has no validation rows."""
    whole = federation()
    parts = {split: whole.lists(split) for split in ("train", "test", "validation")}
    rows = parts["validation"]
    parts["validation"] = Lists.of(np.where(rows.clients == 2, -1, rows.clients), len(rows), rows.values)
    return PooledClients(whole.x, whole.y, parts, classes=list("abcd"))


def engine_of(name: str, clients: PooledClients, **options: Any) -> Any:
    work = prepare(method("fedavg"), clients, network(), RunSettings.of_keywords({"rounds": 1, **options})).work
    return make_engine(name, work, clients, torch.device("cpu"), False)


def models_of(engine: Any, shared: bool) -> list[Tensor]:
    """Some models [c, p], one for all clients or one for each."""
    draw, first = torch.Generator().manual_seed(4), engine.work.initial
    size = (MODELS, 1 if shared else len(CLIENTS), len(first))
    made = first + 0.1 * torch.randn(size, generator=draw)
    return [one.expand(len(CLIENTS), -1) for one in made]


@pytest.mark.parametrize("shared", [True, False], ids=["one for all", "one for each"])
@pytest.mark.parametrize("rows_at_once", [4, 2048])
@pytest.mark.parametrize("name", ["sequential", "vmapped", "batched"])
def test_losses_are_those_of_one_model_after_another(
    name: str, rows_at_once: int, shared: bool, clients: PooledClients, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scoring, "SCORE_ROWS", rows_at_once)
    engine, plain = engine_of(name, clients), engine_of("reference", clients)
    models = models_of(engine, shared)
    for split in ("train", "validation"):
        losses = engine.losses(CLIENTS, models, split)
        each = [engine.score(CLIENTS, model, split, metrics=False)[0]["loss"] for model in models]
        torch.testing.assert_close(losses, torch.stack(each, dim=1), atol=1e-6, rtol=1e-6, equal_nan=True)
        assert torch.equal(losses.isnan().all(1), torch.tensor([split == "validation" and c == 2 for c in CLIENTS]))
        torch.testing.assert_close(losses, plain.losses(CLIENTS, models, split), atol=1e-6, rtol=1e-5, equal_nan=True)


def test_few_rows_are_copied_once_for_all_models(clients: PooledClients, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, copied, plain = engine_of("sequential", clients), list[int](), pytree.take

    def take(tree: Any, index: Any) -> Any:
        copied.extend([len(index)] if isinstance(index, Tensor) and tree is engine.row_loader.clients.x else [])
        return plain(tree, index)

    monkeypatch.setattr(pytree, "take", take)
    engine.losses(CLIENTS, models_of(engine, True), "train")
    assert copied == [sum(clients.size(client, "train") for client in CLIENTS)]
    monkeypatch.setattr(scoring, "SCORE_ROWS", 50)
    copied.clear()
    engine.losses(CLIENTS, models_of(engine, True), "train")
    assert len(copied) > MODELS
    assert max(copied) == 50  # more rows are never held at a time


TOGETHER = {name: one.loss for name, one in OBJECTIVES.items() if name != "model" and not one.compares_rows} | {
    name: metric for name, metric in METRICS.items() if has_value_for_each(metric)
}
SEQUENCES, LABELS, RATES = ((7, 5), 5), ((6,), None), ((1,), None)  # shapes of outputs, and how many classes
SHAPES = {"token": SEQUENCES, "next": SEQUENCES, "language": SEQUENCES, "label": LABELS, "multi": LABELS}
SHAPES |= {"counts": RATES, "poisson": RATES}


@pytest.mark.parametrize("name", TOGETHER)
def test_values_of_all_rows_at_once_are_those_of_each_client(name: str, clients: PooledClients) -> None:
    """To the bit: else a score would depend on who was scored beside."""
    engine, draw = engine_of("sequential", clients), torch.Generator().manual_seed(7)
    sizes = [3, 0, 1, 40, 8]
    shape, classes = next((found for start, found in SHAPES.items() if name.startswith(start)), ((5,), 5))
    outputs = torch.randn(sum(sizes), *shape, generator=draw) * 3
    if name in ("regression", "l1", "huber", "absolute_error", "mae", "squared_error"):
        targets = torch.randn(outputs.shape, generator=draw)
    elif classes is None:
        targets = torch.randint(2, outputs.shape, generator=draw).float()
    else:
        targets = torch.randint(classes, (sum(sizes), *shape[:-1]), generator=draw)
    at_once, by_client = (engine._measured(TOGETHER[name], each, outputs, targets, sizes) for each in (True, False))
    assert torch.equal(at_once.nan_to_num(-1), by_client.nan_to_num(-1))
    assert at_once.isnan().tolist() == [size == 0 for size in sizes]


def test_what_is_not_known_to_be_by_row_sees_one_client_at_a_time(clients: PooledClients) -> None:
    """A metric or a loss of the user's own may compare rows: nobody else's may be among them."""
    seen: list[int] = []

    def centred(outputs: Tensor, targets: Tensor) -> Tensor:
        seen.append(len(targets))
        return outputs[:, 0] - outputs[:, 0].mean()

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return centred(outputs, targets).abs()

    engine = engine_of("sequential", clients, metrics={"centred": centred, "own": METRICS["auc"]}, loss=loss)
    sizes = [clients.size(client, "train") for client in CLIENTS]
    seen.clear()
    scores, _ = engine.score(CLIENTS, models_of(engine, True)[0], "train")
    assert seen == [*sizes, *sizes]
    assert scores["centred"].abs().max() < 1e-5
    assert not has_value_for_each(METRICS["auc"])


@pytest.mark.parametrize("name", ["ifca", "distfl", "fedamp", "hierfavg", "fedasync"])
def test_a_mean_without_a_matrix_of_changes_is_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Changes that started from other models than the current one count from the current one, read one by one too."""
    matrices, plain = list[bool](), Linear.aggregate

    @functools.wraps(plain)
    def noted(self: Linear, cohort: Cohort, context: Any) -> Any:
        matrices.append(cohort.matrix is not None)
        return plain(self, cohort, context)

    monkeypatch.setattr(Linear, "aggregate", noted)
    recipe = method(name)
    if name == "fedasync":  # whose own aggregator damps stale updates, for which it sees them side by side
        recipe = recipe.with_(aggregation={"kind": "equal_weighted"})
    without = carry_out(recipe, rounds=5)
    assert set(matrices) == {False}
    matrices.clear()
    monkeypatch.setattr(Recipe, "needs_matrix", True)
    beside = carry_out(recipe, rounds=5)
    assert all(matrices)
    assert not torch.equal(vector(without), without.work.initial)
    assert_same(without, beside)
