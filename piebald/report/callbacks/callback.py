"""Callbacks, which listen to a run while it goes on, and the recorder that tells them what it records."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from piebald.contracts import Checkpoint
from piebald.report.tables import History
from piebald.storage.store import RunStore

_log = logging.getLogger(__name__)


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

    Examples:
        >>> import piebald
        >>> class Steps(Callback):
        ...     def on_server_step(self, step):
        ...         print("server step", step["version"], "with", step["arrived"], "updates")
        >>> clients = piebald.partition.Iid(clients=3, test=0.2, limit=60).split(piebald.data.digits())
        >>> model = piebald.models.build_model("mlp", (1, 8, 8), 10, hidden=(4,))
        >>> run = piebald.run("fedavg", clients, model, rounds=2, callbacks=[Steps()])
        server step 1 with 3 updates
        server step 2 with 3 updates
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


class ObservedRecorder:
    """Passes everything on to a store; callbacks are told afterwards, in their order.

    Args:
        store: the run's store.
        callbacks: the listeners.
    """

    def __init__(self, store: RunStore, callbacks: Iterable[Callback]) -> None:
        self._store = store
        self._callbacks = list(callbacks)
        self._announced = 0  # the last server step that was told

    @property
    def lasts(self) -> bool:
        """See `contracts.RunRecorder`."""
        return self._store.lasts

    def start(self, version: int) -> None:
        """Tell that the run starts after `version` server steps."""
        self._announced = version
        run = RunStart(MappingProxyType(self._store.meta), self._store.path, version)
        self._notify(lambda callback: callback.on_start(run))

    def commit(
        self,
        step: Mapping[str, Any],
        results: Sequence[Mapping[str, Any]],
        checkpoint: Checkpoint | None = None,
        notes: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        """See `contracts.RunRecorder`."""
        # recorded first: a callback that fails or hangs must not cost a server step
        self._store.commit(step, results, checkpoint, notes)
        version = int(step["version"])
        # the store records a step again when its checkpoint follows
        if version <= self._announced:  # recorded once more, with a checkpoint
            return
        self._announced = version
        if not self._callbacks:
            return
        # read-only copies, so that no callback changes what the next one is told
        for row in _read_only({"version": version, **result} for result in results):
            self._notify(lambda callback, row=row: callback.on_result(row))  # type: ignore[misc]
        (copy,) = _read_only([step])
        self._notify(lambda callback: callback.on_server_step(copy))

    def scores(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """See `contracts.RunRecorder`."""
        self._store.scores(rows)
        if rows:
            copies, version = _read_only(rows), int(rows[0]["version"])
            self._notify(lambda callback: callback.on_evaluation(version, copies))

    def confusion(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """See `contracts.RunRecorder`."""
        self._store.confusion(rows)

    def row_scores(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """See `contracts.RunRecorder`."""
        self._store.row_scores(rows)

    def failures(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """See `contracts.RunRecorder`."""
        self._store.failures(rows)

    def end(self, status: str) -> None:
        """Tell that the run ended."""
        history = History(self._store)
        self._notify(lambda callback: callback.on_end(history, status))

    def _notify(self, call: Callable[[Callback], None]) -> None:
        # a copy: a callback that fails is removed while the loop runs
        for callback in list(self._callbacks):
            try:
                call(callback)
            # a listener's fault must not end a training of hours
            except Exception as error:
                self._callbacks.remove(callback)
                _log.warning(
                    "%s failed and is told nothing more; the run goes on: %s: %s",
                    type(callback).__name__,
                    type(error).__name__,
                    error,
                )


def _read_only(rows: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    return [MappingProxyType(dict(row)) for row in rows]
