"""What the server keeps about each client, for the clients that took part most recently.

A table with a row for every client that is known would grow with the federation, and one with a pair of all of them
with its square: at 100,000 clients 40 GB in float32.  So a component keeps rows in the order of a list of clients, in
its state, and forgets those that were absent longest where they become too many.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

NAMES, SEEN = "clients", "seen"  # in the component's state: whose rows these are, and the step they were last seen at


class Places(NamedTuple):
    """Where rows lie now: `kept` [k] are the old rows that stay, in front; `rows` [n] those of the clients asked for;
    `size` is the number of rows.
    """

    kept: Tensor
    rows: Tensor
    size: int


def places_of(state: dict[str, Any], clients: Sequence[int], version: int, most: int) -> Places:
    """Make room for some clients' rows and say where they are; writes the list of clients to the state.

    Args:
        state: the component's.
        clients: of this step.
        version: of this step.
        most: clients that are remembered; a step's own are in any case.
    """
    empty = torch.zeros(0, dtype=torch.int64)
    names, seen = state.get(NAMES, empty), state.get(SEEN, empty)
    now = torch.tensor(list(dict.fromkeys(clients)), dtype=torch.int64)
    here = torch.isin(names, now)
    fresh = now[~torch.isin(now, names)]
    spare = max(0, len(names) + len(fresh) - max(most, len(now)))
    absent = torch.nonzero(~here).flatten()
    gone = absent[seen[absent].argsort(stable=True)[:spare]]
    stays = torch.ones(len(names), dtype=torch.bool)
    stays[gone] = False
    names = torch.cat([names[stays], fresh])
    seen = torch.cat([seen[stays], torch.zeros_like(fresh)])
    place = {int(name): row for row, name in enumerate(names.tolist())}
    rows = torch.tensor([place[client] for client in clients], dtype=torch.int64)
    seen[rows] = version
    state[NAMES], state[SEEN] = names, seen
    return Places(torch.nonzero(stays).flatten(), rows, len(names))


def resized(table: Tensor | None, places: Places, columns: int) -> Tensor:
    """A table [size, columns] whose rows lie at their new places; those of new clients are 0."""
    if table is not None and len(table) == places.size == len(places.kept):
        return table
    made = torch.zeros(places.size, columns)
    if table is not None:
        made[: len(places.kept)] = table[places.kept]
    return made


def resized_pairs(table: Tensor | None, places: Places) -> Tensor:
    """A table [size, size] of pairs, likewise."""
    if table is not None and len(table) == places.size == len(places.kept):
        return table
    made, kept = torch.zeros(places.size, places.size), places.kept
    if table is not None:
        made[: len(kept), : len(kept)] = table[kept[:, None], kept]
    return made
