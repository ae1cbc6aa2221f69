"""Turns of experiments that share a server and its sites: when one of them makes room for the others.

Experiments that are side by side are trained in turn, so that a site does one thing at a time and its policy counts all
of it in one place.  A turn ends between two server steps, where nothing that sites have computed is thrown away.
"""

from __future__ import annotations

import time
from pathlib import Path

from piebald.core.reading.files import read_json
from piebald.federation.operate.experiment_queue import ExperimentQueue, Queued

_GATHER = 30.0  # seconds that sites have to connect again and to read their rows, however short turns are


class Turn:
    """The turn of one experiment.

    Args:
        credentials: the server's.
        queue: its queue.
        entry: the experiment.
        seconds: how long a turn is, at least; None for no end.

    Attributes:
        ended: whether it has ended for the benefit of others.
    """

    def __init__(self, credentials: Path, queue: ExperimentQueue, entry: Queued, seconds: float | None) -> None:
        self._credentials, self._queue, self._entry, self._seconds = credentials, queue, entry, seconds
        self._began = time.monotonic()
        self._version: int | None = None  # server steps at the last look after its time
        self.ended = False

    def over(self) -> bool:
        """Whether its time has passed, others wait, and a server step was made since the last look, or nobody trains.

        So each turn makes a step at least, except where the experiment waits for its sites.
        """
        spent = time.monotonic() - self._began
        if self._seconds is None or spent < self._seconds:
            return False
        before, self._version = self._version, _steps(Path(self._entry.out))
        stepped = before is not None and self._version > before
        if (stepped or (spent > _GATHER and _idle(self._credentials))) and self._queue.others_wait(self._entry):
            self.ended = True
        return self.ended


def _steps(run: Path) -> int:
    from piebald.storage.store import RunStore

    if not (run / "run.db").exists():
        return 0
    with RunStore.open_read_only(run) as store:
        return store.version


def _idle(credentials: Path) -> bool:
    """Whether no site works on a task, as the server wrote last."""
    try:
        found = read_json(credentials / "status.json")
    except (OSError, ValueError):
        return False
    sites = found.get("sites")
    return isinstance(sites, list) and not any(one.get("working") for one in sites)
