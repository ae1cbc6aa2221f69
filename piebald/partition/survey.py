"""How unlike clients are, as far as can be said before a run without loading a row that is not in memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

from piebald.contracts import InMemory
from piebald.partition.heterogeneity import Heterogeneity, measure
from piebald.partition.pictures import flat
from piebald.partition.statistics import collect

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from piebald.contracts import Clients, Fleet

MOST_CLIENTS = 10_000  # above this nobody could look at the numbers
MOST_EMBEDDED = 100  # clients: each has a covariance, and its root is taken
MOST_ROWS = 100_000  # embedded in all
MOST_NUMBERS = 512  # in an embedding


def survey(clients: Clients, fleet: Fleet | None = None) -> Heterogeneity | None:
    """Sizes, labels and speeds; the distance of inputs, too, where few clients keep their rows in memory.

    Inputs are their own embeddings (`pictures.flat`).

    Args:
        clients: who holds what.
        fleet: the clients' devices, if known.

    Returns:
        The measures, or None where clients do not know what they hold before they load it, or are too many.
    """
    if len(clients) > MOST_CLIENTS or not _counted(clients):
        return None
    seconds = None if fleet is None else [fleet.device(client).seconds_per_step for client in range(len(clients))]
    return measure(collect(clients, embed=embedding(clients)), seconds)


def embedding(clients: Clients) -> Callable[[Tensor], Tensor] | None:
    """Inputs as embeddings where that is cheap, else None: rows in memory, few clients, few numbers."""
    if len(clients) > MOST_EMBEDDED or not isinstance(clients, InMemory) or not clients.in_memory():
        return None
    sizes = [clients.size(client, "train") or 0 for client in range(len(clients))]
    if not 0 < sum(sizes) <= MOST_ROWS:
        return None
    one = clients.rows(next(client for client, size in enumerate(sizes) if size), "train").x[:1]
    return flat if one.dtype.is_floating_point and flat(one).shape[1] <= MOST_NUMBERS else None


def _counted(clients: Clients) -> bool:
    """Whether sizes and classes are known without loading, as far as the first clients tell."""
    first = range(min(10, len(clients)))
    if any(clients.size(client, "train") is None for client in first):
        return False
    return clients.classes is None or all(clients.counts(client, "train") is not None for client in first)
