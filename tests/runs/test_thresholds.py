"""Thresholds of two classes: the best on validation rows, kept in the run folder, for predictions and for scores."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.metrics import accuracy_score, balanced_accuracy_score, f1_score, recall_score
from sklearn.model_selection import TunedThresholdClassifierCV

import piebald
from piebald import models
from piebald.cli import main
from piebald.core.errors import SettingError
from piebald.core.metrics import best_threshold
from piebald.report.findings import notes
from piebald.report.page.report_page import render
from piebald.runs.run import opened

SCORES: dict[str, Any] = {
    "accuracy": accuracy_score,
    "balanced_accuracy": balanced_accuracy_score,
    "f1": lambda y, p: f1_score(y, p, average="macro"),
    "sensitivity": recall_score,
    "specificity": lambda y, p: recall_score(y, p, pos_label=0),
}


class Stated(ClassifierMixin, BaseEstimator):
    """A classifier whose probability of the second class is its input."""

    classes_ = np.array([0, 1])

    def fit(self, x: Any, y: Any) -> Stated:
        return self

    def predict_proba(self, x: Any) -> Any:
        return np.column_stack([1 - x[:, 0], x[:, 0]])


def drawn(seed: int, rows: int = 80) -> tuple[Any, Any]:
    rng = np.random.default_rng(seed)
    positive = rng.random(rows) < 0.25
    return (positive * 1.5 - 2 + rng.normal(size=rows)).round(1), positive


def reached(criterion: str, leads: Any, positive: Any) -> float:
    chosen = best_threshold(leads, positive, criterion)
    assert chosen is not None
    return float(SCORES[criterion](positive, leads > np.log(chosen / (1 - chosen))))


@pytest.mark.parametrize(
    ("criterion", "scoring"), [("accuracy", "accuracy"), ("balanced_accuracy", "balanced_accuracy"), ("f1", "f1_macro")]
)
def test_it_is_the_one_that_scikit_learn_finds(criterion: str, scoring: str) -> None:
    for seed in range(3):
        leads, positive = drawn(seed)
        shares = 1 / (1 + np.exp(-leads))
        cuts = np.unique(shares) + 1e-6
        tuned = TunedThresholdClassifierCV(Stated(), scoring=scoring, cv="prefit", refit=False, thresholds=cuts)
        tuned.fit(shares[:, None], positive.astype(int))
        assert reached(criterion, leads, positive) == pytest.approx(tuned.best_score_)


@pytest.mark.parametrize(("held", "other"), [("sensitivity", "specificity"), ("specificity", "sensitivity")])
def test_a_least_share_of_one_class_leaves_as_much_of_the_other_as_can_be(held: str, other: str) -> None:
    leads, positive = drawn(5)
    chosen = best_threshold(leads, positive, f"{held} = 0.9")
    assert chosen is not None
    at = leads > np.log(chosen / (1 - chosen))
    assert SCORES[held](positive, at) >= 0.9
    fits = [leads > cut for cut in np.append(leads, -9.0) if SCORES[held](positive, leads > cut) >= 0.9]
    assert SCORES[other](positive, at) == max(SCORES[other](positive, taken) for taken in fits)


def test_of_equal_thresholds_the_one_nearest_to_a_half_is_taken() -> None:
    assert best_threshold(np.array([-3.0, -1.0, 1.0, 5.0]), np.array([False, False, True, True]), "f1") == 0.5
    assert best_threshold(np.array([1.0, 2.0]), np.array([True, True]), "f1") is None


def clients(classes: int = 2) -> Any:
    """A rare class, at clients whose inputs are shifted, so that each needs another threshold."""
    rng = np.random.default_rng(0)
    frame = pd.DataFrame({"site": np.repeat(["a", "b", "c"], 200), "dose": rng.normal(size=600)})
    score = frame.dose + rng.normal(0, 0.7, 600)
    frame["dose"] += frame.site.map({"a": -0.4, "b": 0.0, "c": 0.4})
    bounds, names = ([-9, 1.2, 1.6, 9] if classes == 3 else [-9, 1.2, 9]), ["no", "yes", "so"][:classes]
    frame["ill"] = pd.cut(score, bounds, labels=names).astype(str)
    return piebald.clients_from(
        frame, client="site", target="ill", features=["dose"], validation=0.3, test=0.3, seed=1
    )  # fmt: skip


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with piebald.run(
        piebald.recipes.fedavg(lr=0.2, epochs=5), clients(), models.build_model("logistic", (1,), 2), rounds=4,
        out=tmp_path_factory.mktemp("thresholds") / "run",
    ) as run:  # fmt: skip
        yield run


def test_each_client_is_scored_at_the_threshold_of_its_validation_rows(trained: Any) -> None:
    table = trained.at_thresholds("balanced_accuracy")
    assert list(table.index) == ["a", "b", "c"]
    assert table["threshold"].nunique() == 3
    held = clients()
    for number, name in enumerate("abc"):
        rows = held.rows(number, "test")
        said = trained.predict(rows.x, name, threshold="balanced_accuracy")
        assert list(said.columns) == ["no", "yes", "class"]
        assert ((said["yes"] > table["threshold"][name]) == (said["class"] == "yes")).all()
        for metric, score in SCORES.items():
            assert table[metric][name] == pytest.approx(score(rows.y.numpy(), said["class"] == "yes"))
            assert table[f"{metric} at 0.5"][name] == pytest.approx(score(rows.y.numpy(), said["yes"] > 0.5))
    assert table["balanced_accuracy"].mean() > table["balanced_accuracy at 0.5"].mean() + 0.05
    assert trained.at_thresholds("balanced_accuracy", pooled=True)["threshold"].nunique() == 1


def test_a_threshold_is_kept_in_the_run_folder(trained: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    first = trained.threshold("f1"), trained.threshold("f1", "b"), trained.threshold("f1", "b", pooled=True)
    assert first[0] == pytest.approx(first[2], abs=0.01)  # FedAvg's clients have the global model
    assert first[0] != first[1]
    assert 100 * first[2] == pytest.approx(round(100 * first[2]))
    monkeypatch.setattr(type(trained), "outputs", lambda *_, **__: 1 / 0)
    again = trained.threshold("f1"), trained.threshold("f1", "b"), trained.threshold("f1", "b", pooled=True)
    assert again == first


def test_what_has_no_threshold_is_told_in_one_sentence(trained: Any) -> None:
    with pytest.raises(SettingError, match="threshold must be one of accuracy, balanced_accuracy, f1"):
        trained.predict(clients().rows(0, "test").x, threshold="auc")
    with pytest.raises(SettingError, match=r"a least share such as sensitivity=0.9 .* got 'sensitivity=2'"):
        trained.threshold("sensitivity=2")
    model = models.build_model("logistic", (1,), 3)
    run = piebald.run("fedavg", clients(3), model, rounds=1)
    with pytest.raises(SettingError, match="a threshold is for two classes"):
        run.threshold("f1")


@pytest.mark.full
def test_an_experiment_asks_for_thresholds_and_the_comparison_says_what_they_change(tmp_path: Path) -> None:
    """Two runs of an experiment's settings say the same as `at_thresholds`, beside other results and on the page."""
    made = piebald.compare(
        [piebald.recipes.local(lr=0.2), piebald.recipes.fedavg(lr=0.2, epochs=5)], clients(),
        models.build_model("logistic", (1,), 2), rounds=4, threshold="sensitivity = 0.8", out=tmp_path / "both",
    )  # fmt: skip
    fedavg = next(run for run in made.runs if run.label == "fedavg")
    with opened(fedavg.path, clients(), models.build_model("logistic", (1,), 2)) as run:
        assert run.meta["threshold"] == "sensitivity = 0.8"
        table = run.at_thresholds("sensitivity=0.8")
    assert pd.DataFrame(fedavg.threshold_scores).T.to_numpy() == pytest.approx(table.iloc[:, 2:].to_numpy(), abs=1e-6)
    means = {name: f"{100 * table[name].mean():.1f}%" for name in table}
    said = (
        f"fedavg has {means['sensitivity']} sensitivity ({means['sensitivity at 0.5']} at a half) and "
        f"{means['specificity']} specificity ({means['specificity at 0.5']} at a half)."
    )
    (sentence,) = [note for note in notes(made) if note.startswith("At the threshold for sensitivity = 0.8")]
    assert sentence.endswith(said)
    assert said in render(made)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"threshold": "f2"}, "^threshold must be one of accuracy"),
        ({"evaluate_every": 0}, "^threshold needs evaluations"),
        ({"evaluate_split": "validation"}, "^threshold is chosen on validation rows"),
        ({"keep": "best_for_each"}, "^threshold does not fit keep = 'best_for_each'"),
    ],
)
def test_a_run_that_can_have_no_thresholds_is_refused_before_training(options: dict[str, Any], says: str) -> None:
    model = models.build_model("logistic", (1,), 2)
    with pytest.raises(SettingError, match=says):
        piebald.run("fedavg", clients(), model, rounds=1, **{"threshold": "f1"} | options)
    with pytest.raises(SettingError, match="threshold needs two classes"):
        piebald.run("fedavg", clients(3), models.build_model("logistic", (1,), 3), rounds=1, threshold="f1")


