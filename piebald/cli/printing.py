"""Printing of results: tables for people, one JSON object for programs."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from piebald.core.plain_text import printable

if TYPE_CHECKING:
    from piebald.cli.app import SharedOptions
    from piebald.report.tables import History


def print_json(value: Mapping[str, Any] | Sequence[Any]) -> None:
    """Print one JSON object."""
    # JSON has no NaN; a score that does not exist is null.
    print(json.dumps(_finite(value), ensure_ascii=False))


def _finite(value: Any) -> Any:
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        return None
    if isinstance(value, Mapping):
        return {str(key): _finite(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_finite(entry) for entry in value]
    return value if isinstance(value, str | int | float | bool | None) else str(value)


def print_table(heading: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """Print rows under a heading, with a dash for None.

    Cells are printed as they are: square brackets in a name are no markup, and no name moves the cursor.
    """
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from piebald.report.page.markup import plain_cell

    table = Table(box=None, pad_edge=False, header_style="bold", show_header=any(heading))
    for name in heading:
        table.add_column(Text(printable(name)))
    for row in rows:
        table.add_row(*(Text(printable(plain_cell(cell))) for cell in row))
    # Lines are not wrapped where output is not a terminal, for grep.
    Console(width=None if sys.stdout.isatty() else 10_000, highlight=False).print(table)


def facts(history: History) -> dict[str, Any]:
    """Return the figures of a run; the metric has its own name, e.g. "accuracy"."""
    final = history.final
    facts = {name: final[name] for name in ("recipe", "label", "rounds", "seed", "status")}
    facts[history.metric] = final["mean"]
    spread = ("sd", "worst_decile", "q10", "median", "q90")
    names = (*spread, "common", "best", "unseen", "chosen", "bytes_up", "bytes_down", "seconds", "wall")
    if final["untrained"]:  # both numbers: `accuracy` counts every client
        facts |= {"untrained": final["untrained"], "trained_mean": history.figures(untrained=False)["mean"]}
    if history.unscored:
        facts["unscored"] = history.unscored
    if budgets := history.meta.get("privacy"):
        facts["epsilon"] = {budget["unit"]: budget["epsilon_pld"] for budget in budgets}
    if lineage := history.meta.get("lineage"):
        facts["from"] = lineage["folder"]
    return facts | {name: final[name] for name in names} | {"run": str(history.path)}


def print_run(history: History, options: SharedOptions) -> None:
    """Print the results of a run."""
    from piebald.report.page.wording import names

    if options.as_json:
        print_json(facts(history))
    elif not options.quiet:
        cells = {name: cell for name, cell in facts(history).items() if cell is not None or name == history.metric}
        if isinstance(counts := cells.get("chosen"), dict):
            cells["chosen"] = ", ".join(f"{count} {name}" for name, count in counts.items())
        if "unscored" in cells:
            cells["unscored"] = names(cells["unscored"])
        print_table(("", ""), list(cells.items()))


def recipe_toml(entry: Mapping[str, Any]) -> str:
    """Return a recipe as a [recipe] section with its defaults, and a comment on each setting."""
    from piebald.settings.toml_document import pair

    lines = [f"# {entry['summary']}", f"# {entry['paper']}", "[recipe]", pair("name", entry["name"])]
    for name, field in entry["fields"].items():
        written = f"# {name} = ..." if field["default"] is None else pair(name, field["default"])
        doc = f": {field['doc']}" if field.get("doc") else ""
        lines.append(f"{written}  # {field['type']}{doc}")
    return "\n".join(lines) + "\n"
