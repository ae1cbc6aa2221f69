"""The notebooks of `piebald new` run, and their pages show what they print, up to the arithmetic of a machine."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import pages
from printed import assert_alike

NOTEBOOKS = sorted(page.stem for page in (pages.ROOT / "docs" / "examples").glob("*.md"))


@pytest.mark.long
@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_notebook_prints_what_its_page_shows(name: str, tmp_path: Path) -> None:
    for package in ("nbclient", "ipykernel"):
        pytest.importorskip(package, reason="needs the extra: pip install '.[docs]'")
    script = pages.ROOT / "docs" / "make_examples.py"
    done = subprocess.run(
        [sys.executable, str(script), name, "--out", str(tmp_path)], capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    page = f"{name}.md"
    wanted, found = ((folder / page).read_text("utf-8") for folder in (pages.ROOT / "docs" / "examples", tmp_path))
    assert_alike(plain(wanted), plain(found), page)


def plain(page: str) -> str:
    """A page without the tags of its tables."""
    return re.sub(r"<[^>\n]*>", " ", page)
