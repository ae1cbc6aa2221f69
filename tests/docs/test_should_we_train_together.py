"""The page "Should we train together?": its code runs on the hospitals' rows, and prints what the page shows."""

from __future__ import annotations

import contextlib
import gzip
import io
import shlex
import sys
from pathlib import Path

import pytest

from piebald.cli import main
from piebald.data.sets.download import is_prepared, prepared
from piebald.report.tables import History

sys.path.insert(0, str(Path(__file__).parent))
import pages
from printed import assert_alike

PAGE = pages.ROOT / "docs" / "should-we-train-together.md"
HEART = ("heart", "heart.csv.gz")
HEADINGS = ("Answer ", "Measured accuracy on test rows: ", "always the most frequent class", "piebald run advice/")


@pytest.mark.long
@pytest.mark.skipif(not is_prepared(*HEART), reason="the hospitals' rows are not here")
def test_from_the_table_to_the_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("heart.csv").write_bytes(gzip.decompress(prepared(*HEART).read_bytes()))
    printed, compared = "", 0
    for block in pages.blocks(PAGE):
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            if block.language == "python":
                exec(compile("\n" * (block.line - 1) + block.text, str(PAGE), "exec"), {"__name__": "page"})
            elif block.language == "console":
                for line in block.text.splitlines():
                    shorter = line.replace("900 rounds", "150 rounds")
                    shorter += " --set rounds=8 --set seeds=[0,1]" if " compare " in line else ""
                    shorter += " --set rounds=2" if " up " in line else ""
                    assert main(shlex.split(shorter.removeprefix("$ piebald "))) == 0, line
            elif block.language == "toml":
                Path(block.text.split()[1]).write_text(block.text, "utf-8")
            elif block.language == "text" and not block.text.startswith("$"):
                compared += 1
                if compared == 1:
                    assert_alike(block.text, printed.split("\n# an experiment file")[0], "the page")
                else:  # what a race chooses may differ by the arithmetic of a machine
                    texts = [" ".join(text.split()) for text in (block.text, printed)]
                    assert all(line in text for line in HEADINGS for text in texts), printed
                    assert len(printed.splitlines()) <= 24
        printed = out.getvalue() or printed
    assert compared == 2
    assert Path("final", "run.db").exists()
    with History(Path("rehearsal")) as rehearsed:  # four processes that talk over TLS
        assert rehearsed.final["rounds"] == 2
        assert rehearsed.meta["runtime"]["kind"] == "federation"
