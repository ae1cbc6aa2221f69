"""Commits of which the centre sees the sum alone: agree on keys before training, open the sum at the step."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from torch import Tensor

from piebald.client_work import Work
from piebald.contracts import Arrival, Meeting
from piebald.server.cluster_models import Lend
from piebald.transforms.base import Stage


class Sealed:
    """The loop's dealings with the stage that seals updates.

    Args:
        stage: that stage, or None where single updates reach the centre: then nothing here does anything.
    """

    def __init__(self, stage: Stage | None) -> None:
        self.stage = stage
        self._meeting: Meeting | None = None
        self.loss: float | None = None  # of the sum that was opened last

    def meet(self, clients: Sequence[int], lend: Lend) -> None:
        """Let clients agree on keys.  A meeting is over with its commit, so no checkpoint holds one."""
        if self.stage is not None:
            self._meeting = self.stage.meet(clients, lend("update", 0))

    def parts(self, client: int) -> Mapping[str, Tensor]:
        """What a client's assignment brings for its seal."""
        return {} if self._meeting is None else self._meeting.parts(client)

    @property
    def absent(self) -> Mapping[int, str]:
        """Who takes no part in the commit though it was asked, with the reason."""
        return {} if self._meeting is None else self._meeting.absent

    def complaint(self, arrival: Arrival, work: Work) -> str | None:
        """Why a sealed update may not count, or None."""
        assert self.stage is not None
        if arrival.failure is not None or arrival.update is None:
            return arrival.failure or "no answer"
        return self.stage.broken(arrival.update, work)

    def open(self, arrivals: list[Arrival], lend: Lend) -> tuple[list[Arrival], str | None]:
        """The arrivals with their common sum in the place of what was sealed, or none of them and the reason."""
        self.loss = None
        if self.stage is None or not arrivals:
            return arrivals, None
        meeting, self._meeting = self._meeting, None
        sealed = {arrival.assignment.client: arrival.update for arrival in arrivals if arrival.update is not None}
        pool = "no secure sum: nobody has keys" if meeting is None else meeting.open(sealed, lend("update", 0))
        if isinstance(pool, str):
            return [], pool
        self.loss = pool.loss
        opened = []
        for arrival in arrivals:
            assert arrival.update is not None
            update = dataclasses.replace(arrival.update, parts={}, pool=pool)
            opened.append(dataclasses.replace(arrival, update=update))
        return opened, None
