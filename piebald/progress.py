"""Progress with the main metric: a bar on a terminal, elsewhere a line a minute."""

from __future__ import annotations

import sys
from time import monotonic
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from piebald.plain_text import printable

if TYPE_CHECKING:
    from piebald.server import RoundProgress


_EVERY = 60.0  # seconds between two lines where there is no terminal


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
        self._lines = wanted and not self.wanted
        self._said = monotonic()
        self._bar: Any = None
        self._task: Any = None

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
        if self._bar is not None:
            self._bar.stop()

    def show(self, progress: RoundProgress) -> None:
        """Show the progress up to a server step."""
        names = (f"personal/{self.metric}", f"global/{self.metric}")
        score = next((progress.scores[name] for name in names if name in progress.scores), None)
        text = "" if score is None else f"{self.metric} {score:.3f}"
        if self._bar is not None:
            self._bar.update(self._task, completed=progress.version, **({"score": text} if text else {}))
        elif self._lines and monotonic() - self._said >= _EVERY:
            self._said = monotonic()
            steps = f"{progress.version}" if self.total is None else f"{progress.version} of {self.total}"
            print(f"{self.text}: server step {steps}{', ' if text else ''}{text}", file=sys.stderr, flush=True)
