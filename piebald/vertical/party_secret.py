"""A party's own secret, from which its first weights, the chunks of its rows and its noise are drawn.

Both parties know `settings.seed`.  Knowledge of a party's first weights turns its hidden rows back into features, and
knowledge of the rows in a batch lets one solve for single ones.  So neither comes from the seed: a party alone draws a
secret from the operating system and keeps it in its own run folder (mode 0600), because a resumed run needs it.
A simulation of both parties on one machine derives both secrets from the seed, so that it can be repeated; it protects
nobody.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from piebald.core.randomness import NoiseSource

LENGTH = 32  # bytes of a secret


@dataclass(frozen=True, slots=True)
class PartySecret:
    """Random numbers that belong to one party, with a key for each purpose (`NoiseSource`).

    Attributes:
        key: 32 bytes; never printed.
    """

    key: bytes = field(repr=False)

    def __post_init__(self) -> None:
        if len(self.key) != LENGTH:
            raise ValueError(f"key must have {LENGTH} bytes, got {len(self.key)}")

    @classmethod
    def fresh(cls) -> PartySecret:
        """Return a secret from the operating system."""
        return cls(secrets.token_bytes(LENGTH))

    @classmethod
    def simulated(cls, seed: int, party: str) -> PartySecret:
        """Return a secret that follows from the run's seed, which everybody can make: for simulations and tests."""
        text = json.dumps([seed, party]).encode()
        return cls(hashlib.blake2b(text, digest_size=LENGTH, person=b"piebald party").digest())

    def uniform(self, count: int, *words: str | int) -> NDArray[np.float64]:
        """Return uniform numbers in [0, 1) with 53 bits each; the same words give the same numbers."""
        # as JSON, so that no two lists of words give the same key
        key = hashlib.blake2b(json.dumps(words).encode(), digest_size=32, key=self.key).digest()
        return NoiseSource(key).uniform(count)

    def permutation(self, count: int, *words: str | int) -> NDArray[np.int64]:
        """Return the numbers below `count` in random order."""
        # 53 bits: two of n are equal with a chance of about n^2 / 2^54, so ties favour no order in practice
        return np.argsort(self.uniform(count, *words), kind="stable").astype(np.int64)

    def noise(self, content: bytes) -> NoiseSource:
        """Return the noise that hides this content; the same content always gets the same noise."""
        return NoiseSource(hashlib.blake2b(content, digest_size=32, key=self.key, person=b"piebald hidden").digest())
