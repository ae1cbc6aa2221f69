"""Clients whose rows are in one pool in memory; they implement `contracts.Clients`.

Clients whose rows are loaded on demand; they implement `contracts.Clients`.
"""

from __future__ import annotations

import copy
import zlib
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import chain, compress
from typing import Any, Self, TypeVar

import numpy as np
import torch
from torch import Tensor

from piebald.contracts import Rows, Split
from piebald.contracts.data import without_inputs
from piebald.core import pytree
from piebald.core.arguments import Count, Share, checked, checked_class
from piebald.core.errors import SettingError, unknown
from piebald.core.pytree import Tree
from piebald.core.targets import IGNORED
from piebald.data.clients import convert
from piebald.data.clients.lists import Lists, Numbered, check_client
from piebald.data.partition.leakage import SPLITS, check_split, three_ways
from piebald.data.partition.split import Ints, SplitSettings
from piebald.data.preparation.columns import CodedTable
from piebald.data.preparation.written_forms import MOST_COMPARED, warn_of_unlike_classes
from piebald.data.sets.dataset import Decoded


@checked_class
class PooledClients:
    """Clients that hold rows of one pool in memory.

    A million clients need six arrays and no Python objects.  Inputs stay as stored (uint8 images take a quarter of the
    memory) and become float32 when they are read.

    Args:
        x: inputs [n, ...], float32, or uint8 images that are scaled to [0, 1] when read; `Decoded` ones stay in their
            files until then; or a tuple or dict of inputs.
        y: targets [n] int64 (classes) or [n, ...] float32, or a tuple or dict of targets.
        parts: the rows of each client's train, validation and test split; a missing split is empty.
        names: a name for each client, by default its number.
        classes: names of the classes, None where targets are not classes.
        common: a test set that belongs to no client: rows, or row numbers of the pool.
        server_rows: rows that the server keeps for itself: rows, or row numbers of the pool.
        public_rows: rows that all clients have: rows, or row numbers of the pool.
        features: names of the columns of inputs [n, d], where they have names.
        target: name of the column of targets, or of several, where they have one.
        columns: how inputs are columns of a table that is to be prepared.
        weights: how much each row counts in a mean [n] float32, above 0; None where all count alike.
        division: how each client's rows are divided, where settings say it.
        lacking: the names of inputs that a client, by number, lacks; its rows of the pool have anything there.

    Attributes:
        gathered_bytes: of the training rows that were sent to one place, see `in_one_place`; else None.
    """

    gathered_bytes: int | None = None

    def __init__(
        self,
        x: Tree | Decoded,
        y: Tree,
        parts: Mapping[Split, Lists],
        *,
        names: Sequence[str] | None = None,
        classes: Sequence[str] | None = None,
        common: Rows | Ints | None = None,
        server_rows: Rows | Ints | None = None,
        public_rows: Rows | Ints | None = None,
        features: Sequence[str] | None = None,
        target: str | Sequence[str] | None = None,
        columns: CodedTable | None = None,
        weights: Tensor | None = None,
        division: SplitSettings | None = None,
        lacking: Mapping[int, frozenset[str]] | None = None,
    ) -> None:
        if "train" not in parts:
            raise SettingError(f"parts must have the rows of the split 'train', got {sorted(parts)}")
        count = len(parts["train"])
        none = Lists(np.zeros(0, dtype=np.int64), np.zeros(count + 1, dtype=np.int64))
        self._stored, self._y, self._weights = x, y, weights
        self._parts = {split: parts.get(split, none) for split in SPLITS}
        self.names: Sequence[str] = Numbered(count) if names is None else names
        self.classes, self.division = classes, division
        self.features, self.target, self.columns = features, target, columns
        self._common, self._server_rows, self._public_rows = common, server_rows, public_rows
        self._tables: dict[str, Ints] = {}
        self._lacking = dict(lacking or {})
        if len(self.names) != count:
            raise SettingError(f"names must give one name to each of the {count} clients, got {len(self.names)}")

    def __len__(self) -> int:
        return len(self._parts["train"])

    def __repr__(self) -> str:
        """The number of clients and their rows, in one line."""
        rows = ", ".join(f"{self.lists(split).sizes.sum()} {split}" for split in SPLITS)
        kind = "numbers to predict" if self.classes is None else f"{len(self.classes)} classes"
        return f"<{len(self)} clients: {rows} rows of {pytree.plain(pytree.form(self._stored))}, {kind}>"

    @cached_property
    def common(self) -> Rows | None:
        """A test set that no client trained on, or None."""
        return self._extra(self._common)

    @cached_property
    def server_rows(self) -> Rows | None:
        """Rows that the server keeps for itself, or None."""
        return self._extra(self._server_rows)

    @cached_property
    def public_rows(self) -> Rows | None:
        """Rows that all clients have, or None."""
        return self._extra(self._public_rows)

    def with_public_rows(self, rows: Rows) -> Self:
        """The same clients with these public rows."""
        clients = copy.copy(self)
        clients.__dict__.pop("public_rows", None)  # it was looked up already
        clients._public_rows = rows
        return clients

    def with_pool(self, x: Tree | Decoded, y: Tree) -> Self:
        """The same clients with other inputs and targets in the pool; rows that are no client's stay as they are."""
        clients = copy.copy(self)
        clients.__dict__.pop("x", None)  # it was looked up already
        # tables count classes of the old targets
        clients._stored, clients._y, clients._tables = x, y, {}
        # as rows, gathered from the old pool, since their numbers would point into the new one
        clients._common, clients._server_rows, clients._public_rows = self.common, self.server_rows, self.public_rows
        return clients

    @cached_property
    def x(self) -> Tree:
        """Inputs of the whole pool [n, ...] float32; `indices` points into them."""
        return convert.floats(pytree.take(self._stored, slice(None)))  # type: ignore[no-any-return]

    @property
    def y(self) -> Tree:
        """Targets of the whole pool [n, ...]."""
        return self._y

    def on_all_rows(self) -> Self:
        """The same clients, which train on their validation rows as well and hold none out."""
        train, held = self.lists("train"), self.lists("validation")
        owner, rows = (np.concatenate(both) for both in ((train.clients, held.clients), (train.values, held.values)))
        none = Lists.of(np.zeros(0, dtype=np.int64), len(self))
        return self._with_parts(train=Lists.of(owner, len(self), rows), validation=none)

    def in_one_place(self) -> Self:
        """The same clients, whose training rows the first one has, compressed on the way there; all test on their own.

        `gathered_bytes` counts the targets as well, and each leaf as it is stored or as the places of its numbers in a
        list of those that differ, whichever is less.
        """
        if self._lacking:
            raise SettingError("pooled = true needs clients that all have the same inputs, and some lack one")
        rows = self.lists("train").values
        clients = self._with_parts(train=Lists.of(np.zeros_like(rows), len(self), rows))
        places = torch.from_numpy(rows)
        leaves = [leaf for tree in (self._stored, self._y) for leaf in pytree.leaves(pytree.take(tree, places))]
        clients.gathered_bytes = sum(map(_compressed_bytes, leaves))
        return clients

    def _with_parts(self, **parts: Lists) -> Self:
        clients = copy.copy(self)
        clients._parts, clients._tables = {**self._parts, **parts}, {}  # type: ignore[dict-item]
        return clients

    def in_memory(self) -> bool:
        """Return whether inputs are in memory; `x` would decode all of those that stay in their files."""
        return not isinstance(self._stored, Decoded)

    def pool(self) -> Rows:
        """All rows; `indices` points into them."""
        return Rows(self.x, self.y, self._weights)

    def indices(self, client: int, split: Split) -> Ints:
        """Row numbers of one part of one client, a view."""
        return self.lists(split)[client]

    def lists(self, split: Split) -> Lists:
        """Row numbers of one part of every client."""
        check_split(split)
        return self._parts[split]

    @checked
    def rows(self, client: int, split: Split) -> Rows:
        """The rows of one part, without the inputs that the client lacks; empty where the client has none."""
        rows = self._gather(self.indices(client, split))
        return replace(rows, x=without_inputs(rows.x, self.lacks(client))) if self._lacking else rows

    def lacks(self, client: int) -> frozenset[str]:
        """Return the names of the inputs that a client lacks."""
        check_client(client, len(self))
        return self._lacking.get(client, frozenset())

    def size(self, client: int, split: Split) -> int:
        """Return the number of rows."""
        return len(self.indices(client, split))

    def counts(self, client: int, split: Split) -> list[int] | None:
        """Rows of each class, or None where targets are not classes."""
        if self.classes is None or (label := convert.class_numbers(self._y)) is None:
            return None
        check_split(split)
        if split in self._tables:
            check_client(client, len(self))
            return self._tables[split][client].tolist()  # type: ignore[no-any-return]
        return convert.count_classes(label[self.indices(client, split)], len(self.classes)).tolist()  # type: ignore[no-any-return]

    def table(self, split: Split) -> Ints | None:
        """Rows of each class of every client [clients, classes] at once; kept, and `counts` reads from it then."""
        if self.classes is None or (label := convert.class_numbers(self._y)) is None:
            return None
        check_split(split)
        if split not in self._tables:
            lists, width = self.lists(split), len(self.classes)
            # One count over (client, class) cells instead of one for each of a million clients.
            known = label[lists.values] != IGNORED
            cell = (lists.clients * width + label[lists.values])[known]
            self._tables[split] = np.bincount(cell, minlength=len(self) * width).reshape(len(self), width)
        return self._tables[split]

    def _extra(self, rows: Rows | Ints | None) -> Rows | None:
        """Rows that are given as such, or by their numbers."""
        if isinstance(rows, np.ndarray):
            return self._gather(rows) if len(rows) else None
        return rows

    def _gather(self, index: Ints) -> Rows:
        places = torch.from_numpy(index)
        weights = None if self._weights is None else self._weights[places]
        return Rows(convert.floats(pytree.take(self._stored, places)), pytree.take(self._y, places), weights)


