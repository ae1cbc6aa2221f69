"""Blocks between markers in a Markdown file, and the tables in them."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Number:
    """A figure of a table with its 95 % interval, which one seed does not have."""

    value: float
    low: float | None = None
    high: float | None = None

    @classmethod
    def of(cls, cell: str) -> Number | None:
        """Read "+1.6 [-5.5, +8.6]" or "1.6"; None for any other text."""
        found = re.fullmatch(r"([-+]?[\d.]+)(?: \[([-+]?[\d.]+), ([-+]?[\d.]+)\])?", cell)
        return None if found is None else cls(*(None if part is None else float(part) for part in found.groups()))

    @property
    def sign(self) -> int:
        """1 or -1 where the interval excludes 0, otherwise 0."""
        if self.low is None or self.high is None:
            return 0
        return (self.low > 0) - (self.high < 0)


def block(text: str, name: str) -> str:
    """Return the text between the markers of a name, empty if there are none."""
    found = re.search(rf"<!-- {name} -->\n(.*?)<!-- end of {name} -->", text, re.DOTALL)
    return found[1] if found else ""


def put(text: str, name: str, inside: str) -> str:
    """Replace the text between the markers of a name, or append it with its markers."""
    whole = f"<!-- {name} -->\n{inside.strip()}\n<!-- end of {name} -->"
    old = re.compile(rf"<!-- {name} -->.*?<!-- end of {name} -->", re.DOTALL)
    return old.sub(lambda _: whole, text) if old.search(text) else f"{text.rstrip()}\n\n{whole}\n"


def sections(inside: str) -> dict[str, str]:
    """Split a block at its ### headings."""
    parts = re.split(r"^### (.*)\n", inside, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def merged(old: str, new: str) -> str:
    """Return a block whose tables are the new ones, with the old ones, and old rows, that were not run again.

    Sections are the same where their headings are, but for the number of rounds at the end.  In a table of the same
    columns, rows that agree in the cells before "recipe" were run together, so that they are replaced together."""
    before, after = ({_called(title): (title, text) for title, text in sections(one).items()} for one in (old, new))
    for name in before.keys() & after.keys():
        title, text = after[name]
        after[name] = (title, merged_rows(before[name][1], text, "recipe") if title == before[name][0] else text)
    return "\n\n".join(f"### {title}\n{text.rstrip()}" for title, text in (before | after).values()) if after else new


def _called(title: str) -> str:
    return re.sub(r"( \([\d,]+ parameters\))?, \d+ rounds$", "", title)


def merged_rows(old: str, new: str, column: str) -> str:
    """Return the new table with the old rows that were not run again.

    Rows that agree in the cells before a column were run together, so that they are replaced together."""
    lines = [[line for line in text.splitlines() if line.startswith("|")] for text in (old, new)]
    heads = [cell.strip() for cell in lines[1][0].strip("|").split("|")] if lines[1] else []
    if column not in heads or lines[0][:1] != lines[1][:1]:
        return new
    found: list[dict[tuple[str, ...], list[str]]] = [{}, {}]
    for groups, group_lines in zip(found, lines, strict=True):
        for line in group_lines[2:]:
            group = tuple(cell.strip() for cell in line.strip("|").split("|")[: heads.index(column)])
            groups.setdefault(group, []).append(line)
    together = "\n".join([*lines[1][:2], *(line for group in (found[0] | found[1]).values() for line in group)])
    return new.replace("\n".join(lines[1]), together)


def rows(inside: str) -> list[dict[str, str]]:
    """Return the rows of the first table in a text, by the names of its columns."""
    lines = [line.strip().strip("|") for line in inside.splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in line.split("|")] for line in lines]
    return [dict(zip(cells[0], line, strict=True)) for line in cells[2:] if len(line) == len(cells[0])]


def table(heads: list[str], lines: list[list[str]]) -> str:
    """Return a Markdown table."""
    return "\n".join(f"| {' | '.join(line)} |" for line in [heads, ["---"] * len(heads), *lines])
