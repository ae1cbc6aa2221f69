"""Messages of SEAL, unpacked within bounds before SEAL reads them.

SEAL packs everything with zstd, also inside of packed data, makes whole polynomials from seeds, and takes any number of
keys, so that a few bytes can fill all memory.  Therefore messages are unpacked here, up to the length of an honest one;
their content must have the form in which SEAL saves it, not packed again, and no more keys than are needed.
"""

from __future__ import annotations

import struct
from typing import Any

from piebald.core.errors import import_extra
from piebald.vertical.encryption.backend import InvalidMessage

HEADER = struct.Struct("<HB2sBHQ")  # magic number, its own size, SEAL's version, how it is packed, nothing, whole size


MAGIC = 0xA15E


_PLAIN, _ZSTD = 0, 2


_WINDOW = 1 << 23  # bytes that unpacking may look back


_NUMBERS = struct.calcsize("<32s?QQQdQ")  # level, transformed or not, polynomials, degree, primes, scale, correction


def packer() -> Any:
    """Return the module that unpacks zstd.

    Raises:
        SettingError: it is not installed.
    """
    return import_extra("zstandard", "he", "backend 'bfv' needs zstandard, which is not installed")


def unpacked(data: bytes | bytearray, version: bytes, most: int, keys: int | None = None) -> bytes:
    """Return a message of SEAL, unpacked.

    Args:
        data: the message.
        version: SEAL's version, two bytes.
        most: bytes of an honest message, at most.
        keys: number of keys that a set of keys may hold; None for a single ciphertext or key.

    Raises:
        InvalidMessage: it is longer, packed inside, holds more keys, or is no message of SEAL.
    """
    try:
        packed = _head(data, 0, len(data), version)
        content = bytes(data[HEADER.size :])
        if packed == _ZSTD:
            zstandard = packer()
            try:
                # one byte more than allowed, so that a longer message shows without being unpacked to its end
                content = zstandard.ZstdDecompressor(max_window_size=_WINDOW).stream_reader(content).read(most + 1)
            except zstandard.ZstdError:
                raise InvalidMessage("cannot be unpacked") from None
        elif packed != _PLAIN:
            raise InvalidMessage("is packed in another way than zstd")
        if len(content) > most:
            raise InvalidMessage(f"takes more than the {most:,} bytes of an honest one")
        whole = HEADER.pack(MAGIC, HEADER.size, version, _PLAIN, 0, HEADER.size + len(content)) + content
        if keys is None:
            _check_ciphertext(whole, 0, len(whole), version)
        else:
            _check_keys(whole, keys, version)
    except struct.error:
        raise InvalidMessage("is cut off") from None
    return whole


def _head(data: bytes | bytearray, place: int, end: int, version: bytes) -> int:
    """Return the kind of packing of the part from `place` to `end`."""
    magic, size, made_by, packed, _, length = HEADER.unpack_from(data, place)
    if (magic, size, made_by) != (MAGIC, HEADER.size, version) or place + length != end:
        raise InvalidMessage("is not what this version of SEAL saves")
    return int(packed)


def _check_ciphertext(data: bytes, place: int, end: int, version: bytes) -> None:
    """Refuse a ciphertext, or a key, which is one, whose numbers or seed are packed."""
    inner = place + HEADER.size + _NUMBERS
    while inner < end:
        length = HEADER.unpack_from(data, inner)[-1]
        # a length of 0 would keep this loop at one place for ever
        if _head(data, inner, inner + length, version) != _PLAIN or not 0 < length <= end - inner:
            raise InvalidMessage("is packed inside")
        inner += length


def _check_keys(data: bytes, most: int, version: bytes) -> None:
    """Refuse a set of more keys, or with keys that are packed."""
    place = HEADER.size + 32  # after the level
    (sets,) = struct.unpack_from("<Q", data, place)
    place, total = place + 8, 0
    # each set takes at least the bytes of its count, so more of them are a lie that would only cost time
    if sets > len(data):
        raise InvalidMessage("is cut off")
    for _ in range(sets):
        (count,) = struct.unpack_from("<Q", data, place)
        place, total = place + 8, total + count
        if total > most:
            raise InvalidMessage(f"holds more than {most} keys")
        for _ in range(count):
            end = place + HEADER.unpack_from(data, place)[-1]
            if _head(data, place, end, version) != _PLAIN or end <= place:
                raise InvalidMessage("is packed inside")
            _check_ciphertext(data, place, end, version)
            place = end
