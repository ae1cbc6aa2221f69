"""What a secure aggregation costs a client and the server: CPU time for an update of a million numbers, in one thread.

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

from piebald.aggregation import EqualWeighted
from piebald.contracts import ClientSecrets, QueryRequest, Task, Update
from piebald.privacy import SecureAggregation
from piebald.privacy.secure_aggregation.client_side import repeatable, replied, sealed

NUMBERS = 1_000_000
CASES = [(10, None, 32), (10, None, 64), (100, None, 32), (100, 20, 32), (100, 20, 64)]


class Room:
    """A server's questions, answered here; `spent` collects seconds by kind of question."""

    def __init__(self, stage: SecureAggregation, count: int) -> None:
        rule = SimpleNamespace(uploads=lambda: (), common=lambda shared: {})
        self.work: Any = SimpleNamespace(stages=(stage,), layout=SimpleNamespace(shared=NUMBERS), rule=rule)
        self.secrets = {client: ClientSecrets(client, {}, repeatable(client)) for client in range(count)}
        self.spent: dict[str, list[float]] = {}
        self.down: dict[str, int] = {}
        self.up: dict[str, int] = {}

    def ask(self, questions: Sequence[QueryRequest]) -> list[Update | None]:
        return [self._one(one) for one in questions]

    def _one(self, one: QueryRequest) -> Update | None:
        asked = Task(0, one.client, 0, one.vectors, one.query)
        (answer, _), seconds = timed(lambda: replied(asked, self.work, self.secrets[one.client]))
        self.note(one.query.kind, seconds, nbytes(one.vectors), answer)
        return answer

    def note(self, kind: str, seconds: float, down: int, answer: Update | None) -> None:
        self.spent.setdefault(kind, []).append(seconds)
        self.down[kind], self.up[kind] = down, 0 if answer is None else answer.nbytes


def measure(count: int, neighbours: int | None, bits: int) -> dict[str, Any]:
    """One row of the table: milliseconds, medians over clients, and bytes of one client."""
    torch.set_num_threads(1)
    stage = SecureAggregation(
        neighbours=neighbours, bits=bits, threshold=0.6, aggregation=EqualWeighted().table(), heaviest=1.0
    )  # type: ignore[arg-type]
    room = Room(stage, count)
    meeting, met = timed(lambda: stage.meet(range(count), room))  # type: ignore[arg-type]
    model = torch.rand(NUMBERS, generator=torch.Generator().manual_seed(1))
    arrived: dict[int, Update] = {}
    for client in range(count - count // 10):
        asked = Task(1, client, 0, meeting.vectors(client))
        update = Update({"model": model}, 1, 1, {"loss": 1.0})
        outcome, seconds = timed(partial(sealed, update, asked, room.work, room.secrets[client]))
        assert outcome[0] is not None, outcome[1]
        room.note("seal", seconds, nbytes(asked.vectors), outcome[0])
        arrived[client] = outcome[0]
    pool, opened = timed(lambda: meeting.open(arrived, room))  # type: ignore[arg-type]
    assert not isinstance(pool, str), pool
    assert float((pool.vectors["model"] / pool.weight - model).abs().max()) < 1e-4
    answering = sum(sum(seconds) for kind, seconds in room.spent.items() if kind != "seal")
    row = {kind: 1000 * statistics.median(seconds) for kind, seconds in room.spent.items()}
    case = f"{count} clients, {'all' if neighbours is None else neighbours} neighbours, {bits} bits"
    up, down = sum(room.up.values()) - arrived[0].nbytes, sum(room.down.values())
    return {"case": case, **row, "server": 1000 * (met + opened - answering), "update": arrived[0].nbytes,
            "up": up, "down": down}  # fmt: skip


def timed(work: Callable[[], Any]) -> tuple[Any, float]:
    start = time.thread_time()
    made = work()
    return made, time.thread_time() - start


def nbytes(vectors: Any) -> int:
    return sum(part.numel() * part.element_size() for part in vectors.values())
