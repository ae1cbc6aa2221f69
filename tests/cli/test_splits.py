"""[split] at the command line: visits of patients, hospitals that are left out, and the same rows for trees and glm."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from piebald.data import train_validation_test_split
from piebald.report.tables import History
from piebald.runs.adaptation import from_file

from .conftest import Command

FILE = """
rounds = 12
data = { source = "visits.csv", client = "hospital", target = "ill", features = ["a", "b", "c", "d", "e"] }
model = { name = "mlp", hidden = [64] }
recipe = { name = "fedavg", lr = 0.3, epochs = 5 }
"""


@pytest.fixture
def visits(tmp_path: Path) -> pd.DataFrame:
    """Six visits of each patient; the diagnosis has nothing to do with the numbers, which are the patient's own."""
    rng, rows = np.random.default_rng(3), []
    for hospital, patients in (("north", 30), ("south", 24), ("east", 18)):
        for patient in range(patients):
            own, ill = rng.normal(size=5), "yes" if rng.integers(2) else "no"
            for _ in range(6):
                rows.append([hospital, f"{hospital[0]}{patient}", *(own + 0.05 * rng.normal(size=5)).round(3), ill])
    table = pd.DataFrame(rows, columns=["hospital", "patient", *"abcde", "ill"])
    table.to_csv(tmp_path / "visits.csv", index=False)
    (tmp_path / "case.toml").write_text(FILE)
    return table


@pytest.mark.full
def test_coin_flips_are_learnt_only_where_patients_are_on_both_sides(command: Command, visits: pd.DataFrame) -> None:
    """Before, the accuracy was 96 %, and no file could say otherwise."""
    apart = json.loads(command("run", "case.toml", "--json", "--set", "split.group=patient").out)
    assert abs(apart["accuracy"] - 0.5) < 0.15
    assert json.loads(command("run", "case.toml", "--json").out)["accuracy"] > 0.7


@pytest.mark.full
def test_trees_and_glm_have_the_rows_of_the_run(command: Command, visits: pd.DataFrame) -> None:
    split = {"group": "patient", "test": 0.25, "seed": 4}
    flags = [word for name, value in split.items() for word in ("--set", f"split.{name}={json.dumps(value)}")]
    parts = train_validation_test_split(visits, split, client="hospital", target="ill")
    trees = command("trees", "case.toml", "--json", "--no-compare", "--set", "trees.rounds=20", *flags)
    clients = json.loads(trees.out)["clients"]
    rows = parts["train"].hospital.value_counts()
    assert {name: row["rows"] for name, row in clients.items()} == rows.to_dict()
    assert abs(np.mean([row["together"]["auc"] for row in clients.values()]) - 0.5) < 0.2
    table = [
        "trees",
        "visits.csv",
        "--client",
        "hospital",
        "--target",
        "ill",
        "--no-compare",
        "--set",
        "trees.rounds=20",
    ]
    assert json.loads(command(*table, "--json", *flags).out)["clients"] == clients
    for part in ("train", "test"):
        told = command("statistics", "case.toml", "--column", "a", "--split", part, "--json", *flags)
        assert json.loads(told.out)["columns"]["a"]["mean"] == pytest.approx(parts[part].a.mean())
    told = command("glm", "case.toml", "--family", "binomial", "--json", *flags)
    assert json.loads(told.out)["rows"] == len(parts["train"])


@pytest.mark.full
def test_each_hospital_is_left_out_in_turn_and_one_can_be_named(
    command: Command, visits: pd.DataFrame, caplog: pytest.LogCaptureFixture
) -> None:
    short = ["--set", "rounds=1", "--set", "model.hidden=[4]"]
    told = json.loads(
        command("run", "case.toml", "--json", *short, "--set", "split.hold_out=each", "--out", "each").out
    )
    assert [Path(row["run"]).parts[-3] for row in told["runs"]] == ["without-east", "without-north", "without-south"]
    assert told["summary"][0]["kind"] == "interval"
    assert [row["fedavg"] for row in told["divisions"]] == [row["accuracy"] for row in told["runs"]]
    one = command("run", "case.toml", "--json", *short, "--set", "split={ hold_out = ['north'] }")
    assert json.loads(one.out)["held_out"] == ["north"]
    assert json.loads(one.out)["accuracy"] == told["runs"][1]["accuracy"]
    printed = command("compare", "case.toml", *short, "--set", "split.hold_out=each", "--out", "each").out
    assert "without north" in printed
    assert "for other clients, seeds and divisions" in " ".join(printed.split())
    assert "looks like an identifier" not in caplog.text  # no patient is at two hospitals


