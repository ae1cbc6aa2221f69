"""Objectives: inferred from the targets or given; and runs that train for them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import piebald
from piebald import recipes
from piebald.core.errors import SettingError
from piebald.core.metrics import accuracy, squared_error
from piebald.core.objective import METRICS, OBJECTIVES, objective_for
from tests.fakes import classified, federation, seeded, simulate

CLASSES, REALS = torch.tensor([0, 1, 2]), torch.tensor([0.5, 1.0, -2.0])
SEQUENCES = torch.tensor([[0, 1, 2], [2, 1, -100]])


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8, torch.int16, torch.int8])
def test_whole_numbers_are_classes(dtype: torch.dtype) -> None:
    assert objective_for(CLASSES.to(dtype)) is OBJECTIVES["classification"]
    assert objective_for(CLASSES.to(dtype)).metric == "accuracy"


def test_real_numbers_mean_regression() -> None:
    objective = objective_for(REALS)
    assert (objective.name, objective.metric, objective.higher_is_better) == ("regression", "absolute_error", False)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_an_objective_by_name(name: str) -> None:
    whole = {"classification": CLASSES, "ordinal": CLASSES, "token_classification": SEQUENCES}
    whole["language_modelling"] = SEQUENCES
    targets = {**whole, "survival": (REALS.abs(), CLASSES > 0)}.get(name, REALS)
    assert objective_for(targets, name) is OBJECTIVES[name]


def test_your_own_loss_keeps_the_metrics_that_fit_the_targets() -> None:
    objective = objective_for(CLASSES, functional.cross_entropy)
    assert (objective.name, objective.metric, objective.loss) == ("custom", "accuracy", functional.cross_entropy)


@pytest.mark.parametrize(
    ("metrics", "name", "higher"),
    [
        ({}, "loss", False),
        ({"hits": accuracy}, "hits", True),
        ({"error": squared_error, "hits": accuracy}, "error", False),
        ({"own": lambda outputs, targets: outputs}, "own", True),
    ],
)
def test_whether_more_is_better_of_the_first_metric(metrics: dict[str, Any], name: str, higher: bool) -> None:
    objective = objective_for(CLASSES, metrics=metrics)
    assert (objective.metric, objective.higher_is_better) == (name, higher)


@pytest.mark.parametrize(
    ("targets", "options", "message"),
    [
        (REALS, {"loss": "classification"}, "classification needs whole-number targets, got torch.float32"),
        (CLASSES, {"loss": "regresion"}, "there is no loss 'regresion': did you mean 'regression'?"),
        (CLASSES, {"loss": 3}, "loss must be a function of (outputs, targets) or the name of an objective, got 3"),
        (CLASSES, {"metrics": {"f1": 0.5}}, "metric 'f1' must be a function or a torchmetrics object, got 0.5"),
    ],
    ids=str,
)
def test_bad_settings_are_refused(targets: Tensor, options: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingError) as caught:
        objective_for(targets, **options)
    assert message in str(caught.value)


SHAPES = {
    "classification": [((4, 3), (4,)), ((4, 3, 5), (4, 5)), ((4, 3, 2, 2), (4, 2, 2))],
    "regression": [((4,), (4,)), ((4, 1), (4,)), ((4, 3), (4, 3)), ((4, 2, 3), (4, 2, 3))],
    "multilabel": [((4, 3), (4, 3)), ((4, 1), (4,))],
}


@pytest.mark.parametrize(("name", "shapes"), [(name, shape) for name in SHAPES for shape in SHAPES[name]], ids=str)
def test_losses_and_metrics_give_one_value_per_example(name: str, shapes: tuple[tuple[int, ...], ...]) -> None:
    """An example's value is the same alone and in a batch."""
    draw = np.random.default_rng(0)
    outputs = torch.from_numpy(draw.normal(size=shapes[0])).float()
    whole = torch.from_numpy(draw.integers(0, 3 if name == "classification" else 2, shapes[1]))
    targets = whole if name == "classification" else whole.float()
    for function in (OBJECTIVES[name].loss, *OBJECTIVES[name].metrics.values()):
        values = function(outputs, targets)
        assert values.shape == (4,)
        alone = torch.cat([function(outputs[row : row + 1], targets[row : row + 1]) for row in range(4)])
        torch.testing.assert_close(values, alone)


