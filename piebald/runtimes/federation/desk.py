"""What a site does with one assignment: the simulator's own engine, for one client."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from piebald.contracts import Assignment, Clients, Update, Work
from piebald.runtimes.engines.choose import make_engine
from piebald.runtimes.engines.serve import PRIVATE, Engine, Stack, personal_model, serve
from piebald.runtimes.federation.floor import Floor

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
    """

    def __init__(self, prepared: Prepared, floor: Floor, device: str, secret: int) -> None:
        work = prepared.work
        if (
            floor.own_noise or work.rule.privacy() is not None
        ):  # the server knows the run's seed, and could subtract noise that is made from it
            work = replace(work, seed=secret % (1 << 64))
        self.work, self.client, self._floor = work, prepared.client, floor
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
        except (
            Exception
        ) as error:  # whatever happens with its rows, the site stays; the text may hold numbers of theirs
            log.exception("assignment %d failed", assignment.id)
            return None, f"{type(error).__name__} at the site, whose log says more", None
        update = served.update(0)
        # a client whose update cannot count also forgets the attempt
        keeps = query is None and math.isfinite(update.norm)
        return update, None, {name: rows[0].clone() for name, rows in served.memory.items()} if keeps else None

    def personal(self, version: int, community: Tensor, memory: Mapping[str, Tensor] | None) -> Tensor:
        """The model [p] that the site would use for itself, given the community model [s] and what it remembers."""
        assignment = Assignment(0, self.client, version, {"model": community})
        remembered = self._first(assignment) if memory is None else memory
        return personal_model(self._answers, self.client, version, community, remembered)

    def _stack(self, assignment: Assignment, memory: Mapping[str, Tensor] | None) -> Stack:
        remembered = self._first(assignment) if memory is None else memory
        parts = {name: [part] for name, part in assignment.parts.items() if name not in ("model", PRIVATE)}
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
