"""Instructions install from a clone or a wheel, never by a name that anybody could register."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from piebald.core.errors import install

ROOT = Path(__file__).parents[2]
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
PLACES = ("README.md", "CONTRIBUTING.md", "docs", "deploy", "examples", "piebald")


def texts() -> dict[Path, str]:
    found = [path for place in PLACES for path in [ROOT / place, *(ROOT / place).rglob("*")] if path.is_file()]
    return {path: path.read_text("utf-8", "ignore") for path in found if path.suffix not in (".png", ".gz", ".pyc")}


def test_nothing_is_installed_by_the_name_of_the_package() -> None:
    for path, text in texts().items():
        assert not re.search(r"""pip install ["']?piebald(?![-\w]*\*?\.whl|-)""", text), path


def test_every_instruction_names_an_extra_that_there_is_and_reads_as_messages_do() -> None:
    form = install("hf").partition(" in ")[0].replace("hf", r"([a-z,]+)").replace("[", r"\[", 1).replace("]'", r"\]'")
    named = 0
    for path, text in texts().items():
        for extras in re.findall(form, text):
            named += 1
            assert set(extras.split(",")) <= set(EXTRAS), path
    assert named > 10
