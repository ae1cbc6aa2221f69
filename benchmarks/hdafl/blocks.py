"""Blocks between markers in a Markdown file, and the tables in them."""

from __future__ import annotations

import re
from collections.abc import Sequence

from shared.markdown import cells, sections

BASE = "FedAvg"  # what the others are compared with


def merged(old: str, new: str, order: Sequence[str] = ()) -> str:
    """Return a block whose tables are the new ones, with the old ones, and old rows, that were not run again.

    Sections are the same where their headings are, but for the number of rounds at the end.  `merged_rows` says which
    rows stay, and `order` how recipes follow each other."""
    before, after = ({_called(title): (title, text) for title, text in sections(one).items()} for one in (old, new))
    for name in before.keys() & after.keys():
        title, text = after[name]
        after[name] = (title, merged_rows(before[name][1], text, "recipe", order) if title == before[name][0] else text)
    return "\n\n".join(f"### {title}\n{text.rstrip()}" for title, text in (before | after).values()) if after else new


def _called(title: str) -> str:
    return re.sub(r"( \([\d,]+ parameters\))?, \d+ rounds$", "", title)


def merged_rows(old: str, new: str, column: str, order: Sequence[str] = ()) -> str:
    """Return the new table with the old rows that were not run again.

    Rows that agree in the cells before a column were run together, so that they are replaced together.  But where
    FedAvg's row is the same to the last digit, the others were compared with the same runs: each stands for itself."""
    lines = [[line for line in text.splitlines() if line.startswith("|")] for text in (old, new)]
    heads = cells(lines[1][0]) if lines[1] else []
    if column not in heads or lines[0][:1] != lines[1][:1]:
        return new
    before, after = (_groups(part[2:], heads.index(column)) for part in lines)
    for group in before.keys() & after.keys():
        if BASE in before[group] and before[group][BASE] == after[group].get(BASE):
            both = before[group] | after[group]
            after[group] = {name: both[name] for name in sorted(both, key=lambda name: _place(name, order))}
    together = [line for group in (before | after).values() for line in group.values()]
    return new.replace("\n".join(lines[1]), "\n".join([*lines[1][:2], *together]))


def _place(name: str, order: Sequence[str]) -> int:
    return order.index(name) if name in order else len(order)


def _groups(lines: list[str], column: int) -> dict[tuple[str, ...], dict[str, str]]:
    """Return lines by the cells before a column and the one in it."""
    found: dict[tuple[str, ...], dict[str, str]] = {}
    for line in lines:
        row = cells(line)
        found.setdefault(tuple(row[:column]), {})[row[column]] = line
    return found
