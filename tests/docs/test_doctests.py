"""The examples in docstrings (`>>>`) do what they show."""

from __future__ import annotations

import ast
import doctest
import importlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
OPTIONS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


def with_examples() -> list[str]:
    """The modules that have examples; found by their text, so that none is imported while tests are collected."""
    prompt = re.compile(r"^\s*>>> ", re.MULTILINE)
    documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    return [
        ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        for file in sorted((ROOT / "piebald").rglob("*.py"))
        if ">>> " in (text := file.read_text("utf-8"))
        and any(
            prompt.search(ast.get_docstring(node) or "")
            for node in ast.walk(ast.parse(text))
            if isinstance(node, documented)
        )
    ]


@pytest.mark.parametrize("module", with_examples())
def test_examples_in_docstrings_hold(module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In an empty folder, which they may write into."""
    monkeypatch.chdir(tmp_path)
    loaded = importlib.import_module(module)
    runner = doctest.DocTestRunner(optionflags=OPTIONS)
    report: list[str] = []
    examples = 0
    for case in doctest.DocTestFinder(exclude_empty=True).find(loaded, module):
        examples += len(case.examples)
        runner.run(case, out=report.append, clear_globs=True)
    assert examples, f"the examples of {module} are in docstrings that doctest does not see (a nested function?)"
    assert runner.failures == 0, "".join(report)
