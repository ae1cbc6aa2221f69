"""Tables as notebooks show them."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from typing import Any


def written(value: Any) -> str:
    """A value in a table: four digits of a number, a dash for None."""
    return "-" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


def html_table(heading: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """A table in HTML; whatever is in a cell is shown as text."""

    def line(cells: Sequence[Any], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{html.escape(written(cell))}</{tag}>" for cell in cells) + "</tr>"

    head = f"<thead>{line(heading, 'th')}</thead>" if any(heading) else ""
    return f"<table>{head}<tbody>{''.join(line(row, 'td') for row in rows)}</tbody></table>"
