"""The integer arithmetic of the encrypted backends without encryption, for long experiments and for tests."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from piebald.vertical.encryption.backend import (
    Evaluator,
    FixedPointScale,
    Ints,
    KeyOwner,
    UnencryptedBackend,
    added_integers,
    exact_product,
    to_floats,
    to_integers,
    uniform,
)
from piebald.vertical.kernels import Floats, ProductSize


class FixedBackend(UnencryptedBackend):
    """Fixed-point integers, masked modulo 2^64 but not encrypted: bit for bit the results of `bfv` and `paillier`."""

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
        mask = uniform(size.rows * size.width, 1 << 64).reshape(size.rows, size.width)
        return (exact_product(prepared, statistics).astype(np.uint64) + mask).astype("<u8").tobytes(), mask

    def unmask(self, decrypted: bytes, mask: NDArray[np.uint64], size: ProductSize) -> Floats:
        values = np.frombuffer(decrypted, "<u8").reshape(size.rows, size.width) - mask
        return to_floats(values.astype(np.int64), size)
