"""`piebald predict`: a file of predictions, printed ones, runs and trees, and what is refused."""

from __future__ import annotations

import io
import json
import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

FILE = """\
rounds = 2

[data]
source = "rows.csv"
client = "site"
target = "ill"
features = ["age", "dose"]

[partition]
kind = "by_owner"
owner = "site"
validation = 0.2

[model]
name = "logistic"

[recipe]
name = "{recipe}"
"""


def table() -> pd.DataFrame:
    rng = np.random.default_rng(0)
    frame = pd.DataFrame({"site": list("abc") * 20, "age": rng.normal(0, 1, 60), "dose": rng.normal(0, 1, 60)})
    return frame.assign(ill=np.where(frame.age + frame.dose > 0, "yes", "no"), ward=list("xy") * 30)


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where finished runs are copied from, once a test has made them."""
    return tmp_path_factory.mktemp("predict")


@pytest.fixture
def finished(command, tmp_path: Path, kept: Path) -> str:
    table().to_csv(kept / "rows.csv", index=False)
    shutil.copy(kept / "rows.csv", tmp_path)
    if not (kept / "run").exists():
        (kept / "file.toml").write_text(FILE.format(recipe="ditto"))
        assert command("run", kept / "file.toml", "--out", kept / "run", "-q").code == 0
    table().head(9).drop(columns=["site", "ill"])[["dose", "ward", "age"]].to_csv(tmp_path / "new.csv", index=False)
    return str(kept / "run")


def test_finished_runs_are_joined_into_an_ensemble_by_their_shares(command, finished, kept, tmp_path: Path) -> None:
    (kept / "fedavg.toml").write_text(FILE.format(recipe="fedavg"))
    assert command("run", kept / "fedavg.toml", "--out", kept / "fedavg", "-q").code == 0
    runs = [finished, str(kept / "fedavg")]
    assert command("ensemble", *runs, "--shares", "3,1", "--out", "joined", "-q").code == 0

    def answers(folder: str, *words: str) -> pd.DataFrame:
        return pd.read_csv(io.StringIO(command("predict", folder, "new.csv", *words).out))

    ditto, fedavg = (answers(run, "--client", "b") for run in runs)
    assert not np.allclose(ditto, fedavg, atol=0.01)
    np.testing.assert_allclose(answers("joined", "--client", "b"), 0.75 * ditto + 0.25 * fedavg, atol=1e-6)
    everybody = 0.75 * answers(runs[0]) + 0.25 * answers(runs[1])
    np.testing.assert_allclose(answers("joined"), everybody, atol=1e-6)
    refused = {
        "joined is there already": (*runs, "--out", "joined"),
        "two runs or more": (runs[0], "--out", "x"),
        "numbers with commas": (*runs, "--shares", "a,b", "--out", "x"),
        "no ensemble": (*runs, "--like", runs[0], "--out", "x"),
    }
    for said, words in refused.items():
        told = command("ensemble", *words)
        assert (told.code, said in told.err) == (2, True), told.err
    (kept / "other.toml").write_text(FILE.format(recipe="fedavg").replace('"age", ', ""))
    assert command("run", kept / "other.toml", "--out", kept / "other", "-q").code == 0
    told = command("ensemble", runs[0], kept / "other", "--out", "x")
    assert "has other features" in told.err
    assert not (tmp_path / "x").exists()


def test_a_file_of_probabilities_by_the_names_of_classes(command, finished, tmp_path: Path) -> None:
    told = command("predict", finished, "new.csv", "--client", "b", "--out", "some/predictions.csv")
    assert (told.code, told.err) == (0, "")
    assert told.out == "9 rows predicted with the model of b: some/predictions.csv\n"
    answers = pd.read_csv(tmp_path / "some/predictions.csv")
    assert list(answers.columns) == ["no", "yes"]
    np.testing.assert_allclose(answers.sum(axis=1), 1)
    printed = command("predict", finished, "new.csv", "--client", "b")
    pd.testing.assert_frame_equal(pd.read_csv(io.StringIO(printed.out)), answers)
    as_json = json.loads(command("predict", finished, "new.csv", "--client", "b", "--json").out)
    assert as_json == {"rows": 9, "model": "the model of b", "out": None, "predictions": answers.to_dict("list")}
    others = [command("predict", finished, "new.csv", *words).out for words in ((), ("--client", "a"))]
    assert printed.out not in others
    assert others[0] != others[1]
    calibrated = pd.read_csv(io.StringIO(command("predict", finished, "new.csv", "--client", "b", "--calibrate").out))
    assert not np.allclose(calibrated, answers)
    odds = np.log(calibrated.yes / calibrated.no) / np.log(answers.yes / answers.no)
    np.testing.assert_allclose(odds, odds[0])  # one temperature for all rows


def test_answers_of_several_runs_are_averaged_and_have_no_threshold_in_common(
    command, finished, tmp_path: Path
) -> None:
    other = FILE.format(recipe="local").replace("seed = 0", "seed = 1")
    (tmp_path / "other.toml").write_text(other)
    assert command("run", "other.toml", "--out", "both/local", "-q").code == 0
    shutil.copytree(finished, tmp_path / "both" / "ditto")
    each = [
        pd.read_csv(io.StringIO(command("predict", f"both/{name}", "new.csv", "--client", "b").out))
        for name in ("ditto", "local")
    ]
    told = command("predict", "both", "new.csv", "--client", "b", "--out", "mean.csv")
    assert told.out == "9 rows predicted with the model of b in 2 runs, their mean: mean.csv\n"
    assert not np.allclose(each[0], each[1])
    np.testing.assert_allclose(pd.read_csv(tmp_path / "mean.csv"), (each[0] + each[1]) / 2, rtol=1e-6)
    for words, sentence in [
        (["both", "--threshold", "f1"], "--threshold is chosen for one run, and both has 2: name one of them"),
        (["both/ditto", "--pooled"], "--pooled says on which rows a threshold is chosen: give --threshold as well"),
    ]:
        refused = command("predict", words[0], "new.csv", *words[1:])
        assert (refused.code, sentence in refused.err) == (2, True)


def test_gaps_that_training_rows_have_not_are_told_once(command, finished, tmp_path: Path, caplog) -> None:
    rows = pd.read_csv(tmp_path / "new.csv")
    rows.loc[[2, 5, 7], "dose"] = None
    rows.to_csv(tmp_path / "gaps.csv", index=False)
    told = command("predict", finished, "gaps.csv")
    assert told.code == 0
    assert caplog.messages == [
        "column 'dose' has no value in row 4 and in 2 more rows, where training rows have one: the median stands for it"
    ]
    rows.assign(dose=rows.dose.fillna(table().dose.median())).to_csv(tmp_path / "filled.csv", index=False)
    # the median is agreed on by counts at thresholds
    answers = [pd.read_csv(io.StringIO(said)) for said in (told.out, command("predict", finished, "filled.csv").out)]
    np.testing.assert_allclose(*answers, atol=0.05)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["new.csv", "--client", "south"], "the run has models of a, b and c and a global one: leave client out"),
        (["none.csv"], "there is no file none.csv"),
        (["new.csv", "--out", "new.csv"], "--out would overwrite the rows new.csv"),
        (["new.csv", "--out", "new.xlsx"], "--out must be a .csv file, got new.xlsx"),
        (["bare.csv"], "bare.csv has no column 'dose', which the preparation reads: add it"),
        (["new.csv", "--cluster", "4"], "cluster must be one of [0], got 4"),
    ],
)
def test_what_does_not_fit_is_one_sentence(command, finished, tmp_path: Path, words: list[str], sentence: str) -> None:
    (tmp_path / "bare.csv").write_text("age\n3\n")
    told = command("predict", finished, *words)
    assert told.code == 2
    assert sentence in told.err
    assert told.out == ""
    assert len(told.err.splitlines()) == 1


@pytest.mark.full
def test_the_runs_of_a_folder_are_averaged(command, finished, kept: Path, tmp_path: Path) -> None:
    """Of probabilities that is the mean; a search, whose runs are many kinds, is refused."""
    other = (kept / "file.toml").read_text().replace("rounds = 2", "rounds = 1")
    (tmp_path / "other.toml").write_text(other)
    assert command("run", "other.toml", "--out", tmp_path / "both" / "second", "-q").code == 0
    shutil.copytree(finished, tmp_path / "both" / "first")
    single = [
        pd.read_csv(io.StringIO(command("predict", tmp_path / "both" / name, "new.csv", "--client", "b").out))
        for name in ("first", "second")
    ]
    told = command("predict", "both", "new.csv", "--client", "b", "--out", "mean.csv")
    assert told.out == "9 rows predicted with the model of b in 2 runs, their mean: mean.csv\n"
    assert not np.allclose(*single)
    np.testing.assert_allclose(pd.read_csv(tmp_path / "mean.csv"), (single[0] + single[1]) / 2)
    (tmp_path / "both" / "search.json").write_text("{}")
    assert "both holds a search with runs of many kinds" in command("predict", "both", "new.csv").err


def test_what_was_said_of_the_rows_of_a_run_is_not_said_when_it_predicts(
    command, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pd.concat([table(), table()]).to_csv(tmp_path / "rows.csv", index=False)
    (tmp_path / "file.toml").write_text(FILE.format(recipe="fedavg"))
    assert command("run", "file.toml", "--out", "run", "-q").code == 0
    assert "are equal to a row for training" in caplog.text
    caplog.clear()
    assert command("predict", "run", "rows.csv", "--client", "b").code == 0
    assert (
        "there is no client 'zed': choose one of: a, b, c; the"
        in command("predict", "run", "rows.csv", "--client", "zed").err
    )
    assert caplog.text == ""


@pytest.mark.full
@pytest.mark.parametrize("recipe", ["fedavg", "ditto"])
def test_a_run_predicts_where_its_source_is_gone(command, tmp_path: Path, recipe: str) -> None:
    """What needs rows says so, and a temperature that was fitted before is kept."""
    frame = table().assign(target=lambda rows: rows.age * 3 + 10)
    frame.loc[::9, "ward"] = None
    frame.to_csv(tmp_path / "rows.csv", index=False)
    file = FILE.format(recipe=recipe).replace('features = ["age", "dose"]\n', 'features = ["age", "dose", "ward"]\n')
    (tmp_path / "file.toml").write_text(file)
    assert command("run", "file.toml", "--out", "run", "-q").code == 0
    frame[["dose", "ward", "age"]].to_csv(tmp_path / "new.csv", index=False)
    asked = [("--client", "b"), (), ("--client", "b", "--calibrate")]
    before = [command("predict", "run", "new.csv", *words).out for words in asked]
    assert before[0] != before[2]
    (tmp_path / "rows.csv").unlink()
    assert [command("predict", "run", "new.csv", *words).out for words in asked] == before
    told = command("predict", "run", "new.csv", "--client", "a", "--calibrate")
    assert (told.code, told.out) == (2, "")
    assert "this needs the validation rows of client 'a', which the run does not keep: there is no file" in told.err
    assert len(told.err.splitlines()) == 1


@pytest.mark.full
def test_training_rows_are_not_read_again(command, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Before, predictions and exports repeated what had been said of the training file, and large ones took long."""
    frame = table().assign(dose=[f"{row / 2}%" for row in range(60)])
    frame.to_csv(tmp_path / "rows.csv", index=False)
    frame.drop(columns=["site", "ill"]).to_csv(tmp_path / "new.csv", index=False)
    (tmp_path / "file.toml").write_text(FILE.format(recipe="fedavg"))
    assert command("run", "file.toml", "--out", "run", "-q").code == 0
    assert "rows.csv: column 'dose'" in caplog.text
    caplog.clear()
    assert command("predict", "run", "new.csv", "--out", "here.csv").code == 0
    assert "new.csv: column 'dose'" in caplog.text
    assert command("export", "run", "--out", "there").code == 0
    assert "rows.csv" not in caplog.text
    (tmp_path / "rows.csv").unlink()
    assert command("export", "run", "--out", "gone").code == 0
    assert (tmp_path / "gone" / "model.onnx").read_bytes() == (tmp_path / "there" / "model.onnx").read_bytes()


