"""A federation without a network: what goes to a site and comes back is bytes, served by a thread for each site."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn

from piebald.contracts import SERVER_ID, Checkpoint, Clients, Result, SumRequest, Task
from piebald.experiments.file import ExperimentSettings
from piebald.federation.credentials.provisioning import Credentials
from piebald.federation.hub.run_terms import terms
from piebald.federation.link.wire_format import pack_update, task_body, unpack_task, unpack_update
from piebald.federation.site.client_store import FILE, RowMemory
from piebald.federation.site.site_process import SiteSettings, SiteWork
from piebald.federation.site.task_runner import TaskRunner
from piebald.methods.client_work import ClientWork
from piebald.runtimes.base import RuntimeSettings


class InProcess(RuntimeSettings):
    """Sites in threads of this process, each with a run rebuilt from its terms.

    Attributes:
        experiment: the experiment, as the terms hold it.
        site: the settings of every site, as JSON.
        at_once: whether sites work at the same time; metrics of all rows, which are objects, take one at a time.
        memory: a folder for what sites remember of earlier runs, empty for none.
    """

    kind: ClassVar[str] = "in_process_sites"
    simulates: ClassVar[bool] = False

    experiment: dict[str, Any]
    site: str
    at_once: bool = True
    memory: str = ""

    def open(self, work: ClientWork, clients: Clients) -> InProcessSites:
        settings = SiteSettings.model_validate_json(self.site)
        return InProcessSites(work, clients, self.experiment, settings, self.at_once, self.memory)


class InProcessSites:
    """See `contracts.Runtime`."""

    def __init__(
        self,
        work: ClientWork,
        clients: Clients,
        experiment: Mapping[str, Any],
        settings: SiteSettings,
        at_once: bool,
        memory: str = "",
    ) -> None:
        names = [str(clients.names[client]) for client in range(len(clients))]
        text = terms(work, experiment, names, names, clients.classes)
        body, digest = json.loads(text), hashlib.sha256(text).hexdigest()
        self.work, self.runners = work, list[TaskRunner]()
        self.states: list[dict[str, Tensor] | None] = [None for _ in names]
        for name in names:
            credentials = cast(Credentials, SimpleNamespace(party=name, folder=Path(name)))
            prepared = SiteWork(credentials, settings, Path("."), local=True)(body)
            assert settings.policy.reject_reason(prepared.work) is None
            remembered = RowMemory(Path(memory) / name / FILE if memory else None)
            self.runners.append(TaskRunner(prepared, settings.policy, "cpu", terms=digest, memory=remembered))
        self._threads = ThreadPoolExecutor(len(names) if at_once else 1)
        self._done: list[Result] = []

    def submit(self, tasks: Sequence[Task], sum_request: SumRequest | None = None) -> None:
        self._done += self._threads.map(self._serve, tasks)

    def _serve(self, task: Task) -> Result:
        if task.client == SERVER_ID:  # a server has no rows here
            return Result(task, None, 0.0, 0.0, failure="no rows")
        runner, sent = self.runners[task.client], bytes(task_body(self.work.cut(task)))
        update, failure, state = runner.serve(unpack_task(sent), self.states[task.client])
        self.states[task.client] = state or self.states[task.client]
        body = pack_update(update, failure)
        came, failure = unpack_update(bytearray(body), self.work.result_form(task, runner.rows))
        if came is not None and task.query is None:
            came = self.work.expanded(came, task)
        return Result(task, came, 0.0, 0.0, len(sent), len(body), failure)

    def next(self, until: float = float("inf")) -> Result | None:
        return self._done.pop(0) if self._done else None

    def clients(self) -> Sequence[int]:
        return range(len(self.runners))

    def stated_rows(self) -> Sequence[int]:
        return [runner.rows["train"] for runner in self.runners]

    def now(self) -> float:
        return 0.0

    def state(self) -> Checkpoint:
        return Checkpoint({}, {})

    def restore(self, checkpoint: Checkpoint, tasks: Mapping[int, Task]) -> None:
        raise NotImplementedError

    def close(self) -> None:
        self._threads.shutdown()


class Adapted(nn.Module):
    """Images through a frozen layer with an adapter of rank 4, and a head."""

    def __init__(self, input_shape: Sequence[int], outputs: int, seed: int = 0) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            width = math.prod(input_shape)
            self.own = nn.Linear(width, 12).requires_grad_(False)
            self.lora_A, self.lora_B = nn.Linear(width, 4, bias=False), nn.Linear(4, 12, bias=False)
            self.head = nn.Linear(12, outputs)

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1)
        made: Tensor = self.head(torch.relu(self.own(x) + self.lora_B(self.lora_A(x))))
        return made


def in_process(made: ExperimentSettings, at_once: bool = True, memory: str = "", **site: Any) -> InProcess:
    """The runtime for an experiment, at sites whose rows are few, so that no rules of disclosure hold by default."""
    site["policy"] = {"least_rows": 1, **site.get("policy", {})}
    return InProcess(experiment=made.table(), site=json.dumps(site), at_once=at_once, memory=memory)
