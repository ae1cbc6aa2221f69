"""Printing of results: tables for people, one JSON object for programs."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pydantic_core import to_jsonable_python

from piebald.core.plain_text import printable
from piebald.core.result_table import ResultTable

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


def print_table(table: ResultTable, wide: bool = True, width: int | None = None, most: int | None = None) -> None:
    """Print a table; square brackets in a name are no markup, and no name moves the cursor.

    Args:
        table: what is printed.
        wide: whether all columns are printed; else those that have a value, as far as they fit beside each other.
        width: columns of the terminal; by default those that it has, or the variable COLUMNS where not all columns are
            wanted.  Output that is no terminal has lines as long as it takes, for grep.
        most: rows that are printed; all by default.
    """
    if width is None and (sys.stdout.isatty() or (not wide and os.environ.get("COLUMNS", "").isdecimal())):
        width = shutil.get_terminal_size().columns
    shown = table if wide or width is None else table.fitting(width)
    print(shown.first(most).text(width))
    if lost := [name for name in table.columns if name not in shown.columns]:
        print(f"\nnot shown: {', '.join(map(printable, lost))} (--wide shows them)")
    if most is not None and len(table) > most:
        print(f"and {len(table) - most} more (--json has all)")


def print_facts(values: Mapping[str, Any]) -> None:
    """Print values beside their names."""
    print_table(ResultTable.of_facts(values))


def print_run(history: History, options: SharedOptions) -> None:
    """Print the results of a run."""
    if options.as_json:
        print_json(history.facts())
    elif not options.quiet:
        print_table(history.table())


def recipe_toml(entry: Mapping[str, Any]) -> str:
    """Return a recipe as a [recipe] section with its defaults, and a comment on each setting."""
    from piebald.settings.toml_document import pair

    lines = [f"# {entry['summary']}", f"# {entry['paper']}", "[recipe]", pair("name", entry["name"])]
    for name, field in entry["fields"].items():
        written = f"# {name} = ..." if field["default"] is None else pair(name, field["default"])
        doc = f": {field['doc']}" if field.get("doc") else ""
        lines.append(f"{written}  # {field['type']}{doc}")
    return "\n".join(lines) + "\n"
