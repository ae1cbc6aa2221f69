"""Rounds of boosting over clients, wherever they are: bagging and cyclic training.

With F the model so far, in a round of bagging each client k grows Newton trees T_k on its rows from F, and the model
becomes F + sum_k w_k T_k, with w_k its share of the training rows, or the same for all: the learning rate is divided
among the clients, so that a round is one step of boosting whose tree is a forest.  In a round of cyclic training one
client grows trees, which count whole.  Trees that are grown from sums over all clients are in `summed_rounds`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from piebald.contracts import Split
from piebald.core.errors import SettingError
from piebald.statistics.boosting.forest import MOST_TREES, Floats32, Forest
from piebald.statistics.boosting.settings import TreeSettings
from piebald.statistics.boosting.targets import Target, TargetSums


@dataclass(frozen=True, slots=True)
class Start:
    """What all clients know before the first round.

    Attributes:
        margins: where boosting starts [G].
        class_weights: weight of a row of each class, None where all are 1.
        rows: training rows of each client.
    """

    margins: Floats32
    class_weights: tuple[float, ...] | None
    rows: tuple[int, ...]


class TreeClients(Protocol):
    """Clients that grow trees and score them, here or at their sites; numbers are their places."""

    def sums(self) -> list[TargetSums]:
        """Sums of each client's training targets."""

    def grow(self, forest: Forest, start: Start, number: int, who: Sequence[int]) -> list[Forest | None]:
        """The trees that some clients grow in round `number` on top of a forest; None of one that did not answer."""

    def losses(self, forest: Forest, start: Start, split: Split) -> list[tuple[float, int] | None]:
        """The sum of the loss over each client's rows, and how many rows they are."""


@dataclass(frozen=True, slots=True, eq=False)
class Boosted:
    """A forest after some rounds.

    Attributes:
        start: where it starts.
        forest: the trees of all rounds.
        ends: trees after each round, increasing.
        losses: the loss on all clients' validation rows after each round, empty where nobody asked.
    """

    start: Start
    forest: Forest
    ends: tuple[int, ...] = ()
    losses: tuple[float, ...] = ()

    @property
    def best(self) -> int:
        """The number of rounds with the least validation loss; all rounds where it is not known."""
        return len(self.ends) if not self.losses else 1 + int(np.argmin(self.losses))

    def cut(self, rounds: int) -> Boosted:
        """The first rounds alone."""
        trees = self.ends[rounds - 1] if rounds else 0
        return Boosted(self.start, self.forest.first(trees), self.ends[:rounds], self.losses)


def nothing(state: Boosted) -> None:
    """What happens after a round where nobody wants to be told."""


class Rounds(ABC):
    """Rounds of boosting over clients, however a round's trees are grown.

    Args:
        target: what is predicted.
        settings: of boosting.
        done: is told the state after each round.
    """

    def __init__(self, target: Target, settings: TreeSettings, done: Callable[[Boosted], None] = nothing) -> None:
        self.target, self.settings, self.done = target, settings, done

    @abstractmethod
    def started(self) -> Boosted:
        """The model before the first round.

        Raises:
            SettingError: there is nothing to predict, or the rounds would make too many trees.
        """

    @abstractmethod
    def grown(self, state: Boosted) -> Forest:
        """The forest with the trees of a further round."""

    @abstractmethod
    def loss(self, forest: Forest, start: Start) -> tuple[float, int]:
        """The sum of the loss over all clients' validation rows, and how many rows they are."""

    def run(self, state: Boosted) -> Boosted:
        """The model after all rounds, or those until it did not become better, from a state on.

        Raises:
            SettingError: nobody grows a tree, or there are no validation rows to be patient by.
        """
        while len(state.ends) < self.settings.rounds and not self._over(state):
            state = self._round(state)
            self.done(state)
        return state.cut(state.best)

    def check_trees(self, growing: int) -> None:
        """Refuse more trees than fit, where so many clients grow some of their own in a round.

        Raises:
            SettingError: the rounds would make too many.
        """
        trees = self.settings.rounds * self.settings.local_rounds * self.target.groups * growing
        if trees > MOST_TREES:
            raise SettingError(f"rounds would make {trees:,} trees, at most {MOST_TREES:,} are allowed: ask for fewer")

    def start_of(self, told: Sequence[TargetSums]) -> Boosted:
        """The model before the first round, from sums of training targets.

        Raises:
            SettingError: there is nothing to predict.
        """
        if not sum(one.rows for one in told):
            raise SettingError("there is no training row whose target is known")
        margins, weights = self.target.start(told, self.settings.balanced)
        start = Start(margins, weights, tuple(one.rows for one in told))
        return Boosted(start, Forest.none(self.settings.max_depth))

    def _over(self, state: Boosted) -> bool:
        patience = self.settings.patience
        return patience is not None and bool(state.losses) and len(state.losses) - state.best >= patience

    def _round(self, state: Boosted) -> Boosted:
        forest = self.grown(state)
        ends = (*state.ends, len(forest))
        if self.settings.patience is None:
            return Boosted(state.start, forest, ends, state.losses)
        total, rows = self.loss(forest, state.start)
        if not rows:
            raise SettingError("patience needs validation rows, and no client has any: give validation = 0.1")
        return Boosted(state.start, forest, ends, (*state.losses, total / rows))


class Boosting(Rounds):
    """Boosting in which each client grows trees on its own rows.

    Args:
        clients: who grows trees.
        target, settings, done: as of `Rounds`.
    """

    def __init__(
        self, clients: TreeClients, target: Target, settings: TreeSettings,
        done: Callable[[Boosted], None] = nothing,
    ) -> None:  # fmt: skip
        super().__init__(target, settings, done)
        self.clients = clients

    def started(self) -> Boosted:
        """See `Rounds`."""
        told = self.clients.sums()
        self.check_trees(len(told) if self.settings.form == "bagging" else 1)
        return self.start_of(told)

    def grown(self, state: Boosted) -> Forest:
        """See `Rounds`.

        Raises:
            SettingError: nobody grows a tree.
        """
        number, start = len(state.ends), state.start
        held = [client for client, rows in enumerate(start.rows) if rows]
        who = held if self.settings.form == "bagging" else [held[number % len(held)]]
        grown = self.clients.grow(state.forest, start, number, who)
        came = [(client, trees) for client, trees in zip(who, grown, strict=True) if trees is not None]
        if not came and self.settings.form == "bagging":
            raise SettingError(f"no client has grown a tree in round {number + 1}: see why in the log")
        forest = state.forest
        total = sum(start.rows[client] for client, _ in came)
        for client, trees in came:
            share = start.rows[client] / total if self.settings.weights == "examples" else 1 / len(came)
            forest = forest.joined(trees.weighted(share))
        return forest

    def loss(self, forest: Forest, start: Start) -> tuple[float, int]:
        """See `Rounds`."""
        told = [one for one in self.clients.losses(forest, start, "validation") if one is not None]
        return math.fsum(one for one, _ in told), sum(count for _, count in told)
