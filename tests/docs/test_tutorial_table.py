"""The tutorial on a table with gaps: its commands run on the hospitals' rows, and all of them predict the same."""

from __future__ import annotations

import contextlib
import csv
import io
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from piebald.cli import main
from piebald.data.sets.download import is_prepared, prepared

sys.path.insert(0, str(Path(__file__).parent))
import pages
from printed import assert_alike

PAGE = pages.ROOT / "docs" / "tutorial-table.md"
HEART = ("heart", "heart.csv.gz")


def read(text: str) -> list[dict[str, float]]:
    return [{name: float(cell) for name, cell in row.items()} for row in csv.DictReader(io.StringIO(text))]


@pytest.mark.full
@pytest.mark.skipif(not is_prepared(*HEART), reason="the hospitals' rows are not here")
def test_from_the_table_to_the_predictions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copy(prepared(*HEART), "heart.csv.gz")
    printed: dict[str, str] = {}
    for block in pages.blocks(PAGE):
        if block.language == "toml":
            Path(block.text.split()[1]).write_text(block.text.replace("rounds = 20", "rounds = 3"), "utf-8")
        elif block.language == "csv":
            Path("new.csv").write_text(block.text, "utf-8")
        elif block.language == "text":
            assert_alike(block.text, printed["look"], "the page")
        elif block.language == "sh":
            words = [sys.executable, *shlex.split(block.text.partition(">")[0])[1:]]
            scored = subprocess.run(words, capture_output=True, text=True, check=True).stdout
        for line in block.text.splitlines() if block.language == "console" else ():
            words, out = shlex.split(line.removeprefix("$ piebald ")), io.StringIO()
            with contextlib.redirect_stdout(out):
                assert main(words) == 0, line
            printed[words[0]] = out.getvalue()
    assert "column 'ca' has gaps in 99% of the rows at va" in printed["look"]
    assert "class '2' of 'num' has no row at hungarian" in printed["look"]
    here, calibrated, alone = read(Path("cleveland.csv").read_text()), read(printed["predict"]), read(scored)
    for rows in (here, calibrated, alone):
        assert [list(row) for row in rows] == [["0", "1", "2", "3", "4"]] * 2
        assert [sum(row.values()) for row in rows] == pytest.approx([1, 1])
    assert [list(row.values()) for row in alone] == [pytest.approx(list(row.values()), abs=1e-5) for row in here]
    assert here[0]["0"] < 0.5 < here[1]["0"]  # a typical patient, and a healthy one
    with contextlib.redirect_stdout(out := io.StringIO()):  # four processes come to what one has simulated
        assert main(["predict", "rehearsal", "new.csv", "--client", "cleveland"]) == 0
    rehearsed = [list(row.values()) for row in read(out.getvalue())]
    assert rehearsed == [pytest.approx(list(row.values()), abs=1e-4) for row in here]
    assert Path("rehearsal/preparation.json").read_bytes() == Path("hearts/preparation.json").read_bytes()
