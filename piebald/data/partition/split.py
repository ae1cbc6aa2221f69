"""Held-out rows of many clients at once, chosen at random.

A Python generator for each client would take minutes for a million clients, so random numbers are hashes instead: each
row's number comes from (key, client, position in the client) only.  The choice of one client depends on no other
client.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from piebald.core.errors import SettingError
from piebald.core.randomness import generator

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]


def mixed(key: int, *columns: Ints) -> NDArray[np.uint64]:
    """A random 64-bit number for each row, from a key and the row's integers (splitmix64, Steele et al. 2014).

    Args:
        key: from `randomness.key`.
        columns: integers [n], at least one.
    """
    state = np.full(len(columns[0]), key, dtype=np.uint64)
    for column in columns:
        state = (state ^ column.astype(np.uint64)) + np.uint64(0x9E3779B97F4A7C15)
        state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        state = state ^ (state >> np.uint64(31))
    return state


def places(client: Ints) -> Ints:
    """The position of each row within its client, from 0, for rows in order of their clients [n]."""
    steps = np.arange(len(client))
    first = np.r_[True, client[1:] != client[:-1]] if len(client) else np.zeros(0, dtype=bool)
    return steps - np.maximum.accumulate(np.where(first, steps, 0))


def hold_out(client: Ints, share: float, key: int, label: Ints | None = None, group: Ints | None = None) -> Bools:
    """Choose the rows that each client holds out: round(share * rows), spread evenly over classes, never all of them.

    Args:
        client: the client of each row [n], in non-decreasing order.
        share: share of rows to hold out, in [0, 1).
        key: from `randomness.key`.
        label: class of each row [n], or None if there are no classes.
        group: group of each row [n]; rows of one client and group stay on the same side, and the share is then of
            groups.
    """
    if share == 0 or not len(client):
        return np.zeros(len(client), dtype=bool)
    label = np.zeros_like(client) if label is None else label
    if group is None:
        return _choose(client, share, label, places(client), key)
    pair = client * (int(group.max()) + 1) + group  # a group that two clients share is held out by each on its own
    _, first, inverse = np.unique(pair, return_index=True, return_inverse=True)
    return _choose(client[first], share, label[first], group[first], key)[inverse]


def _choose(client: Ints, share: float, label: Ints, unit: Ints, key: int) -> Bools:
    # Within a client the classes come in random order (or all small clients would hold out their last class) and the
    # units of a class too; then every (1 / share)-th is taken.
    order = np.lexsort((mixed(key, client, unit), mixed(key ^ 1, client, label), client))
    place = places(client)  # `order` keeps the clients sorted, so these are the places after sorting, too
    held_out = np.floor((place + 1) * share + 0.5) > np.floor(place * share + 0.5)
    size = np.bincount(client - client[0])[client - client[0]]
    held_out &= (place > 0) | (np.floor(size * share + 0.5) < size)  # one row is left for training
    chosen = np.empty(len(client), dtype=bool)
    chosen[order] = held_out
    return chosen


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
    chosen[order] = (place + 1) * keep // n > place * keep // n
    return chosen


def unseen_numbers(clients: int, unseen: float, seed: int) -> list[int]:
    """Return the numbers of the clients that are held out until the end of a run.

    Args:
        clients: how many clients there are.
        unseen: a number of clients, or a share of them below 1.
        seed: of the choice.

    Raises:
        SettingError: no client would take part, or `unseen` is not a number.
    """
    if isinstance(unseen, bool) or not isinstance(unseen, int | float) or not 0 <= unseen < math.inf:
        raise SettingError(f"unseen must be a number of clients (0, 1, ...) or a share of them (0.2), got {unseen!r}")
    # 1.0 is one client and not all of them: a whole number counts, whatever its type.
    count = int(unseen) if unseen == int(unseen) else max(1, round(unseen * clients))
    if count >= clients:
        raise SettingError(f"unseen = {unseen} leaves none of {clients} clients to train with: lower it")
    return sorted(generator("unseen", seed).choice(clients, count, replace=False).tolist()) if count else []
