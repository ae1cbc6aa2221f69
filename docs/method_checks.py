"""What shows that each method is what its paper says: tests, cross-checks, and where it was run."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import method_sizes
import method_tests

import piebald.methods.recipes
from piebald.methods.recipes import fedavg

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "crosscheck" / "RESULTS.md"
_PLACE = re.compile(r"(?i:algorithms?|equations?|eqs?\.|sections?|theorem|lemma)\s+(?:\d+(?:\.\d+)*|[IVX]+\b)")
_ABOUT = """Tests are named by their file in `tests` and their function, without `test_`.  *Its claim*: what its paper
says that it does.  *Without effect*: the setting with which it is FedAvg, or training alone.  *Beside*: its
[cross-checks](../../benchmarks/crosscheck/RESULTS.md), or the test that has the paper's equations.  *In the paper*: the
place that docstrings name, where there is one in particular.  All recipes run on all engines and in workers, and are
killed and resumed.  *On Ray*, a recipe is tested itself, or one with the same work at the clients is.
*At sites*, "itself" are processes with certificates, and "by bytes" sites in one process, which rebuild the run from
its terms and exchange the bytes of the wire format."""


def checks() -> list[str]:
    """The section of docs/reference/recipes.md about what is shown of each method, as lines.

    Raises:
        LookupError: there is no such recipe, or no such test.
    """
    names = piebald.methods.recipes.names()
    for table in (method_tests.CLAIMS, method_tests.WITHOUT_EFFECT):
        if odd := set(table) - set(names):
            raise LookupError(f"docs/method_tests.py has recipes that are gone: {', '.join(sorted(odd))}")
    ray = listed("contract/test_ray.py", "CARRIED", "CARRIED_ALIKE")
    sites = listed("federation/test_runs.py", "RECIPES")
    text = ["## What is shown of each method", "", *_ABOUT.splitlines(), ""]
    text += ["| recipe | its claim | without effect | beside | in the paper | on Ray | at sites |"]
    text += ["|---|---|---|---|---|---|---|"]
    for name in names:
        beside = f"{len(rows_of(name))} in benchmarks" if rows_of(name) else of_table(method_tests.EQUATIONS, name)
        cells = [of_table(method_tests.CLAIMS, name), of_table(method_tests.WITHOUT_EFFECT, name), beside]
        cells.append(place_of(name))
        cells += [on_ray(name, ray), "itself" if name in sites else "by bytes"]
        text.append(f"| `{name}` | {' | '.join(cells)} |")
    return text


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


def place_of(recipe: str) -> str:
    """Where in its paper a method is: what docstrings of its recipe, and of components that FedAvg has not, name."""
    own, usual = set(method_sizes.own_files()[recipe]), set(map(type, method_sizes.components(fedavg())))
    texts = [inspect.getdoc(inspect.unwrap(getattr(piebald.methods.recipes, recipe))) or ""]
    for one in method_sizes.components(piebald.methods.recipes.make(recipe)):
        if type(one) not in usual:
            texts.append(inspect.getdoc(type(one)) or "")
    texts += [ast.get_docstring(ast.parse(path.read_text("utf-8"))) or "" for path in sorted(own)]
    found = [" ".join(place.split()) for text in texts for place in _PLACE.findall(text)]
    found = [place[0].lower() + place[1:] for place in found]  # also at the beginning of a sentence
    return ", ".join(dict.fromkeys(found[:2])) or "not named"


def listed(file: str, *names: str) -> list[str]:
    """The strings of lists, or keys of dictionaries, that a file of tests assigns to some names."""
    found: list[str] = []
    for node in ast.parse((ROOT / "tests" / file).read_text("utf-8")).body:
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            if isinstance(target, ast.Name) and target.id in names:
                found += [*ast.literal_eval(node.value)]
    return found


def on_ray(recipe: str, tested: list[str]) -> str:
    """Whether a recipe is tested itself, or which one with the same work at the clients is."""
    if recipe in tested:
        return "itself"
    alike = [other for other in tested if at_clients(other) == at_clients(recipe)]
    return f"as `{alike[0]}`" if alike else "no"


def at_clients(recipe: str) -> tuple[type, ...]:
    """What decides what is computed at the clients, and when."""
    made = piebald.methods.recipes.make(recipe)
    return type(made.training), type(made.sharing), type(made.clustering), type(made.scheduling)


def rows_of(recipe: str) -> list[tuple[str, ...]]:
    """Program, quantity, largest difference and verdict of each comparison of a recipe."""
    lines = [line.strip("| ").split(" | ") for line in RESULTS.read_text("utf-8").splitlines() if line.startswith("| ")]
    return [
        (program, quantity, apart, verdict)
        for program, quantity, apart, _, verdict in lines
        if re.sub("[^a-z]", "", quantity.split(",")[0].lower()) == recipe.replace("_", "")
    ]
