"""The fuzzers of benchmarks/robustness, to be run with a few mutations by tests."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

HERE = Path(__file__).parents[2] / "benchmarks" / "robustness"


def fuzzer(name: str) -> ModuleType:
    """One of them; they import each other as scripts do."""
    sys.path.insert(0, str(HERE))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(HERE))
