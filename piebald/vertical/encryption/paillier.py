"""Paillier's additive encryption, 36 numbers per ciphertext.

Row b of S is packed into few ciphertexts; row i of C S is the product over b of Enc(S_b)^C[i, b]: one short exponent
for 36 numbers.  All rows of C share tables of the ciphertexts' powers (Straus 1964).  Each result is multiplied by a
fresh encryption of a mask that is uniform modulo n, so the owner sees a uniform number and a fresh ciphertext.
"""

from __future__ import annotations

import math
import secrets
from dataclasses import dataclass
from typing import Any, Literal

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
    to_floats,
    to_integers,
)
from piebald.vertical.encryption.paillier_key import ORDER, PrivateKey, PublicKey, library
from piebald.vertical.kernels import Floats, ProductSize

SLOT = 56  # bits of a packed number


class PaillierBackend(Backend):
    """Paillier's scheme on gmpy2, packed: smaller messages than `bfv`, in four to eight times the time.

    Attributes:
        bits: bits of the modulus; 2048 gives 112-bit security, 3072 gives 128-bit.
    """

    bits: Literal[2048, 3072] = 2048

    def owner(self, sizes: list[ProductSize]) -> KeyOwner:
        return _PaillierOwner(self)

    @property
    def security(self) -> str:
        orders = ORDER[self.bits]
        return f"{orders // 2} bits (Paillier, modulus of {self.bits} bits, noise of secret order, {orders} bits)"

    def evaluator(self, announcement: bytes, sizes: list[ProductSize]) -> Evaluator:
        return _PaillierEvaluator(self, announcement)

    def announced(self, sizes: list[ProductSize]) -> MessageLength:
        return MessageLength(self.bits // 8 * 3)

    def lengths(self, size: ProductSize) -> tuple[MessageLength, MessageLength, MessageLength]:
        plan, cipher = self.layout(size), self.bits // 4
        out = plan.outputs(size)
        return (
            MessageLength(size.inner * len(plan.cuts) * cipher),
            MessageLength(out * cipher),
            MessageLength(out * cipher // 2),
        )

    def layout(self, size: ProductSize) -> PaillierLayout:
        """Return the layout of rows of S and of C S in ciphertexts."""
        slots = (self.bits - 1) // SLOT
        pieces = math.ceil(size.width / slots)
        cuts = tuple(len(piece) for piece in np.array_split(np.arange(size.width), pieces))
        return PaillierLayout(cuts, slots // size.width if pieces == 1 else 1)

    def check(self, size: ProductSize) -> None:
        super().check(size)
        library()


@dataclass(frozen=True, slots=True)
class PaillierLayout:
    """Widths of the pieces of a row, and number of result rows per ciphertext (`rows_each`)."""

    cuts: tuple[int, ...]
    rows_each: int

    def outputs(self, size: ProductSize) -> int:
        """Return the number of ciphertexts of the result."""
        return math.ceil(size.rows / self.rows_each) * len(self.cuts)


def pack(values: Ints) -> int:
    """Pack signed numbers into one: the sum of values[j] 2^(56 j)."""
    total = 0
    for value in values[::-1].tolist():
        total = (total << SLOT) + value
    return total


def unpack(number: int, count: int) -> Ints:
    """Undo `pack`, for numbers below 2^55 in absolute value."""
    offset = sum(1 << (SLOT * place + SLOT - 1) for place in range(count))
    raw = number + offset
    digits = [(raw >> (SLOT * place)) & ((1 << SLOT) - 1) for place in range(count)]
    return np.array([digit - (1 << (SLOT - 1)) for digit in digits], dtype=np.int64)


def _tiles(values: Ints, layout: PaillierLayout) -> list[Ints]:
    """Return the numbers of each result, from [rows, width], in the order of its ciphertexts."""
    edges = np.cumsum(layout.cuts)[:-1]
    return [
        piece.ravel()
        for start in range(0, len(values), layout.rows_each)
        for piece in np.split(values[start : start + layout.rows_each], edges, axis=1)
    ]


def write(numbers: list[Any], length: int) -> bytes:
    """Write numbers with `length` bytes each."""
    return b"".join(int(number).to_bytes(length, "little") for number in numbers)


def read(data: bytes, length: int, below: Any) -> list[Any]:
    """Undo `write`.

    Raises:
        InvalidMessage: a number is not below its modulus.
    """
    mpz = library().mpz
    numbers = [
        mpz(int.from_bytes(data[place : place + length], "little"))
        for place in range(0, len(data) - length + 1, length)
    ]
    if len(data) % length or any(number >= below for number in numbers):
        raise InvalidMessage("it holds numbers that are not below its modulus")
    return numbers


def read_ciphertexts(data: bytes, length: int, key: PublicKey) -> list[Any]:
    """Undo `write`, for ciphertexts from the other party.

    Raises:
        InvalidMessage: one is not below n^2, shares a factor with n (as 0 and n do), or is 1 modulo n, so that it has
            no noise and everybody can read it.
    """
    numbers, product = read(data, length, key.square), library().mpz(1)
    for number in numbers:
        product = product * number % key.n
    if library().gcd(product, key.n) != 1 or any(number % key.n == 1 for number in numbers):
        raise InvalidMessage("it holds numbers that are no ciphertexts under its key")
    return numbers


class _PaillierOwner(KeyOwner):
    def __init__(self, backend: PaillierBackend) -> None:
        self.backend, self._key = backend, PrivateKey(backend.bits)
        self.bytes = backend.bits // 4
        public = self._key.public
        self.announcement = write([public.n], self.bytes // 2) + write([public.h], self.bytes)

    def encrypt(self, statistics: Floats, size: ProductSize) -> bytes:
        values = to_integers(statistics, FixedPointScale.of(size).statistics)
        edges = np.cumsum(self.backend.layout(size).cuts)[:-1]
        packed = [pack(piece) for row in values for piece in np.split(row, edges)]
        return write(self._key.encrypt([number % self._key.public.n for number in packed]), self.bytes)

    def decrypt(self, masked: bytes, size: ProductSize, constant: Floats) -> bytes:
        values = np.broadcast_to(added_integers(constant, size), (size.rows, size.width))
        added = [pack(tile) for tile in _tiles(values, self.backend.layout(size))]
        products = self._key.decrypt(read_ciphertexts(masked, self.bytes, self._key.public))
        n = self._key.public.n
        return write([(product + part) % n for product, part in zip(products, added, strict=True)], self.bytes // 2)


class _PaillierEvaluator(Evaluator):
    def __init__(self, backend: PaillierBackend, announcement: bytes) -> None:
        self.backend, self.bytes = backend, backend.bits // 4
        mpz, half = library().mpz, self.bytes // 2
        n, h = (mpz(int.from_bytes(part, "little")) for part in (announcement[:half], announcement[half:]))
        self._key = PublicKey(n, h, backend.bits)

    def prepare(self, coefficients: Floats, size: ProductSize) -> tuple[Ints, list[tuple[Any, Any]]]:
        values = to_integers(coefficients, FixedPointScale.of(size).coefficients)
        n, count = int(self._key.n), self.backend.layout(size).outputs(size)
        masks = [library().mpz(secrets.randbelow(n)) for _ in range(count)]
        return values, [(mask, self._key.encrypt(mask)) for mask in masks]

    def multiply(
        self, encrypted: bytes, prepared: tuple[Ints, list[tuple[Any, Any]]], size: ProductSize
    ) -> tuple[bytes, list[Any]]:
        layout, square = self.backend.layout(size), self._key.square
        values, masks = prepared
        ciphertexts = read_ciphertexts(encrypted, self.bytes, self._key)
        pieces = len(layout.cuts)
        columns = [Straus(ciphertexts[piece::pieces], values, square) for piece in range(pieces)]
        powmod, shift = library().powmod, 1 << (SLOT * size.width)
        results = []
        for start in range(0, size.rows, layout.rows_each):
            for column in columns:
                *first, last = range(start, min(start + layout.rows_each, size.rows))
                total = column.row(last)
                for row in reversed(first):
                    total = powmod(total, shift, square) * column.row(row) % square
                results.append(total)
        hidden = [result * mask % square for result, (_, mask) in zip(results, masks, strict=True)]
        return write(hidden, self.bytes), [mask for mask, _ in masks]

    def unmask(self, decrypted: bytes, mask: list[Any], size: ProductSize) -> Floats:
        layout, n = self.backend.layout(size), self._key.n
        template = _tiles(np.arange(size.rows * size.width).reshape(size.rows, size.width), layout)
        values = np.empty(size.rows * size.width, dtype=np.int64)
        for places, masked, part in zip(template, read(decrypted, self.bytes // 2, n), mask, strict=True):
            number = (masked - part) % n
            number = number - n if number > n // 2 else number
            if number.bit_length() > SLOT * len(places):
                number = library().mpz(1 << (SLOT - 2))  # not a valid result, so that `to_floats` refuses it
            values[places] = unpack(int(number), len(places))
        return to_floats(values.reshape(size.rows, size.width), size)


class Straus:
    """Products of powers with shared bases: the product over b of base_b^exponents[i, b], for each row i.

    Exponents are written with few signed odd digits; odd powers of each base, positive and negative, are computed once
    for all rows.
    """

    WIDTH = 7

    def __init__(self, bases: list[Any], exponents: Ints, modulus: Any) -> None:
        self._modulus = modulus
        self._digits = sparse_digits(exponents, self.WIDTH)
        used: list[bool] = np.any(self._digits != 0, axis=(0, 1)).tolist()
        self._tables = [self._table(base) if is_used else {} for base, is_used in zip(bases, used, strict=True)]

    def _table(self, base: Any) -> dict[int, Any]:
        """Return base^j for odd j between -2^(WIDTH - 1) and 2^(WIDTH - 1)."""
        powers: dict[int, Any] = {}
        for sign, start in ((1, base), (-1, library().invert(base, self._modulus))):
            square, power = start * start % self._modulus, start
            for digit in range(1, 1 << (self.WIDTH - 1), 2):
                powers[sign * digit] = power
                power = power * square % self._modulus
        return powers

    def row(self, number: int) -> Any:
        """Return the product for one row of exponents."""
        modulus, tables = self._modulus, self._tables
        total: Any = library().mpz(1)
        for digits in self._digits[:, number]:
            if total != 1:
                total = total * total % modulus
            places = np.flatnonzero(digits)
            for place, digit in zip(places.tolist(), digits[places].tolist(), strict=True):
                total = total * tables[place][digit] % modulus
        return total


def sparse_digits(values: Ints, width: int) -> NDArray[np.int64]:
    """Return binary digits of signed numbers, the highest first [bits, *values.shape]: odd and below 2^(width-1), or 0.

    At most one in `width` neighbours is not 0 (the non-adjacent form of that width).
    """
    base, half, rest = 1 << width, 1 << (width - 1), values.copy()
    digits: list[Ints] = []
    while np.any(rest) or not digits:
        digit = np.where(rest & 1, (rest + half) % base - half, 0)
        digits.append(digit)
        rest = (rest - digit) >> 1
    return np.stack(digits[::-1])
