"""A folder to start from: `piebald new`."""

from __future__ import annotations

import json
import re
import tomllib
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from piebald.cli.app import app
from piebald.core.errors import SettingError

_BLOCK = re.compile(r"^```(\w+)\n(?:# ([\w.]+\.\w+)\n)?(.*?)^```\n", re.MULTILINE | re.DOTALL)


def template(name: str) -> tuple[dict[str, str], list[tuple[str, str]]]:
    """Return the files of a template by name, and the cells of its notebook as pairs of kind and source.

    A template is a page: a block that begins with the name of a file is that file, and the other Python is cells.
    """
    page = (files("piebald.cli") / "templates" / f"{name}.md").read_text("utf-8")
    contents, cells, text, end = {"README.md": page}, [], "", 0
    for block in _BLOCK.finditer(page):
        language, file, source = block.groups()
        text += page[end : block.start()]
        end = block.end()
        if file:
            contents[file] = source
        elif language == "python":
            cells += [("markdown", text.strip()), ("code", source.strip())]
            text = ""
        else:
            text += block[0]
    cells.append(("markdown", (text + page[end:]).strip()))
    return contents, [(kind, source) for kind, source in cells if source]


def notebook(cells: list[tuple[str, str]]) -> dict[str, Any]:
    """Return cells as a notebook of format 4.4."""
    code: dict[str, Any] = {"execution_count": None, "outputs": []}
    return {
        "nbformat": 4,
        # format 4.5 demands an id of each cell
        "nbformat_minor": 4,
        "metadata": {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}},
        "cells": [
            {"cell_type": kind, "metadata": {}, "source": source, **(code if kind == "code" else {})}
            for kind, source in cells
        ],
    }


def _schema_text() -> str:
    from piebald.experiments.reference import schema

    return json.dumps(schema(), indent=1) + "\n"


@app.command(name="schema")
def print_schema() -> None:
    """Print the JSON schema of experiment files, by which editors complete and check them."""
    print(_schema_text(), end="")


@app.command()
def new(
    folder: Annotated[Path, typer.Argument(help="The folder to make.")],
    kind: Annotated[
        Literal["table", "images", "text", "sites", "method"], typer.Option("--template", help="What to start from.")
    ] = "table",
) -> None:
    """Make a folder to start from: an experiment that runs at once, a test and a notebook."""
    from piebald.experiments.reference import SCHEMA, others

    contents, cells = template(kind)
    text = contents["experiment.toml"]
    keys, first_section, sections = text.partition("\n[")
    # editors that know TOML read the schema that the first line names; keys stand before all sections
    keys = f"#:schema ./{SCHEMA}\n{keys}\n{others(tomllib.loads(text))}"
    contents |= {"experiment.toml": f"{keys}{first_section}{sections}", SCHEMA: _schema_text()}
    try:
        # fails where it exists, so that nothing of the user's is overwritten
        folder.mkdir(parents=True)
        for name, text in {**contents, "notebook.ipynb": json.dumps(notebook(cells), indent=1) + "\n"}.items():
            (folder / name).write_text(text, "utf-8")
    except OSError as error:
        raise SettingError(f"{folder} cannot be made ({error.strerror}): give the name of a new folder") from None
    command = "up" if kind == "sites" else "run"
    print(f"{folder} has {', '.join(sorted(contents))} and notebook.ipynb; try:")
    print(f"  cd {folder} && piebald {command} experiment.toml")
