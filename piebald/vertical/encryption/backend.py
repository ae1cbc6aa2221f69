"""What every backend offers: an owner, an evaluator, and a mask between them.

    owner                                          evaluator
    encrypt(S)            -- encrypted -->         prepare(C), then multiply: C S under encryption, plus a uniform mask
    open: decrypt, add K  <-- masked ----
                          --- opened ---->         unmask: C S + K, and nothing else

The owner sees uniform numbers, the evaluator its product.  Numbers are fixed-point integers: bit for bit the same
product comes out of `fixed`, `bfv` and `paillier`.
"""

from __future__ import annotations

import math
import secrets
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from piebald.component import Component
from piebald.errors import RuntimeFault, SettingError
from piebald.vertical.kernels import Floats, ProductSize

Ints = NDArray[np.int64]


class InvalidMessage(RuntimeFault):
    """What the other party sent cannot be what it should be: damaged, replayed, or made under another key."""


ROOM = 49  # results are below 2^49 in size: half of the 50-bit plaintext modulus of BFV, and less than a Paillier slot


@dataclass(frozen=True, slots=True)
class FixedPointScale:
    """Binary digits after the point: of the evaluator's coefficients, and of the owner's statistics."""

    coefficients: int
    statistics: int

    @classmethod
    def of(cls, size: ProductSize) -> FixedPointScale:
        """All digits that a result of this size leaves room for, one kept free so that nonsense can be told.

        The statistics get six more or above: they are means, and smaller than the coefficients.
        """
        total = ROOM - 1 - max(math.ceil(math.log2(size.bound)), 0)
        coefficients = min((total - 6) // 2, 18)
        return cls(coefficients, total - coefficients)

    @property
    def result(self) -> int:
        """Digits after the point of the product."""
        return self.coefficients + self.statistics


def to_integers(values: Floats, digits: int) -> Ints:
    """Fixed-point numbers: values times 2^digits, rounded to the nearest, ties to even.

    Raises:
        RuntimeFault: a value is not finite, or too large for a 53-bit integer.
    """
    scaled = np.rint(np.ldexp(np.asarray(values, dtype=np.float64), digits))
    if not np.all(np.abs(scaled) < 2.0**53):  # also where it is not a number
        raise RuntimeFault("a hidden value is not finite or far too large: training has diverged, lower the rate lr")
    return scaled.astype(np.int64)


def to_floats(values: Ints, size: ProductSize) -> Floats:
    """The result of a product as numbers.

    Raises:
        InvalidMessage: a value is beyond the bound, as one from another key or a wrong ciphertext almost surely is.
    """
    scale = FixedPointScale.of(size)
    if np.any(np.abs(values) > 1 << (ROOM - 1)):
        raise InvalidMessage(
            "a result lies outside its declared range, so it was encrypted under another key or is damaged: "
            "start both parties again"
        )
    return np.ldexp(values.astype(np.float64), -scale.result)


def exact_product(coefficients: Ints, statistics: Ints) -> Ints:
    """C S in integers.  Through floating point where that is exact, since NumPy multiplies integers slowly."""
    largest = float(np.abs(coefficients).max(initial=0)) * float(np.abs(statistics).max(initial=0))
    if largest * coefficients.shape[1] < 2.0**53:
        product: Ints = (coefficients.astype(np.float64) @ statistics.astype(np.float64)).astype(np.int64)
        return product
    return coefficients @ statistics


def uniform(count: int, below: int) -> NDArray[np.uint64]:
    """Numbers from 0 to below - 1, each with the same probability, from the system's generator."""
    bits = (below - 1).bit_length()
    found = np.empty(0, dtype=np.uint64)
    while len(found) < count:
        drawn = np.frombuffer(secrets.token_bytes(8 * (count + 16)), dtype=np.uint64) >> np.uint64(64 - bits)
        found = np.concatenate([found, drawn[drawn < below]])
    return found[:count]


@dataclass(frozen=True, slots=True)
class MessageLength:
    """How many bytes a message part has: at most, and whether always."""

    most: int
    exact: bool = True


class KeyOwner(ABC):
    """Holds the private key and the statistics."""

    announcement: bytes

    @abstractmethod
    def encrypt(self, statistics: Floats, size: ProductSize) -> bytes:
        """S [inner, width], under this owner's key."""

    @abstractmethod
    def decrypt(self, masked: bytes, size: ProductSize, constant: Floats) -> bytes:
        """What is in a masked product, with the owner's constant [width] or [rows, width] added: uniform numbers."""


class Evaluator(ABC):
    """Knows an owner's public key, and the coefficients."""

    @abstractmethod
    def prepare(self, coefficients: Floats, size: ProductSize) -> Any:
        """C [rows, inner] as `multiply` wants it; may be made while waiting for the other party."""

    @abstractmethod
    def multiply(self, encrypted: bytes, prepared: Any, size: ProductSize) -> tuple[bytes, Any]:
        """The masked product, and the mask."""

    @abstractmethod
    def unmask(self, decrypted: bytes, mask: Any, size: ProductSize) -> Floats:
        """C S + K [rows, width]."""


class Backend(Component):
    """Under what encryption the two parties compute."""

    axis = "backend"
    hides: ClassVar[bool] = True  # whether anything is encrypted

    def owner(self, sizes: list[ProductSize]) -> KeyOwner:
        """An owner with a new key of its own, for products of these shapes."""
        raise NotImplementedError

    def evaluator(self, announcement: bytes) -> Evaluator:
        """An evaluator for the owner who announced this.

        Raises:
            InvalidMessage: the announcement is not a key of this backend.
        """
        raise NotImplementedError

    def announced(self) -> MessageLength:
        """Length of an announcement."""
        raise NotImplementedError

    def lengths(self, size: ProductSize) -> tuple[MessageLength, MessageLength, MessageLength]:
        """Lengths of a product's encrypted, masked and opened parts."""
        raise NotImplementedError

    def check(self, size: ProductSize) -> None:
        """Refuse, before anything runs, a product that this backend cannot compute."""
        if size.bound >= 2.0 ** (ROOM - 17):
            raise SettingError(
                f"backend {self.kind!r}: results may grow to {size.bound:.3g}, which leaves fewer than 16 binary "
                "digits after the point: use fewer aligned units, a smaller c or degree, or normalise = true"
            )


class UnencryptedBackend(Backend):
    """Numbers of eight bytes and no key: what `fixed` and `plain` have in common."""

    axis = "backend"  # no choice of its own
    hides: ClassVar[bool] = False

    def announced(self) -> MessageLength:
        return MessageLength(0)

    def lengths(self, size: ProductSize) -> tuple[MessageLength, MessageLength, MessageLength]:
        out = MessageLength(8 * size.rows * size.width)
        return MessageLength(8 * size.inner * size.width), out, out
