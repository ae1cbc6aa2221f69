"""Five commands that lead from the raw tables of three hospitals to predictions."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.advice.raw_hospitals import truth, write_raw
from tests.cli.conftest import Command

pandas = pytest.importorskip("pandas")


@pytest.mark.full  # five commands, of which one trains
def test_five_commands_lead_from_a_look_to_predictions(
    command: Command, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_raw(tmp_path, truth())
    raw = [tmp_path / site / "patients.csv" for site in ("berlin", "graz", "lyon")]
    asked = ("look", "*/patients.csv", "--client", "hospital", "--target", "ill", "--write", "study.toml")
    look = command(*asked)
    assert look.code == 0, look.err
    assert "column 'weight': numbers read from text in 252, converted to kg in 252 of 252 rows" in look.out
    assert command(*asked).code == 2
    statistics = command("statistics", "study.toml").out
    (seen,) = [line.split() for line in statistics.splitlines() if line.startswith("seen")]
    assert all(re.fullmatch(r"202[34]-\d{2}-\d{2}", date) for date in (seen[3], *seen[5:]))
    model = command("glm", "study.toml", "--family", "binomial", "--column", "age", "--column", "glucose")
    assert model.code == 0, model.err
    assert command("run", "study.toml", "--set", "rounds=2", "--out", "run").code == 0
    assert "cleaned by the rules" in caplog.text
    caplog.clear()
    for path in raw:
        site = path.parent.name
        told = command("predict", "run", path, "--client", site, "--out", f"{site}.csv")
        assert told.code == 0, told.err
        assert len(pandas.read_csv(tmp_path / f"{site}.csv")) == len(path.read_text("utf-8").splitlines()) - 1
    assert "column 'glucose' of berlin: mg/dl -> mmol/l in 240 of 240 rows" in caplog.text
    assert "outside of those of training rows" not in caplog.text
    # rows that are sent under the name of another site are read by its rules, and are seen to be unlike
    command("predict", "run", tmp_path / "graz" / "patients.csv", "--client", "berlin", "--out", "wrong.csv")
    assert "column 'glucose' has numbers outside of those of training rows" in caplog.text
