"""What shows that each method is what its paper says: tests, cross-checks, and where it was run."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import method_tests

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "crosscheck" / "RESULTS.md"
ABOUT = """*Tests* are files in `tests`: of what its paper claims, and of the setting with which it is FedAvg or
training alone (`docs/method_tests.py` names the functions).  All recipes also run on all engines, on Ray, in workers
and at sites, and are killed and resumed."""


def lines(name: str) -> list[str]:
    """What is shown of a recipe, as an item of docs/reference/recipes.md.

    Raises:
        LookupError: there is no such test.
    """
    tests = [of_table(table, name) for table in (method_tests.CLAIMS, method_tests.WITHOUT_EFFECT)]
    tests += [of_table(method_tests.EQUATIONS, name)] if not (beside := len(rows_of(name))) else []
    files = dict.fromkeys(f"`{test.partition(': ')[0]}`" for test in tests if not test.startswith("none"))
    checks = [f"{beside} [cross-check{'s' * (beside > 1)}](../../benchmarks/crosscheck/RESULTS.md)"] if beside else []
    return [f"- Tests: {', '.join([*files, *checks])}."]


def of_table(table: Mapping[str, str], recipe: str) -> str:
    """What a table names for a recipe; for one that it does not have yet, the first test of the recipe's own file.

    Raises:
        LookupError: there is neither.
    """
    if recipe in table:
        return shown(table[recipe])
    if table is method_tests.WITHOUT_EFFECT:
        return "none is named"
    own = ROOT / "tests" / "methods" / f"test_{recipe}.py"
    if not own.exists():
        raise LookupError(f"{recipe} needs a test of what it claims in {own.relative_to(ROOT)}")
    first = next(name for name in functions(own) if name.startswith("test_"))
    return shown(f"methods/{recipe}: {first.removeprefix('test_')}")


def shown(test: str) -> str:
    """A test as the page names it, or the reason why there is none.

    Raises:
        LookupError: there is no such test.
    """
    if test.startswith("none: "):
        return test
    file, _, function = test.partition(": ")
    folder, _, module = file.partition("/")
    path = ROOT / "tests" / folder / f"test_{module}.py"
    if f"test_{function}" not in functions(path):
        raise LookupError(f"docs/method_tests.py names test_{function}, which {path} does not have")
    return f"{file}: {function.replace('_', ' ')}"


@cache
def functions(path: Path) -> list[str]:
    """Names of the functions of a file."""
    return [node.name for node in ast.parse(path.read_text("utf-8")).body if isinstance(node, ast.FunctionDef)]


def rows_of(recipe: str) -> list[tuple[str, ...]]:
    """Program, quantity, largest difference and verdict of each comparison of a recipe."""
    lines = [line.strip("| ").split(" | ") for line in RESULTS.read_text("utf-8").splitlines() if line.startswith("| ")]
    return [
        (program, quantity, apart, verdict)
        for program, quantity, apart, _, verdict in lines
        if re.sub("[^a-z]", "", quantity.split(",")[0].lower()) == recipe.replace("_", "")
    ]
