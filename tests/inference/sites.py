"""Sites that check and answer questions about their rows, in this process."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from piebald import recipes
from piebald.contracts import Result, Task, Update
from piebald.data.partition import clients_from
from piebald.experiments.run_settings import RunSettings
from piebald.federation.link.wire_format import Refused, pack_update, task_body, unpack_task, unpack_update
from piebald.federation.site.client_store import ClientStore
from piebald.federation.site.policy import Policy
from piebald.federation.site.site_rows import SiteClient
from piebald.federation.site.task_runner import TaskRunner
from piebald.models import Logistic
from piebald.privacy.secure_aggregation.key_queries import KeyQuery
from piebald.privacy.secure_aggregation.server_side import SimulatedSigner
from piebald.runs.prepare import PreparedRun, prepare

Change = Callable[[Update], Update]


class InProcess:
    """A runtime whose sites check and answer what came over the wire, in this process (`contracts.Runtime`).

    Args:
        plan: the run.
        policies: of the sites.
        change: what a hostile client 0 does to its answers.
        folder: what sites keep: their ledgers, and secrets of a secure aggregation.

    Attributes:
        bodies: all answers as they left.
        away: clients that are gone before they answer anything else than questions about keys.
    """

    def __init__(
        self, plan: PreparedRun, policies: Sequence[Policy], change: Change | None = None, folder: Path | None = None
    ) -> None:
        self._plan, self._change, self._signers = plan, change, [SimulatedSigner(3, k) for k in range(len(policies))]
        self._sites, self._stores, self.away = list[TaskRunner](), list[ClientStore](), set[int]()
        for k, policy in enumerate(policies):
            if folder is not None:
                (folder / f"{k}").mkdir(parents=True, exist_ok=True)
                self._stores.append(ClientStore(folder / f"{k}" / "run"))
            site = SiteClient(plan.work, plan.clients, k)
            ledger = None if folder is None else site.ledger(folder / f"{k}")
            self._sites.append(TaskRunner(site, policy, "cpu", self._signers[k], ledger=ledger))
        self._done: deque[Result] = deque()
        self.questions = 0
        self.bodies: list[bytes] = []

    def submit(self, tasks: Sequence[Task], sum_request: Any = None) -> None:
        for task in tasks:
            self.questions += task.client == 0
            if task.client in self.away and not isinstance(task.query, KeyQuery):
                self._done.append(Result(task, None, 0.0, 0.0, failure="gone"))
                continue
            update, failure = self._answered(unpack_task(bytes(task_body(task))))
            if update is not None and self._change is not None and task.client == 0:
                update = self._change(update)
            try:
                self.bodies.append(body := pack_update(update, failure))
                came = unpack_update(body, self._plan.work.result_form(task, self._sites[task.client].rows))
                self._done.append(Result(task, came[0], 0.0, 0.0, failure=came[1]))
            except Refused as error:
                self._done.append(Result(task, None, 0.0, 0.0, failure=str(error), refused=True))

    def _answered(self, task: Task) -> tuple[Update | None, str | None]:
        """As `ClientRuntime` does it."""
        site = self._sites[task.client]
        if isinstance(task.query, KeyQuery):
            return site.answer_key_query(task, self._stores[task.client])
        update, failure, _ = site.serve(task, None)
        hidden = None if task.query is None else task.query.hiding()
        if update is None or hidden is None or not hidden.masked:
            return update, failure
        return site.mask(update, task, self._stores[task.client])

    def check_signature(self, client: int, text: bytes, signature: bytes) -> bool:
        return self._signers[0].check(client, text, signature)

    def next(self, until: float = float("inf")) -> Result | None:
        return self._done.popleft() if self._done else None

    def clients(self) -> Sequence[int]:
        return range(len(self._sites))

    def now(self) -> float:
        return 0.0


def plan(recipe: Any = None, rows: int = 40) -> PreparedRun:
    rng = np.random.default_rng(5)
    made = {name: (rng.normal(k, 2, (rows, 2)), rng.integers(0, 3, rows)) for k, name in enumerate("abc")}
    clients = clients_from(made, test=0.25)
    return prepare(recipe or recipes.fedavg(), clients, Logistic([2], 3), RunSettings(seed=1))


def coded_plan(recipe: Any = None, rows: int = 40) -> PreparedRun:
    """Clients with a column of numbers between two of codes, 0 to 2 and 0 to 1, and three classes."""
    rng = np.random.default_rng(6)
    made = {}
    for shift, name in enumerate("abc"):
        codes, numbers = rng.integers(0, 3, rows), rng.normal(shift, 2, rows)
        made[name] = np.stack([codes, numbers, rng.integers(0, 2, rows)], 1), (codes + rng.integers(0, 2, rows)) % 3
    clients = clients_from(made, test=0.25)
    return prepare(recipe or recipes.fedavg(), clients, Logistic([3], 3), RunSettings(seed=1))
