"""Train, validation and test split of every client."""

from __future__ import annotations

from typing import cast, get_args

from piebald.contracts import Split
from piebald.core.errors import SettingError, unknown
from piebald.core.randomness import key
from piebald.data.clients.lists import Lists
from piebald.data.partition.split import Ints, hold_out

SPLITS: tuple[Split, ...] = get_args(Split)


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
    validation: float,
    test: float,
    seed: int,
    group: Ints | None = None,
    first: int = 0,
) -> dict[Split, Lists]:
    """Divide each client's rows into train, validation and test; a client with a single row keeps it for training.

    Args:
        lists: row numbers of each client, positions in `label` and `group`.
        label: class of each row, or None.
        validation: share of a client's rows for validation.
        test: share of a client's rows for testing.
        seed: seed of the choice, which depends only on the seed and the client's own rows.
        group: group of each row; rows of one client and group stay in the same split.
        first: number of the client of the first list.
    """
    parts: dict[Split, Lists] = {}
    rest = lists
    # Both shares are of all rows, and validation is chosen from those that the test part leaves.
    for split, share in (("test", test), ("validation", validation / (1 - test))):
        out = hold_out(
            rest.clients + first,
            share,
            key(seed, "split", split),
            None if label is None else label[rest.values],
            None if group is None else group[rest.values],
        )
        parts[cast(Split, split)], rest = rest.where(out), rest.where(~out)
    return {"train": rest, **parts}
