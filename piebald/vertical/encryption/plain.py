"""No encryption and no rounding: the reference, and "MMD without encryption" between two parties."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from piebald.vertical.encryption.backend import Evaluator, InvalidMessage, KeyOwner, UnencryptedBackend
from piebald.vertical.kernels import Floats, ProductSize


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
