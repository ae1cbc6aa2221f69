"""An exported folder scores raw rows by itself: the same numbers as the run, without Piebald."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from torch import nn

import piebald
from piebald.core.errors import SettingError
from piebald.data.preparation import Preparation
from piebald.data.preparation.agreement import fitted
from piebald.report.export import score
from piebald.runs.finished_run import Run

HERE = piebald.Simulator(engine="sequential")
# every import of the package fails in the program that is run
ALONE = """
import runpy, sys
sys.modules["piebald"] = None
sys.argv = {words!r}
runpy.run_path({file!r}, None, "__main__")
"""


def table(rows: int = 60) -> pd.DataFrame:
    rng = np.random.default_rng(0)
    frame = pd.DataFrame(
        {"site": list("ab") * (rows // 2), "age": rng.normal(size=rows), "dose": rng.normal(size=rows)}
    )
    return frame.assign(ill=np.where(frame.age + frame.dose > 0, "yes", "no"))


@pytest.fixture(scope="module")
def run() -> Run:
    clients = piebald.clients_from(table(), client="site", target="ill", validation=0.2)
    return piebald.run("fedavg", clients, nn.Linear(2, 2), rounds=2, runtime=HERE, measure="none")


def scored(folder: Path, rows: Path) -> pd.DataFrame:
    program = ALONE.format(words=["score.py", str(rows)], file=str(folder / "score.py"))
    told = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return pd.read_csv(io.StringIO(told.stdout))


@pytest.mark.full
def test_a_folder_scores_a_raw_table(run: Run, tmp_path: Path) -> None:
    table()[["dose", "site", "age"]].to_csv(tmp_path / "new.csv", index=False)
    folder = run.save(tmp_path / "folder", calibrate=True)
    assert json.loads((folder / "outputs.json").read_text())["temperature"] != 1
    expected = run.predict(table(), calibrate=True)
    pd.testing.assert_frame_equal(scored(folder, tmp_path / "new.csv"), expected, rtol=1e-5)
    scorer = score.Scorer(folder)
    pd.testing.assert_frame_equal(pd.DataFrame(scorer.predict(table())), expected, rtol=1e-5)
    x = table()[["age", "dose"]].to_numpy()
    pd.testing.assert_frame_equal(pd.DataFrame(scorer.predict(x)), expected, rtol=1e-5)
    certain = np.stack([*scorer.predict(1e5 * x).values()])  # beyond what an exponential can hold
    assert certain.sum(0).tolist() == [1.0] * len(x)
    assert certain.max(0).tolist() == [1.0] * len(x)
    assert all(column.shape == (0,) for column in scorer.predict(table().head(0)).values())


@pytest.mark.full
def test_a_folder_scores_a_file_as_it_is_written(tmp_path: Path) -> None:
    """Dates have no operator of ONNX, and are read by the program, as are units."""
    frame, path = table(), tmp_path / "rows.csv"
    seen = pd.Timestamp("2024-01-20 10:00") + pd.to_timedelta(range(60), "D")
    loads = [f"{row / 2}%" for row in range(60)]
    frame = frame.assign(seen=seen.strftime("%m/%d/%Y %H:%M"), load=loads)
    frame["mass"] = [f"{row / 4} kg".replace(".", ",") for row in range(60)]
    frame["part"] = [load.replace(".", ",") for load in loads]
    frame.to_csv(path, index=False)
    clients = piebald.clients_from(path, client="site", target="ill", validation=0.2)
    kinds = {column.name: column.kind for column in clients.preparation.columns}
    assert [kinds.pop("seen"), *{*kinds.values()}] == ["date", "number"]
    run = piebald.run("fedavg", clients, nn.Linear(9, 2), rounds=2, runtime=HERE, measure="none")
    folder = run.save(tmp_path / "folder")
    frame[12:16].to_csv(path, index=False)  # from 02/01/2024 on, which may be in January as well
    pd.testing.assert_frame_equal(scored(folder, path), run.predict(path), rtol=1e-5)
    frame[12:14].assign(mass=["1,234 kg", "1,5 kg"]).to_csv(path, index=False)  # which tells
    pd.testing.assert_frame_equal(scored(folder, path), run.predict(path), rtol=1e-5)
    frame[12:13].assign(mass="1,234 kg").to_csv(path, index=False)
    with pytest.raises(SettingError, match="with a comma before decimals and the unit kg or with a comma between"):
        run.predict(path)
    with pytest.raises(ValueError, match="nothing between thousands in each row, got '1,234 kg'"):
        score.Scorer(folder).predict(score.read(path))


@pytest.mark.full
@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"age": "old"}, "column 'age' must have a number in each row, got 'old' in row 1"),
        ({"age": [0.0, None] * 30}, "column 'age' has no value in row 2"),
        (
            {"age": "1,234"},
            "column 'age' must have a number with a point before decimals and nothing between thousands in each row, "
            "got '1,234' in row 1",
        ),
        (None, "the table has no column 'age'"),
    ],
)
def test_what_cannot_be_scored_is_one_sentence(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Any, sentence: str
) -> None:
    folder = run.save(tmp_path / "folder")
    frame = table().drop(columns="age") if change is None else table().assign(**change)
    with pytest.raises(ValueError, match=sentence):
        score.Scorer(folder).predict(frame)
    if change is not None:
        frame.to_csv(tmp_path / "rows.csv", index=False)
        monkeypatch.setattr(score, "__file__", str(folder / "score.py"))
        monkeypatch.setattr(sys, "argv", ["score.py", str(tmp_path / "rows.csv")])
        words, row = sentence.rsplit(" ", 1)  # a spreadsheet counts the names of the columns
        with pytest.raises(SystemExit, match=f"rows.csv: {words} {int(row) + 1}"):
            score.main()


def test_without_onnx_the_folder_has_a_program_of_torch(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(piebald.report.export.export_formats, "find_spec", lambda name: None)
    folder = run.save(tmp_path / "folder")
    assert not (folder / "model.onnx").exists()
    pd.testing.assert_frame_equal(pd.DataFrame(score.Scorer(folder).predict(table())), run.predict(table()), rtol=1e-5)


def everything(rows: int = 120) -> pd.DataFrame:
    """A table with a column of each kind, with gaps and rare values."""
    rng = np.random.default_rng(1)
    frame = pd.DataFrame({
        "age": rng.normal(50, 10, rows).round(1),
        "whole": rng.integers(0, 9, rows),
        "income": rng.lognormal(3, 1, rows),
        "skewed": rng.lognormal(0, 1, rows) - 1,
        "ranked": rng.integers(0, 30, rows) * 1.5,
        "raw": rng.normal(size=rows),
        "smoker": rng.choice(["yes", "no"], rows),
        "ward": rng.choice(["a", "b", "c d"], rows),
        "code": rng.choice(["007", "1", "x"], rows),
        "town": [f"town {number % 30}" for number in range(rows)],
        "seen": pd.to_datetime("2020-02-27") + pd.to_timedelta(rng.integers(0, 9000, rows), "h"),
    })  # fmt: skip
    frame["seen"] = frame["seen"].dt.strftime("%Y-%m-%d %H:%M")
    for place, name in enumerate(("age", "income", "smoker", "ward", "seen", "town")):
        frame.loc[place :: 9 + place, name] = None
    frame.loc[5, "ward"] = "rare"
    return frame


SETTINGS: dict[str, Any] = {
    "scale": {"income": "log", "skewed": "power", "ranked": "rank", "raw": "none"},
    "least_rows": 2,
    "gaps": ["-9"],
}


@pytest.fixture(scope="module")
def preparation() -> Preparation:
    return fitted(everything(), **SETTINGS)


def test_columns_become_the_inputs_that_scikit_learn_makes_of_them(preparation: Preparation, tmp_path: Path) -> None:
    plain = json.loads(json.dumps(preparation.model_dump(mode="json"), sort_keys=True))
    kinds = [(column["kind"], column.get("coding")) for column in plain["columns"]]
    assert {
        ("number", None),
        ("boolean", None),
        ("date", None),
        ("category", "one-hot"),
        ("category", "embedding"),
    } == {*kinds}
    new = everything().sample(frac=1, random_state=0).reset_index(drop=True)
    new.loc[0, ["ward", "town", "code"]] = ["unseen", "unseen", None]
    new.loc[1, ["age", "whole", "raw", "ranked"]] = [-9, np.nan, np.nan, np.nan]
    new.loc[2, ["age", "ranked", "skewed", "income"]] = [1e4, 1e4, -5.0, 0.0]
    new.loc[3, ["ranked", "seen", "smoker"]] = [-1e4, "2024-02-29T23:59:59.7+01:30", "F"]
    new.loc[4, "seen"] = "1969-7-4"
    expected = preparation.transform(new)
    np.testing.assert_allclose(score.prepared(plain, new), expected, rtol=1e-6, atol=1e-6)
    new[[*new.columns[::-1]]].to_csv(tmp_path / "rows.csv", index=False)
    np.testing.assert_allclose(score.prepared(plain, score.read(tmp_path / "rows.csv")), expected, rtol=1e-6, atol=1e-6)
    less = new.drop(columns=["age", "ward"])  # columns with gaps need not be there
    np.testing.assert_allclose(score.prepared(plain, less), preparation.transform(less), rtol=1e-6, atol=1e-6)
    assert score.prepared(plain, new.head(0)).shape == (0, len(preparation.feature_names_out))


def test_numbers_are_harmonised_as_those_of_the_client(preparation: Preparation) -> None:
    lines = {"north": {"age": [2.0, -50.0], "income": [1.0, 5.0]}}
    harmonised = preparation.model_copy(update={"harmonised": lines})
    plain, frame = harmonised.model_dump(mode="json"), everything()
    for client in ("north", "south", None):
        expected = harmonised.transform(frame, client)
        np.testing.assert_allclose(score.prepared(plain, frame, client), expected, rtol=1e-6, atol=1e-6)
    assert not np.allclose(score.prepared(plain, frame, "north"), expected)


@pytest.mark.parametrize(
    ("column", "value"), [("age", "x"), ("smoker", "perhaps"), ("seen", "31.02.2020"), ("whole", None), ("income", -1)]
)
def test_what_the_preparation_refuses_is_refused(preparation: Preparation, column: str, value: str | None) -> None:
    frame = everything().astype({column: object})
    frame = frame.drop(columns=column) if value is None else frame.assign(**{column: value})
    with pytest.raises(SettingError, match=column):
        preparation.transform(frame)
    with pytest.raises(ValueError, match=column):
        score.prepared(preparation.model_dump(mode="json"), frame)


@pytest.mark.parametrize(
    ("text", "columns"),
    [
        ("a,b\n1,x\n", {"a": ["1"], "b": ["x"]}),
        ("\ufeffa;b\n1,5;x\n-2,25;y,z\n", {"a": ["1.5", "-2.25"], "b": ["x", "y,z"]}),
        ('a\tb\n1\t"x\ty"\n', {"a": ["1"], "b": ["x\ty"]}),
        ("a,b\n", {"a": [], "b": []}),
        ("\ufeffsep=;\r\na;b\r\n1,5;x,y\r\n", {"a": ["1.5"], "b": ["x,y"]}),
    ],
)
def test_tables_of_text(tmp_path: Path, text: str, columns: dict[str, list[str]]) -> None:
    (tmp_path / "rows.csv").write_text(text, encoding="utf-8")
    assert {name: [*cells] for name, cells in score.read(tmp_path / "rows.csv").items()} == columns
