"""Clients whose rows are loaded on demand; they implement `contracts.Clients`."""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, Self, TypeVar

import numpy as np
import torch

from piebald.contracts import Rows, Split
from piebald.core import pytree
from piebald.core.arguments import Count, Share, checked_class
from piebald.core.errors import SettingError, unknown
from piebald.data.clients.collate import Collate, check_lengths, lengths, padded
from piebald.data.clients.convert import class_numbers, floats, input_arrays, target_arrays
from piebald.data.clients.lists import Lists, Numbered, check_client
from piebald.data.partition.split_settings import SplitSettings
from piebald.data.partition.three_way_split import SPLITS, check_shares, check_split, three_ways

T = TypeVar("T")


@checked_class
class LazyClients:
    """Clients whose rows are loaded on demand and kept in a bounded cache.

    Creating a million clients takes no time and reads no data, so `size` and `counts` are not known.

    Args:
        count: number of clients.
        load: called with a client's number; returns (x, y), which is then divided into train, validation and test, or a
            mapping from split names to (x, y).  Inputs and targets are converted as `clients_from` does.
        names: a name for each client, by default its number.
        classes: names of the classes, None where targets are not classes.
        common: a test set that belongs to no client.
        server_rows: rows that the server keeps for itself.
        public_rows: rows that all clients have.
        validation: share of each client's rows for validation.
        test: share of each client's rows for testing.
        seed: seed of the division.
        cache: number of clients whose rows are kept in memory.
        tokens: inputs are whole numbers for an embedding layer and become int64, not float32.
        collate: "pad" fills up sequences as in `clients_from`, to `length`, which all clients have in common.
        length: length of filled-up sequences.

    Raises:
        SettingError: a setting is out of range; later, with the client's name, if `load` returns unusable data.

    Examples:
        >>> import numpy as np
        >>> import piebald as pb
        >>> def load(client: int):
        ...     return np.full((5, 2), client), [0, 1, 0, 1, 0]
        >>> clients = pb.LazyClients(1_000_000, load, classes=["no", "yes"])
        >>> clients.rows(7, "train").x.shape
        torch.Size([4, 2])
    """

    def __init__(
        self,
        count: Count,
        load: Callable[[int], Any],
        *,
        names: Sequence[str] | None = None,
        classes: Sequence[str] | None = None,
        common: Rows | None = None,
        server_rows: Rows | None = None,
        public_rows: Rows | None = None,
        validation: Share = 0.0,
        test: Share = 0.2,
        seed: int = 0,
        cache: Count = 64,
        tokens: bool = False,
        collate: Collate = "stack",
        length: Count | None = None,
    ) -> None:
        if names is not None and len(names) != count:
            raise SettingError(f"names must give one name to each of the {count} clients, got {len(names)}")
        check_shares(validation, test)
        self._count, self._load = count, load
        self.names: Sequence[str] = Numbered(count) if names is None else names
        self.classes, self.common = classes, common
        self.server_rows, self.public_rows = server_rows, public_rows
        self._division = SplitSettings(validation=validation, test=test, seed=seed)
        self._tokens, self._collate, self._length = tokens, collate, length
        check_lengths(collate, length)
        self._cache: dict[Hashable, Any] = {}  # least recently used first
        self._room = cache

    def __len__(self) -> int:
        return self._count

    def with_public_rows(self, rows: Rows) -> Self:
        """The same clients with these public rows."""
        clients = copy.copy(self)
        clients.public_rows = rows
        return clients

    def rows(self, client: int, split: Split) -> Rows:
        """The rows of one split, loaded unless they are in the cache; empty if the client has none."""
        self._check_part(client, split)
        return self._recent(client, lambda: self._fetch(client))[split]

    def _recent(self, key: Hashable, load: Callable[[], T]) -> T:
        """Return what was loaded under a key, loaded unless it is in the cache."""
        # Taken out and put in again at the end, so that the first key is the least recently used.
        value: T = self._cache.pop(key) if key in self._cache else load()
        self._cache[key] = value
        while len(self._cache) > self._room:
            self._cache.pop(next(iter(self._cache)), None)
        return value

    def size(self, client: int, split: Split) -> int | None:
        """None: not known without loading."""
        self._check_part(client, split)
        return None

    def counts(self, client: int, split: Split) -> None:
        """None: not known without loading."""
        self._check_part(client, split)

    def _check_part(self, client: int, split: Split) -> None:
        check_client(client, self._count)
        check_split(split)

    def _fetch(self, client: int) -> dict[Split, Rows]:
        got = self._load(client)
        who = f"client {self.names[client]!r}"
        if isinstance(got, Mapping):
            for split in got:
                if split not in SPLITS:
                    raise unknown(f"split, which {who} was loaded with, called", split, SPLITS)
            if "train" not in got:
                raise SettingError(f"{who} was loaded without rows to train on: load must return a 'train' part")
            ready = {split: self._rows(pair, f"{who}, {split}") for split, pair in got.items()}
            self._check(ready["train"], who)
            # empty rows must have the form of the others, for models that see them
            none = ready["train"][:0]
            return {split: ready.get(split, none) for split in SPLITS}
        rows = self._rows(got, who)
        self._check(rows, who)
        everything = Lists(np.arange(len(rows)), np.array([0, len(rows)]))
        # keyed by the client's number, so that the same rows are held out whenever it is loaded again
        parts = three_ways(everything, class_numbers(rows.y), self._division, first=client)
        index = {split: torch.from_numpy(lists.values) for split, lists in parts.items()}
        return {split: rows[places] for split, places in index.items()}

    @staticmethod
    def _check(rows: Rows, who: str) -> None:
        if not len(rows):
            raise SettingError(f"{who} has no rows to train on: leave it out")

    def _rows(self, got: Any, who: str) -> Rows:
        if isinstance(got, Rows):
            got = (got.x, got.y)
        if not isinstance(got, tuple | list) or len(got) != 2:
            raise SettingError(f"{who}: load must return a pair (x, y), got {type(got).__name__}")
        if self._collate == "pad":
            raw = (who, got[0], got[1])
            got = padded(raw, lengths([raw], self._length))
        x = floats(pytree.mapped(torch.from_numpy, input_arrays(got[0], who, self._tokens)))
        y = pytree.mapped(torch.from_numpy, target_arrays(got[1], who, self.classes))
        rows, targets = pytree.count(x), pytree.count(y)
        if rows != targets:
            raise SettingError(f"{who} has {rows} inputs but {targets} targets: give each row one of both")
        return Rows(x, y)
