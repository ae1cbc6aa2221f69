"""Run what the pages show: Python in order, TOML through the settings, commands through the command line."""

from __future__ import annotations

import functools
import re
import shlex
import statistics
import sys
import tomllib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

# Now, so that searches, comparisons and estimators of later tests have the real `run` and not the brief one.
import piebald
import piebald.advice.tuning.trial_runs
import piebald.runs.compare
import piebald.runs.estimators
from piebald import recipes
from piebald.cli import main
from piebald.contracts.component import Component
from piebald.core.references import USERS
from piebald.experiments.file import ExperimentSettings
from piebald.federation.credentials.provisioning import describe
from piebald.methods.recipe import Recipe
from piebald.runtimes import Simulator
from piebald.settings.toml_document import Document
from piebald.vertical.transfer_settings import TransferSettings

sys.path.insert(0, str(Path(__file__).parent))
import pages

from tests.scripts import loaded

LONG = piebald.run
SEARCHES = ("advise.md", "tune.md")  # whose commands run a dozen experiments and more
RUN = [
    page
    for page in pages.PAGES
    # others run these: test_extend.py in processes of its own, test_should_we_train_together.py with its data,
    # test_outputs.py as it stands, and test_examples.py the notebooks that the pages of examples are made from
    if page.name not in ("extend.md", "should-we-train-together.md", "tutorial.md", "tutorial-table.md")
    and page.parent.name != "examples"
    and any(b.language in ("python", "console", "toml") for b in pages.blocks(page))
]


@pytest.mark.full
@pytest.mark.parametrize(
    "page",
    [pytest.param(page, marks=pytest.mark.long) if page.name in SEARCHES else page for page in RUN],
    ids=pages.name,
)
def test_code_on_the_page_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("piebald.runs.run.run", brief)
    monkeypatch.setattr(Component, "registry", {axis: dict(kinds) for axis, kinds in Component.registry.items()})
    module = ModuleType("page")
    monkeypatch.setitem(sys.modules, "page", module)
    for block in pages.blocks(page):
        if block.language == "python":
            # Blank lines in front, so that a traceback's line is the page's.
            exec(compile("\n" * (block.line - 1) + block.text, str(page), "exec"), vars(module))
        elif block.language == "toml":
            check_toml(block, page)
        elif block.language == "console":
            for line in block.text.splitlines():
                if line.startswith("$ piebald "):
                    run_command(line.removeprefix("$ piebald "), block.text)


@functools.wraps(LONG)
def brief(*arguments: Any, rounds: int | None = None, runtime: Any = None, **options: Any) -> piebald.Run:
    """A run of few rounds in this process: enough to see that the example works."""
    where = runtime if isinstance(runtime, Simulator) else Simulator()
    plain = where.model_copy(update={"engine": "sequential", "workers": 0})
    return LONG(*arguments, rounds=min(rounds or 2, 2), runtime=plain, **options)


def check_toml(block: pages.Block, page: Path) -> object:
    """Check a whole file, or a piece of one that is put on top of the built-in experiment."""
    given = tomllib.loads(block.text)
    if "method" in given:
        TransferSettings.of(Document.of(given, f"{pages.name(page)}:{block.line}"))
        return keep_file(block)
    if "sites" in given:
        keep_file(block)
        return describe(Path(block.text.split()[1]))
    rest = ExperimentSettings.load(None).table()
    if "recipes" in given:
        del rest["recipe"]
    if "seeds" in given:
        del rest["seed"]
    ExperimentSettings.of(Document.of(rest | given, f"{pages.name(page)}:{block.line}"), USERS).plan()
    keep_file(block)


def keep_file(block: pages.Block) -> None:
    """Write a block that begins with the name of a file to that file, for the commands after it."""
    if named := re.match(r"# ([\w-]+\.toml)\n", block.text):
        Path(named[1]).write_text(block.text, "utf-8")


def run_command(command: str, shown: str) -> None:
    """Run a command, which must succeed unless the page shows its error."""
    words = shlex.split(command, comments=True)
    if words[0] == "advise":
        words += ["--budget", "24 rounds"]  # enough to see that it answers
    code = main(words)
    assert code == 0 or (code == 2 and "there is no" in shown), f"piebald {command} ended with {code}"


@pytest.mark.parametrize("page", pages.PAGES, ids=pages.name)
def test_links_have_a_target(page: Path) -> None:
    for link in pages.links(page):
        if link.startswith(("http://", "https://", "mailto:")):
            continue
        file, _, anchor = link.partition("#")
        target = (page.parent / file).resolve() if file else page
        assert target.exists(), f"{pages.name(page)} links to {link}, which is not there"
        if anchor:
            assert anchor in pages.anchors(target), f"{pages.name(page)} links to {link}: no such heading"


