"""Shamir's secret sharing: any `threshold` of the shares give the secret back, fewer say nothing about it.

A secret is the constant term of a random polynomial of degree threshold - 1 over a prime field, share x its value at x
(Shamir 1979).  The field is just larger than 32 bytes, so a key is one element of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache

PRIME = 2**256 + 297  # the smallest prime above 2**256


BYTES = 33  # of a share


def share(secret: bytes, places: list[int], threshold: int, draw: Callable[[int], bytes]) -> dict[int, bytes]:
    """A share for each place.

    Args:
        secret: 32 bytes.
        places: the x of each share: different whole numbers from 1 up.
        threshold: so many shares are needed, at most as many as there are.
        draw: that many random bytes.
    """
    # 16 bytes more than an element has, so that no element is likelier than another by more than 2**-120
    coefficients = [int.from_bytes(draw(BYTES + 16)) % PRIME for _ in range(threshold - 1)]
    polynomial = [int.from_bytes(secret), *coefficients]
    return {place: _value(polynomial, place).to_bytes(BYTES) for place in places}


def combine(shares: Mapping[int, bytes]) -> bytes:
    """The secret behind at least `threshold` shares by place; some other 32 bytes where a share is wrong."""
    # sorted, so that the same holders hit the cache of `_weights` in whatever order they answered
    places = tuple(sorted(shares))
    secret = sum(w * int.from_bytes(shares[x]) for x, w in zip(places, _weights(places), strict=True)) % PRIME
    # wrong shares may give one of the 297 elements beyond 32 bytes, which to_bytes would refuse
    return (secret % 2**256).to_bytes(32)


def _value(polynomial: list[int], x: int) -> int:
    value = 0
    for coefficient in reversed(polynomial):
        value = (value * x + coefficient) % PRIME
    return value


# the survivors of one sum open many secrets with the same places
@lru_cache(maxsize=256)
def _weights(places: tuple[int, ...]) -> list[int]:
    """Lagrange's weights at 0: the product over the other places y of y / (y - x)."""
    weights = []
    for x in places:
        above = below = 1
        for y in places:
            if y != x:
                above, below = above * y % PRIME, below * (y - x) % PRIME
        # one inverse for each weight, not for each factor: an inverse costs many times a product
        weights.append(above * pow(below, -1, PRIME) % PRIME)
    return weights
