"""Messages of SEAL that would unpack to more than they are: refused before SEAL reads them."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

import pytest

zstandard = pytest.importorskip("zstandard", reason="needs the extra: pip install '.[he]'")
sealapi = pytest.importorskip("tenseal.sealapi", reason="needs the extra: pip install '.[he]'")

from piebald.vertical.encryption.backend import InvalidMessage  # noqa: E402
from piebald.vertical.encryption.bfv import context  # noqa: E402
from piebald.vertical.encryption.seal_bytes import HEADER, MAGIC  # noqa: E402

HE = context(8192)
VERSION = HE.save(sealapi.KeyGenerator(HE.context).secret_key())[3:5]


def content(data: bytes) -> bytes:
    return bytes(zstandard.ZstdDecompressor().stream_reader(data[HEADER.size :]).read())


def head(packed: int, body: bytes) -> bytes:
    return HEADER.pack(MAGIC, HEADER.size, VERSION, packed, 0, HEADER.size + len(body)) + body


def packed(body: bytes) -> bytes:
    return head(2, zstandard.ZstdCompressor(level=3).compress(body))


@pytest.fixture(scope="module")
def keys() -> bytes:
    """What is in a set with the keys of one rotation."""
    return content(HE.save(sealapi.KeyGenerator(HE.context).create_galois_keys([3])))


def of_sets(keys: bytes, sets: int, change: Callable[[bytes], bytes] = bytes) -> bytes:
    """A set with the keys of one rotation again and again; 40 bytes come before its first, empty place."""
    one = keys[56:]
    single = one[: struct.unpack_from("<Q", one, 8)[0]]
    assert one == b"".join(one[at : at + len(single)] for at in range(0, len(one), len(single)))
    return keys[:32] + struct.pack("<Q", sets) + sets * (struct.pack("<Q", 1) + change(single))


def test_a_set_of_too_many_keys_is_refused_before_it_is_loaded(keys: bytes) -> None:
    """Before, a few kilobytes became keys of as many gigabytes as the degree allows."""
    bomb = packed(of_sets(keys, 40))
    loaded = HE.load(sealapi.GaloisKeys(), bomb, "public key")
    assert loaded.size() == 40
    assert len(bomb) * 20 < 40 * 2 * 4 * 8 * HE.degree
    with pytest.raises(InvalidMessage, match="public key takes more than the"):
        HE.received(sealapi.GaloisKeys(), bomb, "public key", 3)
    few = head(0, of_sets(keys, 4))
    with pytest.raises(InvalidMessage, match="public key holds more than 3 keys"):
        HE.received(sealapi.GaloisKeys(), few, "public key", 3)
    assert HE.received(sealapi.GaloisKeys(), head(0, of_sets(keys, 3)), "public key", 3).size() == 3


def test_what_is_packed_inside_is_refused(keys: bytes) -> None:
    inside = {
        "a key": lambda one: packed(one[16:]),
        "its numbers": lambda one: head(0, one[16:89] + packed(one[105:])),
    }
    for change in inside.values():
        bomb = packed(of_sets(keys, 3, change))
        with pytest.raises(InvalidMessage, match=r"public key is packed inside|is not what this version"):
            HE.received(sealapi.GaloisKeys(), bomb, "public key", 3)
    whole = HE.load(sealapi.GaloisKeys(), packed(of_sets(keys, 3, inside["a key"])), "public key")
    assert whole.size() == 3  # SEAL itself takes it


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda data: packed(bytes(1 << 28)), "takes more than the"),
        (lambda data: packed(content(data) + bytes(1 << 25)), "takes more than the"),
        (lambda data: head(1, data[16:]), "is packed in another way"),
        (lambda data: head(2, data[20:]), "cannot be unpacked"),
        (lambda data: data[:7], "is cut off"),
        (lambda data: data[:-1], "is not what this version of SEAL saves"),
        (lambda data: data[:3] + b"\3\4" + data[5:], "is not what this version of SEAL saves"),
        (lambda data: head(0, b""), "is damaged or made with other parameters"),
    ],
    ids=["zeros", "zeros behind", "zlib", "damaged", "short", "cut", "another version", "empty"],
)
def test_bombs_and_damage_in_a_ciphertext_are_refused_in_one_sentence(damage: Any, says: str) -> None:
    key = sealapi.PublicKey()
    sealapi.KeyGenerator(HE.context).create_public_key(key)
    data = HE.save(key)
    HE.received(sealapi.PublicKey(), data, "public key")
    with pytest.raises(InvalidMessage, match=f"the other party's public key {says}"):
        HE.received(sealapi.PublicKey(), damage(data), "public key")
