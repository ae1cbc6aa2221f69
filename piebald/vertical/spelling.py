"""Keys that are spelt differently, by one letter: both parties match each key with one letter left out, too.

Two words that differ in one letter more, fewer or other, or in two that changed places, are the same without some
letter of each (Bocek, Hunt, Stiller 2007).  So the match of `key_matching` finds them as what it is: of a key that is
near none of the other party's, nothing is told.  Bloom filters of keys, which record linkage takes for this (Schnell,
Bachteler, Reiher 2009), need a third party that compares them: whoever knows their secret, as both parties do here,
reads the other one's keys out of its filters by a list of names.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from piebald.vertical.encryption.backend import MessageLength
from piebald.vertical.match_keys import BETWEEN, NAME
from piebald.vertical.party_messages import MessageFault, MessageKind
from piebald.vertical.protocol import PartySession

if TYPE_CHECKING:
    from numpy import typing as npt

FEWEST = 4  # letters of a word from which one may be left out
MOST_LINKS = 1 << 24  # of a party
RECORD = 12  # bytes of a link


def spellings(key: str, kinds: Sequence[str]) -> list[str]:
    """Return a key, and what it is without one letter of a column of names.

    Examples:
        >>> spellings("anna", ["name"])
        ['anna', 'nna', 'ana', 'ann']
    """
    cells, found = key.split(BETWEEN), {key: None}
    for number, (cell, kind) in enumerate(zip(cells, kinds, strict=True)):
        for place in range(len(cell)) if kind == NAME and len(cell) >= FEWEST else ():
            shorter = " ".join(sorted((cell[:place] + cell[place + 1 :]).split()))  # in order, as `keys_of` has words
            found[BETWEEN.join([*cells[:number], shorter, *cells[number + 1 :]])] = None
    return list(found)


def nearest(session: PartySession, keys: Mapping[str, Sequence[str]], common: Mapping[str, str]) -> dict[str, str]:
    """Return a name of each own key that is near one of the other party's, the same name at both.

    Args:
        session: a session in which all spellings were matched.
        keys: the spellings of each own key, itself first, in an order that tells nothing.
        common: a name of each spelling that the other party has, too, as of `match_keys`.

    Raises:
        MessageFault: the other party sent what is no part of a match.
    """
    names = sorted(set(common.values()))
    own = _links(keys, common, {name: number for number, name in enumerate(names)})
    session.send(MessageKind.NEAR, [own.astype("<u4").tobytes()])
    (data,) = session.receive(MessageKind.NEAR, [MessageLength(RECORD * MOST_LINKS, exact=False)])
    with session.reading(MessageKind.NEAR):
        if len(data) % RECORD:
            raise MessageFault("the other party's NEAR message holds a part of a link")
        theirs = np.frombuffer(data, "<u4").reshape(-1, 3).astype(np.int64)
        if (theirs >= [MOST_LINKS, max(len(names), 1), 2]).any() or len(np.unique(theirs, axis=0)) < len(theirs):
            raise MessageFault("the other party's NEAR message holds what is no link of a key, or one twice")
    listed = list(keys)
    return {listed[place]: _named(names[name], far) for place, _, name, far in paired(own, theirs)}


def nearest_here(keys: Sequence[Mapping[str, Sequence[str]]]) -> list[dict[str, str]]:
    """Return what `nearest` does at two parties that are both here, given the keys and spellings of each."""
    both = sorted(set.intersection(*({name for some in each.values() for name in some} for each in keys)))
    numbers = {name: number for number, name in enumerate(both)}
    links = [_links(each, dict(zip(both, both, strict=True)), numbers) for each in keys]
    listed, found = [list(each) for each in keys], [dict[str, str](), dict[str, str]()]
    for first, second, name, far in paired(*links):
        for names, key in zip(found, (listed[0][first], listed[1][second]), strict=True):
            names[key] = _named(both[name], far)
    return found


def paired(own: npt.NDArray[np.int64], theirs: npt.NDArray[np.int64]) -> list[tuple[int, int, int, int]]:
    """Return pairs of keys, one to one, each with the number of a name that they have in common, and how far they are.

    The same keys are a pair, then those of which one is the other with a letter left out, then those that are the same
    with one of each left out.  A key that is as far from several is in no pair, so that the order is of no importance.

    Args:
        own, theirs: links [n, 3] of a party's keys: number of the key, number of the name, whether that is the whole
            key.
    """
    first = pd.DataFrame(own, columns=["a", "name", "whole"])
    links = first.merge(pd.DataFrame(theirs, columns=["b", "name", "whole"]), on="name")
    links["far"] = 2 - links["whole_x"] - links["whole_y"]
    links = links.sort_values(["a", "b", "far", "name"]).drop_duplicates(["a", "b"])
    found: list[tuple[int, int, int, int]] = []
    for far in range(3):
        near = links[links["far"] == far]
        alone = near[~near.duplicated("a", keep=False) & ~near.duplicated("b", keep=False)]
        found += alone[["a", "b", "name", "far"]].itertuples(index=False, name=None)
        links = links[~links["a"].isin(near["a"]) & ~links["b"].isin(near["b"])]
    return found


def _links(
    keys: Mapping[str, Sequence[str]], common: Mapping[str, str], numbers: Mapping[str, int]
) -> npt.NDArray[np.int64]:
    """Return links as of `paired` of all spellings that have a name."""
    links = [
        (place, numbers[common[spelling]], spelling == key)
        for place, (key, some) in enumerate(keys.items())
        for spelling in some
        if spelling in common
    ]
    return np.array(links, np.int64).reshape(-1, 3)


def _named(name: str, far: int) -> str:
    """Return the name of a pair: another one than that of a pair which has the same spelling, but is not as far."""
    return hashlib.blake2b(f"{far} {name}".encode(), digest_size=12, person=b"piebald near").hexdigest()