def test_values_by_hand() -> None:
    outputs, targets = torch.tensor([[2.0, 0.0], [0.0, 1.0]]), torch.tensor([0, 0])
    loss = OBJECTIVES["classification"].loss(outputs, targets)
    assert loss.tolist() == pytest.approx([np.log1p(np.exp(-2.0)), np.log1p(np.exp(1.0))])
    assert accuracy(outputs, targets).tolist() == [1.0, 0.0]
    pair = torch.tensor([[1.0, 3.0]]), torch.tensor([[0.0, 1.0]])
    assert squared_error(*pair).item() == pytest.approx((1 + 4) / 2)
    assert OBJECTIVES["regression"].metrics["absolute_error"](*pair).item() == pytest.approx(1.5)
    assert OBJECTIVES["multilabel"].metrics["label_accuracy"](*pair).item() == pytest.approx(0.5)
    expected = (np.log1p(np.exp(1.0)) + np.log1p(np.exp(-3.0))) / 2
    assert OBJECTIVES["multilabel"].loss(*pair).item() == pytest.approx(expected)


# ----------------------------------------------------------------------------------------------------------------- runs

ENGINES = [{"engine": "sequential"}, {"engine": "vmapped", "stack": 4}]


def planes(count: int, outputs: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Clients whose targets are one linear map of their inputs."""
    draw = np.random.default_rng(1)
    weight = draw.normal(size=(3, outputs))
    xs = [draw.normal(size=(30, 3)).astype(np.float32) for _ in range(count)]
    return [(x, (x @ weight).astype(np.float32)) for x in xs]


@pytest.mark.parametrize("simulator", ENGINES, ids=lambda s: s["engine"])
def test_regression_is_learnt(simulator: dict[str, Any]) -> None:
    pairs = [(x, y[:, 0]) for x, y in planes(4, 1)]
    model = seeded(lambda: nn.Linear(3, 1))
    run = simulate(recipes.fedavg(lr=0.1, batch=10), piebald.clients_from(pairs), model, rounds=15, simulator=simulator)
    errors = [point["mean"] for point in run.curve]
    assert (run.metric, run.higher_is_better) == ("absolute_error", False)
    assert errors[-1] < 0.02 < 0.5 < errors[0]


@pytest.mark.parametrize("simulator", ENGINES, ids=lambda s: s["engine"])
def test_multilabel_classification_is_learnt(simulator: dict[str, Any]) -> None:
    pairs = [(x, (y > 0).astype(np.float32)) for x, y in planes(4, 5)]
    model = seeded(lambda: nn.Linear(3, 5))
    run = simulate(
        recipes.fedavg(lr=1.0, batch=10),
        piebald.clients_from(pairs),
        model,
        rounds=15,
        loss="multilabel",
        simulator=simulator,
    )
    assert run.metric == "label_accuracy"
    assert run.curve[-1]["mean"] > 0.9 > 0.75 > run.curve[0]["mean"]


@pytest.mark.parametrize("simulator", ENGINES, ids=lambda s: s["engine"])
def test_a_class_for_every_position_of_a_sequence(simulator: dict[str, Any]) -> None:
    """Inputs [n, 2, 6], targets [n, 6]: whether the number at a position is above 0."""
    draw = np.random.default_rng(2)
    clients = []
    for _ in range(3):
        x = draw.normal(size=(20, 2, 6)).astype(np.float32)
        clients.append((x, (x[:, 0] > 0).astype(np.int64)))
    model = seeded(lambda: nn.Conv1d(2, 2, 1))
    run = simulate(
        recipes.fedavg(lr=0.5), federation(*clients, classes=["no", "yes"]), model, rounds=15, simulator=simulator
    )
    assert run.curve[-1]["mean"] > 0.95


@pytest.mark.parametrize("simulator", ENGINES, ids=lambda s: s["engine"])
def test_a_loss_that_returns_one_mean_trains_to_the_same_model(simulator: dict[str, Any]) -> None:
    """Uneven clients and short batches: a mean over a padded batch would show."""
    clients, model = classified(5, 12, 9, 17), seeded(lambda: nn.Linear(4, 2))
    recipe = recipes.fedavg(lr=0.3, batch=4)
    each = simulate(recipe, clients, model, simulator=simulator)
    mean = simulate(recipe, clients, model, loss=nn.CrossEntropyLoss(), simulator=simulator)
    torch.testing.assert_close(each.model().weight, mean.model().weight)
    assert mean.meta["objective"] == "custom"


def of_columns(outputs: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(outputs, targets, reduction="none")[:, None]


LOSSES = {r"shape \[4, 1\]": of_columns, "None, which is no tensor": lambda *_: None, "3, which is no": lambda *_: 3}


@pytest.mark.parametrize("got", LOSSES)
def test_a_loss_of_another_shape_or_type_is_refused(got: str) -> None:
    with pytest.raises(SettingError, match=f"one value an example or one mean, got {got}"):
        simulate("fedavg", classified(8, 8), nn.Linear(4, 2), loss=LOSSES[got])


def test_torchmetrics_objects() -> None:
    """Each client's value is the metric on its own rows."""
    torchmetrics = pytest.importorskip("torchmetrics", reason="needs torchmetrics")
    clients, model = classified(6, 9, 15), seeded(lambda: nn.Linear(4, 2))
    metrics = {
        "f1": torchmetrics.classification.MulticlassF1Score(num_classes=2, average="macro"),
        "recall": torchmetrics.classification.MulticlassRecall(num_classes=2, average=None),
    }
    run = simulate(recipes.fedavg(lr=0.3), clients, model, rounds=2, metrics=metrics)
    assert (run.metric, run.higher_is_better) == ("f1", True)
    last = {(r["client"], r["metric"]): r["value"] for r in run.scores if r["version"] == 2 and r["split"] == "test"}
    trained = run.model()
    for client in range(3):
        rows = clients.rows(client, "test")
        with torch.no_grad():
            predicted = trained(rows.x).argmax(1)
        scores, recalls = [], []
        for label in (0, 1):
            hits = int(((predicted == label) & (rows.y == label)).sum())
            scores.append(2 * hits / max(1, int((predicted == label).sum() + (rows.y == label).sum())))
            recalls.append(hits / int((rows.y == label).sum()))
        assert last[client, "f1"] == pytest.approx(sum(scores) / 2)
        assert last[client, "recall"] == pytest.approx(sum(recalls) / 2)


def test_torchmetrics_say_which_way_is_better() -> None:
    torchmetrics = pytest.importorskip("torchmetrics", reason="needs torchmetrics")
    assert not objective_for(REALS, metrics={"error": torchmetrics.MeanSquaredError()}).higher_is_better
    assert objective_for(REALS, metrics={"fit": torchmetrics.R2Score()}).higher_is_better


def test_your_own_metric_is_a_mean_over_rows() -> None:
    clients, model = classified(6, 9), seeded(lambda: nn.Linear(4, 2))
    run = simulate("fedavg", clients, model, rounds=1, metrics={"first": lambda outputs, targets: outputs[:, 0]})
    for client in range(2):
        with torch.no_grad():
            value = float(model(clients.rows(client, "test").x)[:, 0].mean())
        row = next(r for r in run.scores if (r["version"], r["client"], r["metric"]) == (0, client, "first"))
        assert row["value"] == pytest.approx(value, rel=1e-4)


@pytest.mark.parametrize("classes", [2, 4])
@pytest.mark.parametrize("ties", [False, True])
def test_auc_is_scikit_learns(classes: int, ties: bool) -> None:
    from sklearn.metrics import roc_auc_score

    draw = torch.Generator().manual_seed(classes)
    outputs = torch.randn(60, classes, generator=draw)
    outputs = outputs.round() if ties else outputs
    targets = torch.cat([torch.arange(classes), torch.randint(0, classes, (60 - classes,), generator=draw)])
    shares = outputs.double().softmax(1).numpy()
    expected = (
        roc_auc_score(targets, shares[:, 1])
        if classes == 2
        else roc_auc_score(targets, shares, multi_class="ovr", average="macro")
    )
    auc = METRICS["auc"]
    auc.reset()
    for rows in (slice(0, 20), slice(20, 60)):
        auc.update(outputs[rows], targets[rows])
    assert float(auc.compute()) == pytest.approx(expected)


def test_auc_of_logits_and_of_one_class_alone() -> None:
    auc = METRICS["auc"]
    auc.reset()
    auc.update(torch.tensor([[-1.0], [2.0], [0.5], [0.5]]), torch.tensor([[0.0], [1.0], [1.0], [0.0]]))
    assert float(auc.compute()) == pytest.approx((1 + 1 + 1 + 0.5) / 4)
    auc.reset()
    auc.update(torch.randn(5, 2), torch.zeros(5, dtype=torch.int64))
    assert auc.compute().isnan()


def test_metrics_by_name() -> None:
    objective = objective_for(CLASSES, metrics=["auc", "accuracy"])
    assert (objective.metric, list(objective.metrics), objective.higher_is_better) == ("auc", ["auc", "accuracy"], True)
    for wrong, message in (("auc", "write metrics="), (["acuracy"], "did you mean 'accuracy'")):
        with pytest.raises(SettingError, match=message):
            objective_for(CLASSES, metrics=wrong)


def test_clients_without_a_positive_have_no_auc() -> None:
    clients = piebald.clients_from(
        [(torch.randn(20, 3), torch.arange(20) % 2), (torch.randn(20, 3), torch.zeros(20, dtype=torch.int64))],
        classes=["no", "yes"],
    )
    run = piebald.run(
        "fedavg", clients, nn.Linear(3, 2), rounds=1, metrics=["auc"], runtime=piebald.Simulator(workers=0)
    )
    assert list(run.per_client) == [0]
    assert run.metric == "auc"
