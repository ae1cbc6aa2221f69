"""Backends without encryption: `fixed`, the integer arithmetic of the encrypted ones, and `plain`, without rounding.

`fixed` is for long experiments and for tests; `plain` is the reference, and "MMD without encryption" between two
parties.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from piebald.vertical.encryption.backend import (
    Backend,
    Evaluator,
    FixedPointScale,
    Ints,
    InvalidMessage,
    KeyOwner,
    MessageLength,
    added_integers,
    exact_product,
    to_floats,
    to_integers,
    uniform,
)
from piebald.vertical.kernels import Floats, ProductSize


class UnencryptedBackend(Backend):
    """Base class of backends without encryption: numbers of eight bytes and no key."""

    axis = "backend"  # a base class, not a choice
    hides: ClassVar[bool] = False

    @property
    def security(self) -> str:
        return "0 bits: nothing is encrypted"

    def announced(self, sizes: list[ProductSize]) -> MessageLength:
        return MessageLength(0)

    def lengths(self, size: ProductSize) -> tuple[MessageLength, MessageLength, MessageLength]:
        out = MessageLength(8 * size.rows * size.width)
        return MessageLength(8 * size.inner * size.width), out, out


class FixedBackend(UnencryptedBackend):
    """Fixed-point integers, masked modulo 2^64 but not encrypted: bit for bit the results of `bfv`."""

    def owner(self, sizes: list[ProductSize]) -> KeyOwner:
        return _FixedOwner()

    def evaluator(self, announcement: bytes, sizes: list[ProductSize]) -> Evaluator:
        return _FixedEvaluator()


class _FixedOwner(KeyOwner):
    announcement = b""

    def encrypt(self, statistics: Floats, size: ProductSize) -> bytes:
        return to_integers(statistics, FixedPointScale.of(size).statistics).astype("<i8").tobytes()

    def decrypt(self, masked: bytes, size: ProductSize, constant: Floats) -> bytes:
        product = np.frombuffer(masked, "<u8").reshape(size.rows, size.width)
        added = added_integers(constant, size).astype(np.uint64)  # arithmetic modulo 2^64
        return (product + added).astype("<u8").tobytes()


class _FixedEvaluator(Evaluator):
    def prepare(self, coefficients: Floats, size: ProductSize) -> Ints:
        return to_integers(coefficients, FixedPointScale.of(size).coefficients)

    def multiply(self, encrypted: bytes, prepared: Ints, size: ProductSize) -> tuple[bytes, NDArray[np.uint64]]:
        statistics = np.frombuffer(encrypted, "<i8").reshape(size.inner, size.width)
        # uniform modulo 2^64, so that the owner sees no trace of the product
        mask = uniform(size.rows * size.width, 1 << 64).reshape(size.rows, size.width)
        return (exact_product(prepared, statistics).astype(np.uint64) + mask).astype("<u8").tobytes(), mask

    def unmask(self, decrypted: bytes, mask: NDArray[np.uint64], size: ProductSize) -> Floats:
        values = np.frombuffer(decrypted, "<u8").reshape(size.rows, size.width) - mask
        return to_floats(values.astype(np.int64), size)


class PlainBackend(UnencryptedBackend):
    """No encryption: statistics are sent in float64, and the other party can read them."""

    masks: ClassVar[bool] = False
    digits: ClassVar[int] = 53

    def owner(self, sizes: list[ProductSize]) -> KeyOwner:
        return _PlainOwner()

    def evaluator(self, announcement: bytes, sizes: list[ProductSize]) -> Evaluator:
        return _PlainEvaluator()

    def check(self, size: ProductSize) -> None:
        pass


class _PlainOwner(KeyOwner):
    announcement = b""

    def encrypt(self, statistics: Floats, size: ProductSize) -> bytes:
        return statistics.astype("<f8").tobytes()

    def decrypt(self, masked: bytes, size: ProductSize, constant: Floats) -> bytes:
        product = np.frombuffer(masked, "<f8").reshape(size.rows, size.width)
        with np.errstate(all="ignore"):  # the other party checks the result
            return (product + constant).astype("<f8").tobytes()


class _PlainEvaluator(Evaluator):
    def prepare(self, coefficients: Floats, size: ProductSize) -> Floats:
        return coefficients

    def multiply(self, encrypted: bytes, prepared: Floats, size: ProductSize) -> tuple[bytes, None]:
        statistics = np.frombuffer(encrypted, "<f8").reshape(size.inner, size.width)
        with np.errstate(all="ignore"):  # the result is checked in the end
            return (prepared @ statistics).astype("<f8").tobytes(), None

    def unmask(self, decrypted: bytes, mask: None, size: ProductSize) -> Floats:
        result = np.frombuffer(decrypted, "<f8").reshape(size.rows, size.width).astype(np.float64)
        if not np.all(np.abs(result) <= 2 * size.bound):
            raise InvalidMessage("a result lies outside its declared range, or is no number")
        return result
