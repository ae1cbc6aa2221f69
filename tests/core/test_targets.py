"""What targets may be: domains of losses, unknown targets in every loss and metric, and checks before training."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from sklearn import metrics as sk
from torch import Tensor, nn

import piebald
from piebald import recipes
from piebald.contracts import Rows
from piebald.core.errors import SettingError
from piebald.core.metrics import Auc, Concordance
from piebald.core.objective import METRICS, OBJECTIVES, objective_for
from piebald.experiments.file import ExperimentSettings
from piebald.experiments.run_settings import RunSettings
from piebald.federation.site.site_process import _check_targets
from piebald.federation.site.site_rows import SiteRows
from piebald.runs.prepare import prepare
from tests.fakes import seeded, simulate

draw = np.random.default_rng(0)
X = draw.normal(size=(24, 5)).astype(np.float32)
CLASSES = (X[:, 0] > 0).astype(np.int64) + (X[:, 1] > 0.5)
UNKNOWN = torch.tensor([True, False, False, True, False, False])


def reals(*shape: int) -> Tensor:
    return torch.from_numpy(draw.normal(size=shape)).float()


# for each loss: outputs, targets that are all known, and the same outputs with some targets unknown
CASES = {
    "classification": (reals(6, 3), torch.tensor([0, 1, 2, 0, 1, 2])),
    "ordinal": (reals(6, 3), torch.tensor([0, 1, 2, 0, 1, 2])),
    "regression": (reals(6, 2), reals(6, 2)),
    "l1": (reals(6), reals(6)),
    "huber": (reals(6, 2), reals(6, 2)),
    "multilabel": (reals(6, 2), (reals(6, 2) > 0).float()),
    "token_classification": (reals(6, 4, 3), torch.arange(24).view(6, 4) % 3),
    "language_modelling": (reals(6, 4, 3), torch.arange(24).view(6, 4) % 3),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("mark", [-100.0, float("nan")])
def test_rows_without_targets_have_no_loss_and_no_gradient(name: str, mark: float) -> None:
    """What is known of the others is as if the unknown rows were not there."""
    outputs, targets = CASES[name][0].clone().requires_grad_(), CASES[name][1].clone()
    if not targets.dtype.is_floating_point and mark != mark:
        return  # whole numbers have no NaN
    targets[UNKNOWN] = mark
    loss = OBJECTIVES[name].loss(outputs, targets)
    assert loss[UNKNOWN].tolist() == [0.0, 0.0]
    torch.testing.assert_close(loss[~UNKNOWN], OBJECTIVES[name].loss(outputs, CASES[name][1])[~UNKNOWN])
    (gradient,) = torch.autograd.grad(loss.sum(), outputs)
    assert bool(gradient.isfinite().all())
    assert gradient.flatten(1).any(1).tolist() == (~UNKNOWN).tolist() if gradient.dim() > 1 else gradient[1] != 0
    domain = OBJECTIVES[name].domain
    assert domain is not None
    assert domain.known_rows(targets).tolist() == (~UNKNOWN).tolist()


def test_unknown_labels_of_a_row_leave_the_mean_of_the_others() -> None:
    outputs, targets = torch.tensor([[2.0, -1.0, 0.5]]), torch.tensor([[1.0, -100.0, float("nan")]])
    assert OBJECTIVES["multilabel"].loss(outputs, targets).item() == pytest.approx(np.log1p(np.exp(-2.0)))
    assert METRICS["label_accuracy"](outputs, targets).item() == 1.0
    assert METRICS["squared_error"](outputs, targets).item() == 1.0


def test_survival_without_some_rows_is_that_of_the_others() -> None:
    hazard, time, event = reals(6), torch.tensor([3.0, 1, 2, 5, 4, 2]), torch.tensor([1.0, 1, 0, 1, 1, 1])
    known = OBJECTIVES["survival"].loss(hazard[~UNKNOWN], (time[~UNKNOWN], event[~UNKNOWN]))
    for part in (0, 1):
        targets = [time.clone(), event.clone()]
        targets[part][UNKNOWN] = -100
        outputs = hazard.clone().requires_grad_()
        loss = OBJECTIVES["survival"].loss(outputs, tuple(targets))
        torch.testing.assert_close(loss.detach(), known)
        (gradient,) = torch.autograd.grad(loss, outputs)
        assert not gradient[UNKNOWN].any()
        metric, of_others = Concordance(), Concordance()
        metric.update(hazard, tuple(targets))
        of_others.update(hazard[~UNKNOWN], (time[~UNKNOWN], event[~UNKNOWN]))
        assert metric.compute() == of_others.compute()


def test_auc_of_labels_leaves_out_unknown_ones() -> None:
    scores, labels = reals(12, 2), (torch.arange(24).view(12, 2) % 3 > 0).float()
    missing = torch.arange(24).view(12, 2) % 5 == 0
    auc = Auc()
    auc.update(scores, torch.where(missing, -100.0, labels))
    each = [sk.roc_auc_score(labels[~missing[:, k], k], scores[~missing[:, k], k]) for k in range(2)]
    assert float(auc.compute()) == pytest.approx(np.mean(each))


# --------------------------------------------------------------------------------------------------------- domains

PAIR = (torch.tensor([1.0, -3.0]), torch.tensor([1, 0]))
REFUSED: dict[str, tuple[str, Any, tuple[int, ...], str]] = {
    "a class number that has no output": ("classification", torch.tensor([0, 3]), (3,), "from 0 to 2"),
    "a class number below 0": ("classification", torch.tensor([0, -1]), (3,), "got -1 in row 2"),
    "classes from 1": ("classification", torch.tensor([1, 3]), (3,), "numbered from 1: subtract 1"),
    "two ones in a row": ("classification", torch.tensor([[1, 1, 0], [0, 1, 0]]), (3,), "a single 1"),
    "a label of -1": ("multilabel", torch.tensor([[0.0, 1.0], [1.0, -1.0]]), (2,), "got -1 in column 2 of row 2"),
    "a label between": ("multilabel", torch.tensor([[0.5, 1.0]]), (2,), "0 or 1 (-100 or NaN where unknown), got 0.5"),
    "an infinite number": ("regression", torch.tensor([1.0, torch.inf]), (1,), "finite numbers, got inf in row 2"),
    "a negative time": ("survival", PAIR, (1,), "at least 0 (-100 where unknown), got -3 in the time of row 2"),
    "an event of 2": ("survival", (PAIR[0].abs(), PAIR[1] + 1), (1,), "got 2 in the event of row 1"),
    "a token of no output": ("token_classification", torch.tensor([[0, 5]]), (2, 4), "got 5 in column 2 of row 1"),
    "a token beyond the vocabulary": ("language_modelling", torch.tensor([[0, 9]]), (2, 9), "from 0 to 8"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_targets_outside_of_a_domain_are_named(case: str) -> None:
    name, targets, outputs, message = REFUSED[case]
    with pytest.raises(SettingError) as caught:
        OBJECTIVES[name].check_targets(targets, outputs, "client 'north'")
    assert str(caught.value).startswith("client 'north': targets must be ")
    assert message in str(caught.value)


@pytest.mark.parametrize("name", CASES)
def test_targets_within_a_domain_pass(name: str) -> None:
    outputs, targets = CASES[name]
    for held in (targets, torch.where(torch.zeros_like(targets).bool(), targets, -100)):
        OBJECTIVES[name].check_targets(held, tuple(outputs.shape[1:]), "client 'north'")


# -------------------------------------------------------------------------------------------- runs, on every engine

ENGINES: list[dict[str, Any]] = [{"engine": name} for name in ("sequential", "vmapped", "batched", "reference")]


def trained(engine: dict[str, Any], recipe: Any, extra: int, **options: Any) -> Any:
    """A run of two clients, the first of which has `extra` rows without a target besides."""
    x = np.concatenate([X[:12], X[12 : 12 + extra]])
    y = np.concatenate([CLASSES[:12], np.full(extra, -100)])
    pairs = {"north": {"train": (x, y), "test": (x, y)}, "south": {"train": (X[12:], CLASSES[12:])}}
    model = seeded(lambda: nn.Linear(5, 3))
    return simulate(recipe, piebald.clients_from(pairs), model, rounds=1, simulator={**engine, "stack": 2}, **options)


@pytest.mark.parametrize("engine", ENGINES, ids=lambda engine: engine["engine"])
@pytest.mark.parametrize("kind", ["plain", "accumulated", "dp_sgd"])
def test_a_row_without_a_target_is_in_no_mean(engine: dict[str, Any], kind: str) -> None:
    """One step of all rows: training loss and scores are those of the rows that have a target."""
    recipe = {
        "plain": recipes.fedavg(lr=0.5, batch=24),
        "accumulated": recipes.fedavg(lr=0.5, batch=5, accumulate=5),
        "dp_sgd": recipes.dp_sgd(noise=1e-9, lr=0.5, batch=24, clip=1e6),
    }[kind]
    without, with_unknown = (trained(engine, recipe, extra) for extra in (0, 5))
    first = [[row["loss"] for row in run.results if row["client"] == 0] for run in (without, with_unknown)]
    if kind != "dp_sgd":  # whose batches are drawn by chance
        assert first[0] == pytest.approx(first[1], rel=1e-5)
    start = [
        [row for row in run.scores if row["client"] == 0 and row["version"] == 0] for run in (without, with_unknown)
    ]
    assert [row["value"] for row in start[0]] == pytest.approx([row["value"] for row in start[1]], rel=1e-5)
    assert {row["examples"] for row in start[1]} == {12}


def test_batches_with_unknown_rows_are_the_same_on_every_engine() -> None:
    recipe = recipes.fedavg(lr=0.5, batch=4, epochs=2)
    starts = [trained(engine, recipe, 7).start() for engine in ENGINES]
    for start in starts[1:]:
        torch.testing.assert_close(start, starts[0], rtol=1e-4, atol=1e-5)


def test_a_client_without_any_target_moves_nothing_and_has_no_score() -> None:
    pairs = {"north": (X, CLASSES), "south": (X, np.full(24, -100))}
    model = seeded(lambda: nn.Linear(5, 3))
    alone = simulate("fedavg", {"north": (X, CLASSES)}, model, rounds=1)
    both = simulate(recipes.fedavg().with_(aggregation="equal_weighted"), pairs, model, rounds=1)
    torch.testing.assert_close(both.start(), alone.start(), rtol=0, atol=1e-6)
    assert both.unscored == ["south"]
    assert list(both.per_client) == [0]


def test_a_metric_by_name_knows_unknown_targets_beside_a_loss_of_ones_own() -> None:
    def own(outputs: Tensor, targets: Tensor) -> Tensor:
        return nn.functional.cross_entropy(outputs, targets, ignore_index=-100, reduction="none")

    y = np.where(np.arange(24) < 12, CLASSES, -100)
    model = seeded(lambda: nn.Linear(5, 3))
    runs = [
        simulate("fedavg", {"a": {"train": (X, CLASSES), "test": test}}, model, rounds=1, loss=own, evaluate_every=1)
        for test in ((X, y), (X[:12], CLASSES[:12]))
    ]
    assert runs[0].accuracy == runs[1].accuracy


ONE_HOT = np.eye(3, dtype=np.int64)[CLASSES]


@pytest.mark.parametrize("kind", [np.int64, np.float64, np.uint8])
def test_one_hot_rows_are_taken_as_classes_and_said(kind: Any, caplog: pytest.LogCaptureFixture) -> None:
    model = seeded(lambda: nn.Linear(5, 3))
    plain = simulate("fedavg", {"a": (X, CLASSES), "b": (X[:9], CLASSES[:9])}, model, rounds=1)
    one_hot = ONE_HOT.astype(kind)
    with caplog.at_level(logging.WARNING):
        coded = simulate("fedavg", {"a": (X, one_hot), "b": (X[:9], one_hot[:9])}, model, rounds=1)
    assert coded.work.objective is OBJECTIVES["classification"]
    assert coded.metric == "accuracy"
    assert "one-hot rows of 3 numbers: they are taken as classes" in caplog.text
    assert coded.accuracy is not None
    assert coded.accuracy is not None
    torch.testing.assert_close(
        coded.start() - coded.work.initial, plain.start() - plain.work.initial, atol=0.05, rtol=0
    )


def test_labels_that_happen_to_be_one_hot_stay_labels_where_the_loss_says_so() -> None:
    assert objective_for(torch.from_numpy(ONE_HOT).float(), "multilabel") is OBJECTIVES["multilabel"]


@pytest.mark.parametrize(
    ("y", "loss", "outputs", "message"),
    [
        (CLASSES + 1, None, 3, "client 'south', train rows: targets must be class numbers from 0 to 2"),
        (np.where(ONE_HOT > 0, 1.0, -1.0), "multilabel", 3, "client 'south', train rows: targets must be 0 or 1"),
        (ONE_HOT * 2, "classification", 3, "client 'south', train rows: targets must be one-hot rows with a single 1"),
    ],
)
def test_the_client_whose_targets_do_not_fit_is_named_before_training(
    y: Any, loss: str | None, outputs: int, message: str, tmp_path: Any
) -> None:
    fits = CLASSES if y.ndim == 1 else ONE_HOT.astype(y.dtype)
    parts = {name: {"train": (X, held), "test": (X, fits)} for name, held in (("north", fits), ("south", y))}
    with pytest.raises(SettingError, match="south") as caught:
        simulate("fedavg", parts, nn.Linear(5, outputs), loss=loss, out=tmp_path / "run")
    assert str(caught.value).startswith(message)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("y", "outputs", "message"),
    [
        (CLASSES, 5, "the model has 5 outputs, and targets have 3 classes (0 to 2)"),
        (CLASSES + 1, 4, "no row has class 0 of the model's 4 outputs: if classes are numbered from 1, subtract 1"),
        (np.where(CLASSES > 1, -100.0, 0.5), 1, "targets of -100 or NaN count as unknown"),
    ],
)
def test_odd_targets_are_said(y: Any, outputs: int, message: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        simulate("fedavg", {"a": (X, y), "b": (X, y)}, nn.Linear(5, outputs), rounds=1)
    assert message in caplog.text


@pytest.mark.full
def test_an_accuracy_is_an_accuracy_or_nothing() -> None:
    numbers = simulate("fedavg", {"a": (X, X[:, 0]), "b": (X, X[:, 1])}, nn.Linear(5, 1), rounds=1)
    assert numbers.score.name == "absolute_error"
    assert numbers.score.value == numbers.final["mean"]
    with pytest.raises(SettingError, match="this run measures absolute_error, which is no accuracy"):
        _ = numbers.accuracy
    classes = {"a": (X, CLASSES), "b": (X, CLASSES)}
    ranked = simulate("fedavg", classes, nn.Linear(5, 3), rounds=1, metrics=["auc", "accuracy"])
    plain = simulate("fedavg", classes, nn.Linear(5, 3), rounds=1)
    assert ranked.score.name == "auc"
    assert 0 <= ranked.accuracy <= 1
    assert plain.score == ("accuracy", plain.accuracy)
    by_auc = simulate("fedavg", classes, nn.Linear(5, 3), rounds=1, metrics=["auc"])
    with pytest.raises(SettingError, match="measures auc"):
        _ = by_auc.accuracy


def test_a_site_tells_what_is_allowed_and_keeps_the_row_to_itself() -> None:
    """The server reads the message; the cause is for the site's own terminal."""
    rows = Rows(torch.from_numpy(X), torch.from_numpy(CLASSES + 1))
    site = SiteRows(["north"], 0, {"train": rows, "validation": rows[:0], "test": rows[:0]}, None)
    settings = SimpleNamespace(data=SimpleNamespace(target="grade"))
    terms = SimpleNamespace(outputs=[3])
    with pytest.raises(SettingError) as caught:
        _check_targets(site, 0, OBJECTIVES["classification"], cast(Any, terms), cast(Any, settings), hides=False)
    allowed = "class numbers from 0 to 2 (-100 where unknown)"
    assert str(caught.value) == f"its column 'grade' must be {allowed}, in train rows"
    assert f"train rows, column 'grade': targets must be {allowed}, got 3 in row " in str(caught.value.__cause__)


def test_a_column_of_a_file_is_named(tmp_path: Path) -> None:
    table = "site,a,grade\n" + "".join(f"{'north' if n % 2 else 'south'},{n / 9},{1 + n % 3}\n" for n in range(24))
    (tmp_path / "rows.csv").write_text(table)
    (tmp_path / "run.toml").write_text(
        'rounds = 1\nmodel = { name = "logistic" }\nrecipe = { name = "fedavg" }\nloss = "multilabel"\n'
        '[data]\nsource = "rows.csv"\nclient = "site"\ntarget = "grade"\nregression = true\n'
    )
    settings = ExperimentSettings.load(tmp_path / "run.toml")
    plan = settings.plan()
    options = RunSettings.of_keywords({"rounds": 1, "loss": "multilabel"}, settings.table())
    with pytest.raises(SettingError, match="client 'north', train rows, column 'grade': targets must be 0 or 1"):
        prepare(plan.recipes["fedavg"], plan.clients, plan.model, options)
