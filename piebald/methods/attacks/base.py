"""The base class of attacks, and how often they succeed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar, Protocol

import torch
from pydantic import Field, field_validator
from torch import Tensor, nn

from piebald.core.arguments import checked
from piebald.core.pytree import single
from piebald.methods.transforms.base import Transform

if TYPE_CHECKING:
    from piebald.contracts import Rows


class Attack(Transform):
    """Changes the updates of some clients; subclasses define in `corrupt` what these send.

    For testing defences.  Only the change of the shared numbers is touched, running statistics included; other named
    vectors go as they are.

    Attributes:
        clients: numbers of the attackers.
    """

    axis = "transforms"
    takes_statistics: ClassVar[bool] = True

    clients: tuple[int, ...] = Field(min_length=1)

    @field_validator("clients")
    @classmethod
    def _check_clients(cls, clients: tuple[int, ...]) -> tuple[int, ...]:
        if min(clients) < 0 or len(set(clients)) < len(clients):
            raise ValueError(f"clients must name each attacker once, from 0 up, got {clients}")
        return clients

    def on_client(
        self, vectors: Mapping[str, Tensor], keys: Sequence[int], clients: Sequence[int]
    ) -> Mapping[str, Tensor]:
        struck = [row for row, client in enumerate(clients) if client in self.clients]
        if not struck:
            return vectors
        # a clone: rows of honest clients share this tensor, and the caller may keep it
        change = vectors["model"].clone()
        change[struck] = self.corrupt(change[struck], [keys[row] for row in struck])
        return {**vectors, "model": change}

    def corrupt(self, change: Tensor, keys: Sequence[int]) -> Tensor:
        """Return what the attackers [a, s] send instead, each from its own update and key alone."""
        raise NotImplementedError


class Collusion(Attack):
    """An attack by clients that know one another's updates; subclasses define in `colluded_update` what they send.

    No client can compute that alone, so it is done where the updates of a step are collected, before aggregation.  In a
    real federation the attackers would communicate directly; the server would see the same.
    """

    axis = "transforms"

    def on_client(
        self, vectors: Mapping[str, Tensor], keys: Sequence[int], clients: Sequence[int]
    ) -> Mapping[str, Tensor]:
        return vectors

    def collude(self, matrix: Tensor, clients: Sequence[int], key: int) -> Tensor:
        struck = [row for row, client in enumerate(clients) if client in self.clients]
        if not struck:
            return matrix
        matrix = matrix.clone()
        # honest updates of the attackers only: they do not know those of others
        matrix[struck] = self.colluded_update(matrix[struck], len(clients))
        return matrix

    def colluded_update(self, own: Tensor, count: int) -> Tensor:
        """Return what the attackers send [a, s] or [s], from the updates [a, s] that they would honestly have sent,
        among `count` updates in all.
        """
        raise NotImplementedError


def deviation(own: Tensor) -> Tensor:
    """Standard deviation of each column of [a, s]; 0 where there is but one row."""
    return own.std(dim=0) if len(own) > 1 else torch.zeros_like(own[0])


class Trigger(Protocol):
    """A mark on inputs, such as `partition.Backdoor`."""

    target: int

    def mark(self, x: Tensor) -> Tensor:
        """Inputs [n, ...] with the trigger on every one."""


@checked
def backdoor_success(model: nn.Module, rows: Rows, trigger: Trigger) -> float:
    """Of clean rows of other classes, the share that the marked input puts into the target class.

    Args:
        model: any module, e.g. `run.model()`.
        rows: clean test rows, e.g. a federation's `common`.
        trigger: the change that poisoned the clients.
    """
    x, y = (single(part, "the backdoor's success") for part in (rows.x, rows.y))
    of_others = y != trigger.target
    # rows of the target class prove nothing, since they belong there without a trigger
    if not bool(of_others.any()):
        return math.nan
    was = model.training
    model.eval()
    with torch.no_grad():
        # in parts, as a whole test set need not fit a forward pass
        predicted = torch.cat([model(part).argmax(1) for part in torch.split(trigger.mark(x[of_others]), 1024)])
    model.train(was)
    return float((predicted == trigger.target).float().mean())
