"""The client's end of secure sums, the same wherever a client runs: questions about keys, and sealing what leaves."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

from piebald.client_work import Work
from piebald.contracts import Assignment, Secrets, Update
from piebald.errors import Declined
from piebald.parameters import nbytes
from piebald.randomness import key
from piebald.transforms.base import Stage

Outcome = tuple[Update | None, str | None]  # an update, or why there is none


def sealing(work: Work) -> Stage | None:
    """The stage that seals updates, or None."""
    return work.stages[-1] if work.stages and work.stages[-1].hides_each else None


def replied(assignment: Assignment, work: Work, secrets: Secrets) -> Outcome:
    """The answer to a question about keys."""
    stage, query = sealing(work), assignment.query
    if stage is None or query is None:
        return None, "this run seals nothing"
    try:
        parts = query.reply(assignment.parts, secrets, stage)
    except Declined as error:
        return None, str(error)
    return Update(parts, 0, 0, {}, nbytes=nbytes(parts)), None


def sealed(update: Update, assignment: Assignment, work: Work, secrets: Secrets) -> Outcome:
    """What leaves instead of a trained update: the update itself where nothing seals."""
    stage = sealing(work)
    if stage is None:
        return update, None
    try:
        return stage.seal(update, assignment, secrets), None
    except Declined as error:
        return None, str(error)


def repeatable(*words: int | str) -> Callable[[int], bytes]:
    """Random bytes for a simulation: they come from these words, so that a run can be repeated."""
    calls = 0

    def draw(count: int) -> bytes:
        nonlocal calls
        calls += 1
        return hashlib.shake_256(key("secrets", calls, *words).to_bytes(8)).digest(count)

    return draw
