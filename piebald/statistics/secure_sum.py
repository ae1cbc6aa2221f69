"""Sums under pairwise masks: who sums learns the total and no part of it.

Each two clients agree on a seed by X25519, of which one adds the mask and the other takes it away, modulo 2^64
(Bonawitz et al. 2017, section 4, without recovery: a sum is opened only if all clients have sent their part, so there
is nothing to recover).  Keys are fresh for each sum and come from the operating system.
"""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Sequence

import numpy as np

from piebald.core.errors import SettingError
from piebald.data.partition.split import Ints
from piebald.privacy.secure_aggregation import masks

LEAST = 3  # of two clients, each would know the other's part
MOST = 1000  # each two of them agree on a seed


def secure_sum(vectors: Sequence[Ints]) -> Ints:
    """The sum of clients' vectors [k], each of which leaves its client under masks.

    Raises:
        SettingError: there are too few clients, or too many.
    """
    if not LEAST <= len(vectors) <= MOST:
        raise SettingError(f"secure sums are of {LEAST} to {MOST:,} clients, got {len(vectors)}")
    private = [secrets.token_bytes(masks.KEY) for _ in vectors]
    sent = [masked(vector, private, client) for client, vector in enumerate(vectors)]
    total = np.zeros_like(sent[0])
    for one in sent:
        total += one  # wraps around, as the masks do
    return total.view(np.int64)


def masked(vector: Ints, private: Sequence[bytes], client: int) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
    """What a client sends: its vector with the masks that it shares with each of the others.

    Args:
        vector: its whole numbers [k].
        private: the clients' private keys; a client uses its own, and of the others the public ones.
        client: its place.
    """
    public = [masks.public_key(key) for key in private]
    words = b"".join(public)  # so that a seed belongs to this sum alone
    seeds = {
        other: masks.agree(private[client], public[other], "statistics", words)
        for other in range(len(private))
        if other != client
    }
    made = np.ascontiguousarray(vector, dtype=np.int64).view(np.uint64).copy()
    plus, minus = itertools.tee(seeds.items())
    masks.add_masks(made, [s for other, s in plus if other > client], [s for other, s in minus if other < client])
    return made
