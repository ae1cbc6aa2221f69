"""Microsoft SEAL through TenSEAL's low-level module: parameters, serialization, and fast encoding.

TenSEAL saves and loads by file name only, so bytes go through an anonymous file in memory.
"""

from __future__ import annotations

import os
import struct
import tempfile
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from piebald.core.errors import PiebaldError, SettingError, install
from piebald.vertical.encryption.backend import InvalidMessage
from piebald.vertical.encryption.seal_bytes import HEADER, MAGIC, packer, unpacked

PRIMES = {8192: (60, 52, 52, 54), 16384: (60, 60, 60, 60, 60)}  # 218 and 300 bits: at least 128-bit security
# Largest modulus by security in bits, for secrets of -1, 0 and 1 and classical attacks (Albrecht et al. 2018,
# Homomorphic encryption standard, table 1)
STANDARD = {8192: {256: 118, 192: 152, 128: 218}, 16384: {256: 237, 192: 305, 128: 438}}
PLAIN_BITS = 50
BLOCKS = 256  # up to so many blocks, their indicators are cached: 17 to 34 MB
PIECE = 16  # plaintexts made at once: temporary arrays of 2 to 4 MB
Unsigned = NDArray[np.uint64]


def library() -> Any:
    """Return TenSEAL's low-level module.

    Raises:
        SettingError: it is not installed, or zstandard, which unpacks its messages.
    """
    try:
        from tenseal import sealapi
    except ImportError:
        raise SettingError(f"backend 'bfv' needs tenseal, which is not installed: {install('he')}") from None
    packer()
    return sealapi


