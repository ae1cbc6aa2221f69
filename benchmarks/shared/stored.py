"""What a benchmark keeps outside its code: figures that papers print, texts of its page, and results of its runs."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Any

from shared.markdown import block

Line = dict[str, Any]
PRINTED = Path(__file__).parents[1] / "papers" / "printed.toml"


def table(path: Path) -> dict[str, Any]:
    """Return the tables of a TOML file."""
    return tomllib.loads(path.read_text("utf-8"))


def printed(paper: str) -> dict[str, Any]:
    """Return what a paper prints."""
    return dict(table(PRINTED)[paper])


def texts(path: Path) -> dict[str, str]:
    """Return the texts of a page by the names in their markers; braces in them are for `str.format`."""
    whole = path.read_text("utf-8")
    return {name: block(whole, name) for name in re.findall(r"<!-- end of (.*?) -->", whole)}


def with_notes(page: Path, text: str) -> None:
    """Write a page; what stands below its mark `notes` is written by hand and stays."""
    notes = page.read_text("utf-8").partition("<!-- notes -->")[2] if page.exists() else "\n"
    page.write_text(f"{text}<!-- notes -->{notes}", "utf-8")


class Lines:
    """Results of runs, a JSON object a line, written when a run has ended; so nothing is run twice.

    Args:
        path: the file; it need not exist.
        key: names of the fields that tell runs apart.
    """

    def __init__(self, path: Path, *key: str) -> None:
        self.path, self.key = path, key

    def read(self) -> list[Line]:
        """Return all lines; one that a kill has cut off is left out."""
        found = []
        for text in self.path.read_text("utf-8").splitlines() if self.path.exists() else ():
            try:
                found.append(json.loads(text))
            except json.JSONDecodeError:
                continue
        return found

    def done(self) -> set[tuple[Any, ...]]:
        """Return the keys of the runs that have ended."""
        return {tuple(line[name] for name in self.key) for line in self.read()}

    def add(self, line: Line) -> None:
        """Add a line, after one that a kill may have cut off."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        cut_off = self.path.exists() and not self.path.read_bytes().endswith(b"\n")
        with self.path.open("a", encoding="utf-8") as file:
            file.write("\n" * cut_off + json.dumps(line, separators=(",", ":")) + "\n")
