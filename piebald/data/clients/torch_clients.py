"""Clients whose rows are items of torch data sets, read when they are needed; they implement `contracts.Clients`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch

from piebald.contracts import Rows, Split
from piebald.core.arguments import Count, Share, checked_class
from piebald.core.errors import SettingError
from piebald.data.clients.collate import Collate
from piebald.data.clients.lazy_clients import LazyClients
from piebald.data.clients.lists import Lists
from piebald.data.clients.owner import given
from piebald.data.partition.split import Ints
from piebald.data.partition.three_way_split import three_ways


class MapStyle(Protocol):
    """A map-style data set: it has a length, and an item (x, y) for each place."""

    def __len__(self) -> int: ...

    def __getitem__(self, place: int) -> Any: ...


@checked_class
class TorchClients(LazyClients):
    """Clients that each have a map-style data set of `torch.utils.data`, whose items are read only when needed.

    A client's training items are read when it trains, its test items when a model is evaluated on them, and those of a
    client without a task never.  Since no label is known before, items are held out at random and not class by class.
    A data set must return the same item each time: random changes belong into `augmentation`.

    Args:
        datasets: a list, or a dict from client names, of data sets of pairs (x, y).
        classes: names of the classes, None where targets are not classes.
        validation: share of each client's items for validation.
        test: share of each client's items for testing.
        seed: seed of the choice of items.
        cache: number of parts of clients that are kept in memory.
        tokens, collate, length: see `LazyClients`.

    Raises:
        SettingError: a data set is none, or has no items; later, with the client's name, if its items cannot be used.
    """

    def __init__(
        self,
        datasets: Mapping[str, Any] | Sequence[Any],
        *,
        classes: Sequence[str] | None = None,
        validation: Share = 0.0,
        test: Share = 0.2,
        seed: int = 0,
        cache: Count = 64,
        tokens: bool = False,
        collate: Collate = "stack",
        length: Count | None = None,
    ) -> None:
        named = datasets if isinstance(datasets, Mapping) else {str(n): dataset for n, dataset in enumerate(datasets)}
        if not named:
            raise SettingError("there are no clients: give at least one data set")
        for name, dataset in named.items():
            if not isinstance(dataset, torch.utils.data.Dataset) or _size(dataset) == 0:
                raise SettingError(
                    f"client {name!r} must have a map-style torch data set of one item or more, got "
                    f"{type(dataset).__name__}"
                )
        super().__init__(
            # `load` is never called, since `rows` reads items part by part
            len(named), lambda client: None, names=[str(name) for name in named], classes=classes,
            validation=validation, test=test, seed=seed, cache=cache, tokens=tokens, collate=collate, length=length,
        )  # fmt: skip
        self._datasets: list[MapStyle] = list(named.values())
        client = np.repeat(np.arange(len(named)), [_size(dataset) for dataset in named.values()])
        # classes are not known before items are read, so nothing is stratified by them
        self._parts = three_ways(Lists.of(client, len(named)), None, self._division)
        self._starts = np.concatenate([[0], np.cumsum([_size(dataset) for dataset in named.values()])])

    def rows(self, client: int, split: Split) -> Rows:
        """The rows of one part, read unless they are in the cache; empty where the client has none."""
        self._check_part(client, split)
        return self._recent((client, split), lambda: self._read(client, split))

    def size(self, client: int, split: Split) -> int:
        """Return the number of rows; no item is read for that."""
        self._check_part(client, split)
        return len(self._parts[split][client])

    def _read(self, client: int, split: Split) -> Rows:
        places = self._parts[split][client] - self._starts[client]
        if not len(places):  # the form of empty rows is that of the first item
            return self._converted(client, np.zeros(1, dtype=np.int64))[:0]
        return self._converted(client, places)

    def _converted(self, client: int, places: Ints) -> Rows:
        who = f"client {self.names[client]!r}"
        subset: Any = torch.utils.data.Subset(self._datasets[client], places.tolist())  # type: ignore[arg-type]
        return self._rows(given(subset, who), who)


def _size(dataset: Any) -> int:
    """Return the number of items of a data set, 0 where it has no length."""
    try:
        return len(dataset)
    except TypeError:
        return 0
