"""Write measured figures into docs/howto/gpus.md: python benchmarks/gpu/figures.py build/gpu/results.json

Replaces the rows of the workloads that were measured; those of the others stay, with when they were last seen.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from ledger import SEEN, SPEED
from works import NAMES

PAGE = Path(__file__).parents[2] / "docs" / "howto" / "gpus.md"
BEGIN, END = "<!-- figures", "<!-- end of figures -->"


def row(tables: dict[str, dict[str, Any]], part: str, name: str) -> str | None:
    """The row of a workload, or None where it was not measured."""
    speed = tables.get(SPEED, {})
    ours, bare, peer = (speed.get(key, {}) for key in (name, f"{name}, bare loop", f"{name}, fedjax"))
    if "seconds a round" not in ours or "seconds a round" not in bare:
        return None
    seen, seconds, base = tables[SEEN][part], ours["seconds a round"], bare["seconds a round"]
    theirs = f"{peer['seconds a round']:.3g}" if "seconds a round" in peer else ""
    chosen = f"{seconds:.3g}, {ours['engine']}, {ours['stack']}"
    last = ", ".join(seen[key] for key in ("card", "date", "commit"))
    return f"| {name} | {base:.3g} | {chosen} | {seconds / base:.2g} | {theirs} | {last} |"


def written(page: str, tables: dict[str, dict[str, Any]]) -> str:
    """The page with the rows that were measured."""
    start, stop = page.index(BEGIN), page.index(END)
    lines = page[start:stop].split("\n")
    for part, name in NAMES.items():
        found = row(tables, part, name)
        lines = [found if found is not None and line.startswith(f"| {name} |") else line for line in lines]
    return page[:start] + "\n".join(lines) + page[stop:]


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text(), json.loads(Path(sys.argv[1]).read_text())["tables"]))
