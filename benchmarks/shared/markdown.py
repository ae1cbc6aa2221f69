"""Blocks between markers in a Markdown file, and the tables in them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence


def block(text: str, name: str) -> str:
    """Return the text between the markers of a name, empty if there are none."""
    match = re.search(rf"<!-- {name} -->\n(.*?)<!-- end of {name} -->", text, re.DOTALL)
    return match[1] if match else ""


def put(text: str, name: str, inside: str, *, append: bool = False) -> str:
    """Replace the text between the markers of a name.

    Args:
        text: the page.
        name: the name in the markers.
        inside: what stands between them afterwards.
        append: add the block with its markers at the end of a page that does not have it.
    """
    whole = f"<!-- {name} -->\n{inside.strip()}\n<!-- end of {name} -->"
    marked = re.compile(rf"<!-- {name} -->\n.*?<!-- end of {name} -->", re.DOTALL)
    if append and not marked.search(text):
        return f"{text.rstrip()}\n\n{whole}\n"
    return marked.sub(lambda _: whole, text)


def sections(inside: str) -> dict[str, str]:
    """Split a block at its ### headings."""
    parts = re.split(r"^### (.*)\n", inside, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def cells(line: str) -> list[str]:
    """Return the cells of a line of a table."""
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def body(inside: str) -> list[list[str]]:
    """Return the cells of each line of the tables in a text, without the two that the first begins with."""
    return [cells(line) for line in inside.splitlines() if line.startswith("|")][2:]


def rows(inside: str) -> list[dict[str, str]]:
    """Return the rows of the first table in a text, by the names of its columns."""
    lines = [cells(line) for line in inside.splitlines() if line.startswith("|")]
    return [dict(zip(lines[0], line, strict=True)) for line in lines[2:] if len(line) == len(lines[0])]


def table(heads: Sequence[object], lines: Iterable[Sequence[object]], *rules: str) -> str:
    """Return a Markdown table; `rules` are the cells of its second line, of which the last holds for all further."""
    first, *others = (f"| {' | '.join(map(str, line))} |" for line in (heads, *lines))
    rules = rules or (" --- ",)
    return "\n".join([first, f"|{'|'.join([*rules, *[rules[-1]] * len(heads)][: len(heads)])}|", *others])


def of_any(value: object) -> str:
    """Return any value as a cell: real numbers to four digits, and nothing for what is not there."""
    if value is None:
        return ""
    return f"{value:.4g}" if isinstance(value, float) else str(value).replace("|", "/")
