"""Text that others wrote, made fit for logs, tables and terminals."""

from __future__ import annotations

import logging
import re
import textwrap
import unicodedata
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

_SEQUENCE = re.compile(  # what terminals take for a command (ECMA-48), with 7-bit and with 8-bit introducers
    "(?:\x1b\\[|\x9b)[0-?]*[ -/]*[@-~]"  # control sequences: colours, cursor movements
    "|(?:\x1b[\\]PX^_]|[\x90\x98\x9d-\x9f])[^\x07\x1b\x9c]*(?:\x07|\x1b\\\\|\x9c)?"  # titles, links, device strings
    "|\x1b[ -/]*[0-~]"  # all others
)
WIDTH = 80  # columns of a terminal
_MORE = "\N{HORIZONTAL ELLIPSIS}"
_UNPRINTED = {"Cc", "Cf", "Cs", "Co", "Zl", "Zp"}  # controls, invisible formats and overrides of direction, surrogates


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
        if letter.isspace() or unicodedata.category(letter) not in _UNPRINTED
    )
    return " ".join(visible.split())[:longest]


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