@pytest.mark.parametrize("page", pages.PAGES, ids=pages.name)
def test_tests_that_a_page_names_exist(page: Path) -> None:
    named = set(re.findall(r"`(test_(?:\w+\.py|[a-z]+_\w+))`", page.read_text("utf-8")))
    files = list((pages.ROOT / "tests").rglob("test_*.py")) if named else []
    known = {path.name for path in files}
    for path in files:
        known.update(re.findall(r"^ *def (test_\w+)", path.read_text("utf-8"), re.MULTILINE))
    assert named <= known, f"{pages.name(page)} names tests that do not exist: {sorted(named - known)}"


def test_every_page_can_be_reached_from_the_index() -> None:
    index = pages.ROOT / "docs" / "index.md"
    linked = {(index.parent / link.partition("#")[0]).resolve() for link in pages.links(index)}
    docs = {page.resolve() for page in pages.PAGES if page.parent != pages.ROOT and page != index}
    assert docs <= linked


@pytest.fixture(scope="module")
def maker() -> ModuleType:
    """docs/make_reference.py as a module."""
    return loaded(pages.ROOT / "docs" / "make_reference.py")


def test_generated_pages_and_tables_are_up_to_date(maker: ModuleType) -> None:
    assert maker.stale() == [], "run python docs/make_reference.py"


def test_half_of_the_methods_are_short() -> None:
    """The house's promise about a method's size: at most 60 lines of code in the median."""
    sizes = loaded(pages.ROOT / "docs" / "method_sizes.py")
    code = [sizes.lines_of(files)[1] for files in sizes.own_files().values()]
    assert statistics.median(code) <= 60
    assert (
        sizes.lines_of_code('"""About."""\n\nX = """a\nb"""  # why\n\n# nothing\ndef f():\n    "It."\n    return 1\n')
        == 4
    )


def test_each_recipe_has_a_test_of_its_claim_and_tables_name_tests_that_there_are() -> None:
    tables = loaded(pages.ROOT / "docs" / "method_tests.py")
    named = {*tables.CLAIMS, *tables.WITHOUT_EFFECT, *tables.EQUATIONS}
    assert named <= set(recipes.names())
    own = {path.stem.removeprefix("test_") for path in (pages.ROOT / "tests" / "methods").glob("test_*.py")}
    assert set(recipes.names()) - set(tables.CLAIMS) <= own
    for shown in (*tables.CLAIMS.values(), *tables.WITHOUT_EFFECT.values(), *tables.EQUATIONS.values()):
        file, _, function = shown.partition(": ")
        if file != "none":
            folder, _, module = file.partition("/")
            text = (pages.ROOT / "tests" / folder / f"test_{module}.py").read_text("utf-8")
            assert f"def test_{function}(" in text, shown


def test_the_readme_is_short_and_names_recipes_that_there_are() -> None:
    readme = (pages.ROOT / "README.md").read_text("utf-8")
    assert len(readme.splitlines()) <= 120
    table = readme.partition("| family |")[2].partition("\n\n")[0]
    named = set(re.findall(r"`(\w+)`", table))
    assert len(named) > 30
    assert named <= set(recipes.names())


def test_the_glossary_has_the_words_of_a_recipe() -> None:
    page = (pages.ROOT / "docs" / "reference" / "glossary.md").read_text("utf-8")
    words = set(re.findall(r"^- \*\*([\w ]+)\*\*", page, re.MULTILINE))
    assert {axis.replace("_", " ") for axis in Recipe.axes} <= words


@pytest.mark.parametrize("file", sorted((pages.ROOT / "examples").glob("*.toml")), ids=lambda path: path.name)
def test_example_files_are_settings(file: Path) -> None:
    if "method" in tomllib.loads(file.read_text("utf-8")):
        assert TransferSettings.load(file).steps > 0
    else:
        assert ExperimentSettings.load(file).plan().recipes


@pytest.mark.long
def test_the_demo_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    demo = loaded(pages.ROOT / "examples" / "demo.py")
    monkeypatch.setattr(demo, "SEEDS", (0,))
    monkeypatch.setattr("piebald.runs.run.run", brief)
    for _ in range(2):  # the second time it shows what it has
        monkeypatch.setattr(sys, "argv", ["demo.py", "--out", str(tmp_path / "demo"), "--rounds", "1"])
        demo.main()
        said = capsys.readouterr().out
        assert "SCAFFOLD" in said
        assert (tmp_path / "demo" / "disjoint" / "report.html").stat().st_size > 100_000
        assert (tmp_path / "demo" / "dirichlet" / "accuracy_over_rounds.png").exists()
    assert "shown again;" in " ".join(said.split())
