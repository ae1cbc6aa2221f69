"""Case 01: a label that a site did not annotate, and what else a loss does not take."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import piebald
from piebald import recipes
from piebald.core.errors import SettingError
from tests.fakes import seeded, simulate

RECIPE = recipes.fedavg(lr=1.0, epochs=3)
QUICK: dict[str, Any] = {"simulator": {"engine": "batched", "stack": 2}, "evaluate_every": 12}
RULE = np.random.default_rng(1).normal(size=(5, 3))


def hospital(rows: int, known: list[int], mark: float, seed: int) -> tuple[Any, Any]:
    """Three findings of each patient, of which the hospital annotates some."""
    x = np.random.default_rng(seed).normal(size=(rows, 5)).astype(np.float32)
    y = (x @ RULE > 0).astype(np.float32)
    y[:, [finding for finding in range(3) if finding not in known]] = mark
    return x, y


def trained(mark: float, **options: Any) -> piebald.Run:
    rows = {"north": hospital(80, [0, 1], mark, 2), "south": hospital(60, [2], mark, 3)}
    clients = piebald.clients_from(rows, test=0.25)
    return simulate(RECIPE, clients, seeded(lambda: nn.Linear(5, 3)), rounds=12, loss="multilabel", **QUICK | options)


def right(run: piebald.Run) -> float:
    """The share of labels that are right among new patients, all of whose findings are known."""
    x, y = hospital(2000, [0, 1, 2], 0, 4)
    return float(((run.model()(torch.from_numpy(x)) > 0).numpy() == (y > 0)).mean())


@pytest.mark.parametrize("mark", [-100.0, np.nan])
def test_labels_that_nobody_annotated_count_in_no_loss_and_no_metric(mark: float) -> None:
    run = trained(mark)
    assert right(run) > 0.93  # 0.52 where -100 counts
    assert run.score.name == "label_accuracy"
    assert run.score.value > 0.9


@pytest.mark.parametrize("aggregation", ["example_weighted", "equal_weighted", "median"])
@pytest.mark.parametrize("loaded", [False, True])
def test_who_annotated_nothing_has_no_say(aggregation: str, loaded: bool) -> None:
    rows = {"north": hospital(40, [0, 1], -100, 2), "south": hospital(60, [2], -100, 3)}
    blank = {f"blank {k}": hospital(50, [], -100, k) for k in range(3)}
    models = []
    for held in (rows, rows | blank):
        clients: Any = {name: {"train": pair} for name, pair in held.items()}
        if loaded:
            clients = piebald.LazyClients(len(held), list(clients.values()).__getitem__, names=list(held))
        recipe = recipes.fedavg(lr=0.5).with_(aggregation=aggregation)
        run = simulate(recipe, clients, seeded(lambda: nn.Linear(5, 3)), rounds=2, loss="multilabel", evaluate_every=0)
        models.append(run.start())
    torch.testing.assert_close(models[1], models[0], rtol=0, atol=1e-6)


def test_a_mark_that_is_no_target_is_refused_with_client_column_and_row() -> None:
    with pytest.raises(SettingError, match=r"client 'north', train rows: targets must be 0 or 1 .* column 3 of row 1"):
        trained(-1.0)


def survival(rows: int, first: float) -> tuple[Any, Any]:
    draw = np.random.default_rng(rows)
    time = draw.exponential(size=rows).astype(np.float32)
    time[0] = first
    return draw.normal(size=(rows, 3)).astype(np.float32), (time, np.ones(rows, np.float32))


@pytest.mark.parametrize("odd", ["north", "south"])
def test_a_negative_time_is_refused_before_training_whoever_has_it(odd: str) -> None:
    rows = {name: survival(count, -1.0 if name == odd else 1.0) for name, count in (("north", 20), ("south", 12))}
    with pytest.raises(SettingError, match=rf"client '{odd}', train rows: .* got -1 in the time of row"):
        simulate("fedavg", rows, nn.Linear(3, 1), rounds=1, loss="survival")


def scans(rows: int, void: int) -> tuple[Any, Any]:
    """Pictures whose class is that of each pixel, and a margin that nobody has outlined."""
    x = np.random.default_rng(rows).normal(size=(rows, 1, 4, 4)).astype(np.float32)
    y = (x[:, 0] > 0).astype(np.int64)
    y[:, 0] = void
    return x, y


def test_pixels_that_nobody_outlined_are_in_no_loss_and_no_metric() -> None:
    """The model is that of training on the other pixels alone, which one convolution of 1 x 1 can do."""
    recipe, loss = recipes.fedavg(lr=0.5, batch=50), "classification"
    with_margin = {"north": scans(12, -100), "south": scans(9, -100)}
    without = {name: (x[:, :, 1:], y[:, 1:]) for name, (x, y) in with_margin.items()}
    models = []
    for rows in (with_margin, without):
        clients = {name: {"train": pair, "test": pair} for name, pair in rows.items()}
        models.append(simulate(recipe, clients, seeded(lambda: nn.Conv2d(1, 2, 1)), rounds=3, loss=loss))
    torch.testing.assert_close(models[0].start(), models[1].start(), rtol=1e-4, atol=1e-5)
    assert models[0].accuracy == pytest.approx(models[1].accuracy)


@pytest.mark.parametrize(
    ("y", "sentence"),
    [
        (np.array([1, 2, 3, 1]), "classes seem to be numbered from 1: subtract 1"),
        (np.array([0, 1, 2, 7]), "class numbers from 0 to 2 (-100 where unknown), got 7 in row"),
        (np.eye(3, dtype=np.float32)[[0, 1, 2, 2]] / 2, "one-hot rows with a single 1"),
    ],
    ids=["from 1", "beyond", "shares"],
)
def test_classes_that_have_no_output_are_told_in_our_own_words(y: Any, sentence: str) -> None:
    x = np.ones((4, 5), np.float32)
    fits = (np.eye(3, dtype=np.float32) if y.ndim == 2 else np.arange(3))[[0, 1, 2, 0]]
    with pytest.raises(SettingError) as caught:
        simulate("fedavg", {"north": (x, fits), "south": (x, y)}, nn.Linear(5, 3), rounds=1, loss="classification")
    assert str(caught.value).startswith("client 'south', train rows: targets must be ")
    assert sentence in str(caught.value)


@pytest.mark.parametrize("odd", ["north", "south"])
@pytest.mark.parametrize(("first", "advice"), [(1, "subtract 1"), (4, "give the model an output for each class")])
def test_a_loss_of_ones_own_that_refuses_a_class_is_told_in_our_words(odd: str, first: int, advice: str) -> None:
    def own(outputs: Tensor, targets: Tensor) -> Tensor:
        return nn.functional.cross_entropy(outputs, targets, reduction="none")

    rows = {name: (np.ones((6, 5), np.float32), np.arange(6) % 3) for name in ("north", "south")}
    rows[odd] = rows[odd][0], rows[odd][1] + first
    with pytest.raises(SettingError, match=rf"client '{odd}', train rows: .* from 0 to 2 .* got \d in row .*{advice}"):
        simulate("fedavg", rows, nn.Linear(5, 3), rounds=1, loss=own)


def test_a_loss_of_ones_own_may_take_class_numbers_without_an_output() -> None:
    def ordinal(outputs: Tensor, targets: Tensor) -> Tensor:
        steps = (targets[:, None] > torch.arange(outputs.shape[1])).float()
        return nn.functional.binary_cross_entropy_with_logits(outputs, steps, reduction="none").sum(1)

    rows = {name: (np.ones((6, 5), np.float32), np.arange(6) % 4) for name in ("north", "south")}
    assert simulate("fedavg", rows, nn.Linear(5, 3), rounds=1, loss=ordinal).final["rounds"] == 1


def test_labels_that_would_be_predicted_as_amounts_are_said(caplog: pytest.LogCaptureFixture) -> None:
    rows = {"north": hospital(20, [0, 1, 2], 0, 5), "south": hospital(20, [0, 1], -100, 6)}
    with caplog.at_level(logging.WARNING):
        simulate("fedavg", rows, nn.Linear(5, 3), rounds=1)
    assert "rows of 0 and 1, predicted as amounts: if they are labels, pass loss='multilabel'" in caplog.text
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        simulate("fedavg", rows, nn.Linear(5, 3), rounds=1, loss="multilabel")
    assert "amounts" not in caplog.text


def test_a_loss_of_ones_own_may_know_unknown_labels_in_its_own_way() -> None:
    def own(outputs: Tensor, targets: Tensor) -> Tensor:
        known = (targets >= 0).float()
        each = nn.functional.binary_cross_entropy_with_logits(outputs, targets.clamp(0, 1), reduction="none")
        return (each * known).sum(1) / known.sum(1)

    rows = {"north": hospital(80, [0, 1], -1.0, 2), "south": hospital(60, [2], -1.0, 3)}
    assert right(simulate(RECIPE, rows, seeded(lambda: nn.Linear(5, 3)), rounds=12, loss=own, **QUICK)) > 0.93
