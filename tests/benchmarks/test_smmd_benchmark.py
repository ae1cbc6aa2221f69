"""SMMD's benchmark: its summary follows from its tables."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks" / "smmd"


def module() -> ModuleType:
    """The module of the sentences, which imports nothing of the benchmark."""
    spec = importlib.util.spec_from_file_location("smmd_prose", FOLDER / "prose.py")
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = made
    spec.loader.exec_module(made)
    del sys.modules[spec.name]
    return made


def test_the_summary_is_that_of_the_tables() -> None:
    """Before, it was written by hand; now another table makes another verdict."""
    prose, text = module(), (FOLDER / "RESULTS.md").read_text("utf-8")
    assert prose.block(text, "summary").strip() == prose.summary(text)
    row = "| credit | SMMD, Gaussian, sigma 1, encrypted | FTL, encrypted | "
    (line,) = [line for line in text.splitlines() if line.startswith(row)]
    for shown, verdict in (
        ("+0.0100 ± 0.0020", "| better than FTL | yes: +0.0100 ± 0.0020 on credit"),
        ("-0.0100 ± 0.0020", "| better than FTL | no, the opposite: -0.0100 ± 0.0020 on credit"),
        ("+0.0100 ± nan", "| better than FTL | no verdict from one seed: +0.0100 ± nan on credit"),
    ):
        assert verdict in prose.summary(text.replace(line, f"{row}{shown} |"))
    costly = text.replace(
        "linear, without encryption | -0.0000 ± 0.0000", "linear, without encryption | -0.0200 ± 0.0010"
    )
    assert costly != text
    assert "encryption costs less than 0.01 AUC | no: the intervals of 10 pairs" in prose.summary(costly)
    assert prose.block(text, "gap prose").strip() == prose.gap(text)
    assert prose.block(text, "speed prose").strip() == prose.speed(text)
    assert "faster in 2 of 4" in prose.speed(text.replace("| 0.091 | 0.091 | 0.118 |", "| 0.191 | 0.191 | 0.118 |"))
    (line,) = [line for line in text.splitlines() if line.startswith("| credit | 600 steps |")]
    other = prose.gap(text.replace(line, "| credit | 600 steps | 0.900 | +0.202 ± 0.010 | 0.5 | 0.6 | 0.7 | 3 |"))
    assert "They raise it: features divided by turns, none in common +0.019 ± 0.002; 600 steps +0.202 ± 0.010" in other
    assert "The paper's AUC of 0.724 on credit is reached by: 600 steps (0.900)" in other


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
