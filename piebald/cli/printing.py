"""Printing of results: tables for people, one JSON object for programs."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pydantic_core import to_jsonable_python

from piebald.core.plain_text import printable

_NO_TERMINAL = 10_000  # letters of a line where nobody looks at it
_SHORTEST = 12  # letters of a cell that is cut

if TYPE_CHECKING:
    from piebald.cli.app import SharedOptions
    from piebald.report.tables import History


def print_json(value: Mapping[str, Any] | Sequence[Any]) -> None:
    """Print one JSON object."""
    # JSON has no NaN; a score that does not exist is null
    plain = to_jsonable_python(value, inf_nan_mode="null", fallback=str)
    print(json.dumps(plain, ensure_ascii=False))


def print_result(options: SharedOptions, value: Mapping[str, Any], line: str) -> None:
    """Print what a command did: one JSON object with --json, else a line for people."""
    if options.as_json:
        print_json(value)
    else:
        options.say(line)


def print_table(
    heading: Sequence[str], rows: Sequence[Sequence[Any]], wide: bool = True, width: int | None = None
) -> None:
    """Print rows under a heading, with a dash for None.

    Cells are printed as they are: square brackets in a name are no markup, and no name moves the cursor.

    Args:
        heading: names of the columns, the most important ones first.
        rows: the cells of each row.
        wide: whether all columns are printed, and long cells go on below; else the columns that have a value, as far
            as they fit.
        width: letters of a line; by default those of the terminal, or of the variable COLUMNS where not all columns
            are wanted.  Output that is no terminal has lines as long as it takes, for grep.
    """
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from piebald.report.page.markup import plain_cell

    sized = sys.stdout.isatty() or (not wide and os.environ.get("COLUMNS", "").isdecimal())
    console = Console(width=width if width or sized else _NO_TERMINAL, highlight=False)
    cells = [[printable(plain_cell(cell)) for cell in row] for row in rows]
    heading = [printable(name) for name in heading]
    shown = list(range(len(heading)))
    if not wide and console.width < _NO_TERMINAL:
        shown, cells = _fitting(heading, cells, console.width)
    table = Table(box=None, pad_edge=False, header_style="bold", show_header=any(heading))
    for column in shown:
        table.add_column(Text(heading[column]), no_wrap=not wide)
    for row in cells:
        table.add_row(*(Text(row[column]) for column in shown))
    with console.capture() as printed:
        console.print(table)
    # rich fills lines with blanks up to the width
    print(*(line.rstrip() for line in printed.get().splitlines()), sep="\n")
    if lost := [name for column, name in enumerate(heading) if column not in shown]:
        print(f"\nnot shown: {', '.join(lost)} (--wide shows them)")


def _fitting(heading: Sequence[str], cells: list[list[str]], width: int) -> tuple[list[int], list[list[str]]]:
    """Return the columns that fit, and the cells; only sentences and the first column are cut, all else is left out."""
    shown, room = list[int](), width
    for column, name in enumerate(heading):
        values = [row[column] for row in cells]
        # never the first, without which a row has no name
        if column and set(values) <= {"-", ""}:
            continue
        longest = max(map(len, [name, *values]))
        space = room - (2 if shown else 0)
        sentences = all(" " in value for value in values if len(value) > space)
        if (longest > space >= max(len(name), _SHORTEST) and sentences) or not shown:
            longest = min(longest, space)
            values = [
                value if len(value) <= longest else f"{value[: longest - 1]}\N{HORIZONTAL ELLIPSIS}" for value in values
            ]
            cells = [[*row[:column], value, *row[column + 1 :]] for row, value in zip(cells, values, strict=True)]
        elif longest > space:
            continue
        shown.append(column)
        room = space - longest
    return shown, cells


def facts(history: History) -> dict[str, Any]:
    """Return the figures of a run; the metric has its own name, e.g. "accuracy"."""
    from piebald.report.page.wording import rounds

    final = history.final
    facts = {name: final[name] for name in ("recipe", "label", "rounds", "seed", "status")}
    facts[history.metric] = final["mean"]
    spread = ("sd", "worst_decile", "q10", "median", "q90")
    names = (*spread, "common", "best", "unseen", "chosen", "bytes_up", "bytes_down", "seconds", "wall")
    if final["untrained"]:  # both numbers: `accuracy` counts every client
        facts |= {"untrained": final["untrained"], "trained_mean": history.figures(untrained=False)["mean"]}
        facts["why_untrained"] = history.reasons(history.untrained, "train")
    if history.held_out:  # the metric is of these clients alone
        facts["held_out"] = history.held_out
    if history.unscored:
        facts["unscored"] = history.unscored
        facts["why_unscored"] = history.reasons(history.unscored, "evaluate")
    failed = {row["name"]: row for row in history.failures if row["kind"] == "train"}
    failed = {name: row for name, row in failed.items() if name not in facts.get("why_untrained", {})}
    if failed:
        facts["failed"] = {name: f"{row['reason']} ({rounds(row['rounds'])})" for name, row in failed.items()}
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
        for name in {"unscored", "held_out"} & cells.keys():
            cells[name] = names(cells[name])
        for name in ("why_untrained", "why_unscored", "failed"):
            if name in cells:
                reasons = {client: reason for client, reason in cells[name].items() if reason}
                cells[name] = _listed(reasons) if reasons else None
        print_table(("", ""), list(cells.items()))


def _listed(reasons: Mapping[str, str]) -> str:
    """Return names with their reasons on one line, the first ten of them."""
    shown = "; ".join(f"{name}: {reason}" for name, reason in list(reasons.items())[:10])
    return f"{shown}; and {len(reasons) - 10} more" if len(reasons) > 10 else shown


def recipe_toml(entry: Mapping[str, Any]) -> str:
    """Return a recipe as a [recipe] section with its defaults, and a comment on each setting."""
    from piebald.settings.toml_document import pair

    lines = [f"# {entry['summary']}", f"# {entry['paper']}", "[recipe]", pair("name", entry["name"])]
    for name, field in entry["fields"].items():
        written = f"# {name} = ..." if field["default"] is None else pair(name, field["default"])
        doc = f": {field['doc']}" if field.get("doc") else ""
        lines.append(f"{written}  # {field['type']}{doc}")
    return "\n".join(lines) + "\n"
