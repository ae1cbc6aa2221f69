"""An exported folder cleans raw rows by the rules of its client, as `predict` does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

import piebald
from piebald.data.preparation.cleaning import Cleaning
from piebald.report.export import score
from piebald.runs.finished_run import Run
from tests.report.test_score import HERE, scored

RULES: dict[str, Any] = {
    "parse": {"weight": "number", "dose": "decimal comma", "seen": "day.month.year"},
    "unit": {"weight": "kg", "temperature": "F -> C"},
    "map": {"ward": {"ICU": "icu", "none": ""}},
    "absent": {"dose": ["unknown"], "age": ["-9"]},
    "by_site": {"b": {"unit": {"glucose": "mg/dl -> mmol/l", "dose": {"factor": 0.001}}}},
}


def table(site: str, rows: int = 60) -> pd.DataFrame:
    """Rows as hospitals write them: 1.234,5 mg, lb, Fahrenheit, and dates with points."""
    rng = np.random.default_rng(ord(site))
    dose, weight = rng.normal(3, 1, rows).clip(0.5), rng.normal(70, 9, rows)
    written = [f"{1000 * number:,.1f}".translate(str.maketrans(",.", ".,")) for number in dose]
    return pd.DataFrame({
        "site": site, "glucose": rng.normal(5.5, 1, rows) * (18.016 if site == "b" else 1),
        "dose": written if site == "b" else [f"{number:.3f}".replace(".", ",") for number in dose],
        "weight": [f"{kg:.1f} kg" if row % 2 else f"{kg * 2.2046226:.2f}lbs" for row, kg in enumerate(weight)],
        "temperature": rng.normal(98, 1, rows), "age": rng.choice([-9, 40, 50, 61], rows),
        "ward": rng.choice(["icu", " ICU ", "South", "none"], rows),
        "seen": rng.choice(["01.05.2024", "3.6.2024"], rows), "ill": np.where(dose > 3, "yes", "no"),
    })  # fmt: skip


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    rows = pd.concat([table("a"), table("b")], ignore_index=True)
    clients = piebald.clients_from(rows, client="site", target="ill", prepare=RULES)
    model = piebald.models.build_model("logistic", (len(clients.preparation.feature_names_out),), 2)
    out = tmp_path_factory.mktemp("cleaned") / "run"
    return piebald.run("ditto", clients, model, rounds=2, runtime=HERE, measure="none", out=out)


@pytest.mark.full
@pytest.mark.parametrize("separator", [",", ";"])
@pytest.mark.parametrize("client", ["a", "b"])
def test_a_folder_answers_for_raw_rows_as_predict_does(
    run: Run, client: str, separator: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = run.save(tmp_path / "folder", client=client)
    new = table(client, 40).drop(columns="ill")
    new.loc[3, "dose"] = "Unknown"
    new.to_csv(tmp_path / "new.csv", index=False, sep=separator)
    expected = run.predict(tmp_path / "new.csv", client=client)
    pd.testing.assert_frame_equal(scored(folder, tmp_path / "new.csv"), expected, rtol=1e-5)
    # numbers of a data frame are no text, and no comma is in them
    numbers = new.assign(dose=pd.to_numeric(new.dose.str.replace(".", "").str.replace(",", "."), errors="coerce"))
    answers = pd.DataFrame(score.Scorer(folder).predict(numbers))
    pd.testing.assert_frame_equal(answers, run.predict(numbers, client=client), rtol=1e-5)


@pytest.mark.full
@pytest.mark.parametrize(
    ("column", "value", "sentence"),
    [
        ("weight", "70 stone", "has a number in 'stone', which no rule converts, in row 1"),
        ("weight", "heavy", "must have a number in each row, got 'heavy' in row 1"),
        ("dose", "1,5,5", "must have a number in each row"),
        ("seen", "2024/31/05", "must have a date of the form day.month.year in each row, got '2024/31/05' in row 1"),
    ],
)
def test_what_no_rule_reads_is_one_sentence(run: Run, tmp_path: Path, column: str, value: str, sentence: str) -> None:
    folder = run.save(tmp_path / "folder", client="a")
    with pytest.raises(ValueError, match=sentence.replace(".", r"\.")):
        score.Scorer(folder).predict(table("a", 4).assign(**{column: value}))


def test_two_units_without_a_rule_for_them_are_refused_as_they_are_in_training() -> None:
    rule = json.loads(json.dumps(Cleaning(parse={"weight": "number"}).as_table(None)))["weight"]
    assert score._cleaned({"weight": ["70 kg", "71 kg", "NA"]}, "weight", rule) == ["70.0", "71.0", ""]
    with pytest.raises(ValueError, match="numbers in kg, lb"):
        score._cleaned({"weight": ["70 kg", "150 lb"]}, "weight", rule)
