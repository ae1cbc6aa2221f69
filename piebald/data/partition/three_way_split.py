"""Train, validation and test split of every client."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, get_args

import numpy as np
from numpy.typing import NDArray

from piebald.contracts import Split
from piebald.core.errors import SettingError, unknown
from piebald.core.randomness import key
from piebald.data.clients.lists import Lists
from piebald.data.partition.leakage import warn_of_leaks
from piebald.data.partition.row_keys import RowKeys
from piebald.data.partition.split import Bools, Floats, Ints, folds_of, forward_chain, hold_out, units
from piebald.data.partition.split_settings import Amount, SplitSettings

SPLITS: tuple[Split, ...] = get_args(Split)
NO_KEYS = RowKeys()


def check_split(split: Split) -> None:
    """Refuse what is no split's name."""
    if not isinstance(split, str) or split not in SPLITS:
        raise unknown("split", split, SPLITS)


def check_shares(validation: float, test: float) -> None:
    """Refuse shares that are out of range or leave nothing to train on."""
    for name, share in (("validation", validation), ("test", test)):
        if not isinstance(share, int | float) or not 0 <= share < 1:
            raise SettingError(f"{name} must be a share of a client's rows, at least 0 and below 1, got {share!r}")
    if validation + test >= 1:
        raise SettingError(
            f"validation = {validation} and test = {test} leave no rows to train on: their sum must be below 1"
        )


def three_ways(
    lists: Lists,
    label: Ints | None,
    split: SplitSettings,
    keys: RowKeys = NO_KEYS,
    *,
    names: Sequence[str] = (),
    first: int = 0,
) -> dict[Split, Lists]:
    """Divide each client's rows into train, validation and test; a client with a single row keeps it for training.

    Args:
        lists: row numbers of each client, positions in `label` and `keys`.
        label: class of each row, or None.
        split: the settings.
        keys: what the settings say of each row.
        names: of the clients, where settings name clients.
        first: number of the client of the first list: the choice depends on it, the seed and the client's own rows.

    Raises:
        SettingError: settings name no client, or rows have no classes to be stratified by.
    """
    split.refuse_several()
    if split.stratify is True and label is None:
        raise SettingError("split: stratify = true needs classes, and targets are none: name a column, or leave it out")
    rows, client = lists.values, lists.clients
    stratum, group, order, fixed = (
        None if column is None else column[rows] for column in (keys.stratum, keys.group, keys.order, keys.part)
    )
    if stratum is None and label is not None and split.stratify is not False:
        stratum = label[rows]
    place = SPLITS.index
    part: NDArray[np.integer] = np.zeros(len(rows), dtype=np.int8) if fixed is None else fixed.astype(np.int8)

    def choose(name: Split, open_rows: Bools, amount: Amount | Floats) -> None:
        """Move an amount of each client's rows to a part, out of those that are open."""
        rows_left: Any = slice(None) if open_rows.all() else open_rows
        # one client's numbers are one number broadcast, which a mask would write out for each row
        owner = client[rows_left] if len(lists) > 1 else client[: np.count_nonzero(open_rows)]
        chosen = hold_out(
            owner + first if first else owner,
            amount,
            key(split.seed, "split", name),
            *(None if column is None else column[rows_left] for column in (stratum, group, order)),
        )
        open_rows[open_rows] = chosen
        part[open_rows] = place(name)

    if split.fold is not None and split.folds is not None and order is not None:
        side = forward_chain(client, split.folds, split.fold, order, group)
        part[side == 0], part[side > 0] = place("test"), -1  # later rows are in no part
    elif split.fold is not None and split.folds is not None:
        folds = folds_of(client + first, split.folds, key(split.seed, "folds"), stratum, group)
        part[folds == split.fold] = place("test")
    elif fixed is None:
        choose("test", part == 0, split.test_amount)
    if split.validation and not (part == place("validation")).any():
        amount = split.validation
        if isinstance(amount, float) and isinstance(split.test_amount, float) and split.fold is None and fixed is None:
            amount = amount / (1 - split.test_amount)  # both shares are of all rows
        elif isinstance(amount, float):
            size = np.bincount(client, minlength=len(lists))
            tested = np.bincount(client[part == place("test")], minlength=len(lists))
            share_left = 1 - tested / np.maximum(size, 1)
            # a share of all rows of the client as one of those that are left; a client that only tests has none left
            amount = np.minimum(amount / np.maximum(share_left, 1e-9), 1.0)[client][part == 0]
        choose("validation", part == 0, amount)
    alone = np.isin(client, split.untrained(names))
    # after all choices, since all rows of a client that does not train are for testing
    part[alone] = place("test")
    if group is not None and not keys.local:
        part = _together(part, client, group, alone)
    parts: dict[Split, Lists] = {name: lists.where(part == place(name)) for name in SPLITS}
    warn_of_leaks(parts, keys)
    return parts


def _together(part: NDArray[np.integer], client: Ints, group: Ints, alone: Bools) -> NDArray[np.integer]:
    """Return the part of each row where a group lies at several clients: it has one, that of its client with most rows.

    A client that does not train counts before all others.
    """
    first, unit = units(client, group)
    rows = np.bincount(unit)
    order = np.lexsort((client[first], -rows, ~alone[first], group[first]))  # of units: the first of a group decides
    of_group = group[first][order]
    begins = np.r_[True, of_group[1:] != of_group[:-1]] if len(order) else np.zeros(0, dtype=bool)
    decided = part[first][order][begins][np.cumsum(begins) - 1]
    by_unit = np.empty_like(decided)
    by_unit[order] = decided
    return np.asarray(by_unit[unit])
