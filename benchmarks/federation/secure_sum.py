"""What a secure sum costs a client and the centre: CPU time for an update of a million numbers, in one thread.

Clients and centre are in this process, so nothing travels; one in ten clients drops out after it has trained.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch

from piebald.aggregation import Equal
from piebald.contracts import Assignment, Question, Secrets, Update
from piebald.privacy import SecureSum
from piebald.privacy.secure_aggregation.client_side import repeatable, replied, sealed

NUMBERS = 1_000_000
CASES = [(10, None, 32), (10, None, 64), (100, None, 32), (100, 20, 32), (100, 20, 64)]


class Room:
    """A centre's questions, answered here; `spent` collects seconds by kind of question."""

    def __init__(self, stage: SecureSum, count: int) -> None:
        rule = SimpleNamespace(uploads=lambda: (), common=lambda shared: {})
        self.work: Any = SimpleNamespace(stages=(stage,), layout=SimpleNamespace(shared=NUMBERS), rule=rule)
        self.secrets = {client: Secrets(client, {}, repeatable(client)) for client in range(count)}
        self.spent: dict[str, list[float]] = {}
        self.down: dict[str, int] = {}
        self.up: dict[str, int] = {}

    def ask(self, questions: Sequence[Question]) -> list[Update | None]:
        return [self._one(one) for one in questions]

    def _one(self, one: Question) -> Update | None:
        asked = Assignment(0, one.client, 0, one.parts, one.query)
        (answer, _), seconds = timed(lambda: replied(asked, self.work, self.secrets[one.client]))
        self.note(one.query.kind, seconds, nbytes(one.parts), answer)
        return answer

    def note(self, kind: str, seconds: float, down: int, answer: Update | None) -> None:
        self.spent.setdefault(kind, []).append(seconds)
        self.down[kind], self.up[kind] = down, 0 if answer is None else answer.nbytes


def measure(count: int, neighbours: int | None, bits: int) -> dict[str, Any]:
    """One row of the table: milliseconds, medians over clients, and bytes of one client."""
    torch.set_num_threads(1)
    stage = SecureSum(neighbours=neighbours, bits=bits, threshold=0.6, weigh=Equal().table(), heaviest=1.0)  # type: ignore[arg-type]
    room = Room(stage, count)
    meeting, met = timed(lambda: stage.meet(range(count), room))  # type: ignore[arg-type]
    model = torch.rand(NUMBERS, generator=torch.Generator().manual_seed(1))
    arrived: dict[int, Update] = {}
    for client in range(count - count // 10):
        asked = Assignment(1, client, 0, meeting.parts(client))
        update = Update({"model": model}, 1, 1, {"loss": 1.0})
        outcome, seconds = timed(partial(sealed, update, asked, room.work, room.secrets[client]))
        assert outcome[0] is not None, outcome[1]
        room.note("seal", seconds, nbytes(asked.parts), outcome[0])
        arrived[client] = outcome[0]
    pool, opened = timed(lambda: meeting.open(arrived, room))  # type: ignore[arg-type]
    assert not isinstance(pool, str), pool
    assert float((pool.parts["model"] / pool.weight - model).abs().max()) < 1e-4
    answering = sum(sum(seconds) for kind, seconds in room.spent.items() if kind != "seal")
    row = {kind: 1000 * statistics.median(seconds) for kind, seconds in room.spent.items()}
    case = f"{count} clients, {'all' if neighbours is None else neighbours} neighbours, {bits} bits"
    up, down = sum(room.up.values()) - arrived[0].nbytes, sum(room.down.values())
    return {"case": case, **row, "centre": 1000 * (met + opened - answering), "update": arrived[0].nbytes,
            "up": up, "down": down}  # fmt: skip


def timed(work: Callable[[], Any]) -> tuple[Any, float]:
    start = time.thread_time()
    made = work()
    return made, time.thread_time() - start


def nbytes(parts: Any) -> int:
    return sum(part.numel() * part.element_size() for part in parts.values())
