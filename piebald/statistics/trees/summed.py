"""Clients of whose sums boosted trees are grown (`summed_rounds.SummedClients`): on this machine, or at their sites."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from piebald.contracts import Runtime
from piebald.core.errors import SettingError
from piebald.core.moments import Ints
from piebald.methods.client_work import ClientWork
from piebald.privacy import SecureAggregation
from piebald.statistics.boosting.clients import HereClients, TreeRows
from piebald.statistics.boosting.forest import Floats32, Forest
from piebald.statistics.boosting.rounds import Start
from piebald.statistics.boosting.settings import TreeSettings
from piebald.statistics.boosting.summed_rounds import Growing
from piebald.statistics.boosting.summed_rows import SummedRows, summed_loss
from piebald.statistics.boosting.targets import Target
from piebald.statistics.hidden_at_sites import AskedSites
from piebald.statistics.queries.tree_sums import MaskedTreeSumsQuery
from piebald.statistics.secure_sum import LEAST, MOST, secure_sum

log = logging.getLogger("piebald.trees")


class SummedHere:
    """Clients on this machine.

    Args:
        clients: their rows.
        target: what is predicted.
        settings: of boosting.
        seed: of subsampling.

    Raises:
        SettingError: sums under masks are of more clients, or of fewer.
    """

    def __init__(self, clients: Sequence[TreeRows], target: Target, settings: TreeSettings, seed: int) -> None:
        if settings.secure and not LEAST <= len(clients) <= MOST:
            raise SettingError(f"secure sums are of {LEAST} to {MOST:,} clients, got {len(clients)}")
        self._clients, self._target, self._settings, self._seed = clients, target, settings, seed
        self._rows = [SummedRows(one.x["train"], one.y["train"], target, settings) for one in clients]
        self._here = HereClients(clients, target, settings, seed)

    @property
    def columns(self) -> int:
        """See `SummedClients`."""
        return int(self._clients[0].x["train"].shape[1])

    def targets(self) -> Ints:
        """See `SummedClients`."""
        return self._sum([one.targets() for one in self._rows])

    def at_most(self, thresholds: Floats32) -> Ints:
        """See `SummedClients`."""
        return self._sum([one.at_most(thresholds) for one in self._rows])

    def histograms(self, growing: Growing) -> Ints:
        """See `SummedClients`."""
        start = growing.start
        return self._sum([
            one.histograms(
                self._here.margins(client, growing.forest, start, "train"), growing.grown, growing.level,
                growing.thresholds, start.class_weights, self._seed, "trees", client, growing.number,
            )
            for client, one in enumerate(self._rows)
        ])  # fmt: skip

    def loss(self, forest: Forest, start: Start) -> Ints:
        """See `SummedClients`."""
        return self._sum([
            summed_loss(self._here.margins(client, forest, start, "validation"), one.y["validation"], self._target,
                        self._settings)
            for client, one in enumerate(self._clients)
        ])  # fmt: skip

    def _sum(self, told: Sequence[Ints]) -> Ints:
        if not self._settings.secure:
            return np.asarray(np.sum(told, axis=0))
        return secure_sum([one.reshape(-1) for one in told]).reshape(told[0].shape)


class SummedAtSites:
    """Clients who are asked for sums under masks through a runtime.

    Each question is summed over those who answer it; one that falls silent is left out of it, as long as the masks can
    be taken off.

    Args:
        runtime: where they are.
        work: the run, with `SecureAggregation` of 64 bits.
        columns: how many inputs they have.
        target: what is predicted.
        settings: of boosting.
        seed: of subsampling.
        say: is told who is left out, and why.

    Attributes:
        taking_part: client numbers of those who answered the first question.
    """

    def __init__(
        self, runtime: Runtime, work: ClientWork, columns: int, target: Target, settings: TreeSettings, seed: int,
        say: Callable[[str], None] = log.warning,
    ) -> None:  # fmt: skip
        assert isinstance(work.masking, SecureAggregation)
        self._runtime, self._work, self._masking, self._say = runtime, work, work.masking, say
        self._columns, self._target, self._settings, self._seed = columns, target, settings, seed
        self._sites = AskedSites(runtime, work)
        self._left_out: set[int] = set()
        self.taking_part: list[int] = []

    @property
    def columns(self) -> int:
        """See `SummedClients`."""
        return self._columns

    def targets(self) -> Ints:
        """See `SummedClients`."""
        return self._asked("targets", {})

    def at_most(self, thresholds: Floats32) -> Ints:
        """See `SummedClients`."""
        columns, count = thresholds.shape
        return self._asked("at_most", {"thresholds": thresholds}, columns=columns, thresholds=count)

    def histograms(self, growing: Growing) -> Ints:
        """See `SummedClients`."""
        brought = {"forest": growing.forest.sent, "grown": growing.grown.sent, "thresholds": growing.thresholds}
        columns, count = growing.thresholds.shape
        return self._asked(
            "histograms", brought, growing.number, columns=columns, thresholds=count, nodes=growing.nodes,
            level=growing.level, round=growing.number, **_about(growing.start),
        )  # fmt: skip

    def loss(self, forest: Forest, start: Start) -> Ints:
        """See `SummedClients`."""
        rounds = len(forest) // self._target.groups
        return self._asked("loss", {"forest": forest.sent}, rounds - 1, **_about(start))

    def _asked(self, ask: Any, brought: Mapping[str, Floats32], version: int = 0, **more: Any) -> Ints:
        query = MaskedTreeSumsQuery(
            ask=ask, boosting=self._settings, objective=self._target.objective, classes=self._target.classes,
            seed=self._seed, **more,
        )  # fmt: skip
        vectors: dict[str, Tensor] = {name: torch.from_numpy(one) for name, one in brought.items()}
        who, total = self._sites.sums(query, self._masking, vectors, version)
        self.taking_part = self.taking_part or who
        for client in sorted({*self._runtime.clients()} - {*who} - self._left_out):
            self._left_out.add(client)
            self._say(f"client {client + 1} is left out of a sum: {self._sites.refused.get(client, 'no answer')}")
        return np.rint(total).astype(np.int64).reshape(query.shape)


def _about(start: Start) -> dict[str, Any]:
    return {"start": tuple(start.margins.tolist()), "class_weights": start.class_weights}
