"""Queries to clients: send them, wait for the answers, and check these."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from piebald.contracts import Result, Runtime, Task, Update
from piebald.model_spec import ModelSpec
from piebald.server.records import TableRow, result_row


class ClientQueries:
    """Puts queries to clients and waits for all answers.

    Attributes:
        queue: training results that came while answers were awaited.
    """

    def __init__(self, runtime: Runtime, spec: ModelSpec) -> None:
        self.queue: deque[Result] = deque()
        self._runtime, self._spec = runtime, spec
        self._rows: list[TableRow] = []

    def answers(self, tasks: Sequence[Task]) -> list[Result]:
        """Send queries and wait for their results, which are returned in the order of the tasks' ids."""
        self._runtime.submit(tasks)
        missing, answers = {task.id: task for task in tasks}, []
        while missing:
            result = self._runtime.next()
            if result is None:  # nothing is under way any more, so they will never come
                now = self._runtime.now()
                answers += [Result(one, None, now, now, failure="no answer") for one in missing.values()]
                break
            if missing.pop(result.task.id, None) is not None:
                answers.append(result)
            else:
                self.queue.append(result)
        return sorted(answers, key=lambda result: result.task.id)

    def ask(self, tasks: Sequence[Task], version: int) -> list[Update | None]:
        """The usable answers to queries, None for the others; the exchange is recorded for `version`."""
        answers: list[Update | None] = []
        for result in self.answers(tasks):
            reason = self._reject_reason(result)
            status = "ok" if reason is None else "lost" if result.update is None else "refused"
            self._rows.append(result_row(result, version, status, reason))
            answers.append(result.update if reason is None else None)
        return answers

    def take_rows(self) -> list[TableRow]:
        """The exchanges since the last call, as rows of the run folder."""
        rows, self._rows = self._rows, []
        return rows

    def _reject_reason(self, result: Result) -> str | None:
        query, update = result.task.query, result.update
        if update is None or result.failure is not None or query is None:
            return result.failure or "no answer"
        for name, vector in update.vectors.items():
            if not bool(vector.isfinite().all()):
                return f"{name} is not finite"
        return query.reject_reason(update, self._spec)
