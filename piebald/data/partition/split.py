"""Held-out rows of many clients at once, chosen at random.

A Python generator for each client would take minutes for a million clients, so random numbers are hashes instead: each
row's number comes from (key, client, position in the client) only.  The choice of one client depends on no other
client.

The table `[split]`: which of a client's rows are for training, which for validation, and which for testing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, Protocol, Self, runtime_checkable

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from piebald.contracts.component import Settings
from piebald.core.errors import SettingError, shown, unknown
from piebald.core.randomness import generator
from piebald.core.tensor_store import BLOCK, blocks

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]
Floats = NDArray[np.float64]


def mixed(key: int, *columns: Ints) -> NDArray[np.uint64]:
    """A random 64-bit number for each row, from a key and the row's integers (splitmix64, Steele et al. 2014).

    Args:
        key: from `randomness.key`.
        columns: integers [n], at least one.
    """
    state = np.full(len(columns[0]), key, dtype=np.uint64)
    for rows in blocks(len(state)):
        part = state[rows]
        # products and sums of uint64 wrap modulo 2 ** 64, as splitmix64 has it
        for column in columns:
            part = (part ^ column[rows].astype(np.uint64)) + np.uint64(0x9E3779B97F4A7C15)
            part = (part ^ (part >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
            part = (part ^ (part >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
            part = part ^ (part >> np.uint64(31))
        state[rows] = part
    return state


def places(client: Ints) -> Ints:
    """The position of each row within its client, from 0, for rows in order of their clients [n]."""
    steps = np.arange(len(client))
    if not len(client) or client[0] == client[-1]:
        return steps
    first = np.r_[True, client[1:] != client[:-1]]
    # the running maximum is the place where each row's client begins
    return steps - np.maximum.accumulate(np.where(first, steps, 0))


def hold_out(
    client: Ints,
    share: float | Floats,
    key: int,
    label: Ints | None = None,
    group: Ints | None = None,
    order: Ints | None = None,
) -> Bools:
    """Choose the rows that each client holds out: round(share * rows), spread evenly over classes, never all of them.

    Args:
        client: the client of each row [n], in non-decreasing order.
        share: share of rows to hold out, in [0, 1), or of each row's client [n]; a whole number is that of rows.
        key: from `randomness.key`.
        label: class of each row [n], or None if there are no classes.
        group: group of each row [n]; rows of one client and group stay on the same side, and the share is then of
            groups.
        order: the last rows in this order [n] are chosen, instead of any; the last groups by their last rows.
    """
    if not len(client) or not np.any(share):
        return np.zeros(len(client), dtype=bool)
    shares = share if isinstance(share, int) else np.broadcast_to(share, client.shape)
    chosen = [
        _hold_out(client[rows], shares if isinstance(shares, int) else shares[rows], key,
                  *(None if column is None else column[rows] for column in (label, group, order)))
        for rows in _of_whole_clients(client)
    ]  # fmt: skip
    return np.concatenate(chosen)


def _of_whole_clients(client: Ints) -> Iterator[slice]:
    """Yield slices of rows of some clients each, whose choice takes much memory for each row."""
    ends = np.r_[np.flatnonzero(client[1:] != client[:-1]) + 1, len(client)]
    first = 0
    while first < len(client):
        # a client is never cut: its choice depends on how many rows it has
        last = int(ends[min(np.searchsorted(ends, first + BLOCK), len(ends) - 1)])
        yield slice(first, last)
        first = last


def _hold_out(
    client: Ints, share: int | Floats, key: int, label: Ints | None, group: Ints | None, order: Ints | None
) -> Bools:
    label = np.zeros_like(client) if label is None else label
    if group is None:
        return _choose(client, share, label, None, key, order)
    first, inverse = units(client, group)  # a group that two clients share is held out by each on its own
    if order is not None:
        last = np.full(len(first), order.min())
        np.maximum.at(last, inverse, order)
        order = last
    share = share if isinstance(share, int) else share[first]
    return _choose(client[first], share, label[first], group[first], key, order)[inverse]


def units(client: Ints, group: Ints) -> tuple[Ints, Ints]:
    """Return the first row of each client's groups [u], in the order of clients, and each row's place [n] in it."""
    order = np.lexsort((group, client))
    new = np.r_[True, (client[order][1:] != client[order][:-1]) | (group[order][1:] != group[order][:-1])]
    inverse = np.empty(len(client), dtype=np.int64)
    inverse[order] = np.cumsum(new) - 1
    return order[new], inverse


def _choose(client: Ints, share: int | Floats, label: Ints, unit: Ints | None, key: int, by: Ints | None) -> Bools:
    place = places(client)
    # Within a client the classes come in random order (or all small clients would hold out their last class) and the
    # units of a class too; then every (1 / share)-th is taken.
    order = _shuffled(client, label, place if unit is None else unit, key) if by is None else _sorted(client, by)
    # less the first number, or each block would count all clients before it as well
    sizes, chosen = np.bincount(client - client[0]), np.empty(len(client), dtype=bool)
    for rows in blocks(len(client)):  # `order` keeps the clients sorted, so these are the places after sorting, too
        size, at = sizes[client[rows] - client[0]], place[rows]
        part = np.minimum(share, size - 1) / size if isinstance(share, int) else share[rows]
        if by is not None:
            held_out = at >= size - np.minimum(np.floor(size * part + 0.5), size - 1)
        else:
            # the differences of a rounded line add up to its end, round(size * part), wherever they are taken
            held_out = np.floor((at + 1) * part + 0.5) > np.floor(at * part + 0.5)
            held_out &= (at > 0) | (np.floor(size * part + 0.5) < size)  # one row is left for training
        chosen[order[rows]] = held_out
    return chosen


def _shuffled(client: Ints, label: Ints, unit: Ints, key: int) -> Ints:
    # another key, or a class and a row of the same number would have the same random number
    return _sorted(client, mixed(key ^ 1, client, label), mixed(key, client, unit))


def _sorted(client: Ints, *columns: NDArray[np.integer]) -> Ints:
    """Return the order of rows by client, then by columns, the first one first; a client alone takes no memory."""
    return np.lexsort((*columns[::-1], *([client] if client[0] != client[-1] else [])))


def folds_of(client: Ints, folds: int, key: int, label: Ints | None = None, group: Ints | None = None) -> Ints:
    """Return the fold [n] of each row: folds of a client have as many rows, and as many of each class, within one.

    Rows of one client and group are in one fold.  Groups go to folds as in scikit-learn's `StratifiedGroupKFold`, the
    largest first, each to the fold with the fewest rows of its class, and of these to that with the fewest rows.

    Args:
        client, key, label, group: see `hold_out`.
        folds: how many there are; a client of fewer rows or groups has none in some of them.
    """
    label = np.zeros_like(client) if label is None else label
    fold = np.empty(len(client), dtype=np.int64)
    if not len(client):
        return fold
    if group is None:
        fold[_shuffled(client, label, places(client), key)] = places(client) % folds
        return fold
    first, inverse = units(client, group)
    rows, by_unit = np.bincount(inverse), np.empty(len(first), dtype=np.int64)
    load = np.zeros((folds, 2), dtype=np.int64)  # rows of the class, and of all
    classes: dict[int, Ints] = {}
    of_client = -1
    for unit in np.lexsort((mixed(key, client[first], group[first]), -rows, client[first])).tolist():
        # loads start over for each client, so that its folds do not depend on other clients
        if client[first[unit]] != of_client:
            of_client, classes, load = int(client[first[unit]]), {}, np.zeros((folds, 2), dtype=np.int64)
        in_class = classes.setdefault(int(label[first[unit]]), np.zeros(folds, dtype=np.int64))
        load[:, 0] = in_class
        by_unit[unit] = chosen = int(np.lexsort((load[:, 1], load[:, 0]))[0])
        in_class[chosen] += rows[unit]
        load[chosen, 1] += rows[unit]
    return by_unit[inverse]


def forward_chain(client: Ints, folds: int, fold: int, order: Ints, group: Ints | None = None) -> Ints:
    """Return for each row [n] whether it comes before the rows that a fold tests on (-1), is one (0), or after (1).

    Each client's rows are those of scikit-learn's `TimeSeriesSplit`: the last parts of one size, one for each fold.

    Args:
        client, order, group: see `hold_out`; groups count in place of rows.
        folds: how many there are.
        fold: the number of one of them.
    """
    if not len(client):
        return np.zeros(0, dtype=np.int64)
    if group is not None:
        first, inverse = units(client, group)
        last = np.full(len(first), order.min())
        np.maximum.at(last, inverse, order)
        return forward_chain(client[first], folds, fold, last)[inverse]
    place = np.empty(len(client), dtype=np.int64)
    place[np.lexsort((order, client))] = places(client)
    rows = np.bincount(client - client[0])[client - client[0]]
    size = rows // (folds + 1)
    # counted from the end, so that rows left over by the division are in the first training part
    start = rows - (folds - fold) * size
    return np.where(place < start, -1, np.where(place < start + size, 0, 1))


def thin(stratum: Ints, keep: int, key: int) -> Bools:
    """Choose exactly `keep` of n rows, in proportion from all strata (within one row).

    Args:
        stratum: class or owner of each row [n].
        keep: number of rows to choose, at most n.
        key: from `randomness.key`.
    """
    n = len(stratum)
    place = np.arange(n)
    order = np.lexsort((mixed(key, place), stratum))
    chosen = np.empty(n, dtype=bool)
    # adds up to `keep` exactly, and takes every (n / keep)-th row of the strata in order
    chosen[order] = (place + 1) * keep // n > place * keep // n
    return chosen


def unseen_numbers(names: Sequence[str], unseen: float | Sequence[str], seed: int) -> set[int]:
    """Return the numbers of the clients that are held out until the end of a run.

    Args:
        names: of all clients.
        unseen: a number of clients, or a share of them below 1, or their names.
        seed: of the choice.

    Raises:
        SettingError: no client would take part, or `unseen` is no number and no list of clients.
    """
    if isinstance(unseen, list | tuple):
        number_of = {str(name): number for number, name in enumerate(names)}
        if strange := next((name for name in unseen if name not in number_of), None):
            raise unknown("client (unseen)", strange, number_of)
        held_out = {number_of[name] for name in unseen}
    # True is an int, and would be one client
    elif isinstance(unseen, bool) or not isinstance(unseen, int | float) or not 0 <= unseen < math.inf:
        raise SettingError(
            f"unseen must be a number of clients (0, 1, ...), a share of them (0.2), or names of them, got {unseen!r}"
        )
    else:
        # 1.0 is one client and not all of them: a whole number counts, whatever its type
        count = int(unseen) if unseen == int(unseen) else max(1, round(unseen * len(names)))
        every = count >= len(names)
        chosen = range(len(names)) if every else generator("unseen", seed).choice(len(names), count, replace=False)
        held_out = {int(number) for number in chosen} if count else set()
    if len(held_out) >= len(names):
        raise SettingError(f"unseen = {unseen} leaves none of {len(names)} clients to train with: lower it")
    return held_out


Amount = int | float
MOST_FOLDS = 1000  # a site divides its rows as a server says


class SplitSettings(Settings):
    """How each client's rows are divided, from these rows alone, so that a site divides its rows alike.

    Attributes:
        test: rows for testing, as a share of a client's rows in [0, 1), or as their number; 0.2 by default, and 0
            where clients are held out.  A client always keeps one row to train on.  With groups it counts groups.
        validation: rows for validation, likewise.
        seed: seed of the choice.
        group: the column, or columns, whose equal values mark rows that stay together, as a patient's visits do; across
            clients, too, where their rows are on one machine.  Of a data set with owners, a kind of owners.
        order: the column to sort by, numbers or dates: the last rows are for testing, those before for validation.
        stratify: true takes the same share of each class, as by default where targets are classes; false takes any
            rows; a column takes the same share of each of its values.
        column: the column that says of each row "train", "validation" or "test".
        folds: the number of divisions, 2 to 1000, in each of which another part of the rows is for testing.  With order
            they are forward chains: a fold trains on the rows before its part and leaves out those after it, and a
            client of as many rows as folds, or fewer, has none for testing.
        fold: the number of one of them, from 0, as one run has it.
        hold_out: names of clients that do not train, and on all of whose rows the models are scored; "each" holds one
            client after the other out.
        test_only: names of clients that do not train, and that are scored like the others.

    Raises:
        SettingError: a setting is unknown or out of range, or two do not fit together.

    Examples:
        >>> SplitSettings(group="patient", folds=5).repeats(["north", "south"])[4].fold
        4
    """

    test: Amount | None = None
    validation: Amount = 0
    seed: int = Field(default=0, ge=0)
    group: str | list[str] | None = None
    order: str | None = None
    stratify: bool | str | None = None
    column: str | None = None
    folds: int | None = Field(default=None, ge=2, le=MOST_FOLDS)
    fold: int | None = Field(default=None, ge=0)
    hold_out: Literal["each"] | list[str] | None = None
    test_only: list[str] = []  # noqa: RUF012 - a pydantic field

    @classmethod
    def in_words(cls) -> str:
        """See `Settings`."""
        return "split"

    @classmethod
    def of(cls, value: Self | Mapping[str, Any] | str | None) -> Self:
        """Return the settings in a table, or in the name of a column of parts; the default ones of None."""
        if isinstance(value, cls):
            return value
        if isinstance(value, str):
            return cls(column=value)
        if value is not None and not isinstance(value, Mapping):
            raise SettingError(f"split must be a table of settings, or the name of a column, got {shown(value)}")
        return cls(**value or {})

    @model_validator(mode="after")
    def _check(self) -> Self:
        validation, test = self.validation, self.test_amount
        _check_amount("validation", validation)
        _check_amount("test", test)
        if isinstance(validation, float) and isinstance(test, float) and validation + test >= 1:
            raise ValueError(
                f"validation = {validation} and test = {test} leave no rows to train on: their sum must be below 1"
            )
        if self.fold is not None and (self.folds is None or self.fold >= self.folds):
            raise ValueError(f"fold must be below folds, got {self.fold} of {self.folds}: they are numbered from 0")
        for first, second in (
            ("folds", "test"), ("folds", "hold_out"), ("order", "stratify"), ("column", "test"), ("column", "folds"),
            ("column", "order"),
        ):  # fmt: skip
            if getattr(self, first) is not None and getattr(self, second) not in (None, False):
                raise ValueError(f"{first} and {second} both say which rows are for testing: leave one of them out")
        if isinstance(self.hold_out, list) and not self.hold_out:
            raise ValueError("hold_out must name a client at least, or be 'each', got none")
        return self

    @property
    def test_amount(self) -> Amount:
        """The rows for testing, with the default filled in."""
        if self.test is not None:
            return self.test
        return 0 if self.hold_out is not None or self.column is not None else 0.2

    @property
    def several(self) -> bool:
        """True if the settings define more than one division."""
        return self.hold_out == "each" or (self.folds is not None and self.fold is None)

    @property
    def groups(self) -> list[str]:
        """The columns of groups."""
        return [self.group] if isinstance(self.group, str) else self.group or []

    @property
    def columns(self) -> list[str]:
        """The columns that say how rows are divided, and that models do not read unless features names them."""
        return [*self.groups, *(name for name in (self.order, self.column) if name is not None)]

    @property
    def held_out(self) -> list[str]:
        """Names of the clients that are held out."""
        return self.hold_out if isinstance(self.hold_out, list) else []

    def untrained(self, names: Sequence[str]) -> list[int]:
        """Return the numbers of the clients that do not train.

        Args:
            names: of all clients.

        Raises:
            SettingError: there is no client of such a name, or none is left to train.
        """
        number_of = {str(name): number for number, name in enumerate(names)} if self.held_out or self.test_only else {}
        for setting, listed in (("hold_out", self.held_out), ("test_only", self.test_only)):
            for name in listed:
                if name not in number_of:
                    raise unknown(f"client (split, {setting})", name, number_of)
        chosen = sorted({number_of[name] for name in [*self.held_out, *self.test_only]})
        if chosen and len(chosen) == len(names):
            raise SettingError(f"split holds out or only tests all {len(names)} clients: leave one to train")
        return chosen

    def refuse_several(self) -> None:
        """Refuse settings that define more than one division, where there is one run.

        Raises:
            SettingError: they do.
        """
        if self.several:
            raise SettingError(
                f"{'folds' if self.folds else 'hold_out'} of split asks for several runs: use piebald compare, in "
                "Python piebald.data.cross_validation, or choose one of them with fold = 0 or hold_out = ['a client']"
            )

    def repeats(self, names: Sequence[str]) -> list[Self]:
        """Return the settings of each division, by fold or by the client that is held out.

        Args:
            names: of all clients.
        """
        if self.hold_out == "each":
            return [self.with_(hold_out=[str(name)]) for name in names if str(name) not in self.test_only]
        if self.folds is not None and self.fold is None:
            return [self.with_(fold=fold) for fold in range(self.folds)]
        return [self]

    @property
    def title(self) -> str:
        """The division in words, "" where there is one alone."""
        if self.held_out:
            return f"without {', '.join(self.held_out)}"
        return "" if self.fold is None else f"fold {self.fold + 1} of {self.folds}"

    def with_(self, **changes: Any) -> Self:
        """Return the settings with some of them replaced."""
        # anew and not by `model_copy`, which checks nothing; fields that were left out stay so
        return type(self)(**self.model_dump(exclude_unset=True) | changes)


@runtime_checkable
class HasDivision(Protocol):
    """Clients that know how their rows are divided."""

    @property
    def division(self) -> SplitSettings | None:
        """The settings, None where rows came in parts or are divided at random by shares alone."""


def division_of(clients: Any) -> SplitSettings | None:
    """Return how the rows of clients are divided, None where they do not say it."""
    return clients.division if isinstance(clients, HasDivision) else None


def _check_amount(name: str, amount: Amount) -> None:
    """Refuse a share that is out of range, and a number of rows below 0."""
    if amount < 0 or (isinstance(amount, float) and not amount < 1):
        raise ValueError(
            f"{name} must be a share of a client's rows, at least 0 and below 1, or a number of rows, got {amount!r}"
        )
