"""Clients with a frozen extractor, which runs once over each client's rows; a small model is trained on its embeddings.

The extractor is the same at all clients and is never trained, so only the classifier is sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from piebald.contracts import Clients, Rows, Split
from piebald.contracts.data import public_rows_of
from piebald.core import pytree
from piebald.core.arguments import Count, checked
from piebald.core.errors import SettingError, unknown
from piebald.core.references import USERS, Reference
from piebald.data.embeddings.extractors import EXTRACTORS, embed
from piebald.data.partition.split_settings import division_of
from piebald.settings import plugins

SPLITS: tuple[Split, ...] = ("train", "validation", "test")


class Embedded:
    """Clients whose inputs are embeddings [n, d] of the rows of other clients.

    Args:
        clients: the clients with the rows.
        network: the extractor.  Embeddings are cached on disk as `name`-<fingerprint>, a file for each client, see
            `extractors.embed`.
        name: name of the cached embeddings; None keeps them in memory only.
        batch: rows per batch.
    """

    def __init__(self, clients: Clients, network: nn.Module, name: str | None, batch: int = 64) -> None:
        self.names, self.classes, self.division = clients.names, clients.classes, division_of(clients)
        self._places: dict[tuple[int, Split], np.ndarray[Any, np.dtype[np.int64]]] = {}
        self._counts = {
            (client, split): clients.counts(client, split) for client in range(len(clients)) for split in SPLITS
        }
        x: list[Tensor] = []
        y: list[Tensor] = []
        at = 0
        for client in range(len(clients)):
            parts = {split: clients.rows(client, split) for split in SPLITS}
            held = [part for part in parts.values() if len(part)]
            if held:  # one file a client, whatever its parts
                x.append(
                    _embedded(
                        network, pytree.single(pytree.joined([part.x for part in held]), "an extractor"), name, batch
                    )
                )
                y += [pytree.single(part.y, "an extractor") for part in held]
            for split, part in parts.items():
                self._places[client, split] = np.arange(at, at + len(part))
                at += len(part)
        self.x, self.y = torch.cat(x), torch.cat(y)
        common = clients.common
        self.common = None if common is None else Rows(_embedded(network, common.x, name, batch), common.y)
        public = public_rows_of(clients)
        self.public_rows = None if public is None else Rows(_embedded(network, public.x, name, batch), public.y)

    def __len__(self) -> int:
        return len(self.names)

    def in_memory(self) -> bool:
        """True: embeddings are in memory."""
        return True

    def pool(self) -> Rows:
        """The embeddings of all rows."""
        return Rows(self.x, self.y)

    def indices(self, client: int, split: Split) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Row numbers of one part of one client in `x` and `y`."""
        return self._places[client, split]

    def rows(self, client: int, split: Split) -> Rows:
        """The rows of one part; empty where the client has none."""
        places = torch.from_numpy(self._places[client, split])
        return Rows(self.x[places], self.y[places])

    def size(self, client: int, split: Split) -> int:
        """Return the number of rows."""
        return len(self._places[client, split])

    def counts(self, client: int, split: Split) -> Sequence[int] | None:
        """Rows of each class, or None where targets are not classes."""
        return self._counts[client, split]


@checked
def embedded(clients: Clients, extractor: str | nn.Module, *, key: str | None = None, batch: Count = 64) -> Embedded:
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
        return Embedded(clients, extractor, key, batch)
    return embedded_by(clients, USERS.mark(extractor), key, batch)


def embedded_by(clients: Clients, extractor: str, key: str | None = None, batch: int = 64) -> Embedded:
    """`embedded`, where an extractor is one of those with names or a reference, and other text names nothing."""
    name = key if isinstance(extractor, Reference) else key or extractor
    return Embedded(clients, _network(extractor), name, batch)


def embedding(extractor: str, x: pytree.Tree) -> Tensor:
    """Return what the extractor of a run, by its name or reference, makes of inputs [n, ...]: embeddings [n, d].

    Raises:
        SettingError: there is no such extractor, or it cannot read these rows.
    """
    return _embedded(_network(extractor), x, None, 64)


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
