"""Nothing hidden, nothing rounded: the reference, and "MMD without encryption" between two parties."""

from __future__ import annotations

import numpy as np

from piebald.vertical.encryption.backend import Evaluator, KeyOwner, Unencrypted
from piebald.vertical.kernels import Floats, Size


class Plain(Unencrypted):
    """No encryption: statistics are sent as they are, in float64.  The other party sees them."""

    def owner(self, sizes: list[Size]) -> KeyOwner:
        return _Owner()

    def evaluator(self, announcement: bytes) -> Evaluator:
        return _Evaluator()

    def check(self, size: Size) -> None:
        pass


class _Owner(KeyOwner):
    announcement = b""

    def encrypt(self, statistics: Floats, size: Size) -> bytes:
        return statistics.astype("<f8").tobytes()

    def open(self, masked: bytes, size: Size, constant: Floats) -> bytes:
        product = np.frombuffer(masked, "<f8").reshape(size.rows, size.width)
        return (product + constant).astype("<f8").tobytes()


class _Evaluator(Evaluator):
    def prepare(self, coefficients: Floats, size: Size) -> Floats:
        return coefficients

    def multiply(self, encrypted: bytes, prepared: Floats, size: Size) -> tuple[bytes, None]:
        statistics = np.frombuffer(encrypted, "<f8").reshape(size.inner, size.width)
        return (prepared @ statistics).astype("<f8").tobytes(), None

    def unmask(self, opened: bytes, mask: None, size: Size) -> Floats:
        return np.frombuffer(opened, "<f8").reshape(size.rows, size.width).astype(np.float64)
