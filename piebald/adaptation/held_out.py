"""Some clients are held out of a run until its end."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import Tensor

from piebald.contracts import Clients, Rows, Split
from piebald.errors import SettingError
from piebald.randomness import generator


class SomeClients:
    """Some of many clients, numbered from 0 again.

    Args:
        clients: all of them.
        chosen: the numbers of these there.
    """

    def __init__(self, clients: Clients, chosen: Sequence[int]) -> None:
        self._clients, self._chosen = clients, list(chosen)
        self.names = [clients.names[number] for number in self._chosen]
        self.classes, self.common = clients.classes, clients.common

    def __len__(self) -> int:
        return len(self._chosen)

    def rows(self, client: int, split: Split) -> Rows:
        """See `contracts.Clients`."""
        return self._clients.rows(self._chosen[client], split)

    def size(self, client: int, split: Split) -> int | None:
        """See `contracts.Clients`."""
        return self._clients.size(self._chosen[client], split)

    def counts(self, client: int, split: Split) -> Sequence[int] | None:
        """See `contracts.Clients`."""
        return self._clients.counts(self._chosen[client], split)


class SomePooledClients(SomeClients):
    """The same of clients that keep their rows in one pool, which engines index."""

    @property
    def x(self) -> Tensor:
        """Inputs of the whole pool."""
        x: Tensor = self._clients.x  # type: ignore[attr-defined]
        return x

    @property
    def y(self) -> Tensor:
        """Targets of the whole pool."""
        y: Tensor = self._clients.y  # type: ignore[attr-defined]
        return y

    def indices(self, client: int, split: Split) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Row numbers of one part of one client."""
        places: np.ndarray[Any, np.dtype[np.int64]] = self._clients.indices(self._chosen[client], split)  # type: ignore[attr-defined]
        return places


def set_apart(clients: Clients, unseen: float, seed: int) -> tuple[Clients, Clients | None]:
    """Those who take part, and those who stay unseen until the end; None where nobody does.

    Args:
        clients: everybody.
        unseen: a number of clients, or a share of them below 1.
        seed: of the choice.

    Raises:
        SettingError: nobody would take part, or it is not a number.
    """
    if isinstance(unseen, bool) or not isinstance(unseen, int | float) or not 0 <= unseen < math.inf:
        raise SettingError(f"unseen must be a number of clients (0, 1, ...) or a share of them (0.2), got {unseen!r}")
    count = int(unseen) if unseen == int(unseen) else max(1, round(unseen * len(clients)))
    if count >= len(clients):
        raise SettingError(f"unseen = {unseen} leaves none of {len(clients)} clients to train with: lower it")
    if not count:
        return clients, None
    apart = set(generator("unseen", seed).choice(len(clients), count, replace=False).tolist())
    there = [client for client in range(len(clients)) if client not in apart]
    pooled = hasattr(clients, "indices") and not getattr(clients, "lazy", False)
    some = SomePooledClients if pooled else SomeClients
    return some(clients, there), some(clients, sorted(apart))
