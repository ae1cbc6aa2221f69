"""The tests that the explanations name are there, so that no claim stands on a test that was renamed or removed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TABLE = ROOT / "tests" / "security" / "README.md"
PAGES = [*sorted((ROOT / "docs" / "explanation").glob("*.md")), TABLE]


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


def test_every_line_has_an_attack_and_what_it_got_before() -> None:
    rows = [line.strip("| ").split(" | ") for line in TABLE.read_text().splitlines() if re.match(r"\| \d", line)]
    assert [int(line) for line, *_ in rows] == list(range(1, len(rows) + 1))
    assert len(rows) > 21
    for _, attack, tests, before in rows:
        assert attack
        assert "`test_" in tests
        assert before.startswith(("run: ", "off: ", "audit: "))