@pytest.mark.full
def test_numbers_are_predicted_in_their_unit_where_the_source_is_gone(command, tmp_path: Path) -> None:
    frame = table().assign(cost=lambda rows: rows.age * 3 + 1000).drop(columns="ill")
    frame.to_csv(tmp_path / "rows.csv", index=False)
    (tmp_path / "file.toml").write_text(FILE.format(recipe="fedavg").replace('"ill"', '"cost"'))
    assert command("run", "file.toml", "--out", "run", "-q", "--set", "rounds=20").code == 0
    before = command("predict", "run", "rows.csv").out
    (tmp_path / "rows.csv").rename(tmp_path / "moved.csv")
    assert command("predict", "run", "moved.csv").out == before
    assert pd.read_csv(io.StringIO(before)).cost.mean() == pytest.approx(frame.cost.mean(), abs=1)


def test_trees_predict_too(command, tmp_path: Path) -> None:
    pytest.importorskip("xgboost", reason="needs the extra: pip install '.[trees]'")
    frame = table()
    frame.loc[::7, "dose"] = np.nan
    frame.to_csv(tmp_path / "rows.csv", index=False)
    flags = ["--client", "site", "--target", "ill", "--set", "trees.rounds=2", "--set", "trees.max_depth=2"]
    assert command("trees", "rows.csv", *flags, "--out", "trees", "-q").code == 0
    frame[["ward", "dose", "age"]].to_csv(tmp_path / "new.csv", index=False)
    answers = pd.read_csv(io.StringIO(command("predict", "trees", "new.csv", "--client", "a").out))
    assert list(answers.columns) == ["no", "yes"]
    import xgboost

    booster = xgboost.Booster(model_file=str(tmp_path / "trees/trees.json"))
    inputs = frame[["age", "dose"]].assign(x=(frame.ward == "x") * 1.0, y=(frame.ward == "y") * 1.0)
    inputs.columns = booster.feature_names
    np.testing.assert_allclose(answers.yes, booster.predict(xgboost.DMatrix(inputs)), rtol=1e-5)

    frame.assign(ward=np.nan).to_csv(tmp_path / "gaps.csv", index=False)  # a column without a value has no type
    assert command("predict", "trees", "gaps.csv").code == 0
    frame.assign(age="old").to_csv(tmp_path / "age.csv", index=False)
    assert "column 'age' must have a number in each row, got 'old'" in command("predict", "trees", "age.csv").err
    frame.drop(columns="ward").to_csv(tmp_path / "less.csv", index=False)
    for words, sentence in [
        (["less.csv"], "less.csv has no column 'ward', which the preparation reads: add it"),
        (["new.csv", "--client", "z"], "there is no client 'z': choose one of: a, b, c"),
        (["new.csv", "--calibrate"], "--cluster, --calibrate and --threshold are for runs of a recipe"),
    ]:
        told = command("predict", "trees", *words)
        assert told.code == 2
        assert sentence in told.err
    (tmp_path / "trees/result.json").unlink()
    assert "has no finished trees" in command("predict", "trees", "new.csv").err


@pytest.mark.full
def test_trees_of_numbers_predict_in_the_unit_of_the_target(command, tmp_path: Path) -> None:
    pytest.importorskip("xgboost", reason="needs the extra: pip install '.[trees]'")
    frame = table().assign(cost=lambda frame: 5000 + 1000 * frame.age)
    frame.to_csv(tmp_path / "rows.csv", index=False)
    flags = ["--client", "site", "--target", "cost", "--column", "age", "--set", "trees.rounds=30"]
    assert command("trees", "rows.csv", *flags, "--set", "trees.learning_rate=0.5", "--out", "trees", "-q").code == 0
    assert command("predict", "trees", "rows.csv", "--out", "p.csv").out == "60 rows predicted with the trees: p.csv\n"
    answers = pd.read_csv(tmp_path / "p.csv")
    assert list(answers.columns) == ["cost"]
    assert np.abs(answers.cost - frame.cost).mean() < 200
