"""SMMD's benchmark: its summary follows from its tables."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

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
