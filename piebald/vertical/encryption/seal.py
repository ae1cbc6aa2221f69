"""Microsoft SEAL through TenSEAL's low-level module: parameters, serialization and encoding.

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
from piebald.vertical.encryption.seal_bytes import packer, unpacked

PRIMES = {8192: (60, 52, 52, 54), 16384: (60, 60, 60, 60, 60)}  # 218 and 300 bits: at least 128-bit security
# Largest modulus by security in bits, for secrets of -1, 0 and 1 and classical attacks (Albrecht et al. 2018,
# Homomorphic encryption standard, table 1)
STANDARD = {8192: {256: 118, 192: 152, 128: 218}, 16384: {256: 237, 192: 305, 128: 438}}
PLAIN_BITS = 50
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

    def ntt(self, plain: Any) -> Any:
        """Return a plaintext ready for products with fresh ciphertexts."""
        out = self.seal.Plaintext()
        self.evaluator.transform_to_ntt(plain, self.top, out)
        return out


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
