"""Every cell of every full scale begins: data, partition, model, recipe and one step, by the benchmark's program."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests import processes

CELLS = {"distfl": 92, "hdafl": 102, "metis": 126, "cgau": 84, "smmd": 39}  # so that none is lost by accident


@pytest.mark.long
@pytest.mark.skipif("PIEBALD_DATA" not in os.environ, reason="PIEBALD_DATA is not set")
@pytest.mark.parametrize("benchmark", CELLS)
def test_every_cell_of_the_full_scale_begins(benchmark: str) -> None:
    """Before, two cells of Metis' table I could not be dealt, which was found on the bigger machine."""
    program = Path(__file__).with_name("starting.py")
    command = [sys.executable, str(program), benchmark]
    done = processes.run(command, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert [line for line in lines if ": begins, " not in line] == []
    assert len(lines) == CELLS[benchmark]