class SealContext:
    """BFV with exact integers modulo a 50-bit prime `t`, in `degree` slots.

    Args:
        degree: 8192 or 16384.

    Attributes:
        row: number of slots in a row, which rotate together: degree / 2.
        top, second, last: levels of ciphertexts, with all primes, without one of them, and with only one.
    """

    def __init__(self, degree: int) -> None:
        self.seal = seal = library()
        self.degree, self.row = degree, degree // 2
        parameters = seal.EncryptionParameters(seal.SCHEME_TYPE.BFV)
        parameters.set_poly_modulus_degree(degree)
        parameters.set_coeff_modulus(seal.CoeffModulus.Create(degree, list(PRIMES[degree])))
        parameters.set_plain_modulus(seal.PlainModulus.Batching(degree, PLAIN_BITS))
        self.t = int(parameters.plain_modulus().value())
        self.context = seal.SEALContext(parameters, True, seal.SEC_LEVEL_TYPE.TC128)
        self.evaluator, self.encoder = seal.Evaluator(self.context), seal.BatchEncoder(self.context)
        self.top, self.last = self.context.first_parms_id(), self.context.last_parms_id()
        self.second = self.context.first_context_data().next_context_data().parms_id()
        self._columns: dict[int, tuple[NDArray[np.float64], NDArray[np.float64]]] = {}
        self._file, self._file_lock = _memory_file(), threading.Lock()  # both parties may be threads of this process
        weakref.finalize(self, os.close, self._file)  # also where the process ends first
        # where SEAL's header has its version (`seal_bytes.HEADER`)
        self._version = self.save(parameters)[3:5]

    # ------------------------------------------------------------------------------------------------ serialization

    def save(self, value: Any) -> bytes:
        """Serialize a key, ciphertext or plaintext."""
        with self._file_lock:
            os.ftruncate(self._file, 0)
            value.save(f"/dev/fd/{self._file}")
            return os.pread(self._file, os.fstat(self._file).st_size, 0)

    def received(self, empty: Any, data: bytes | bytearray, name: str, keys: int | None = None) -> Any:
        """Load a ciphertext or key of the other party, or a set of keys, within the memory of an honest one.

        Args:
            empty: an empty object of SEAL.
            data: its bytes.
            name: its name, for errors.
            keys: number of keys that a set may hold.

        Raises:
            InvalidMessage: an honest party sends no such bytes.
        """
        # 8 bytes for each coefficient and prime; 4096 bytes leave room for headers
        pair = 2 * len(PRIMES[self.degree]) * 8 * self.degree + 4096  # two polynomials
        most = pair if keys is None else pair * keys + 8 * self.degree
        try:
            plain = unpacked(data, self._version, most, keys)
        except InvalidMessage as error:
            raise InvalidMessage(f"the other party's {name} {error}") from None
        return self.load(empty, plain, name)

    def load(self, empty: Any, data: bytes | bytearray, name: str) -> Any:
        """Load a key or ciphertext from bytes; SEAL checks that it fits these parameters.

        Raises:
            InvalidMessage: it does not fit.
        """
        try:
            with self._file_lock:
                os.ftruncate(self._file, 0)
                os.pwrite(self._file, data, 0)
                empty.load(self.context, f"/dev/fd/{self._file}")
        except (RuntimeError, ValueError, IndexError, MemoryError):
            raise InvalidMessage(f"the other party's {name} is damaged or made with other parameters") from None
        return empty

    def ciphertext(self, data: bytes, name: str, level: Any) -> Any:
        """Return a ciphertext from the other party, at a level of these parameters.

        SEAL also loads ciphertexts of other levels, of three polynomials, transformed, or that anybody can read, and
        only fails when it computes with them.

        Raises:
            InvalidMessage: an honest party sends no such ciphertext.
        """
        loaded = self.received(self.seal.Ciphertext(), data, name)
        if loaded.size() != 2 or loaded.is_ntt_form() or loaded.parms_id() != level or loaded.is_transparent():
            raise InvalidMessage(
                f"a ciphertext of the {name} must have two polynomials, be at its own level, not be transformed and "
                "not be readable without a key"
            )
        return loaded

    @contextmanager
    def computing(self, name: str) -> Iterator[None]:
        """Turn SEAL's errors about ciphertexts of the other party into one of ours."""
        try:
            yield
        except (RuntimeError, ValueError, IndexError, MemoryError) as error:
            if isinstance(error, PiebaldError):
                raise
            raise InvalidMessage(f"the encryption library cannot compute with the other party's {name}") from None

    # -------------------------------------------------------------------------------------------------------- encoding

    def encode(self, slots: Unsigned | NDArray[np.int64]) -> Any:
        """Encode slots [degree] with values in [0, t) as a plaintext."""
        plain = self.seal.Plaintext()
        self.encoder.encode(slots.tolist(), plain)
        return plain

    def decode(self, plain: Any) -> Unsigned:
        """Return the slots of a plaintext [degree]."""
        return np.array(self.encoder.decode_uint64(plain), dtype=np.uint64)

    def encode_blocks(self, values: NDArray[np.int64], width: int) -> list[Any]:
        """Return plaintexts with slots constant over blocks of `width`.

        Values [degree / width, count] are small and signed.

        Encoding is linear, so all plaintexts together are one matrix product with the coefficients of the blocks'
        indicators; they go to SEAL as raw bytes, without a Python list.  Many small blocks would make it large.
        """
        most = int(np.abs(values).max(initial=0))
        if len(values) > BLOCKS or len(values) * most > 2**27:  # sums beyond are not exact in floating point
            return [self.encode(np.mod(np.repeat(column, width), self.t)) for column in values.T]
        pieces = (values[:, start : start + PIECE] for start in range(0, values.shape[1], PIECE))
        return [self._raw(coefficients) for piece in pieces for coefficients in self._times_columns(piece, width)]

    def ntt(self, plain: Any) -> Any:
        """Return a plaintext ready for products with fresh ciphertexts."""
        out = self.seal.Plaintext()
        self.evaluator.transform_to_ntt(plain, self.top, out)
        return out

    def _times_columns(self, values: NDArray[np.int64], width: int) -> Unsigned:
        """Return coefficients [count, degree] of the plaintexts of these values [degree / width, count]."""
        even, uneven = self._indicators(width)
        first, second = np.split(values.astype(np.float64).T, 2, axis=1)
        plus, minus = (first + second) @ even, (first - second) @ uneven
        middle = self.degree // 2
        coefficients = np.empty((values.shape[1], self.degree), dtype=np.uint64)
        coefficients[:, : middle + 1] = self._remainders(minus + plus)
        coefficients[:, middle + 1 :] = self._remainders(minus - plus)[:, -2:0:-1]
        return coefficients

    def _remainders(self, halves: NDArray[np.float64]) -> Unsigned:
        """Return the remainders of low + 2^25 high, of up to 80 bits, for halves [2, ...] of whole numbers.

        They follow from a quotient that is good to one unit and not too large, in integers that wrap at 2^64.
        """
        low, high = halves
        quotient = high * 2.0**25
        quotient += low
        quotient /= self.t
        # float64 is less off for quotients of 30 bits, so floor is never one too high and `rest` never negative
        quotient -= 2.0**-10
        rest = high.astype(np.int64) << 25
        rest += low.astype(np.int64)
        rest -= np.floor(quotient, out=quotient).astype(np.int64) * self.t
        rest -= self.t
        rest += (rest >> 63) & self.t  # add t to what is negative
        below: Unsigned = rest.view(np.uint64)
        return below

    def _indicators(self, width: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return halves of sums and differences of coefficients of plaintexts that are 1 in one block of the first row.

        Slots are values at the powers of 3 (first row) and their inverses (second row) of a root of unity, so X -> X^g
        permutes slots: one indicator gives all others by permuting its coefficients.  The indicator of a block of the
        second row has the coefficients of its twin in the first one, negative and in reverse order.  So for values u
        and v of twins, coefficient i of u I + v J is (u - v) odd + (u + v) even, and coefficient degree - i is
        (u - v) odd - (u + v) even, with odd and even half of I[i] + I[degree - i] and of I[i] - I[degree - i].

        Returns:
            Even and odd, each the low 25 bits and the rest [2, degree / 2 / width, degree / 2 + 1].
        """
        if width not in self._columns:
            first = np.zeros(self.degree, dtype=np.int64)
            first[:width] = 1
            plain = self.encode(first)
            count = plain.coeff_count()
            source = np.zeros(self.degree, dtype=np.int64)
            source[:count] = [plain.data(index) for index in range(count)]
            places = np.arange(self.degree)
            indicators = np.empty((self.row // width, self.degree + 1), dtype=np.int64)
            for number, indicator in enumerate(indicators):
                moved = places * pow(3, -number * width, 2 * self.degree) % (2 * self.degree)
                indicator[moved % self.degree] = np.where(moved >= self.degree, -source, source)
            indicators[:, -1] = -indicators[:, 0]  # X^degree is -1
            front, back = indicators[:, : self.row + 1], indicators[:, : self.row - 1 : -1]
            even, uneven = (_digits(_half((front + sign * back) % self.t, self.t)) for sign in (-1, 1))
            self._columns[width] = even, uneven
        return self._columns[width]

    def _raw(self, coefficients: Unsigned) -> Any:
        """Return a plaintext from its coefficients [degree], through SEAL's own file format, uncompressed."""
        inner = self._headed(struct.pack("<Q", self.degree), coefficients.tobytes())
        whole = self._headed(bytes(32), struct.pack("<Qd", self.degree, 1.0), inner)
        return self.load(self.seal.Plaintext(), whole, "plaintext")

    def _headed(self, *parts: bytes) -> bytes:
        """Return parts after a header: magic number, its size, SEAL's version, no compression, 0, size of the whole."""
        size = 16 + sum(map(len, parts))
        return b"".join([HEADER.pack(MAGIC, HEADER.size, self._version, 0, 0, size), *parts])


def _half(values: NDArray[np.int64], t: int) -> NDArray[np.int64]:
    """Return halves modulo an odd t of numbers from 0 to t - 1."""
    return (values + (values & 1) * t) >> 1


def _digits(values: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return the low 25 bits, and the rest [2, ...]."""
    return np.stack([values & (2**25 - 1), values >> 25]).astype(np.float64)


def _memory_file() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("piebald")
    handle, path = tempfile.mkstemp()
    # where there is no memfd; unlinked at once, since keys go through it and no other process may open it by name
    os.unlink(path)
    return handle


def join(blobs: list[bytes]) -> bytes:
    """Join blobs, each after its length."""
    return b"".join(struct.pack("<Q", len(blob)) + blob for blob in blobs)


def split(data: bytes, count: int, name: str) -> list[bytes]:
    """Undo `join`, for a known number of blobs.

    Raises:
        InvalidMessage: there are more or fewer, or one is cut off.
    """
    blobs, place = [], 0
    for _ in range(count):
        # where not even a length is left, the check below must fail
        length = struct.unpack_from("<Q", data, place)[0] if place + 8 <= len(data) else len(data)
        place += 8 + length
        if place > len(data):
            raise InvalidMessage(f"the other party's {name} is cut off")
        blobs.append(data[place - length : place])
    if place != len(data):
        raise InvalidMessage(f"the other party's {name} is too long")
    return blobs
