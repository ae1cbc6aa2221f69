"""`import piebald`: what it loads, and the public names."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import piebald
from piebald import recipes
from piebald.contracts.component import Component
from piebald.core.discovery import public_classes
from tests import processes

ROOT = Path(__file__).parents[2]


def loaded_after(code: str, run: Callable[..., Any] = subprocess.run) -> set[str]:
    lines = f"import sys\n{code}\nprint(*sys.modules)"
    done = run([sys.executable, "-c", lines], cwd=ROOT, capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def after_torch(code: str) -> set[str]:
    """As `loaded_after`, for code that needs PyTorch anyway: PyTorch and packages of others are loaded before."""
    return loaded_after(code, processes.run)


@pytest.mark.parametrize(
    "code", ["import piebald", "import piebald; dir(piebald)", "import piebald; piebald.__version__"]
)
def test_torch_waits_until_it_is_needed(code: str) -> None:
    assert not loaded_after(code) & {"torch", "numpy", "pandas", "pydantic", "sklearn", "matplotlib", "plotly"}


HEAVY = {
    *(
        "ray",
        "optuna",
        "pandas",
        "sklearn",
        "scipy",
        "matplotlib",
        "plotly",
        "torchmetrics",
        "torchvision",
        "torchaudio",
    ),
    *("datasets", "PIL", "h5py", "transformers", "peft", "onnx", "onnxruntime", "dp_accounting", "opacus"),
    *("flwr", "tenseal", "pooch", "threadpoolctl", "mlflow", "wandb", "tensorboard", "typer"),
}
BEGIN = "import piebald; piebald.run; piebald.recipes.fedavg; piebald.models; piebald.data.partition; piebald.tune"


@pytest.mark.full
def test_nothing_heavy_but_torch_is_loaded_to_begin() -> None:
    loaded = loaded_after(BEGIN)
    by_torch = loaded_after("import torch")
    assert "torch" in loaded
    assert not (loaded - by_torch) & HEAVY
    assert not {name for name in loaded - by_torch if name.startswith("torch.") and "functional" not in name}


def test_the_command_line_loads_neither_torch_nor_pydantic() -> None:
    assert not loaded_after("from piebald.cli import main") & {"torch", "numpy", "pydantic", *HEAVY} - {"typer"}


@pytest.mark.full
def test_the_check_would_notice_torch() -> None:
    assert "torch" in loaded_after("import piebald; piebald.Layout")


def test_the_public_names() -> None:
    assert piebald.__all__ == sorted(piebald.__all__)
    assert len(set(piebald.__all__)) == len(piebald.__all__)
    for name in piebald.__all__:
        assert getattr(piebald, name) is not None
        assert name in dir(piebald)
    assert not hasattr(piebald, "Nonsense")


# ------------------------------------------------------------------------------ components are imported when asked for

LAZY = [
    "data",
    "data.partition",
    "methods.catalog.recipes",
    "models",
    "report.callbacks",
    "runtimes",
    "vertical",
]  # packages that name what they offer
OF_CLASSES = [
    f"methods.{axis}"
    for axis in (
        *("training", "sharing", "transforms", "attacks", "scheduling", "clustering", "aggregation"),
        *("server_optimizer", "queries"),
    )
]


@pytest.mark.full
def test_a_run_imports_the_components_of_its_recipe_alone() -> None:
    loaded = after_torch("import piebald; piebald.run; piebald.Simulator; piebald.recipes.fedavg(lr=0.1)")
    assert {
        "piebald.methods.training.sgd",
        "piebald.methods.aggregation.linear",
        "piebald.methods.recipes.fedavg",
    } <= loaded
    for name in ("recipes.hdafl", "training.ditto", "aggregation.krum", "clustering.distfl", "attacks.sign_flip"):
        assert f"piebald.methods.{name}" not in loaded


@pytest.mark.full
@pytest.mark.parametrize(
    "asked",
    [
        "component.build('aggregation', 'krum')",
        "component.Component.registry['aggregation']['krum']",
        "dict(component.Component.registry.items())['aggregation']['krum']",
        "component.knows('krum') or 1 / 0",
        "recipe.Recipe(**{**recipes.fedavg().model_dump(), 'aggregation': {'kind': 'krum'}})",
        "recipes.fedavg().with_(aggregation='krum')",
        "references.USERS.find('piebald.methods.aggregation:Krum', 'component')",
        "recipes.fedavg().with_(aggregation='piebald.methods.aggregation:Krum')",
    ],
)
def test_a_component_is_found_though_nothing_has_imported_it(asked: str) -> None:
    before = after_torch(
        "import piebald.settings.plugins, piebald.methods.recipe; from piebald import recipes; recipes.fedavg"
    )
    assert "piebald.methods.aggregation.krum" not in before
    names = (
        "piebald.contracts import component",
        "piebald.methods import recipe",
        "piebald import recipes",
        "piebald.core import references",
    )
    code = "".join(f"from {name}; " for name in names) + asked
    assert "piebald.methods.aggregation.krum" in after_torch(code)


def test_a_worker_that_builds_what_it_is_sent_imports_nothing() -> None:
    """Each would import the components for itself, during the first round."""
    code = """