@pytest.mark.full
def test_a_run_of_one_fold_goes_on_with_its_own_rows(command: Command, visits: pd.DataFrame, tmp_path: Path) -> None:
    short = ["--set", "model.hidden=[4]", "--set", "split={ group = 'patient', folds = 3 }"]
    folds = command("run", "case.toml", "--json", *short, "--set", "rounds=1", "--out", "folds")
    assert len(json.loads(folds.out)["runs"]) == 3
    again = command("resume", "folds/fold-2-of-3/fedavg/seed-0", "--rounds", 2, "--json")
    whole = command("run", "case.toml", "--json", *short, "--set", "rounds=2", "--set", "split.fold=1")
    assert json.loads(again.out)["accuracy"] == json.loads(whole.out)["accuracy"]


@pytest.mark.full
def test_a_search_takes_the_first_of_several_folds(
    command: Command, visits: pd.DataFrame, caplog: pytest.LogCaptureFixture
) -> None:
    short = ["--set", "model.hidden=[4]", "--set", "rounds=1", "--set", "tune.budget={ rounds = 2 }", "--json"]
    folds = command("tune", "case.toml", *short, "--set", "split={ folds = 3 }", "--out", "folds")
    assert "settings and methods are chosen in the first of 3 folds: compare them in all" in caplog.text
    caplog.clear()
    first = command("tune", "case.toml", *short, "--set", "split={ folds = 3, fold = 0 }", "--out", "first")
    assert "in the first of" not in caplog.text
    scores = [[trial["score"] for trial in json.loads(told.out)["trials"]] for told in (folds, first)]
    assert scores[0] == scores[1] != []
    each = command("tune", "case.toml", *short, "--set", "split.hold_out=each", "--out", "each")
    assert "hold_out of split asks for several runs" in each.err


@pytest.mark.full
def test_a_client_column_with_validation_rows_needs_no_partition(command: Command, visits: pd.DataFrame) -> None:
    short = ["--set", "rounds=1", "--set", "model.hidden=[4]", "--set", "split.validation=0.1"]
    told = json.loads(command("run", "case.toml", "--json", *short, "--set", "unseen=['east']").out)
    assert told["unseen"] is not None
    assert json.loads(command("run", "case.toml", "--json", *short, "--set", "keep=best").out)["status"] == "finished"


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["split.grup=patient"], "there is no setting of split called 'grup': did you mean 'group'?"),
        (["split.group=patent"], "there is no column (split) 'patent': did you mean 'patient'?"),
        (["split.hold_out=['west']"], "there is no client (split, hold_out) 'west': did you mean 'east'?"),
        (["unseen=['west']"], "there is no client (unseen) 'west': did you mean 'east'?"),
        (["split.folds=1"], "split: folds must be at least 2, got 1"),
        (["split.test=0.3", "partition={ kind = 'by_owner', owner = 'hospital', test = 0.1 }"], "test is set in split"),
    ],
)
def test_a_wrong_split_is_one_sentence(command: Command, visits: pd.DataFrame, flags: list[str], sentence: str) -> None:
    told = command("run", "case.toml", *(word for flag in flags for word in ("--set", flag)))
    assert (told.code, told.out) == (2, "")
    *warnings, last = told.err.splitlines()
    assert sentence in last
    assert all("looks like an identifier" in line for line in warnings)


@pytest.mark.full
def test_a_newcomers_patients_stay_together_too(command: Command, visits: pd.DataFrame, tmp_path: Path) -> None:
    short = ["--set", "rounds=1", "--set", "model.hidden=[4]", "--set", "split.group=patient", "--set", "prepare=none"]
    (tmp_path / "all.toml").write_text(FILE.replace(', features = ["a", "b", "c", "d", "e"]', ""))
    assert command("run", "all.toml", *short, "--out", "grouped").code == 0
    new = visits[visits.hospital == "east"].drop(columns="hospital")
    new.to_csv(tmp_path / "new.csv", index=False)
    with History(tmp_path / "grouped") as run:
        newcomer = from_file("new.csv", None, run.meta, 0.2, 0.2)
    held = {tuple(x): part for part in ("train", "validation", "test") for x in newcomer.rows(0, part).x.tolist()}
    sides = {}
    for row in new.itertuples(index=False):
        part = held[tuple(np.array([row.a, row.b, row.c, row.d, row.e], dtype=np.float32).tolist())]
        assert sides.setdefault(row.patient, part) == part
    assert set(sides.values()) == {"train", "validation", "test"}
    assert command("adapt", "grouped", "--data", "new.csv", "--epochs", "1", "--quiet").code == 0
    new.drop(columns="patient").to_csv(tmp_path / "without.csv", index=False)
    assert command("adapt", "grouped", "--data", "without.csv", "--epochs", "1", "--quiet").code == 0
