"""`import piebald`: what it loads, and the public names."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import piebald

ROOT = Path(__file__).parents[2]


def loaded_after(code: str) -> set[str]:
    lines = f"import sys\n{code}\nprint(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", lines], cwd=ROOT, capture_output=True, text=True, check=True)
    return set(done.stdout.split())


@pytest.mark.parametrize(
    "code", ["import piebald", "import piebald; dir(piebald)", "import piebald; piebald.__version__"]
)
def test_torch_waits_until_it_is_needed(code: str) -> None:
    assert not loaded_after(code) & {"torch", "numpy", "pandas", "pydantic", "sklearn", "matplotlib", "plotly"}


def test_the_check_would_notice_torch() -> None:
    assert "torch" in loaded_after("import piebald; piebald.Layout")


def test_the_public_names() -> None:
    assert piebald.__all__ == sorted(piebald.__all__)
    assert len(set(piebald.__all__)) == len(piebald.__all__)
    for name in piebald.__all__:
        assert getattr(piebald, name) is not None
        assert name in dir(piebald)
    assert not hasattr(piebald, "Nonsense")
