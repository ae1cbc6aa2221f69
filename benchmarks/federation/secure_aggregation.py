"""Cost of secure aggregation for a client and the server: CPU time for an update of a million numbers, in one thread.

Clients and server are in this process, so there is no network; one in ten clients drops out after it has trained.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch

from piebald.contracts import ClientSecrets, QueryRequest, Task, Update
from piebald.methods.aggregation import EqualWeighted
from piebald.privacy import SecureAggregation
from piebald.privacy.secure_aggregation.server_side import ANY_SUM, SimulatedSigner, masked, repeatable, replied

NUMBERS = 1_000_000
CASES = [(10, None, 32), (10, None, 64), (100, None, 32), (100, 20, 32), (100, 20, 64)]


class LocalContext:
    """A `contracts.ServerContext` whose queries are answered here; `spent` collects seconds by kind of query."""

    def __init__(self, masking: SecureAggregation, count: int) -> None:
        self.version = 0
        self.spec: Any = SimpleNamespace(layout=SimpleNamespace(shared=NUMBERS))
        self.work: Any = SimpleNamespace(masking=masking)
        self.secrets = {
            client: ClientSecrets(
                client, {}, repeatable(client), SimulatedSigner(0, client), ANY_SUM, rows={"train": 1}
            )
            for client in range(count)
        }
        self.spent: dict[str, list[float]] = {}
        self.down: dict[str, int] = {}
        self.up: dict[str, int] = {}

    def query(self, requests: Sequence[QueryRequest]) -> list[Update | None]:
        return [self._one(one) for one in requests]

    def _one(self, one: QueryRequest) -> Update | None:
        task = Task(0, one.client, 0, one.vectors, one.query)
        (answer, _), seconds = timed(lambda: replied(task, self.work, self.secrets[one.client]))
        self.record(one.query.kind, seconds, nbytes(one.vectors), answer)
        return answer

    def record(self, kind: str, seconds: float, down: int, answer: Update | None) -> None:
        self.spent.setdefault(kind, []).append(seconds)
        self.down[kind], self.up[kind] = down, 0 if answer is None else answer.nbytes


def measure(count: int, neighbours: int | None, bits: int) -> dict[str, Any]:
    """One row of the table: milliseconds, medians over clients, and bytes of one client."""
    torch.set_num_threads(1)
    masking = SecureAggregation(
        neighbours=neighbours, bits=bits, threshold=0.6, aggregation=EqualWeighted().table(), heaviest=1.0
    )  # type: ignore[arg-type]
    context = LocalContext(masking, count)
    agreement, agreeing = timed(lambda: masking.agree_keys(range(count), context))  # type: ignore[arg-type]
    model = torch.rand(NUMBERS, generator=torch.Generator().manual_seed(1))
    arrived: dict[int, Update] = {}
    for client in range(count - count // 10):
        task = Task(1, client, 0, agreement.vectors(client))
        update = Update({"model": model}, 1, 1, {"loss": 1.0})
        outcome, seconds = timed(partial(masked, update, task, context.work, context.secrets[client]))
        assert outcome[0] is not None, outcome[1]
        context.record("masking", seconds, nbytes(task.vectors), outcome[0])
        arrived[client] = outcome[0]
    total, unmasking = timed(lambda: agreement.unmask(arrived, context))  # type: ignore[arg-type]
    assert not isinstance(total, str), total
    assert float((total.vectors["model"] / total.weight - model).abs().max()) < 1e-4
    answering = sum(sum(seconds) for kind, seconds in context.spent.items() if kind != "masking")
    row = {kind: 1000 * statistics.median(seconds) for kind, seconds in context.spent.items()}
    case = f"{count} clients, {'all' if neighbours is None else neighbours} neighbours, {bits} bits"
    up, down = sum(context.up.values()) - arrived[0].nbytes, sum(context.down.values())
    return {"case": case, **row, "server": 1000 * (agreeing + unmasking - answering), "update": arrived[0].nbytes,
            "up": up, "down": down}  # fmt: skip


def timed(work: Callable[[], Any]) -> tuple[Any, float]:
    start = time.thread_time()
    made = work()
    return made, time.thread_time() - start


def nbytes(vectors: Any) -> int:
    return sum(part.numel() * part.element_size() for part in vectors.values())