from piebald.contracts import component
from piebald.methods.aggregation.linear import ExampleWeighted
from piebald.methods.queries.scores import Evaluate
before = set(sys.modules)
component.build("aggregation", ExampleWeighted().table())
component.build("query", Evaluate(split="test").table())
assert set(sys.modules) == before, set(sys.modules) - before
"""
    after_torch(code)


@pytest.mark.full
@pytest.mark.parametrize(
    "asked",
    [
        "recipes.async_dvw",
        "recipes.make('async_dvw')",
        "references.USERS.find('piebald.methods.recipes.dvw:async_dvw', 'recipe')",
    ],
)
def test_a_recipe_is_found_in_a_module_of_another_name(asked: str) -> None:
    assert "piebald.methods.recipes.dvw" in after_torch(
        f"from piebald import recipes; from piebald.core import references; {asked}"
    )


@pytest.mark.full
def test_one_recipe_by_its_name_imports_no_other() -> None:
    loaded = after_torch("from piebald import recipes; recipes.make('ditto')")
    assert "piebald.methods.recipes.ditto" in loaded
    assert "piebald.methods.recipes.hdafl" not in loaded


@pytest.mark.full
def test_a_recipe_made_from_a_table_alone_has_its_maker() -> None:
    table = repr(recipes.hdafl(lr=0.2).model_dump())
    after_torch(f"""
from piebald import Recipe
from piebald.methods.catalog.registry import maker
assert maker(Recipe(**{table})).__name__ == "hdafl"
""")


@pytest.mark.full
@pytest.mark.parametrize("kind", ["krum", "median"])
def test_a_kind_of_ours_is_taken_though_nothing_has_imported_it(kind: str) -> None:
    code = f"""
from piebald.methods.aggregation.base import Aggregator
from piebald.core.errors import SettingError
try:
    type({kind.title()!r}, (Aggregator,), dict(__module__="elsewhere", __doc__="Mine."))
except SettingError as error:
    assert "is already defined by {kind.title()} in piebald.methods.aggregation" in str(error), error
else:
    raise AssertionError
"""
    after_torch(code)


@pytest.mark.full
def test_a_recipe_of_ours_is_taken_though_nothing_has_imported_it() -> None:
    code = """
from piebald.core.errors import SettingError
from piebald.methods.catalog.registry import recipe
from piebald.methods.training.sgd import Sgd
def async_dvw():
    "Mine."
try:
    recipe("a paper", Sgd)(async_dvw)
except SettingError as error:
    assert "is already defined in piebald.methods.recipes.dvw" in str(error), error
else:
    raise AssertionError
"""
    after_torch(code)


@pytest.mark.parametrize("package", LAZY)
def test_what_a_package_offers_is_what_its_types_say(package: str) -> None:
    made = importlib.import_module(f"piebald.{package}")
    tree = ast.parse(Path(str(made.__file__)).read_text("utf-8"))
    typed = {
        alias.asname: node.module
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if alias.asname
    }
    assert sorted(typed) == sorted(made.__all__) == sorted(dir(made))
    for name, home in typed.items():
        assert getattr(made, name) is getattr(importlib.import_module(str(home)), name)


@pytest.mark.parametrize("package", OF_CLASSES)
def test_a_package_of_components_offers_its_classes(package: str) -> None:
    package = f"piebald.{package}"
    made = importlib.import_module(package)
    assert made.__all__ == dir(made) == list(public_classes(package))
    for name in made.__all__:
        assert getattr(made, name).__module__.startswith(f"{package}.")
    for name in ("Nonsense", "nonsense"):
        assert not hasattr(made, name)


@pytest.mark.full
def test_every_axis_has_its_home_and_every_component_is_found_there() -> None:
    code = """
import pkgutil, importlib, piebald
from piebald.contracts.component import Component, imported
lazily = {axis: set(kinds) for axis, kinds in Component.registry.items()}
for module in pkgutil.walk_packages(piebald.__path__, "piebald."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)
everything = {axis: set(kinds) for axis, kinds in dict.items(Component.registry)}
assert lazily == everything, [axis for axis in everything if lazily.get(axis) != everything[axis]]
"""
    after_torch(code)
    assert Component.registry["aggregation"]["krum"].__module__ == "piebald.methods.aggregation.krum"


NO_COLLECTION = """
import gc, torch, piebald
collections = []
gc.callbacks.append(lambda phase, info: collections.append(info["generation"]) if phase == "start" else None)
piebald.run, piebald.Simulator, piebald.recipes.fedavg
gc.callbacks.clear()
assert len(collections) < 10, collections  # at most one after each of these names; without a rest some seventy
assert gc.isenabled()
gc.disable()
piebald.tune
assert not gc.isenabled()
"""


@pytest.mark.full
def test_imports_collect_no_garbage() -> None:
    """A full collection takes a tenth of a second, since it looks at all of torch's objects."""
    after_torch(NO_COLLECTION)
