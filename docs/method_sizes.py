"""How large each method is: the files that no other recipe needs, and their lines."""

from __future__ import annotations

import ast
import inspect
import io
import tokenize
from collections import Counter
from pathlib import Path

import piebald
from piebald.methods.recipe import Recipe

_NO_CODE = {
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENCODING,
    tokenize.ENDMARKER,
}  # fmt: skip
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef)


def own_files() -> dict[str, list[Path]]:
    """The files of each recipe that no other one has."""
    made = {name: piebald.recipes.make(name) for name in piebald.recipes.names()}
    files = {name: {file_of(type(one)) for one in components(recipe)} for name, recipe in made.items()}
    often = Counter(path for paths in files.values() for path in paths)
    return {
        name: [file_of(getattr(piebald.recipes, name)), *sorted(path for path in paths if often[path] == 1)]
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
