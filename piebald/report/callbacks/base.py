"""Callbacks: what a run tells while it goes on, to whoever wants to know."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from piebald.report.tables import History


@dataclass(frozen=True, slots=True)
class RunStart:
    """A run that starts, or goes on.

    Attributes:
        meta: what the run folder keeps about the run, by name (label, seed, recipe, rounds, model, parameters, ...).
        folder: the run folder, None for a run in memory.
        version: the server steps already done, which are not told again.
    """

    meta: Mapping[str, Any]
    folder: Path | None
    version: int


class Callback:
    """A listener of a run, whose methods do nothing: override those that you need.

    Rows are copies and cannot be written to, so a callback cannot change the run.  An error that it raises is logged as
    one warning, and the callback is told nothing more; the run goes on.  Callbacks are called in the process of the
    server, which waits for them.  A run that was killed goes on from its last checkpoint, so that a resumed run may
    tell of a server step again.
    """

    def on_start(self, run: RunStart) -> None:
        """Before the first server step."""

    def on_result(self, result: Mapping[str, Any]) -> None:
        """Each task that ended: client, version, kind, examples, steps, loss, bytes_up, status, reason and more, as in
        the run folder's table `result`.
        """

    def on_server_step(self, step: Mapping[str, Any]) -> None:
        """Each server step, after its results: version, time, wall, arrived, failed, bytes_up, bytes_down, loss and
        norm, as in the run folder's table `step`.
        """

    def on_evaluation(self, version: int, scores: Sequence[Mapping[str, Any]]) -> None:
        """Each evaluation: client (None on the common test set), model ("global" or "personal"), split, metric, value
        and examples, as in the run folder's table `score`.
        """

    def on_end(self, history: History, status: str) -> None:
        """After the last server step.

        Args:
            history: the run, for reading, also of what was before a resumption.
            status: "finished", "stopped" (by Ctrl-C or SIGTERM) or "failed".
        """
