"""CONTRIBUTING's section on a new method, followed to the letter in a copy of the tree."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
COPIED = (
    "piebald", "tests", "docs", "examples", "README.md", "CHANGELOG.md", "CONTRIBUTING.md", "pyproject.toml",
    "benchmarks/crosscheck/RESULTS.md",
)  # fmt: skip
GENERATED = re.compile(r"docs/reference/[\w-]+\.md")


def hashes(tree: Path) -> dict[str, str]:
    """A digest of every file of a tree, by its path."""
    files = (file for file in tree.rglob("*") if file.is_file() and "__pycache__" not in file.parts)
    return {str(file.relative_to(tree)): hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


def section() -> str:
    """The steps of CONTRIBUTING's section on a new method."""
    text = (ROOT / "CONTRIBUTING.md").read_text("utf-8")
    return text.split("## A new method\n", 1)[1].split("### Rules for components", 1)[0]


def block(after: str, text: str) -> str:
    """The first code block after some words."""
    found = re.search(r"```\w+\n(.*?)```", text.split(after, 1)[1], re.DOTALL)
    assert found is not None, f"no code block after {after!r}"
    return found.group(1)


def follow(tree: Path) -> set[str]:
    """Do what the section says; returns the files that it makes."""
    text = section()
    made = re.findall(r"^Create `([^`]+)`", text, re.MULTILINE)
    for path in made:
        (tree / path).write_text(block(f"Create `{path}`", text), encoding="utf-8")
    listed = tree / "piebald/methods/catalog/recipes.py"
    lines, line = (
        listed.read_text("utf-8").splitlines(),
        block("In `piebald/methods/catalog/recipes.py`", text).rstrip(),
    )
    place = next(
        row for row, other in enumerate(lines) if other.startswith("    from piebald.methods.recipes.") and other > line
    )
    listed.write_text("\n".join([*lines[:place], line, *lines[place:]]) + "\n", encoding="utf-8")
    table = tree / "tests/contract/conftest.py"
    head, rest = table.read_text("utf-8").split("\nTABLE: ", 1)
    rows, rest = rest.split("\n}\n", 1)
    row = block("In `tests/contract/conftest.py`", text).rstrip("\n")
    table.write_text(f"{head}\nTABLE: {rows}\n{row}\n}}\n{rest}", encoding="utf-8")
    log = tree / "CHANGELOG.md"
    log.write_text(
        log.read_text("utf-8").replace("### Added\n\n", "### Added\n\n" + block("In `CHANGELOG.md`", text), 1),
        encoding="utf-8",
    )
    return set(made)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A copy of what the repository holds."""
    made = tmp_path / "tree"
    made.mkdir()
    ignored = shutil.ignore_patterns("__pycache__", ".*", "*.egg-info")
    for name in COPIED:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, made / name, ignore=ignored)
        else:
            (made / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, made / name)
    return made


def run(tree: Path, *words: str) -> str:
    environment = os.environ | {"PYTHONPATH": str(tree), "PYTEST_ADDOPTS": ""}
    done = subprocess.run(
        [sys.executable, *words], cwd=tree, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout


@pytest.mark.long
def test_a_method_touches_what_contributing_says_and_inherits_the_contract_tests(tree: Path) -> None:
    before = hashes(tree)
    made = follow(tree)
    run(tree, "docs/make_reference.py")
    after = hashes(tree)
    touched = {path for path in after if after[path] != before.get(path)}
    by_hand = {path for path in touched if not GENERATED.fullmatch(path)}
    assert by_hand == made | {"piebald/methods/catalog/recipes.py", "tests/contract/conftest.py", "CHANGELOG.md"}
    assert {"docs/reference/recipes.md", "docs/reference/components.md"} <= touched
    name = next(Path(path).stem for path in made if path.startswith("piebald/methods/recipes/"))
    listing = json.loads(run(tree, "-m", "piebald.cli", "recipes", "--json"))
    assert name in {entry["name"] for entry in listing}
    own = next(path for path in made if path.startswith("tests/"))
    out = run(tree, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:randomly", own)
    assert "1 passed" in out
    out = run(
        tree,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:randomly",
        "tests/contract",
        "-k",
        f"{name} and not ray",
    )
    passed = re.search(r"(\d+) passed", out)
    assert passed is not None
    assert int(passed.group(1)) >= 5
    assert "failed" not in out


@pytest.mark.full
@pytest.mark.parametrize("tool", ["ruff", pytest.param("mypy", marks=pytest.mark.long)])
def test_its_examples_are_in_the_projects_style(tree: Path, tool: str) -> None:
    pytest.importorskip(tool)
    follow(tree)
    words = {
        "ruff": ["check", "piebald", "tests/methods"],
        "mypy": ["--cache-dir", str(tree / ".mypy"), "piebald/methods/recipes"],
    }
    run(tree, "-m", tool, *words[tool])
