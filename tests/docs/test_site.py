"""The documentation as a site: it is built without a warning, and every public name has its place in it."""

from __future__ import annotations

import importlib
import os
import pkgutil
import re
import subprocess
import sys
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import pytest

from piebald import models
from piebald.contracts.component import Component

ROOT = Path(__file__).parents[2]


@pytest.mark.long
def test_the_site_is_built_without_warnings(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs", reason="needs the extra: pip install '.[docs]'")
    pytest.importorskip("mkdocstrings", reason="needs the extra: pip install '.[docs]'")
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
    results = {page.parent.name for page in (ROOT / "benchmarks").glob("*/RESULTS.md")}
    listed = set(re.findall(r"results/(\w+)\.md", (ROOT / "mkdocs.yml").read_text("utf-8")))
    assert results == listed, "pages that no menu leads to"
    for page in ("index", "tutorial", "howto/extend", "api/runs", "results/hdafl", "contributing"):
        assert (tmp_path / "site" / f"{page}.html").is_file()
    settings = (tmp_path / "site" / "reference" / "settings.html").read_text("utf-8")
    assert all(f"<code>{name} = " in settings for name in ("evaluate_every", "checkpoint_every", "longest_step"))


PUBLIC = (
    "advice", "advice.tuning", "contracts", "core.metrics", "data", "data.partition",
    "methods.aggregation", "methods.attacks", "methods.clustering", "methods.catalog.recipes", "methods.scheduling",
    "methods.server_optimizer", "methods.sharing", "methods.training", "methods.transforms", "models", "testing",
    "vertical",
)  # fmt: skip


@pytest.mark.parametrize("name", ["", *PUBLIC])
def test_every_public_name_is_in_the_api_reference(name: str, documented: tuple[set[int], str]) -> None:
    """In a page of docs/api, or in the generated reference of components, recipes, models and data sets."""
    module = importlib.import_module(f"piebald.{name}".rstrip("."))
    found, generated = documented
    values = {public: getattr(module, public) for public in names_of(module)}
    missing = [
        public
        for public, value in values.items()
        if isinstance(value, type | FunctionType) and id(value) not in found and not in_generated(value, generated)
    ]
    assert missing == []


def names_of(module: ModuleType) -> list[str]:
    """The names in the module's list, or else what it defines without a line in front."""
    own = [name for name, value in vars(module).items() if getattr(value, "__module__", None) == module.__name__]
    return getattr(module, "__all__", None) or [name for name in own if not name.startswith("_")]


def in_generated(value: Any, generated: str) -> bool:
    """Whether a component's kind, a capability, a recipe, a model or a data set has its heading or its line."""
    if isinstance(value, type) and issubclass(value, Component) and value.kind:
        return re.search(f"^##+ (?:{value.axis} = )?{value.kind}(?::|$)", generated, re.M | re.I) is not None
    name = value.__name__
    of_model = [one for one in models.names() if one.replace("_", "") == name.lower()]
    return any(f"## {one}\n" in generated or f"| `{one}` |" in generated for one in (name, *of_model)) or (
        f".{name}`" in generated
    )


@pytest.fixture(scope="module")
def documented() -> tuple[set[int], str]:
    """What the pages of docs/api name, and the text of the generated pages."""
    pages = "\n".join(page.read_text("utf-8") for page in (ROOT / "docs" / "api").glob("*.md"))
    found: list[Any] = []
    for path, options in re.findall(r"^::: (piebald[\w.]*)$((?:\n    .*)*)", pages, re.MULTILINE):
        value = pkgutil.resolve_name(path)
        if isinstance(value, ModuleType):
            only = re.search(r"members: \[(.*)\]", options)
            found += [getattr(value, name) for name in (only[1].split(", ") if only else names_of(value))]
        else:
            found.append(value)
    generated = ("components", "partitions", "recipes", "transfer")
    text = "\n".join((ROOT / "docs" / "reference" / f"{page}.md").read_text("utf-8") for page in generated)
    return {id(value) for value in found}, text
