"""Text that others wrote, made fit for logs, tables and terminals."""

from __future__ import annotations

import html
import logging
import re
import textwrap
import unicodedata
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

_SEQUENCE = re.compile(  # what terminals take for a command (ECMA-48), with 7-bit and with 8-bit introducers
    "(?:\x1b\\[|\x9b)[0-?]*[ -/]*[@-~]"  # control sequences: colours, cursor movements
    "|(?:\x1b[\\]PX^_]|[\x90\x98\x9d-\x9f])[^\x07\x1b\x9c]*(?:\x07|\x1b\\\\|\x9c)?"  # titles, links, device strings
    "|\x1b[ -/]*[0-~]"  # all others
)
WIDTH = 80  # columns of a terminal
_MORE = "\N{HORIZONTAL ELLIPSIS}"
_UNPRINTED = {"Cc", "Cf", "Cs", "Co", "Zl", "Zp"}  # controls, invisible formats and overrides of direction, surrogates


_FORMULA = {*"=+-@\uff1d\uff0b\uff0d\uff20"}  # what a formula begins with, in the width of East Asia as well
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")

if TYPE_CHECKING:
    import pandas as pd


@contextmanager
def any_letters() -> Iterator[None]:
    """A context in which matplotlib draws a box for a letter that its font lacks, and says nothing on the terminal."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from font", UserWarning)
        yield


@contextmanager
def errors_alone(logger: str) -> Iterator[None]:
    """A context in which a logger and those below it say nothing but errors."""
    log = logging.getLogger(logger)
    before = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(before)


def printable(text: object, longest: int | None = None) -> str:
    r"""One line of visible text, from text that others wrote.

    Escape sequences and characters that are not visible are left out: control characters (C0 and C1), overrides of the
    writing direction, characters of no width, lone surrogates.  All white space becomes single spaces.  What is left
    can neither move a terminal's cursor, nor forge a line of a log, nor read differently from what it says.

    Args:
        text: what others wrote.
        longest: characters to keep, None for all.

    Examples:
        >>> printable("red \x1b[31mtext\x1b[0m\nand a second line")
        'red text and a second line'
    """
    # whole sequences first: without its escape character the rest of one would be visible text
    visible = "".join(
        " " if letter.isspace() else letter
        for letter in _SEQUENCE.sub("", str(text))
        if letter.isspace() or _is_seen(letter)
    )
    return " ".join(visible.split())[:longest]


def visible(text: str) -> str:
    r"""Return text that others wrote without what cannot be seen, as in `printable`, and with its lines and blanks.

    Examples:
        >>> visible("red \x1b[31mtext\x1b[0m\n  a second\u202e line")
        'red text\n  a second line'
    """
    text = _SEQUENCE.sub("", text)
    unseen = {ord(letter): None for letter in {*text} - {"\n", "\t"} if not _is_seen(letter)}
    return text.translate(unseen)


def html_text(text: object, quote: bool = True) -> str:
    """Return text that others wrote as HTML: escaped, and without what cannot be seen."""
    return html.escape(visible(str(text)), quote)


def csv_text(table: pd.DataFrame) -> str:
    r"""Return a table as CSV, in which no text of others is a formula for a spreadsheet, and none cannot be seen.

    Examples:
        >>> import pandas
        >>> csv_text(pandas.DataFrame({"=cmd": ["@x", "-1", "a"], "n": [-0.5, 1.0, 2.0]}))
        "'=cmd,n\n'@x,-0.5\n-1,1.0\na,2.0\n"
    """
    shown = table.rename(columns=csv_cell)
    for name in shown.columns[[dtype.kind not in "biufc" for dtype in shown.dtypes]]:
        shown[name] = shown[name].map(csv_cell, na_action="ignore")
    return str(shown.to_csv(index=False, lineterminator="\n"))


def csv_cell(value: object) -> object:
    """Return what stands in a cell of a spreadsheet for a value: text that would be a formula gets an apostrophe."""
    if not isinstance(value, str):
        return value
    text = printable(value)
    return f"'{text}" if text[:1] in _FORMULA and not _NUMBER.fullmatch(text) else text


def wrap(text: str, width: int = WIDTH, most: int | None = None) -> list[str]:
    """Return a paragraph in lines of a width in columns of a terminal; what goes beyond the most lines is cut.

    Examples:
        >>> wrap("Nobody gains beyond chance", 14, 1)
        ['Nobody gains…']
    """
    from rich.cells import cell_len

    text = printable(text)
    # letters of East Asia take two columns, so a line holds fewer of them, half as many at worst
    letters = max(width // 2, width - (cell_len(text) - len(text)))
    return textwrap.wrap(text, letters, max_lines=most, placeholder=_MORE)


def cut(text: object, columns: int) -> str:
    """Return one line of text in at most so many columns of a terminal.

    Examples:
        >>> cut("university hospital", 11), cut("東京都", 5)
        ('university…', '東京…')
    """
    from rich.cells import cell_len, chop_cells

    line = printable(text)
    # one column is for the ellipsis, and a letter needs one at least
    return line if cell_len(line) <= columns else f"{chop_cells(line, max(columns, 2) - 1)[0]}{_MORE}"


def _is_seen(letter: str) -> bool:
    return unicodedata.category(letter) not in _UNPRINTED