def warn_of_codings(clients: PooledClients, target: str | Sequence[str] | None) -> None:
    """Log a warning where owners of rows seem to code the same classes in different ways, see `warn_of_unlike_classes`.

    Args:
        clients: whose rows come from their owners, and are not dealt from one data set.
        target: the column of classes, None where it has no name.
    """
    if (classes := clients.classes) is None or len(clients) > MOST_COMPARED:
        return
    held = {
        str(name): [clients.counts(client, split) or [] for split in SPLITS]
        for client, name in enumerate(clients.names)
    }
    warn_of_unlike_classes(
        {name: {*chain(*(compress(classes, rows) for rows in parts))} for name, parts in held.items()},
        target if isinstance(target, str) else None,
    )


def _compressed_bytes(numbers: Tensor) -> int:
    array = np.ascontiguousarray(numbers.numpy())
    forms = [[array]]
    # single bytes have at most 256 values already, and their places take as many bytes
    if array.itemsize > 1:
        values, places = np.unique(array, return_inverse=True)
        forms.append([values, places.astype(np.min_scalar_type(len(values)))])
    return min(sum(len(zlib.compress(part.tobytes())) for part in form) for form in forms)


T = TypeVar("T")


@checked_class
class LazyClients:
    """Clients whose rows are loaded on demand and kept in a bounded cache.

    Creating a million clients takes no time and reads no data, so `size` and `counts` are not known.

    Args:
        count: number of clients.
        load: called with a client's number; returns (x, y), which is then divided into train, validation and test, or a
            mapping from split names to (x, y); each may be `contracts.Rows` instead, which may have weights.  Inputs
            and targets are converted as `clients_from` does.
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
        collate: convert.Collate = "stack",
        length: Count | None = None,
    ) -> None:
        if names is not None and len(names) != count:
            raise SettingError(f"names must give one name to each of the {count} clients, got {len(names)}")
        self._count, self._load = count, load
        self.names: Sequence[str] = Numbered(count) if names is None else names
        self.classes, self.common = classes, common
        self.server_rows, self.public_rows = server_rows, public_rows
        self._division = SplitSettings(validation=validation, test=test, seed=seed)
        self._tokens, self._collate, self._length = tokens, collate, length
        convert.check_lengths(collate, length)
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
        parts = three_ways(everything, convert.class_numbers(rows.y), self._division, first=client)
        index = {split: torch.from_numpy(lists.values) for split, lists in parts.items()}
        return {split: rows[places] for split, places in index.items()}

    @staticmethod
    def _check(rows: Rows, who: str) -> None:
        if not len(rows):
            raise SettingError(f"{who} has no rows to train on: leave it out")

    def _rows(self, got: Any, who: str) -> Rows:
        weight = got.weight if isinstance(got, Rows) else None
        if isinstance(got, Rows):
            got = (got.x, got.y)
        if not isinstance(got, tuple | list) or len(got) != 2:
            raise SettingError(f"{who}: load must return a pair (x, y), got {type(got).__name__}")
        if self._collate == "pad":
            raw = (who, got[0], got[1])
            got = convert.padded(raw, convert.lengths([raw], self._length))
        x = convert.floats(pytree.mapped(torch.from_numpy, convert.input_arrays(got[0], who, self._tokens)))
        y = pytree.mapped(torch.from_numpy, convert.target_arrays(got[1], who, self.classes))
        rows, targets = pytree.count(x), pytree.count(y)
        if rows != targets:
            raise SettingError(f"{who} has {rows} inputs but {targets} targets: give each row one of both")
        return Rows(x, y, weight)
