"""What the tests of deploy/ share: its commands and the container file, parsed."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import typer.main
from typer.core import TyperGroup

from piebald.cli.program import app

DEPLOY = Path(__file__).parents[1] / "deploy"


def parse(words: Sequence[str]) -> dict[str, Any]:
    """Parse the words after `piebald` with the package's own command line, without running the command."""
    command: Any = typer.main.get_command(app)
    context = command.make_context("piebald", list(words[:1]))
    while isinstance(command, TyperGroup):
        command = command.commands[words[0]]
        words = words[1:]
    return dict(command.make_context("piebald", list(words), parent=context).params)


def instructions(text: str) -> list[tuple[str, str]]:
    """The instructions of a container file."""
    lines = re.sub(r"\\\n", "", re.sub(r"^#.*\n", "", text, flags=re.MULTILINE)).splitlines()
    return [(line.split(" ", 1)[0], line.split(" ", 1)[1]) for line in lines if line]


INSTRUCTIONS = instructions((DEPLOY / "Containerfile").read_text())
LAST = dict(INSTRUCTIONS[max(number for number, (name, _) in enumerate(INSTRUCTIONS) if name == "FROM") :])


def health() -> list[str]:
    """The words of the health check."""
    words: list[str] = json.loads(LAST["HEALTHCHECK"].partition("CMD ")[2])
    return words