def test_where_scores_are_no_numbers_there_is_no_threshold() -> None:
    assert best_threshold(np.array([np.nan, 1.0]), np.array([False, True]), "f1") is None


def test_predictions_name_the_class_by_the_threshold_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Thresholds are kept when the run ends, for its rows may be gone when somebody predicts."""
    made = piebald.run(
        piebald.recipes.fedavg(lr=0.2, epochs=5), clients(), models.build_model("logistic", (1,), 2), rounds=4,
        threshold="f1", out=tmp_path / "run",
    )  # fmt: skip
    x = clients().rows(0, "test").x
    expected = made.predict(x, "b", threshold="f1")
    monkeypatch.setattr(type(made), "outputs", lambda *_, **__: 1 / 0)
    pd.testing.assert_frame_equal(made.predict(x, "b"), expected)
    assert "class" in made.predict(x)
    assert list(made.predict(x, cluster=0).columns) == ["no", "yes"]


@pytest.mark.full
def test_the_command_says_how_it_names_the_class(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """At b nobody of the validation rows is ill, so predictions there have no class."""
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    frame = pd.DataFrame({"site": np.repeat(["a", "b"], 60), "dose": rng.normal(size=120)})
    frame["ill"] = np.where(frame.dose + rng.normal(size=120) > 0.7, "yes", "no")
    frame.loc[(frame.site == "b") & (np.arange(120) % 20 > 0), "ill"] = "no"
    frame.to_csv("rows.csv", index=False)
    Path("file.toml").write_text(
        'rounds = 2\ndata = { source = "rows.csv", client = "site", target = "ill" }\nmodel = { name = "logistic" }\n'
        'recipe = { name = "fedavg" }\nevaluate = { threshold = "f1" }\nsplit = { validation = 0.1, test = 0.3 }\n'
    )
    assert main(["run", "file.toml", "--out", "run", "--quiet"]) == 0
    Path("rows.csv").rename("new.csv")
    for words, shown in ((["--client", "a"], "a"), ([], "all clients")):
        capsys.readouterr()
        assert main(["predict", "run", "new.csv", *words]) == 0
        said = capsys.readouterr()
        assert said.out.startswith("no,yes,class\n")
        assert re.fullmatch(
            rf"class: yes above a probability of 0\.\d+, the best for f1 on the validation rows of {shown}\n", said.err
        )
    assert main(["predict", "run", "new.csv", "--client", "b"]) == 0
    said = capsys.readouterr()
    assert said.out.startswith("no,yes\n")
    assert said.err == "no class is named: the run has no threshold by validation rows of both classes of b here\n"
    assert main(["predict", "run", "new.csv", "--client", "b", "--quiet"]) == 0
    assert capsys.readouterr().err == ""
    assert main(["predict", "run", "new.csv", "--client", "a", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["naming"].startswith("class: yes above")
