"""What a site does with one task: the simulator's own engine, for one client."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from piebald.client_work import ClientWork
from piebald.contracts import MASKING, Clients, ClientSecrets, Signer, Task, Update
from piebald.privacy.secure_aggregation.client_side import Outcome, masked, replied
from piebald.runtimes.engines.choose import make_engine
from piebald.runtimes.engines.engine import Engine
from piebald.runtimes.engines.serving import personal_model, serve
from piebald.runtimes.engines.stack import PRIVATE, ClientStack
from piebald.runtimes.federation.client_store import ClientStore
from piebald.runtimes.federation.policy import Policy

log = logging.getLogger("piebald.federation")


@dataclass(frozen=True, slots=True, eq=False)
class SiteClient:
    """A run's terms as a site understands them.

    Attributes:
        work: rebuilt from names and fields.
        clients: all clients' names, and this site's rows alone.
        client: this site's number.
    """

    work: ClientWork
    clients: Clients
    client: int


class TaskRunner:
    """Serves tasks of one run.

    Args:
        prepared: the terms.
        policy: what the site agrees to.
        device: where it computes.
        secret: a number that only this site knows.
        signer: signs the site's keys of secure aggregation, and checks those of others.
    """

    def __init__(
        self, prepared: SiteClient, policy: Policy, device: str, secret: int, signer: Signer | None = None
    ) -> None:
        work = prepared.work
        # the server knows the run's seed, and could subtract noise that is made from it
        if policy.own_noise or work.row_privacy is not None:
            work = replace(work, seed=secret % (1 << 64))
        self.work, self.client, self._policy, self._signer = work, prepared.client, policy, signer
        self._fresh = work.initial_state()
        # one engine a thread: a question is answered while the other trains
        made = (make_engine("sequential", work, prepared.clients, torch.device(device), False) for _ in range(2))
        self._trains, self._answers = made

    def serve(
        self, task: Task, memory: Mapping[str, Tensor] | None
    ) -> tuple[Update | None, str | None, dict[str, Tensor] | None]:
        """The update or the reason why there is none, and what is remembered from now on (None: as before)."""
        query = task.query
        if query is not None and not self._policy.answers(query):
            return None, f"this site does not answer {query.kind!r}", None
        engine: Engine = self._trains if query is None else self._answers
        try:
            served = serve(engine, self._stack(task, memory))
        except Exception as error:  # whatever its rows do, the site stays; the text may hold numbers of theirs
            log.exception("task %d failed", task.id)
            return None, f"{type(error).__name__} at the site, whose log says more", None
        update = served.update(0)
        # a client whose update cannot count also forgets the attempt
        keeps = query is None and math.isfinite(update.norm)
        return update, None, {name: rows[0].clone() for name, rows in served.state.items()} if keeps else None

    def reply(self, task: Task, store: ClientStore) -> Outcome:
        """The answer to a question about keys."""
        return self._with_secrets(store, lambda secrets: replied(task, self.work, secrets))

    def mask(self, update: Update, task: Task, store: ClientStore) -> Outcome:
        """What leaves instead of an update."""
        if self.work.masking is None:
            return update, None
        return self._with_secrets(store, lambda secrets: masked(update, task, self.work, secrets))

    def _with_secrets(self, store: ClientStore, act: Callable[[ClientSecrets], Outcome]) -> Outcome:
        """Do something with the site's secrets; what must not be forgotten is on disk before anything is handed
        back.
        """
        secrets = ClientSecrets(self.client, store.secrets(), os.urandom, self._signer)
        try:
            outcome = act(secrets)
        except Exception as error:  # whatever the server sends, the site stays
            log.exception("the keys of a secure aggregation failed")
            outcome = None, f"{type(error).__name__} at the site, whose log says more"
        store.keep(secrets.kept)
        return outcome

    def personalize(self, version: int, community: Tensor, memory: Mapping[str, Tensor] | None) -> Tensor:
        """The model [p] that the site would use for itself, given the global model [s] and what it remembers."""
        task = Task(0, self.client, version, {"model": community})
        remembered = self._first(task) if memory is None else memory
        return personal_model(self._answers, self.client, version, community, remembered)

    def _stack(self, task: Task, memory: Mapping[str, Tensor] | None) -> ClientStack:
        remembered = self._first(task) if memory is None else memory
        own = ("model", PRIVATE)
        vectors = {n: [part] for n, part in task.vectors.items() if n not in own and not n.startswith(MASKING)}
        return ClientStack(
            clients=[self.client],
            versions=[task.version],
            rng_versions=[task.rng_version],
            committed=[task.committed],
            models=[task.vectors["model"]],
            vectors=vectors,
            state={name: [tensor] for name, tensor in remembered.items()},
            query=task.query,
        )

    def _first(self, task: Task) -> Mapping[str, Tensor]:
        """What a site remembers before its first training: what the rule says, and the private part sent along."""
        shared = self.work.layout.shared
        if shared == self.work.layout.size:
            return self._fresh
        return self._fresh | {PRIVATE: task.vectors.get(PRIVATE, self.work.initial[shared:])}
