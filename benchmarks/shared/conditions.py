"""The paper's conditions beside those of a run, as text: what `--dry-run` prints."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from shared.stored import table

LEGEND = ["", "* differs from the paper, or says more than it"]


def filled(path: Path, **here: Any) -> list[tuple[str, list[list[str]]]]:
    """Return the sections of a file, each a title and rows of a name, the paper's, and ours, which values fill in."""
    return [
        (one["title"], [[cell.format(**here) for cell in row] for row in one["rows"]])
        for one in table(path)["sections"]
    ]


def beside(rows: Iterable[Sequence[str]], name: int, paper: int) -> list[str]:
    """Return a line for each row of a name, the paper's, and ours, in columns of these widths; * where they differ."""
    return [f"  {what:{name}} {theirs:{paper}} {ours}{'' if theirs == ours else '   *'}" for what, theirs, ours in rows]
