"""Clients with a frozen extractor, which runs once over each client's rows; a small model is trained on its embeddings.

The extractor is the same at all clients and is never trained, so only the classifier is sent.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

from piebald.contracts import Clients, HasServerRows, Rows, Split
from piebald.contracts.data import public_rows_of
from piebald.core import pytree
from piebald.core.arguments import Count, checked
from piebald.core.errors import SettingError, unknown
from piebald.core.references import USERS, Reference
from piebald.data.clients.lists import Lists
from piebald.data.clients.pooled_clients import PooledClients
from piebald.data.embeddings.extractors import EXTRACTORS, embed
from piebald.data.partition.split import Ints
from piebald.data.partition.split_settings import division_of
from piebald.data.partition.three_way_split import SPLITS
from piebald.settings import plugins


@checked
def embedded(
    clients: Clients, extractor: str | nn.Module, *, key: str | None = None, batch: Count = 64
) -> PooledClients:
    """Clients whose inputs are the embeddings of a frozen extractor.

    Args:
        clients: the clients with the rows.
        extractor: "squeezenet" (images), "log_mel" (recordings), any module that maps inputs [batch, ...] to
            [batch, d], or "module:name" for one of a plugin, or for a class or function that makes it.
        key: name under which a module's embeddings are cached on disk; those of named extractors always are.
        batch: rows per batch.

    Raises:
        SettingError: there is no extractor with this name, it cannot read these rows, or its output is not a row of
            finite numbers for each.
    """
    if isinstance(extractor, nn.Module):
        return _pooled(clients, extractor, key, batch)
    return embedded_by(clients, USERS.mark(extractor), key, batch)


def embedded_by(clients: Clients, extractor: str, key: str | None = None, batch: int = 64) -> PooledClients:
    """`embedded`, where an extractor is one of those with names or a reference, and other text names nothing."""
    name = key if isinstance(extractor, Reference) else key or extractor
    return _pooled(clients, _network(extractor), name, batch)


def embedding(extractor: str, x: pytree.Tree) -> Tensor:
    """Return what the extractor of a run, by its name or reference, makes of inputs [n, ...]: embeddings [n, d].

    Raises:
        SettingError: there is no such extractor, or it cannot read these rows.
    """
    return _embedded(_network(extractor), x, None, 64)


def _pooled(clients: Clients, network: nn.Module, name: str | None, batch: int) -> PooledClients:
    """Return clients with the embeddings; all rows of a client are one file of the cache, whatever their splits."""
    x, y = list[Tensor](), list[Tensor]()
    places: dict[Split, list[Ints]] = {split: [] for split in SPLITS}
    at = 0
    for client in range(len(clients)):
        parts = {split: clients.rows(client, split) for split in SPLITS}
        if held := [part for part in parts.values() if len(part)]:
            x.append(_embedded(network, pytree.joined([part.x for part in held]), name, batch))
            y += [pytree.single(part.y, "an extractor") for part in held]
        for split, part in parts.items():
            places[split].append(np.arange(at, at + len(part)))
            at += len(part)

    def extra(rows: Rows | None) -> Rows | None:
        return None if rows is None else Rows(_embedded(network, rows.x, name, batch), rows.y)

    # rows were appended client by client and split by split, so places only grow
    lists = {split: Lists(np.concatenate(own), np.cumsum([0, *map(len, own)])) for split, own in places.items()}
    return PooledClients(
        torch.cat(x), torch.cat(y), lists, names=clients.names, classes=clients.classes, division=division_of(clients),
        common=extra(clients.common), public_rows=extra(public_rows_of(clients)),
        server_rows=extra(clients.server_rows if isinstance(clients, HasServerRows) else None),
    )  # fmt: skip


def _network(extractor: str) -> nn.Module:
    if isinstance(extractor, Reference):
        return _of_plugin(extractor)
    if extractor not in EXTRACTORS:
        raise unknown("extractor", extractor, EXTRACTORS)
    return EXTRACTORS[extractor]()


def _of_plugin(reference: Reference) -> nn.Module:
    named = plugins.find(reference, "extractor")
    network = named if isinstance(named, nn.Module) else plugins.call(reference, "extractor")
    if not isinstance(network, nn.Module):
        raise SettingError(f"extractor {reference!r} must be or make a torch.nn.Module, got {type(network).__name__}")
    return network


def _embedded(network: nn.Module, x: pytree.Tree, name: str | None, batch: int) -> Tensor:
    return torch.from_numpy(embed(network, pytree.single(x, "an extractor"), batch=batch, key=name))
