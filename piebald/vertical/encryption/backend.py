"""The interface of encryption backends, and the backends without encryption.

    owner                                   evaluator
    encrypt(S)      -- encrypted -->        prepare(C), then multiply: C S under encryption, plus a uniform mask
    decrypt, add K  <-- masked -----
                    --- decrypted ->        unmask: C S + K, and nothing else

The owner sees uniform numbers, the evaluator its product.  Numbers are fixed-point integers: the backends `fixed`,
and `bfv` compute the same product, bit for bit.

`fixed` is for long experiments and for tests; `plain` is the reference, and "MMD without encryption" between two
parties.
"""

from __future__ import annotations

import math
import secrets
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from piebald.contracts.component import Component
from piebald.core.errors import RuntimeFault, SettingError
from piebald.vertical.kernels import Floats, ProductSize

Ints = NDArray[np.int64]


class InvalidMessage(RuntimeFault):
    """A message of the other party is invalid: damaged, replayed, or made under another key.

    The run folder stays as it was: the run can be resumed.
    """

    exit_code = 2


ROOM = 49  # results are below 2^49 in size: half of the 50-bit plaintext modulus of BFV


@dataclass(frozen=True, slots=True)
class FixedPointScale:
    """Number of binary digits after the point, of the evaluator's coefficients and of the owner's statistics."""

    coefficients: int
    statistics: int

    @classmethod
    def of(cls, size: ProductSize) -> FixedPointScale:
        """Return the largest scale for results of this size, with one digit free by which invalid results are detected.

        The statistics get at least six digits more: they are means, and smaller than the coefficients.
        """
        total = ROOM - 1 - max(math.ceil(math.log2(size.bound)), 0)
        coefficients = min((total - 6) // 2, 18)
        return cls(coefficients, total - coefficients)

    @property
    def result(self) -> int:
        """Number of binary digits after the point of the product."""
        return self.coefficients + self.statistics


def to_integers(values: Floats, digits: int) -> Ints:
    """Return fixed-point numbers: values times 2^digits, rounded to the nearest, ties to even.

    Raises:
        RuntimeFault: a value is not finite, or too large for a 53-bit integer.
    """
    scaled = np.rint(np.ldexp(np.asarray(values, dtype=np.float64), digits))
    if not np.all(np.abs(scaled) < 2.0**53):  # false for NaN, too
        raise RuntimeFault("a hidden value is not finite or far too large: training has diverged, lower the rate lr")
    return scaled.astype(np.int64)


def added_integers(constant: Floats, size: ProductSize) -> Ints:
    """Return the owner's constant at the scale of the product, with no more digits than its statistics have."""
    scale = FixedPointScale.of(size)
    return to_integers(constant, scale.statistics) << scale.coefficients


def to_floats(values: Ints, size: ProductSize) -> Floats:
    """Return the result of a product as floating-point numbers, which may lie outside its range (`in_range`)."""
    return np.ldexp(values.astype(np.float64), -FixedPointScale.of(size).result)


def in_range(values: Floats, size: ProductSize, clamp: bool) -> Floats:
    """Return the result of a product within its range, twice its bound at most.

    Args:
        values: C S + K [rows, width].
        size: of the product.
        clamp: replace numbers outside the range by its ends.  An error would tell the other party, which chooses S and
            K, something about C, which is a party's own rows.

    Raises:
        InvalidMessage: without `clamp`, a value is outside, as almost every result of another key or a wrong ciphertext
            is.
    """
    most = 2.0 ** max(math.ceil(math.log2(size.bound)), 0) * (1 + 1e-9)  # what `FixedPointScale` leaves room for
    if clamp:
        return np.clip(np.nan_to_num(values), -most, most)
    if not np.all(np.abs(values) <= most):  # true for NaN, too
        raise InvalidMessage(
            "a result lies outside its declared range, so it was encrypted under another key or is damaged: "
            "start both parties again"
        )
    return values


def exact_product(coefficients: Ints, statistics: Ints) -> Ints:
    """Return C S in integers, computed in floating point where that is exact: NumPy multiplies integers slowly."""
    largest = _largest(coefficients) * _largest(statistics)
    # bounds every partial sum, so the result is exact in whatever order BLAS adds
    if largest * coefficients.shape[1] < 2.0**53:
        product: Ints = (coefficients.astype(np.float64) @ statistics.astype(np.float64)).astype(np.int64)
        return product
    return coefficients @ statistics


def _largest(values: Ints) -> float:
    """Return the largest absolute value; in Python's integers, since that of -2^63 does not fit 64 bits."""
    return float(max(int(values.max(initial=0)), -int(values.min(initial=0))))


def uniform(count: int, below: int) -> NDArray[np.uint64]:
    """Return uniformly distributed numbers from 0 to below - 1, from the operating system's generator."""
    bits = (below - 1).bit_length()
    numbers = np.empty(0, dtype=np.uint64)
    while len(numbers) < count:
        drawn = np.frombuffer(secrets.token_bytes(8 * (count + 16)), dtype=np.uint64) >> np.uint64(64 - bits)
        # the 16 spare draws make a second turn rare, as moduli lie just below a power of two
        numbers = np.concatenate([numbers, drawn[drawn < below]])  # a remainder would not be uniform
    return numbers[:count]


@dataclass(frozen=True, slots=True)
class MessageLength:
    """Length of a message part in bytes: the largest allowed one, and whether it is exact."""

    most: int
    exact: bool = True


class KeyOwner(ABC):
    """The party with the private key and the statistics."""

    announcement: bytes

    @abstractmethod
    def encrypt(self, statistics: Floats, size: ProductSize) -> bytes:
        """Encrypt S [inner, width] under this owner's key."""

    @abstractmethod
    def decrypt(self, masked: bytes, size: ProductSize, constant: Floats) -> bytes:
        """Decrypt a masked product and add the owner's constant [width] or [rows, width]; the result is uniform."""


class Evaluator(ABC):
    """The party with the coefficients, which knows the owner's public key."""

    @abstractmethod
    def prepare(self, coefficients: Floats, size: ProductSize) -> Any:
        """Encode C [rows, inner] for `multiply`, for instance while waiting for the other party."""

    @abstractmethod
    def multiply(self, encrypted: bytes, prepared: Any, size: ProductSize) -> tuple[bytes, Any]:
        """Compute the masked product; return it and the mask."""

    @abstractmethod
    def unmask(self, decrypted: bytes, mask: Any, size: ProductSize) -> Floats:
        """Remove the mask: C S + K [rows, width], which an honest owner's numbers keep `in_range`."""


class Backend(Component):
    """The encryption of a transfer."""

    axis = "backend"
    masks: ClassVar[bool] = True  # whether the owner sees uniform numbers in place of the evaluator's products
    digits: ClassVar[int] = 31  # most binary digits of a disclosed number: those of `FixedPointScale`, and a sign

    def owner(self, sizes: list[ProductSize]) -> KeyOwner:
        """Return an owner with a new key, for products of these sizes."""
        raise NotImplementedError

    @property
    def security(self) -> str:
        """The security level of the keys in use, in words."""
        raise NotImplementedError

    def evaluator(self, announcement: bytes, sizes: list[ProductSize]) -> Evaluator:
        """Return an evaluator for the owner with this announcement, for products of these sizes.

        Raises:
            InvalidMessage: the announcement is not a key of this backend.
        """
        raise NotImplementedError

    def announced(self, sizes: list[ProductSize]) -> MessageLength:
        """Return the length of an owner's announcement, for products of these sizes."""
        raise NotImplementedError

    def lengths(self, size: ProductSize) -> tuple[MessageLength, MessageLength, MessageLength]:
        """Return the lengths of a product's encrypted, masked and decrypted parts."""
        raise NotImplementedError

    def told(self, constant: Floats, size: ProductSize) -> bytes:
        """Return a constant [width] or [rows, width] as it is sent in the open, with the digits of statistics."""
        numbers = to_integers(constant, FixedPointScale.of(size).statistics)
        return np.broadcast_to(numbers, (size.rows, size.width)).astype("<i8").tobytes()

    def heard(self, constant: bytes, size: ProductSize) -> Floats:
        """Return a constant [rows, width] that was sent in the open, and may lie outside its range."""
        numbers = np.frombuffer(constant, "<i8").reshape(size.rows, size.width)
        return np.ldexp(numbers.astype(np.float64), -FixedPointScale.of(size).statistics)

    def check(self, size: ProductSize) -> None:
        """Refuse a product that this backend cannot compute, before anything runs."""
        if size.bound >= 2.0 ** (ROOM - 17):
            raise SettingError(
                f"backend {self.kind!r}: results may grow to {size.bound:.3g}, which leaves fewer than 16 binary "
                "digits after the point: use fewer aligned units, a smaller c or degree, or normalize = true"
            )


class UnencryptedBackend(Backend):
    """Base class of backends without encryption: numbers of eight bytes and no key."""

    axis = "backend"  # a base class, not a choice

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
        # signed again: modulo 2^64, a negative result is in the upper half
        return to_floats(values.astype(np.int64), size)


class PlainBackend(UnencryptedBackend):
    """No encryption: statistics are sent in float64, and the other party can read them."""

    masks: ClassVar[bool] = False
    digits: ClassVar[int] = 53

    def owner(self, sizes: list[ProductSize]) -> KeyOwner:
        return _PlainOwner()

    def evaluator(self, announcement: bytes, sizes: list[ProductSize]) -> Evaluator:
        return _PlainEvaluator()

    def told(self, constant: Floats, size: ProductSize) -> bytes:
        return np.broadcast_to(constant, (size.rows, size.width)).astype("<f8").tobytes()

    def heard(self, constant: bytes, size: ProductSize) -> Floats:
        return np.frombuffer(constant, "<f8").reshape(size.rows, size.width).astype(np.float64)

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
        return np.frombuffer(decrypted, "<f8").reshape(size.rows, size.width).astype(np.float64)
