"""Heterogeneity of clients, measured before a run without loading rows that are not in memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from piebald.contracts import Clients, Fleet, InMemory
from piebald.core.arguments import checked
from piebald.data.measures.client_statistics import collect
from piebald.data.measures.heterogeneity import Heterogeneity, measure
from piebald.data.measures.pictures import flat

if TYPE_CHECKING:
    from collections.abc import Callable


MOST_CLIENTS = 10_000  # for more clients the numbers would be unreadable
MOST_EMBEDDED = 100  # clients; each needs the root of a covariance
MOST_ROWS = 100_000  # embedded in total
MOST_NUMBERS = 512  # in an embedding


@checked
def survey(clients: Clients, fleet: Fleet | None = None) -> Heterogeneity | None:
    """Measure sizes, labels and speeds, and the distance of inputs if few clients have their rows in memory.

    Flattened inputs are the embeddings (`pictures.flat`).

    Args:
        clients: the clients.
        fleet: the clients' devices, if known.

    Returns:
        The measures, or None if counts are not known before rows are loaded, or if there are too many clients.

    Examples:
        >>> import piebald as pb
        >>> clients = pb.partition.Disjoint(clients=2, classes_each=5, limit=200).split(pb.data.digits())
        >>> round(pb.partition.survey(clients).federation["total_variation"], 1)
        0.5
    """
    if len(clients) > MOST_CLIENTS or not _counted(clients):
        return None
    seconds = None if fleet is None else [fleet.device(client).seconds_per_step for client in range(len(clients))]
    return measure(collect(clients, embed=embedding(clients)), seconds)


def embedding(clients: Clients) -> Callable[[Tensor], Tensor] | None:
    """A function from inputs to embeddings, or None if that would be slow: many clients, rows or numbers."""
    if len(clients) > MOST_EMBEDDED or not isinstance(clients, InMemory) or not clients.in_memory():
        return None
    sizes = [clients.size(client, "train") or 0 for client in range(len(clients))]
    if not 0 < sum(sizes) <= MOST_ROWS:
        return None
    row = clients.rows(next(client for client, size in enumerate(sizes) if size), "train")[:1].x
    return (
        flat if isinstance(row, Tensor) and row.dtype.is_floating_point and flat(row).shape[1] <= MOST_NUMBERS else None
    )


def _counted(clients: Clients) -> bool:
    """Return whether sizes and classes are known without loading, judged by the first clients."""
    first = range(min(10, len(clients)))
    if any(clients.size(client, "train") is None for client in first):
        return False
    return clients.classes is None or all(clients.counts(client, "train") is not None for client in first)
