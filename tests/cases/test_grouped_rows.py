"""Cases 04 and 09: rows that belong together, and hospitals that are held out."""

from __future__ import annotations

import logging
from itertools import pairwise
from pathlib import Path

import numpy as np
import pandas
import pytest

import piebald
from piebald import data
from piebald.core.errors import SettingError
from tests.cases.conftest import FromFile

FEATURES = list("abcde")
FILE = """
rounds = 20
data = { source = "rows.csv", client = "hospital", target = "ill", features = ["a", "b", "c", "d", "e"] }
model = { name = "mlp", hidden = [64] }
recipe = { name = "fedavg", lr = 0.3, epochs = 5 }
runtime = { kind = "simulator", engine = "batched", stack = 3 }
evaluate = { every = 20 }
"""


def visits(seed: int = 3) -> pandas.DataFrame:
    """Six visits of each patient, whose diagnosis has nothing to do with the patient's five numbers."""
    rng, rows = np.random.default_rng(seed), []
    for hospital, patients in (("north", 30), ("south", 24), ("east", 18)):
        for patient in range(patients):
            own, ill = rng.normal(size=5), "yes" if rng.integers(2) else "no"
            for visit in range(6):
                measured = (own + 0.05 * rng.normal(size=5)).round(3)
                rows.append([hospital, f"{hospital[0]}{patient}", visit, *measured, ill])
    return pandas.DataFrame(rows, columns=["hospital", "patient", "visit", *FEATURES, "ill"])


@pytest.mark.full
def test_patients_with_several_visits_are_on_one_side(from_file: FromFile) -> None:
    """The diagnosis is a coin, so that half of the answers are right."""
    assert from_file(FILE, visits(), "split.group=patient").accuracy < 0.65


@pytest.mark.full
def test_patients_on_both_sides_are_said(from_file: FromFile, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert from_file(FILE, visits()).accuracy > 0.8
    assert "set group = 'patient' in [split]" in caplog.text


def test_folds_keep_patients_together_and_every_patient_is_tested_once() -> None:
    table = visits()
    table["a"] = np.arange(len(table))  # so that rows are known again
    tested = list[str]()
    for fold in range(3):
        clients = piebald.clients_from(
            table, client="hospital", target="ill", features=FEATURES, prepare="none",
            split={"group": "patient", "folds": 3, "fold": fold},
        )  # fmt: skip
        for number in range(3):
            rows = clients.rows(number, "test").x[:, 0].int().tolist()
            tested += sorted(set(table.patient[rows]))
    assert sorted(tested) == sorted(set(table.patient))


def test_later_visits_are_tested_where_an_order_is_named() -> None:
    table = visits().assign(a=lambda rows: rows.visit.astype(float))
    clients = piebald.clients_from(
        table, client="hospital", target="ill", features=FEATURES, split={"order": "visit", "test": 1 / 3}
    )
    for number in range(3):
        sides = [clients.rows(number, split).x[:, 0] for split in ("train", "test")]
        assert all(float(early.max()) <= float(late.min()) for early, late in pairwise(sides))


@pytest.mark.full
def test_named_hospitals_are_held_out_and_fitted_to_afterwards(from_file: FromFile) -> None:
    text = FILE + 'unseen = ["east"]\npartition = { kind = "by_owner", owner = "hospital", validation = 0.1 }\n'
    run = from_file(text.replace("rounds = 12", "rounds = 2").replace("every = 12", "every = 0"), visits())
    assert [newcomer["client"] for newcomer in run.newcomers] == ["east"]
    assert {run.names[row["client"]] for row in run.results} == {"north", "south"}


def test_each_hospital_in_turn_makes_one_table(tmp_path: Path) -> None:
    clients = data.cross_validation(visits(), {"hold_out": "each"}, client="hospital", target="ill", features=FEATURES)
    compared = piebald.compare(["fedavg"], clients, piebald.models.build_model("logistic", (5,), 2), rounds=1)
    assert [row["division"] for row in compared.by_division()] == ["without east", "without north", "without south"]


def test_a_hospital_that_is_not_there_cannot_be_held_out() -> None:
    with pytest.raises(SettingError, match="'eest': did you mean 'east'"):
        piebald.clients_from(visits(), client="hospital", target="ill", features=FEATURES, split={"hold_out": ["eest"]})
