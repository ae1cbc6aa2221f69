"""Clients of boosting on this machine, and one client at its site: trees, margins between rounds, sums."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from piebald.contracts import Split
from piebald.core.errors import SettingError
from piebald.core.machine import count_cores
from piebald.core.moments import Ints
from piebald.statistics.bounded_sums import FEWEST_CLIENTS, MOST_CLIENTS, secure_sum
from piebald.statistics.trees.encoding import TreeRows
from piebald.statistics.trees.forest import Floats32, Forest
from piebald.statistics.trees.growth import Grower
from piebald.statistics.trees.histograms import SummedRows, summed_loss
from piebald.statistics.trees.rounds import Boosted, Boosting, Growing, Start
from piebald.statistics.trees.settings import TreeSettings
from piebald.statistics.trees.targets import Target, TargetSums


class LocalTreeClients:
    """Clients on this machine (`rounds.TreeClients`), each computed with one thread, so that bits repeat.

    Args:
        clients: their rows.
        target: the objective.
        settings: of boosting.
        seed: of subsampling.
        numbers: the clients' numbers, from which their random numbers follow; 0, 1, ... by default.
    """

    def __init__(
        self, clients: Sequence[TreeRows], target: Target, settings: TreeSettings, seed: int,
        numbers: Sequence[int] | None = None,
    ) -> None:  # fmt: skip
        self._clients, self._target, self._settings, self._seed = clients, target, settings, seed
        self._numbers = range(len(clients)) if numbers is None else numbers
        self._growers: dict[int, Grower] = {}
        self._margins: dict[
            tuple[int, Split], tuple[int, Floats32]
        ] = {}  # by client and split: how many trees, and their margins

    def sums(self) -> list[TargetSums]:
        """See `rounds.TreeClients`."""
        return [self._target.sums(client.y["train"]) for client in self._clients]

    def grow(self, forest: Forest, start: Start, number: int, who: Sequence[int]) -> list[Forest | None]:
        """See `rounds.TreeClients`."""

        def grown_by(client: int) -> Forest:
            rows = self._clients[client]
            if client not in self._growers:
                self._growers[client] = Grower(
                    rows.x["train"], rows.y["train"], self._target, self._settings, start.class_weights
                )
            # a copy, since a grower adds its trees to the margins
            margins = self.margins(client, forest, start, "train").copy()
            return self._growers[client].grow(margins, self._seed, "trees", self._numbers[client], number)

        if len(who) == 1:
            return [grown_by(who[0])]
        # xgboost computes without the interpreter lock, so threads use all cores
        with ThreadPoolExecutor(min(count_cores(), len(who))) as pool:
            return list(pool.map(grown_by, who))

    def losses(self, forest: Forest, start: Start, split: Split) -> list[tuple[float, int] | None]:
        """See `rounds.TreeClients`."""
        losses: list[tuple[float, int] | None] = []
        for client, rows in enumerate(self._clients):
            row_losses = self._target.row_losses(self.margins(client, forest, start, split), rows.y[split])
            losses.append((float(row_losses.sum()), len(row_losses)))
        return losses

    def scores(self, boosted: Boosted, split: Split) -> list[dict[str, float]]:
        """Return each client's scores of a model."""
        return [
            self._target.scores(margins_of(rows.x[split], boosted.forest, boosted.start), rows.y[split])
            for rows in self._clients
        ]

    def margins(self, client: int, forest: Forest, start: Start, split: Split) -> Floats32:
        """Return margins [n, G] of a client's rows, from those of the forest's first trees if they are known."""
        x = self._clients[client].x[split]
        trees, margins = self._margins.get((client, split), (0, start_margins(len(x), start)))
        if trees > len(forest):  # another run has begun
            trees, margins = 0, start_margins(len(x), start)
        Forest(forest.table[trees:], forest.depth).add_to(margins, x)
        self._margins[client, split] = len(forest), margins
        return margins


def start_margins(rows: int, start: Start) -> Floats32:
    """Return the margins [n, G] before the first tree."""
    return np.tile(start.margins, (rows, 1)).astype(np.float32)


def margins_of(x: Floats32, forest: Forest, start: Start) -> Floats32:
    """Return the margins [n, G] of a forest."""
    margins = start_margins(len(x), start)
    forest.add_to(margins, x)
    return margins


def alone(rows: TreeRows, target: Target, settings: TreeSettings, seed: int) -> Boosted | None:
    """Return the model that a client boosts by itself; None where its targets are all the same.

    Under all forms a single client does the same: usual boosting, by xgboost.  A client without validation rows has no
    patience.
    """
    if not len(rows.y["train"]):
        return None
    plain = {"form": "bagging", "secure": False, "target_bounds": None} if settings.form == "histogram" else {}
    settings = settings.model_copy(update=plain if len(rows.y["validation"]) else {**plain, "patience": None})
    if target.objective != "regression" and len(np.unique(rows.y["train"])) < 2:
        return None
    boosting = Boosting(LocalTreeClients([rows], target, settings, seed), target, settings)
    return boosting.run(boosting.started())


class LocalSums:
    """Clients on this machine that send sums (`rounds.SummedClients`).

    Args:
        clients: their rows.
        target: the objective.
        settings: of boosting.
        seed: of subsampling.

    Raises:
        SettingError: there are too many clients for sums under masks, or too few.
    """

    def __init__(self, clients: Sequence[TreeRows], target: Target, settings: TreeSettings, seed: int) -> None:
        if settings.secure and not FEWEST_CLIENTS <= len(clients) <= MOST_CLIENTS:
            raise SettingError(f"secure sums are of {FEWEST_CLIENTS} to {MOST_CLIENTS:,} clients, got {len(clients)}")
        self._clients, self._target, self._settings, self._seed = clients, target, settings, seed
        self._rows = [SummedRows(client.x["train"], client.y["train"], target, settings) for client in clients]
        self._local = LocalTreeClients(clients, target, settings, seed)

    @property
    def columns(self) -> int:
        """See `SummedClients`."""
        return int(self._clients[0].x["train"].shape[1])

    def targets(self) -> Ints:
        """See `SummedClients`."""
        return self._sum([rows.targets() for rows in self._rows])

    def at_most(self, thresholds: Floats32) -> Ints:
        """See `SummedClients`."""
        return self._sum([rows.at_most(thresholds) for rows in self._rows])

    def histograms(self, growing: Growing) -> Ints:
        """See `SummedClients`."""
        start = growing.start
        return self._sum([
            rows.histograms(
                self._local.margins(client, growing.forest, start, "train"), growing.grown, growing.level,
                growing.thresholds, start.class_weights, self._seed, "trees", client, growing.number,
            )
            for client, rows in enumerate(self._rows)
        ])  # fmt: skip

    def loss(self, forest: Forest, start: Start) -> Ints:
        """See `SummedClients`."""
        return self._sum([
            summed_loss(self._local.margins(client, forest, start, "validation"), rows.y["validation"], self._target,
                        self._settings)
            for client, rows in enumerate(self._clients)
        ])  # fmt: skip

    def _sum(self, parts: Sequence[Ints]) -> Ints:
        if not self._settings.secure:
            return np.asarray(np.sum(parts, axis=0))
        return secure_sum([part.reshape(-1) for part in parts]).reshape(parts[0].shape)
