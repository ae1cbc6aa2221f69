"""The house rules that a tool can hold: what may be imported, what is public, what every file says of itself."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import piebald
from piebald.contracts.component import Component

ROOT = Path(__file__).parents[1]
EXTRAS = {
    "datasets",
    "mlflow",
    "opacus",
    "peft",
    "ray",
    "tenseal",
    "tensorboard",
    "transformers",
    "xgboost",
}
UNPICKLING = {"pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}


def modules(folder: Path, root: Path) -> dict[str, Path]:
    """The files of a folder by the names under which they are imported where `root` is on the path."""
    return {
        ".".join(file.relative_to(root).with_suffix("").parts).removesuffix(".__init__"): file
        for file in sorted(folder.rglob("*.py"))
    }


PACKAGE = modules(ROOT / "piebald", ROOT)


@cache
def parsed(file: Path) -> ast.Module:
    return ast.parse(file.read_text("utf-8"))


def imports(tree: ast.AST) -> Iterator[tuple[str, str | None]]:
    """What is imported: (module, None) or (module, name); also what only types need, and in functions."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, None) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"line {node.lineno}: imports are written out from the package's name"
            yield from ((node.module or "", alias.name) for alias in node.names)
        elif not isinstance(node, ast.expr):  # which holds no import
            yield from imports(node)


def circle(files: Mapping[str, Path]) -> list[str]:
    """Modules of which each imports the next one and the last one the first, also in functions; or nothing."""
    graph = {
        name: {
            known
            for module, imported in imports(parsed(file))
            for known in [f"{module}.{imported}" if f"{module}.{imported}" in files else module]
            if known in files and known != name
        }
        for name, file in files.items()
    }
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(reversed(error.args[1]))
    return []


def run_python(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stdout


@pytest.mark.full
def test_every_module_is_found_under_its_name() -> None:
    """No function of a package has the name of a module in it, by which `import X as m` would give the function."""
    program = """
import importlib, sys
from types import ModuleType
for name in sys.argv[1:]:
    importlib.import_module(name)
for name in sys.argv[1:]:
    space = {}
    exec(f"import {name} as module", space)
    if space["module"] is not sys.modules[name]:
        print(name)
"""
    names = [name for name in PACKAGE if not name.endswith("__main__")]
    hidden = subprocess.run([sys.executable, "-c", program, *names], capture_output=True, text=True, check=True)
    assert hidden.stdout.split() == []


def test_every_module_can_be_imported_and_has_a_docstring():
    assert [name for name in PACKAGE if not (importlib.import_module(name).__doc__ or "").strip()] == []


@pytest.mark.full
def test_no_extra_is_imported_until_it_is_needed():
    everything = "".join(f"import {module}\n" for module in PACKAGE)
    assert run_python(f"import sys\n{everything}print(sorted({EXTRAS!r} & set(sys.modules)))") == "[]\n"


def test_the_package_itself_loads_nothing_heavy():
    heavy = {"torch", "numpy", "pydantic", "typer"}
    assert run_python(f"import sys, piebald; print(sorted({heavy!r} & set(sys.modules)))") == "[]\n"


def test_every_public_name_exists_and_is_listed():
    assert dir(piebald) == sorted([*piebald.__all__, "__version__"])
    for name in piebald.__all__:
        assert getattr(piebald, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = piebald.nonsense


def test_lists_of_public_names_are_true():
    missing = [
        f"{module}.__all__ lists {name!r}"
        for module in PACKAGE
        for name in getattr(importlib.import_module(module), "__all__", ())
        if not hasattr(importlib.import_module(module), name)
    ]
    assert missing == []


def test_nothing_is_unpickled():
    unpickling = [
        f"{importer} imports {module}"
        for importer, file in PACKAGE.items()
        for module, _ in imports(parsed(file))
        if module.split(".")[0] in UNPICKLING
    ]
    assert unpickling == []


def test_no_private_name_is_imported_from_another_module():
    private = [
        f"{importer} imports {name} from {module}"
        for importer, file in PACKAGE.items()
        for module, name in imports(parsed(file))
        if module.split(".")[0] == "piebald"
        and any(word.startswith("_") and not word.startswith("__") for word in [*module.split("."), name or ""])
    ]
    assert private == []


@pytest.mark.full
def test_modules_import_each_other_in_no_circle():
    """Neither in the package nor in a benchmark; imports that only types need count, and those in functions."""
    benchmarks = {file.parent for file in (ROOT / "benchmarks").glob("*/run.py")}
    circles = [" -> ".join(circle(PACKAGE))]
    circles += [f"{folder.name}: " + " -> ".join(circle(modules(folder, folder))) for folder in sorted(benchmarks)]
    assert [found for found in circles if "->" in found] == []


def test_no_two_public_classes_have_one_name():
    homes = defaultdict(list)
    for module, file in PACKAGE.items():
        for node in parsed(file).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes[node.name].append(module)
    assert {name: found for name, found in homes.items() if len(found) > 1} == {}


def test_every_component_has_a_docstring_and_a_kind_of_its_own():
    for module in PACKAGE:
        importlib.import_module(module)
    for axis, kinds in Component.registry.items():
        for kind, component in kinds.items():
            if not component.__module__.startswith("piebald."):  # other tests define some, too
                continue
            assert component.__doc__, f"{axis} {kind!r} has no docstring"
            assert component.kind == kind
