"""What a site does with one assignment: the simulator's own engine, for one client."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from piebald.client_work import Work
from piebald.contracts import SEALING, Assignment, Clients, Secrets, Signer, Update
from piebald.privacy.secure_aggregation.client_side import Outcome, replied, sealed, sealing
from piebald.runtimes.engines.choose import make_engine
from piebald.runtimes.engines.serving import PRIVATE, Engine, Stack, personal_model, serve
from piebald.runtimes.federation.client_store import Vault
from piebald.runtimes.federation.policy import Floor

log = logging.getLogger("piebald.federation")


@dataclass(frozen=True, slots=True, eq=False)
class Prepared:
    """A run's terms as a site understands them.

    Attributes:
        work: rebuilt from names and fields.
        clients: all clients' names, and this site's rows alone.
        client: this site's number.
    """

    work: Work
    clients: Clients
    client: int


class Desk:
    """Serves assignments of one run.

    Args:
        prepared: the terms.
        floor: what the site agrees to.
        device: where it computes.
        secret: a number that only this site knows.
        signer: signs the site's keys of secure sums, and checks those of others.
    """

    def __init__(
        self, prepared: Prepared, floor: Floor, device: str, secret: int, signer: Signer | None = None
    ) -> None:
        work = prepared.work
        # the server knows the run's seed, and could subtract noise that is made from it
        if floor.own_noise or work.rule.privacy() is not None:
            work = replace(work, seed=secret % (1 << 64))
        self.work, self.client, self._floor, self._signer = work, prepared.client, floor, signer
        self._fresh = work.rule.remember(work.initial, work.layout.shared)
        # one engine a thread: a question is answered while the other trains
        made = (make_engine("lean", work, prepared.clients, torch.device(device), False) for _ in range(2))
        self._trains, self._answers = made

    def serve(
        self, assignment: Assignment, memory: Mapping[str, Tensor] | None
    ) -> tuple[Update | None, str | None, dict[str, Tensor] | None]:
        """The update or the reason why there is none, and what is remembered from now on (None: as before)."""
        query = assignment.query
        if query is not None and not self._floor.answers(query):
            return None, f"this site does not answer {query.kind!r}", None
        engine: Engine = self._trains if query is None else self._answers
        try:
            served = serve(engine, self._stack(assignment, memory))
        except Exception as error:  # whatever its rows do, the site stays; the text may hold numbers of theirs
            log.exception("assignment %d failed", assignment.id)
            return None, f"{type(error).__name__} at the site, whose log says more", None
        update = served.update(0)
        # a client whose update cannot count also forgets the attempt
        keeps = query is None and math.isfinite(update.norm)
        return update, None, {name: rows[0].clone() for name, rows in served.memory.items()} if keeps else None

    def reply(self, assignment: Assignment, vault: Vault) -> Outcome:
        """The answer to a question about keys."""
        return self._with_secrets(vault, lambda secrets: replied(assignment, self.work, secrets))

    def seal(self, update: Update, assignment: Assignment, vault: Vault) -> Outcome:
        """What leaves instead of an update."""
        if sealing(self.work) is None:
            return update, None
        return self._with_secrets(vault, lambda secrets: sealed(update, assignment, self.work, secrets))

    def _with_secrets(self, vault: Vault, act: Callable[[Secrets], Outcome]) -> Outcome:
        """Do something with the site's secrets; what must not be forgotten is on disk before anything is handed
        back.
        """
        secrets = Secrets(self.client, vault.secrets(), os.urandom, self._signer)
        try:
            outcome = act(secrets)
        except Exception as error:  # whatever the server sends, the site stays
            log.exception("the keys of a secure sum failed")
            outcome = None, f"{type(error).__name__} at the site, whose log says more"
        vault.keep(secrets.kept)
        return outcome

    def personal(self, version: int, community: Tensor, memory: Mapping[str, Tensor] | None) -> Tensor:
        """The model [p] that the site would use for itself, given the community model [s] and what it remembers."""
        assignment = Assignment(0, self.client, version, {"model": community})
        remembered = self._first(assignment) if memory is None else memory
        return personal_model(self._answers, self.client, version, community, remembered)

    def _stack(self, assignment: Assignment, memory: Mapping[str, Tensor] | None) -> Stack:
        remembered = self._first(assignment) if memory is None else memory
        own = ("model", PRIVATE)
        parts = {n: [part] for n, part in assignment.parts.items() if n not in own and not n.startswith(SEALING)}
        return Stack(
            clients=[self.client],
            versions=[assignment.version],
            moments=[assignment.moment],
            committed=[assignment.committed],
            models=[assignment.parts["model"]],
            parts=parts,
            memory={name: [tensor] for name, tensor in remembered.items()},
            query=assignment.query,
        )

    def _first(self, assignment: Assignment) -> Mapping[str, Tensor]:
        """What a site remembers before its first training: what the rule says, and the private part sent along."""
        shared = self.work.layout.shared
        if shared == self.work.layout.size:
            return self._fresh
        return self._fresh | {PRIVATE: assignment.parts.get(PRIVATE, self.work.initial[shared:])}
