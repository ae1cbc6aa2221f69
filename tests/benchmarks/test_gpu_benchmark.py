"""The GPU's benchmark runs, keeps what it has measured, and says what it has not."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from tests import processes

ROOT = Path(__file__).parents[2]


def measure(out: Path, *options: str) -> dict[str, dict[str, dict[str, object]]]:
    """Run the program on the CPU, and return its tables."""
    command = [sys.executable, str(ROOT / "benchmarks" / "gpu" / "run.py"), "--device", "cpu", "--scale", "tiny"]
    done = processes.run(
        [*command, "--out", str(out), *options],
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    return json.loads((out / "results.json").read_text())["tables"]  # type: ignore[no-any-return]


@pytest.mark.long
def test_what_was_measured_before_the_time_was_up_is_kept_and_continued(tmp_path: Path) -> None:
    parts = ("--only", "machine", "equality", "registered", "stacks")
    late = measure(tmp_path, *parts, "--budget-seconds", "0")
    assert len(late["Equality with the CPU"]) == 3  # FedAvg on each engine
    assert {"not measured" in row for table in late.values() for row in table.values()} == {True}
    found = measure(tmp_path, "--only", "machine", "equality", "registered")
    assert [row["equal"] for row in found["Equality with the CPU"].values()] == ["yes"] * 3
    assert all(float(row["seconds a round"]) > 0 for row in found["Registered clients"].values())  # type: ignore[arg-type]
    assert found["Stacks"] == late["Stacks"]  # not asked for again, and still a row that says so
    before = (tmp_path / "results.json").read_text()
    measure(tmp_path, "--only", "equality")
    assert (tmp_path / "results.json").read_text() == before
    page = (tmp_path / "RESULTS.md").read_text()
    assert "the time of this command was up" in page
    assert "fedavg, batched" in page


@pytest.mark.full
def test_a_device_that_is_not_here_is_refused_in_one_sentence(tmp_path: Path) -> None:
    command = [
        sys.executable,
        str(ROOT / "benchmarks" / "gpu" / "run.py"),
        "--device",
        "cuda:99",
        "--out",
        str(tmp_path),
    ]
    done = processes.run(command, capture_output=True, text=True)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert "cuda:99" in done.stderr


@pytest.mark.long
def test_each_part_is_switched_once_on_each_workload(tmp_path: Path) -> None:
    found = measure(tmp_path, "--only", "W1", "switches")["One part switched"]
    for switch in ("server on the host", "sums in a CPU's blocks", "numbers for each stack", "channels-last"):
        assert float(found[f"W1, {switch}"]["seconds a round"]) > 0  # type: ignore[arg-type]
        assert "times the bare loop" in found[f"W1, {switch}"]
    assert "not on cpu" in str(found["W1, recorded"]["not measured"])
