"""The papers at full size: every row says what it found or why it found nothing, and nothing is run twice."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests import processes
from tests.scripts import loaded

FOLDER = Path(__file__).parents[2] / "benchmarks" / "full_scale"


def carry_out(out: Path, *options: str, **environment: str) -> dict[str, dict[str, dict[str, object]]]:
    """Run the program on the CPU with tiny sizes, and return its tables."""
    command = [sys.executable, str(FOLDER / "run.py"), "--device", "cpu", "--scale", "tiny", "--out", str(out)]
    import os

    own = {name: value for name, value in os.environ.items() if name != "PIEBALD_DATA"} | environment
    done = processes.run([*command, *options], capture_output=True, text=True, env=own)
    assert done.returncode == 0, done.stderr
    return json.loads((out / "results.json").read_text())["tables"]  # type: ignore[no-any-return]


def test_one_seed_of_everything_comes_before_a_second_of_anything() -> None:
    rows = list(loaded(FOLDER / "rows.py").rows())
    assert [row.about for row in rows[:5]] == [
        ("vgg", method) for method in ("FedAvg", "Local", "LG-Net (fine-tuning)", "K-Cluster (K = 5)", "DistFL")
    ]
    seeds = [row.seed for row in rows if row.study != "metis"]
    assert seeds == sorted(seeds)
    assert len({(row.table, row.name) for row in rows}) == len(rows)
    assert all(row.paper for row in rows)


@pytest.mark.long
def test_rows_without_time_or_data_say_so_and_are_tried_again(tmp_path: Path) -> None:
    one = ("--only", "dirichlet", "--seeds", "0")
    late = carry_out(tmp_path, *one, "--budget-seconds", "0")
    (table,) = late.values()
    assert {row["not measured"] for row in table.values()} == {"the time of this command was up"}
    (table,) = carry_out(tmp_path, "--only", "hdafl", "--seeds", "7").values()  # no such rows: nothing changes
    missing = processes.run(
        [sys.executable, str(FOLDER / "one.py"), "dirichlet", "0", "fedavg", "--out", str(tmp_path), "--device", "cpu"],
        capture_output=True, text=True, env={"PATH": "", "PYTHONPATH": str(FOLDER.parents[1])},
    )  # fmt: skip
    assert missing.returncode
    assert "PIEBALD_DATA" in missing.stderr
