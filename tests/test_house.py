"""The house rules that a tool can hold: what may be imported, what is public, what every file says of itself."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import piebald
from piebald.component import Component

ROOT = Path(__file__).parents[1]
FILES = sorted((ROOT / "piebald").rglob("*.py"))
MODULES = [".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for file in FILES]
EXTRAS = {"datasets", "gmpy2", "mlflow", "nvflare", "opacus", "ray", "tenseal", "tensorboard"}


@pytest.mark.parametrize("module", MODULES)
def test_every_module_can_be_imported_and_says_what_it_is(module):
    assert (importlib.import_module(module).__doc__ or "").strip()


def test_no_extra_is_imported_until_it_is_needed():
    everything = "".join(f"import {module}\n" for module in MODULES)
    code = f"import sys\n{everything}print(sorted({EXTRAS!r} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_the_package_itself_loads_nothing_heavy():
    code = "import sys, piebald; print(sorted({'torch', 'numpy', 'pydantic', 'typer'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_every_public_name_exists_and_is_listed():
    assert dir(piebald) == sorted([*piebald.__all__, "__version__"])
    for name in piebald.__all__:
        assert getattr(piebald, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = piebald.nonsense


@pytest.mark.parametrize(
    "module", [name for name, file in zip(MODULES, FILES, strict=True) if file.name == "__init__.py"]
)
def test_lists_of_public_names_are_true(module):
    loaded = importlib.import_module(module)
    for name in getattr(loaded, "__all__", ()):
        assert hasattr(loaded, name), f"{module}.__all__ lists {name!r}"


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_nothing_is_unpickled(file):
    imported = {
        alias.name
        for node in ast.walk(ast.parse(file.read_text("utf-8")))
        if isinstance(node, ast.Import)
        for alias in node.names
    }
    assert not imported & {"pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}


def test_every_part_has_a_docstring_and_a_kind_of_its_own():
    for module in MODULES:
        importlib.import_module(module)
    for axis, kinds in Component.registry.items():
        for kind, part in kinds.items():
            assert part.__doc__, f"{axis} {kind!r} has no docstring"
            assert part.kind == kind
