"""Clients on this machine, and one client at its site: rows, margins that are kept from round to round, trees."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from piebald.contracts import Split
from piebald.core.errors import SettingError
from piebald.core.machine import count_cores
from piebald.core.moments import Floats
from piebald.statistics.boosting.forest import Floats32, Forest
from piebald.statistics.boosting.growth import Grower
from piebald.statistics.boosting.rounds import Boosted, Boosting, Start
from piebald.statistics.boosting.settings import TreeSettings
from piebald.statistics.boosting.targets import Target, TargetSums


@dataclass(frozen=True, slots=True, eq=False)
class TreeRows:
    """The rows of one client.

    Attributes:
        name: the client's name.
        x: inputs [n, d] of each split, NaN for a gap.
        y: targets [n] of each split, a class as its number.
    """

    name: str
    x: Mapping[Split, Floats32]
    y: Mapping[Split, Floats]

    def pooled(self, others: Sequence[TreeRows]) -> TreeRows:
        """These rows and those of others, as of one client of this name."""
        every = [self, *others]
        x: dict[Split, Floats32] = {split: np.concatenate([one.x[split] for one in every]) for split in self.x}
        y: dict[Split, Floats] = {split: np.concatenate([one.y[split] for one in every]) for split in self.y}
        return TreeRows(self.name, x, y)


def usable(x: Floats32, missing: float | None, whose: str) -> Floats32:
    """Inputs [n, d] as float32 with NaN for gaps.

    Raises:
        SettingError: a number is infinite, or too large for float32.
    """
    made = np.ascontiguousarray(x, dtype=np.float32)
    if missing is not None:
        made = np.where(made == np.float32(missing), np.float32(np.nan), made)
    if np.isinf(made).any():
        column = int(np.nonzero(np.isinf(made).any(0))[0][0])
        raise SettingError(f"{whose} has a number in column {column} of the inputs that is infinite or above 3e38: "
                           "write a gap in its place")  # fmt: skip
    return made


class HereClients:
    """Clients on this machine (`rounds.TreeClients`), each computed with one thread, so that bits repeat.

    Args:
        clients: their rows.
        target: what is predicted.
        settings: of boosting.
        seed: of subsampling.
        numbers: the clients' numbers, which random numbers belong to; 0, 1, ... by default.
    """

    def __init__(
        self, clients: Sequence[TreeRows], target: Target, settings: TreeSettings, seed: int,
        numbers: Sequence[int] | None = None,
    ) -> None:  # fmt: skip
        self._clients, self._target, self._settings, self._seed = clients, target, settings, seed
        self._numbers = range(len(clients)) if numbers is None else numbers
        self._growers: dict[int, Grower] = {}
        self._margins: dict[tuple[int, Split], tuple[int, Floats32]] = {}  # of a client's rows after so many trees

    def sums(self) -> list[TargetSums]:
        """See `rounds.TreeClients`."""
        return [self._target.sums(one.y["train"]) for one in self._clients]

    def grow(self, forest: Forest, start: Start, number: int, who: Sequence[int]) -> list[Forest | None]:
        """See `rounds.TreeClients`."""

        def grown(client: int) -> Forest:
            rows = self._clients[client]
            if client not in self._growers:
                self._growers[client] = Grower(
                    rows.x["train"], rows.y["train"], self._target, self._settings, start.class_weights
                )
            margins = self.margins(client, forest, start, "train").copy()
            return self._growers[client].grow(margins, self._seed, "trees", self._numbers[client], number)

        if len(who) == 1:
            return [grown(who[0])]
        with ThreadPoolExecutor(min(count_cores(), len(who))) as pool:
            return list(pool.map(grown, who))

    def losses(self, forest: Forest, start: Start, split: Split) -> list[tuple[float, int] | None]:
        """See `rounds.TreeClients`."""
        found: list[tuple[float, int] | None] = []
        for client, rows in enumerate(self._clients):
            losses = self._target.row_losses(self.margins(client, forest, start, split), rows.y[split])
            found.append((float(losses.sum()), len(losses)))
        return found

    def scores(self, boosted: Boosted, split: Split) -> list[dict[str, float]]:
        """Each client's scores of a model."""
        return [
            self._target.scores(fresh(rows.x[split], boosted.forest, boosted.start), rows.y[split])
            for rows in self._clients
        ]

    def margins(self, client: int, forest: Forest, start: Start, split: Split) -> Floats32:
        """Margins [n, G] of a client's rows, from those of the forest's first trees if they are known."""
        x = self._clients[client].x[split]
        trees, known = self._margins.get((client, split), (0, started(len(x), start)))
        if trees > len(forest):
            trees, known = 0, started(len(x), start)
        Forest(forest.table[trees:], forest.depth).add_to(known, x)
        self._margins[client, split] = len(forest), known
        return known


def started(rows: int, start: Start) -> Floats32:
    """The margins [n, G] before the first tree."""
    return np.tile(start.margins, (rows, 1)).astype(np.float32)


def fresh(x: Floats32, forest: Forest, start: Start) -> Floats32:
    """The margins [n, G] of a forest."""
    margins = started(len(x), start)
    forest.add_to(margins, x)
    return margins


def alone(rows: TreeRows, target: Target, settings: TreeSettings, seed: int) -> Boosted | None:
    """The model that a client boosts by itself; None where its targets are all the same.

    Under all forms a single client does the same: boosting as it is known, by xgboost.  Where it has no validation
    rows, it is not patient.
    """
    if not len(rows.y["train"]):
        return None
    plain = {"form": "bagging", "secure": False, "target_bounds": None} if settings.form == "histogram" else {}
    own = settings.model_copy(update=plain if len(rows.y["validation"]) else {**plain, "patience": None})
    if target.objective != "regression" and len(np.unique(rows.y["train"])) < 2:
        return None
    boosting = Boosting(HereClients([rows], target, own, seed), target, own)
    return boosting.run(boosting.started())
