"""The benchmark of bad networks: its page says what is missing, and what is not to be trusted."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

RUN = Path(__file__).parents[2] / "benchmarks" / "networks" / "run.py"


def test_the_page_says_what_failed_what_is_missing_and_under_what_load(tmp_path: Path) -> None:
    link = "10 Mbit/s, 50 ms"
    bare = {"seconds": 4.0, "nbytes": 1_000_000, "load": 40.2}
    step = {"seconds": 2.0, "nbytes": 1_000_000, "up": 500_000, "down": 1_000_000, "resets": 0, "again": 1, "lost": 0}
    found = {f"bare; {link}; 1 MB": bare, f"step; {link}; 1 MB": step, f"flower; {link}; 1 MB": {"error": "no answer"}}
    (tmp_path / "results.json").write_text(json.dumps(found))
    command = [sys.executable, str(RUN), "--only", "nothing has this name", "--out", str(tmp_path)]
    subprocess.run(command, check=True)
    page = (tmp_path / "RESULTS.md").read_text()
    assert f"| {link} | 1 MB | 2.00 | 4.00 (load 40) | 200% | 150% | 1.5 | 0 | 1 | 0 |" in page
    assert f"| {link} | 1 MB | 2.00 | not measured | no answer |" in page
    assert "Not measured yet: " in page
    assert f"step; {link}; 25 MB" in page
    assert json.loads((tmp_path / "results.json").read_text()) == found
