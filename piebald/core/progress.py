"""Progress of whatever takes a while: a bar on a terminal and in a notebook, elsewhere a line a minute.

Training, trees, transfers, downloads and embeddings show their steps in a `Bar`; searches, which consist of many runs,
say what happens in lines (`line_writer`).  All of it goes to standard error, so that output can be piped.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from time import monotonic
from typing import Any, Self

from piebald.core.plain_text import html_text, printable
from piebald.core.private_files import make_private

_LINE_EVERY = 60.0  # seconds between two lines where there is no terminal
_DRAW_EVERY = 0.2  # seconds between two states of a notebook's bar


class LineClock:
    """The time of the last line: many short runs in a row write a line a minute together."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget the runs so far."""
        # a minute ago and not 0: the monotonic clock may begin near 0, and would hold a first line back
        self._written = self._ended = -_LINE_EVERY

    def begin(self) -> None:
        """Begin a run: the first line is due in a minute, unless another run has just ended."""
        if monotonic() - self._ended >= _LINE_EVERY:
            self._written = monotonic()

    def end(self) -> None:
        """End a run."""
        self._ended = monotonic()

    def is_due(self) -> bool:
        """Return whether a line is to be written now, and take it for written."""
        if monotonic() - self._written < _LINE_EVERY:
            return False
        self._written = monotonic()
        return True


line_clock = LineClock()


class Bar:
    """Progress towards a number of steps, shown while the bar is entered.

    Args:
        text: the name of what is going on.
        total: the number of steps, None if it is not known.
        wanted: False shows nothing.
        unit: the name of a step; "bytes" are shown as such.
        lines: whether a line a minute takes the bar's place where there is neither a terminal nor a notebook.

    Examples:
        >>> with Bar("training", 2, wanted=False) as bar:
        ...     for step in (1, 2):
        ...         bar.show(step, f"accuracy {step / 2:.3f}")
        >>> bar.note
        'accuracy 1.000'
    """

    def __init__(
        self, text: str, total: int | None, wanted: bool, unit: str = "server step", lines: bool = True
    ) -> None:
        self.text, self.total, self.unit = printable(text), total, unit
        self.done, self.note = 0, ""
        self._on_terminal = wanted and sys.stderr.isatty()
        self._in_notebook = wanted and _in_notebook()
        self._in_lines = wanted and lines and not self._on_terminal and not self._in_notebook
        self._bar: Any = None
        self._task: Any = None
        self._handle: Any = None
        self._drawn = 0.0
        if self._in_lines:
            line_clock.begin()

    def __enter__(self) -> Self:
        if self._on_terminal:
            from rich import progress
            from rich.console import Console

            count = progress.DownloadColumn() if self.unit == "bytes" else progress.MofNCompleteColumn()
            # what is shown comes from files and sites, so none of it is markup
            texts = [progress.TextColumn(f"{{task.{name}}}", markup=False) for name in ("description", "fields[note]")]
            columns = texts[0], progress.BarColumn(), count, progress.TimeRemainingColumn(), texts[1]
            self._bar = progress.Progress(*columns, console=Console(stderr=True))
            self._bar.start()
            self._task = self._bar.add_task(self.text, total=self.total, note="")
        return self

    def __exit__(self, *_: object) -> None:
        if self._in_lines:
            line_clock.end()
        if self._bar is not None:
            self._bar.stop()
        if self._in_notebook:
            self._draw()

    def show(self, done: int | None = None, note: str = "") -> None:
        """Show the number of steps done so far; a step or a note that is left out stays as it was."""
        self.done, self.note = self.done if done is None else done, note or self.note
        if self._bar is not None:
            self._bar.update(self._task, completed=self.done, note=self.note)
        elif self._in_notebook and monotonic() - self._drawn >= _DRAW_EVERY:
            self._draw()
        elif self._in_lines and done is not None and line_clock.is_due():
            ending = f", {note}" if note else ""
            print(f"{self.text}: {self.unit} {self._count}{ending}", file=sys.stderr, flush=True)

    @property
    def _count(self) -> str:
        return f"{self.done}" if self.total is None else f"{self.done} of {self.total}"

    def _draw(self) -> None:
        """Draw the bar of a notebook in HTML alone, so that it is also there once the notebook was saved."""
        from IPython import display

        notebook: Any = display  # its functions have no types
        self._drawn = monotonic()
        value = "" if self.total is None else f" value='{self.done}' max='{max(self.total, 1)}'"
        # escaped, as names and notes come from files and sites
        bar = f"{html_text(self.text)} <progress{value}></progress> {self._count} {html_text(self.note)}"
        if self._handle is None:
            self._handle = notebook.display(notebook.HTML(bar), display_id=True)
        else:
            self._handle.update(notebook.HTML(bar))


def line_writer(wanted: bool, log: Path | None = None) -> Callable[[str], None]:
    """Return a function that says a line of progress on standard error, with its indentation.

    Args:
        wanted: False says nothing.
        log: a file to which every line is appended; standard error then shows the last one on a terminal, where an
            empty line clears it, and elsewhere one a minute.
    """

    def write(line: str) -> None:
        text = f"{' ' * (len(line) - len(line.lstrip(' ')))}{printable(line)}"
        if log is not None and text:
            make_private(log)
            with log.open("a", encoding="utf-8") as file:
                file.write(f"{text}\n")
        if not wanted:
            return
        if log is None:
            print(text, file=sys.stderr, flush=True)
        elif sys.stderr.isatty():
            # a line that wraps could not be cleared again by a return to its beginning
            print(f"\r\x1b[K{text[:79]}", end="", file=sys.stderr, flush=True)
        elif text and line_clock.is_due():
            print(text, file=sys.stderr, flush=True)

    return write


def _in_notebook() -> bool:
    """Return whether this process is the kernel of a notebook; no terminal's IPython is."""
    if "IPython" not in sys.modules:
        return False
    from IPython import get_ipython

    shell: Any = get_ipython()
    return shell is not None and "IPKernelApp" in shell.config
