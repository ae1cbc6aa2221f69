"""Progress with the main metric: a bar on a terminal and in a notebook, elsewhere a line a minute."""

from __future__ import annotations

import html
import sys
from time import monotonic
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from piebald.core.plain_text import printable

if TYPE_CHECKING:
    from piebald.server import RoundProgress


_EVERY = 60.0  # seconds between two lines where there is no terminal
_REDRAWN = 0.2  # seconds between two states of a notebook's bar


class LineClock:
    """When the last line was written: many short runs in a row make a line a minute together."""

    def __init__(self) -> None:
        self._said = self._ended = -_EVERY

    def reset(self) -> None:
        """Forget the runs so far."""
        self._said = self._ended = -_EVERY

    def begin(self) -> None:
        """A run begins: the first line is due in a minute, unless another run has just ended."""
        if monotonic() - self._ended >= _EVERY:
            self._said = monotonic()

    def end(self) -> None:
        """A run has ended."""
        self._ended = monotonic()

    def due(self) -> bool:
        """Whether a line is to be written now."""
        if monotonic() - self._said < _EVERY:
            return False
        self._said = monotonic()
        return True


line_clock = LineClock()


class Bar:
    """Progress of a run's server steps.

    Args:
        label: the label of the run.
        seed: its seed.
        total: the number of server steps, None if it is not known.
        metric: the metric to show, the mean over clients of the personal model or else of the global model.
        wanted: False shows nothing.
    """

    def __init__(self, label: str, seed: int, total: int | None, metric: str, wanted: bool) -> None:
        self.text, self.total, self.metric = printable(f"{label} (seed {seed})"), total, metric
        self.wanted = wanted and sys.stderr.isatty()
        self._notebook = NotebookBar(self.text, total) if wanted and in_notebook() else None
        self._lines = wanted and not self.wanted and self._notebook is None
        self._bar: Any = None
        self._task: Any = None
        line_clock.begin()

    def __enter__(self) -> Self:
        if self.wanted:
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

            columns = (
                TextColumn("{task.description}", markup=False),
                BarColumn(),
                MofNCompleteColumn(),
                TimeRemainingColumn(),
            )
            self._bar = Progress(
                *columns, TextColumn("{task.fields[score]}", markup=False), console=Console(stderr=True)
            )
            self._bar.start()
            self._task = self._bar.add_task(self.text, total=self.total, score="")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        line_clock.end()
        if self._bar is not None:
            self._bar.stop()
        if self._notebook is not None:
            self._notebook.draw()

    def show_choices(self, chosen: int, clients: int) -> None:
        """Show how many clients have chosen their model."""
        if self._bar is not None:
            self._bar.update(self._task, score=f"{chosen} of {clients} clients have chosen")
        if self._notebook is not None:
            self._notebook.show(f"{chosen} of {clients} clients have chosen")

    def show(self, progress: RoundProgress) -> None:
        """Show the progress up to a server step."""
        names = (f"personal/{self.metric}", f"global/{self.metric}")
        score = next((progress.scores[name] for name in names if name in progress.scores), None)
        text = "" if score is None else f"{self.metric} {score:.3f}"
        if self._bar is not None:
            self._bar.update(self._task, completed=progress.version, **({"score": text} if text else {}))
        elif self._notebook is not None:
            self._notebook.show(text, progress.version)
        elif self._lines and line_clock.due():
            steps = f"{progress.version}" if self.total is None else f"{progress.version} of {self.total}"
            print(f"{self.text}: server step {steps}{', ' if text else ''}{text}", file=sys.stderr, flush=True)


class NotebookBar:
    """A bar below a notebook's cell, of HTML alone, so that it is also there in a notebook that was saved.

    Args:
        text: what it is the progress of.
        total: the number of server steps, None if it is not known.
    """

    def __init__(self, text: str, total: int | None) -> None:
        self.text, self.total, self.version, self.score = text, total, 0, ""
        self._handle: Any = None
        self._drawn = 0.0

    def show(self, score: str, version: int | None = None) -> None:
        """Show the progress up to a server step, unless it was shown a moment ago."""
        self.version, self.score = self.version if version is None else version, score or self.score
        if monotonic() - self._drawn >= _REDRAWN:
            self.draw()

    def draw(self) -> None:
        """Draw the bar as it is now."""
        from IPython import display

        notebook: Any = display  # its functions have no types
        self._drawn = monotonic()
        value = "" if self.total is None else f" value='{self.version}' max='{max(self.total, 1)}'"
        steps = f"{self.version}" if self.total is None else f"{self.version} of {self.total}"
        drawn = notebook.HTML(
            f"{html.escape(self.text)} <progress{value}></progress> {steps} {html.escape(self.score)}"
        )
        if self._handle is None:
            self._handle = notebook.display(drawn, display_id=True)
        else:
            self._handle.update(drawn)


def in_notebook() -> bool:
    """Whether this process is the kernel of a notebook; no terminal's IPython is."""
    if "IPython" not in sys.modules:
        return False
    from IPython import get_ipython

    shell: Any = get_ipython()
    return shell is not None and "IPKernelApp" in shell.config
