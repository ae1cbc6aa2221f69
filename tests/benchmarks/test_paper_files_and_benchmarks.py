"""The papers' files of settings run what their benchmarks run: the same network, rows and recipe."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = {
    "cgau": {"cgau-figure-2a", "cgau-figure-2b"},
    "distfl": {"distfl-table-2", "distfl-table-4", "distfl-table-5", "distfl-table-6"},
    "hdafl": {"hdafl-table-3", "hdafl-table-5"},
    "metis": {"metis-table-1", "metis-table-1-right"},
}
# the small run of Fig. 2a was made with ten steps at every client, also where an epoch is shorter
STEPS = {"local training", "training.step_limit", "training.steps"}


@pytest.mark.skipif("PIEBALD_DATA" not in os.environ, reason="PIEBALD_DATA is not set")
@pytest.mark.parametrize(  # the others build networks of the papers' sizes
    "paper", [pytest.param(paper, marks=pytest.mark.full if paper == "hdafl" else pytest.mark.long) for paper in FILES]
)
def test_each_file_runs_what_its_benchmark_runs(paper: str) -> None:
    """Before, CGAU's trained on raw pixels, with eight times the numbers, and Metis tested on what it trained on."""
    done = subprocess.run(
        [sys.executable, ROOT / "benchmarks" / "papers" / "files.py", paper], cwd=ROOT / "benchmarks" / paper,
        stdout=subprocess.PIPE, text=True, check=True,
    )  # fmt: skip
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert {file for file, *_ in lines} == FILES[paper]
    apart = {(file, scale, label): {*names} for file, scale, label, names in lines if names}
    known = {key: STEPS for key in apart if key[:2] == ("cgau-figure-2a", "")}
    assert apart == known, done.stdout
