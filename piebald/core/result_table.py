"""The table that every result is shown as: text of any width, HTML, Markdown, CSV, JSON and a data frame."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, Self

from pydantic_core import to_jsonable_python

from piebald.core.plain_text import csv_text, html_text, printable, wrap

if TYPE_CHECKING:
    import pandas

_GAP = 2  # blanks between columns
_WHOLE = 12  # columns of a terminal up to which a cell stays on one line
_UNLIMITED = 10_000  # columns of a line where nobody looks at it


class ResultTable(list[dict[str, Any]]):
    r"""The rows of a result, each a dictionary by column; it can be shown and exported in several ways.

    Args:
        rows: dictionaries, or cells in the order of the columns.
        columns: their names, the most important ones first; by default those of the first row.
        units: of columns, shown behind their names.
        title: a sentence above the table.
        notes: sentences below it.
        headed: whether the names of the columns are shown.

    Examples:
        >>> table = ResultTable([["north", 0.8125, None], ["south", 0.75, 3]], ("site", "score", "behind"))
        >>> table[0]["score"], list(table.frame().columns)
        (0.8125, ['site', 'score', 'behind'])
        >>> print(table.text())
        site   score   behind
        north  0.8125  -
        south  0.75    3
        >>> print(table.text(width=14))
        site   score
        north  0.8125
        south  0.75
        <BLANKLINE>
        site   behind
        north  -
        south  3
        >>> table.only("site", "score").csv()
        'site,score\nnorth,0.8125\nsouth,0.75\n'
    """

    def __init__(
        self,
        rows: Iterable[Mapping[str, Any] | Sequence[Any]] = (),
        columns: Sequence[str] = (),
        *,
        units: Mapping[str, str] | None = None,
        title: str = "",
        notes: Sequence[str] = (),
        headed: bool = True,
    ) -> None:
        rows = list(rows)
        first = rows[0] if rows else None
        self.columns = tuple(columns) or (tuple(first) if isinstance(first, Mapping) else ())
        self.units, self.title, self.notes, self.headed = dict(units or {}), title, tuple(notes), headed
        super().__init__(
            dict(row) if isinstance(row, Mapping) else dict(zip(self.columns, row, strict=True)) for row in rows
        )

    @classmethod
    def of_facts(cls, facts: Mapping[str, Any], **about: Any) -> Self:
        """Return a table of two columns, names and values, without a heading."""
        return cls(facts.items(), ("name", "value"), headed=False, **about)

    @property
    def heading(self) -> list[str]:
        """The names of the columns with their units."""
        units = {name: f" ({unit})" for name, unit in self.units.items()}
        return [printable(f"{name}{units.get(name, '')}") for name in self.columns]

    def only(self, *columns: str) -> ResultTable:
        """Return the table of some columns alone, in this order; a row that lacks one has None in it."""
        return self._with([[row.get(name) for name in columns] for row in self], columns)

    def first(self, most: int | None) -> ResultTable:
        """Return the table of the first rows; of all where no number is given."""
        return self._with(self[:most], self.columns)

    def _with(self, rows: Iterable[Mapping[str, Any] | Sequence[Any]], columns: Sequence[str]) -> ResultTable:
        return ResultTable(rows, columns, units=self.units, title=self.title, notes=self.notes, headed=self.headed)

    # ---------------------------------------------------------------------------------------------------- as text

    def __str__(self) -> str:
        return self.text()

    def text(self, width: int | None = None) -> str:
        """Return the title, the table and the notes as lines of text.

        A cell goes on below at the end of a word.  Columns that do not fit come in further tables, each with the first
        column.  A word is broken only where it is longer than a line.

        Args:
            width: columns of the terminal; lines are as long as it takes by default.
        """
        width = width or _UNLIMITED
        grid = [self.heading, *self._cells()] if self.headed else self._cells()
        least = _least(grid, width)
        tables = [_lines([[row[column] for column in block] for row in grid], width) for block in _blocks(least, width)]
        notes = [line for note in self.notes for line in wrap(note, width)]
        parts = [wrap(self.title, width), *tables, notes]
        return "\n\n".join("\n".join(lines) for lines in parts if lines)

    def fitting(self, width: int) -> ResultTable:
        """Return the table of the columns that have a value, as far as they fit beside each other."""
        cells = self._cells()
        filled = [
            name
            for column, name in enumerate(self.columns)
            # never the first, without which a row has no name
            if not column or any(row[column] not in ("-", "") for row in cells)
        ]
        shown = self.only(*filled)
        least = _least([shown.heading, *shown._cells()], width)
        return shown.only(*(filled[column] for block in _blocks(least, width)[:1] for column in block))

    def _cells(self) -> list[list[str]]:
        return [[printable(plain_cell(row.get(name))) for name in self.columns] for row in self]

    # ------------------------------------------------------------------------------------------- in other formats

    def html(self) -> str:
        """Return the table as HTML, as notebooks show it; each cell is shown as text.

        Examples:
            >>> ResultTable.of_facts({"<north>": 0.25}).html()
            '<table><tbody><tr><td>&lt;north&gt;</td><td>0.25</td></tr></tbody></table>'
        """

        def line(cells: Sequence[str], tag: str) -> str:
            return f"<tr>{''.join(f'<{tag}>{html_text(cell)}</{tag}>' for cell in cells)}</tr>"

        title = f"<p><strong>{html_text(self.title)}</strong></p>" if self.title else ""
        head = f"<thead>{line(self.heading, 'th')}</thead>" if self.headed else ""
        body = "".join(line(row, "td") for row in self._cells())
        notes = "".join(f"<p>{html_text(note)}</p>" for note in self.notes)
        return f"{title}<table>{head}<tbody>{body}</tbody></table>{notes}"

    def _repr_html_(self) -> str:
        return self.html()

    def markdown(self) -> str:
        """Return the rows as a table in Markdown."""
        lines = [self.heading, ["---"] * len(self.columns), *self._cells()]
        return "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines)

    def csv(self) -> str:
        """Return the rows as CSV, in which no text is a formula for a spreadsheet."""
        return csv_text(self.frame())

    def json(self) -> str:
        """Return the rows as JSON, with null for what is not a finite number."""
        return json.dumps(to_jsonable_python(list(self), inf_nan_mode="null", fallback=str), ensure_ascii=False)

    def frame(self) -> pandas.DataFrame:
        """Return the rows as a data frame."""
        import pandas

        return pandas.DataFrame([[row.get(name) for name in self.columns] for row in self], columns=list(self.columns))


def _least(grid: Sequence[Sequence[str]], width: int) -> list[int]:
    """Return how wide each column must be, so that no word is broken if that can be."""
    from rich.cells import cell_len

    least = list[int]()
    for cells in zip(*grid, strict=True):
        word = max((cell_len(word) for cell in cells for word in cell.split()), default=1)
        room = width - _GAP - least[0] if least else width // 2
        least.append(max(1, min(max(word, min(max(map(cell_len, cells)), _WHOLE)), room)))
    return least


def _blocks(least: Sequence[int], width: int) -> list[list[int]]:
    """Return the columns of each table: the first one, and as many further ones as fit."""
    blocks = [[0]] if least else []
    for column in range(1, len(least)):
        taken = sum(least[other] + _GAP for other in blocks[-1])
        if taken + least[column] > width and len(blocks[-1]) > 1:
            blocks.append([0])
        blocks[-1].append(column)
    return blocks


def _lines(grid: Sequence[Sequence[str]], width: int) -> list[str]:
    """Return the lines of a table whose columns all fit."""
    from rich.cells import cell_len, set_cell_size

    least = _least(grid, width)
    widths = [max(map(cell_len, cells), default=0) for cells in zip(*grid, strict=True)]
    while sum(widths) + _GAP * (len(widths) - 1) > width:
        # the widest gives way first, as it has most words
        column = max(range(len(widths)), key=lambda column: (widths[column] > least[column], widths[column]))
        if widths[column] <= least[column]:
            break
        widths[column] -= 1
    lines = []
    for row in grid:
        wrapped = [wrap(cell, size) if size else [] for cell, size in zip(row, widths, strict=True)]
        for cells in zip_longest(*wrapped, fillvalue=""):
            sized = (set_cell_size(cell, size) for cell, size in zip(cells, widths, strict=True))
            lines.append((" " * _GAP).join(sized).rstrip())
    return lines


class Tabular(ABC):
    """A result with a table, which notebooks show."""

    @abstractmethod
    def table(self) -> ResultTable:
        """Return the result as a table."""

    def publication(self) -> ResultTable:
        """Return the table as it is printed in a paper, with fewer digits."""
        return self.table()

    def _repr_html_(self) -> str:
        return self.table().html()


def p_text(value: float) -> str:
    """Return a p-value as papers print it.

    Examples:
        >>> p_text(0.03456), p_text(0.2), p_text(1e-9), p_text(float("nan"))
        ('0.035', '0.20', '<0.001', '-')
    """
    if value != value:  # NaN
        return "-"
    return "<0.001" if value < 0.001 else f"{value:.3f}" if value < 0.1 else f"{value:.2f}"


def plain_cell(value: object) -> str:
    """Return a value as the cell of a table: four digits of a number, a dash for None, the items of a list.

    Examples:
        >>> plain_cell(0.123456), plain_cell(None), plain_cell(12), plain_cell(["a", "b"])
        ('0.1235', '-', '12', 'a b')
    """
    if isinstance(value, list):
        return " ".join(map(str, value)) or "-"
    return "-" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)
