"""A recorder that tells callbacks what it recorded."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from piebald.contracts import Checkpoint
from piebald.report.callbacks.base import Callback, RunStart
from piebald.report.tables import History
from piebald.storage.store import RunStore

_log = logging.getLogger(__name__)


class ObservedRecorder:
    """Passes everything on to a store; callbacks are told afterwards, in their order.

    Args:
        store: the run's store.
        callbacks: the listeners.
    """

    def __init__(self, store: RunStore, callbacks: Iterable[Callback]) -> None:
        self._store = store
        self._callbacks = list(callbacks)
        self._told = 0  # the last server step that was told

    @property
    def lasts(self) -> bool:
        """See `contracts.RunRecorder`."""
        return self._store.lasts

    def start(self, version: int) -> None:
        """Tell that the run starts after `version` server steps."""
        self._told = version
        about = RunStart(MappingProxyType(self._store.meta), self._store.path, version)
        self._tell(lambda one: one.on_start(about))

    def commit(
        self,
        step: Mapping[str, Any],
        results: Sequence[Mapping[str, Any]],
        checkpoint: Checkpoint | None = None,
        notes: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        """See `contracts.RunRecorder`."""
        self._store.commit(step, results, checkpoint, notes)
        version = int(step["version"])
        if version <= self._told:  # recorded once more, with a checkpoint
            return
        self._told = version
        if not self._callbacks:
            return
        for row in _read_only({"version": version, **result} for result in results):
            self._tell(lambda one, row=row: one.on_result(row))  # type: ignore[misc]
        (told,) = _read_only([step])
        self._tell(lambda one: one.on_server_step(told))

    def scores(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """See `contracts.RunRecorder`."""
        self._store.scores(rows)
        if rows:
            told, version = _read_only(rows), int(rows[0]["version"])
            self._tell(lambda one: one.on_evaluation(version, told))

    def confusion(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """See `contracts.RunRecorder`."""
        self._store.confusion(rows)

    def end(self, status: str) -> None:
        """Tell that the run ended."""
        history = History(self._store)
        self._tell(lambda one: one.on_end(history, status))

    def _tell(self, call: Callable[[Callback], None]) -> None:
        for one in list(self._callbacks):
            try:
                call(one)
            except Exception as error:
                self._callbacks.remove(one)
                _log.warning(
                    "%s failed and is told nothing more; the run goes on: %s: %s",
                    type(one).__name__,
                    type(error).__name__,
                    error,
                )


def _read_only(rows: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    return [MappingProxyType(dict(row)) for row in rows]
