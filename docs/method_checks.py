"""What each method was compared with: the rows of benchmarks/crosscheck/RESULTS.md, by recipe."""

from __future__ import annotations

import re
from pathlib import Path

import piebald.recipes

RESULTS = Path(__file__).parents[1] / "benchmarks" / "crosscheck" / "RESULTS.md"


def section() -> list[str]:
    """The section of docs/reference/recipes.md about cross-checks, as lines."""
    text = ["## Cross-checks", ""]
    text += ["Each recipe beside another program, or its paper's equations in plain PyTorch, on the same rows from the"]
    text += ["same model: the largest difference of a parameter, from `benchmarks/crosscheck/RESULTS.md`, where the"]
    text += ["programs' versions are.", ""]
    text += ["| recipe | beside | what | largest difference | verdict |", "|---|---|---|---|---|"]
    for name in piebald.recipes.names():
        text += [f"| `{name}` | {' | '.join(row)} |" for row in rows_of(name)]
    absent = [f"`{name}`" for name in piebald.recipes.names() if not rows_of(name)]
    return [*text, "", f"Not compared with another program: {', '.join(absent)}."]


def rows_of(recipe: str) -> list[tuple[str, ...]]:
    """Program, quantity, largest difference and verdict of each comparison of a recipe."""
    lines = [line.strip("| ").split(" | ") for line in RESULTS.read_text("utf-8").splitlines() if line.startswith("| ")]
    return [
        (program, quantity, apart, verdict)
        for program, quantity, apart, _, verdict in lines
        if re.sub("[^a-z]", "", quantity.split(",")[0].lower()) == recipe.replace("_", "")
    ]
