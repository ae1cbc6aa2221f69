"""The documentation as a site: it is built without a warning, and every public name has its place in it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import piebald

ROOT = Path(__file__).parents[2]


@pytest.mark.full
def test_the_site_is_built_without_warnings(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs", reason="needs the extra: pip install 'piebald[docs]'")
    pytest.importorskip("mkdocstrings", reason="needs the extra: pip install 'piebald[docs]'")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert not done.stderr.strip()
    for page in ("index", "tutorial", "howto/extend", "api/runs", "results/hdafl", "contributing"):
        assert (tmp_path / "site" / f"{page}.html").is_file()
    runs = (tmp_path / "site" / "api" / "runs.html").read_text("utf-8")
    assert all(f"<code>{name}</code>" in runs for name in ("evaluate_every", "checkpoint_every", "longest_step"))


def test_every_public_name_is_in_the_api_reference() -> None:
    pages = "\n".join(page.read_text("utf-8") for page in (ROOT / "docs" / "api").glob("*.md"))
    listed = set(re.findall(r"^::: piebald\.([\w.]+)$", pages, re.MULTILINE))
    modules = {
        "advice",
        "data",
        "models",
        "partition",
        "recipes",
        "tuning",
        "vertical",
    }  # they have reference pages of their own
    errors = {name for name in piebald.__all__ if name.endswith(("Error", "Fault"))}  # in piebald.errors
    assert set(piebald.__all__) - modules - errors <= listed
