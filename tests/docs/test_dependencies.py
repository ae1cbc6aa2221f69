"""The page about dependencies names them all, with the licences that they state."""

from __future__ import annotations

import re
import tomllib
from importlib.metadata import PackageNotFoundError, metadata
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
WORDS = ("apache", "bsd", "gpl", "isc", "matplotlib", "mit", "mpl", "psf", "python software foundation")


def rows() -> dict[tuple[str, str], str]:
    """The licence of each package, by what it is installed with."""
    page = (ROOT / "docs" / "reference" / "dependencies.md").read_text()
    cells = re.findall(r"^\| (\S+) \| (\S+) \| ([^|]+) \| [^|]+ \|$", page, re.MULTILINE)
    return {
        (extra.strip("`"), name): licence.strip("* ") for extra, name, licence in cells if not extra.startswith("-")
    }


def wanted() -> set[tuple[str, str]]:
    """The direct dependencies, without those of developers."""
    groups = {"always": PROJECT["dependencies"], **PROJECT["optional-dependencies"]}
    named = {(group, re.split(r"[<>=\[]", one)[0]) for group, found in groups.items() for one in found}
    return {(group, name) for group, name in named if group != "dev" and name != "piebald"}


def test_every_direct_dependency_is_named_and_no_other() -> None:
    assert set(rows()) == wanted()


@pytest.mark.parametrize(("group", "name"), sorted(wanted()))
def test_a_licence_is_what_the_package_says(group: str, name: str) -> None:
    try:
        about = metadata(name)
    except PackageNotFoundError:
        pytest.skip(f"{name} is not installed")
    kinds = " ".join(line for line in about.get_all("Classifier", []) if line.startswith("License"))
    stated = f"{about.get('License-Expression', '')} {about.get('License', '')[:200]} {kinds}".lower()
    said = rows()[group, name].lower()
    assert any(word in said and word in stated for word in WORDS), (said, stated)
    assert ("gpl" in stated.split("and")[0]) == ("gpl" in said)
