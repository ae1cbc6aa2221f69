"""Write server steps to the run folder, with a checkpoint as often as costs little."""

from __future__ import annotations

import time
from collections.abc import Callable

from piebald.contracts import Checkpoint, RunRecorder
from piebald.server.records import TableRow

SAVING = 0.02  # the largest share of a run's time spent on saving its state, by default


class StepWriter:
    """Writes one step at a time.

    Args:
        recorder: where steps are kept.
        every: server steps between checkpoints; None saves as often as takes no more than `SAVING` of the run's time.
    """

    def __init__(self, recorder: RunRecorder, every: int | None) -> None:
        self._recorder, self._every = recorder, every
        self._saving = 0.0  # seconds that saving has taken
        self._pending: tuple[TableRow, list[TableRow], list[TableRow]] | None = None

    def due(self, version: int, elapsed: float) -> bool:
        """Whether a checkpoint belongs to the step to `version`, after `elapsed` seconds of the run."""
        return self._saving <= SAVING * elapsed if self._every is None else version % self._every == 0

    def write(
        self,
        step: TableRow,
        rows: list[TableRow],
        notes: list[TableRow],
        state: Callable[[], Checkpoint] | None,
    ) -> None:
        """Write a step with its results and notes; with the checkpoint that `state` makes, unless none is due.

        No checkpoint is made where the recorder keeps none.
        """
        began = time.perf_counter()
        checkpoint = state() if state is not None and self._recorder.lasts else None
        self._recorder.commit(step, rows, checkpoint, notes)
        if checkpoint is not None:
            self._saving += time.perf_counter() - began
        self._pending = (step, rows, notes) if checkpoint is None else None

    def finish(self, state: Callable[[], Checkpoint]) -> None:
        """Write the last step again with a checkpoint, if it has none: a score may have ended the run after it."""
        if self._pending is not None and self._recorder.lasts:
            step, rows, notes = self._pending
            self._recorder.commit(step, rows, state(), notes)
