"""How large each method is: the files that no other recipe needs, and their lines."""

from __future__ import annotations

import ast
import inspect
import io
import statistics
import tokenize
from collections import Counter
from pathlib import Path

import piebald.methods.recipes
from piebald.methods.recipe import Recipe

_NO_CODE = {
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENCODING,
    tokenize.ENDMARKER,
}  # fmt: skip
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef)


def section() -> list[str]:
    """The section of docs/reference/recipes.md about sizes, as lines."""
    sizes = {name: (len(files), *lines_of(files)) for name, files in own_files().items()}
    files, lines, code = (statistics.median(column) for column in zip(*sizes.values(), strict=True))
    text = ["## Size of each method", ""]
    text += [
        "Files that no other recipe has: that of the recipe, and those of components that it alone has by default."
    ]
    text += [
        "Lines of code leave out docstrings, comments and empty lines.  A new method touches three more files, with"
    ]
    text += ["one line each: the list of recipes, the table of the contract tests, and the changelog."]
    text += [f"The medians are {files:g} files, {lines:g} lines, and {code:g} lines of code.", ""]
    text += ["| recipe | files | lines | lines of code |", "|---|---|---|---|"]
    return text + [f"| `{name}` | {' | '.join(map(str, row))} |" for name, row in sizes.items()]


def own_files() -> dict[str, list[Path]]:
    """The files of each recipe that no other one has."""
    made = {name: piebald.methods.recipes.make(name) for name in piebald.methods.recipes.names()}
    files = {name: {file_of(type(one)) for one in components(recipe)} for name, recipe in made.items()}
    often = Counter(path for paths in files.values() for path in paths)
    return {
        name: [file_of(getattr(piebald.methods.recipes, name)), *sorted(path for path in paths if often[path] == 1)]
        for name, paths in files.items()
    }


def components(recipe: Recipe) -> list[object]:
    """The components of a recipe."""
    found = [getattr(recipe, axis) for axis in Recipe.axes]
    return [one for part in found for one in (part if isinstance(part, tuple) else [part])]


def file_of(made: object) -> Path:
    """The file that something is defined in."""
    return Path(inspect.getfile(inspect.unwrap(made)))  # type: ignore[arg-type]


def lines_of(files: list[Path]) -> tuple[int, int]:
    """Lines of some files, and lines of code among them."""
    texts = [path.read_text("utf-8") for path in files]
    return sum(len(text.splitlines()) for text in texts), sum(map(lines_of_code, texts))


def lines_of_code(text: str) -> int:
    """Lines of a module without docstrings, comments and empty lines."""
    tokens = tokenize.tokenize(io.BytesIO(text.encode()).readline)
    numbers = {n for one in tokens if one.type not in _NO_CODE for n in range(one.start[0], one.end[0] + 1)}
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, _DOCUMENTED) and ast.get_docstring(node) is not None:
            first = node.body[0]
            numbers -= set(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    return len(numbers)
