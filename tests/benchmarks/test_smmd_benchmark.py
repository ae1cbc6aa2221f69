"""SMMD's benchmark: conditions stand beside the paper's."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks" / "smmd"


@pytest.mark.full
@pytest.mark.skipif("PIEBALD_DATA" not in os.environ, reason="PIEBALD_DATA is not set")
def test_a_dry_run_prints_the_conditions_beside_the_papers(tmp_path: Path) -> None:
    """Before, there was neither; the full scale encrypts, as the paper does, instead of computing in fixed point."""
    command = [sys.executable, FOLDER / "run.py", "tables", "--scale", "full", "--dry-run"]
    environment = os.environ | {"PYTHONPATH": str(FOLDER.parents[1]), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert list(tmp_path.iterdir()) == []
    lines = {line[2:24].strip(): line for line in done.stdout.splitlines() if line.startswith("  ")}
    assert not any(lines[name].endswith("*") for name in ("units", "kernels"))
    assert "BFV, every product" in lines["encryption"]
    assert "30,000 rows" in lines["credit"]
    assert lines["repetitions"].split()[-2:] == ["5", "*"]
