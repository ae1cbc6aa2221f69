"""The tests that the explanations name are there, so that no claim stands on a test that was renamed or removed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs" / "explanation").glob("*.md"))


@pytest.fixture(scope="module")
def known() -> set[str]:
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    functions = {name for file in files for name in re.findall(r"^def (test_\w+)", file.read_text(), re.MULTILINE)}
    return functions | {file.name for file in files}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_test_that_a_page_names_is_there(page: Path, known: set[str]) -> None:
    named = {name.rpartition("/")[2] for name in re.findall(r"`((?:tests/\w+/)?test_\w+(?:\.py)?)`", page.read_text())}
    assert named - known == set()
    assert named or page.name not in ("threat-model.md", "secure-aggregation.md", "privacy.md", "transfer.md")
