"""Keys and masks: agreement by X25519, one key from another, boxes for one reader, and the masks' numbers.

Every secret of a client in one round is derived from one root of 32 random bytes, so that it can say the same
thing twice and never two things.  The primitives are those of `cryptography`.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher, CipherContext, algorithms, modes
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

from piebald.core.errors import Declined

KEY = 32  # bytes of a key
TAG = 16  # bytes that a box is longer than what is in it
_PIECE = 1 << 16  # numbers handled at a time, so that what a piece needs stays in the processor's cache

Words = str | bytes | int


def derive(secret: bytes, *words: Words, length: int = KEY) -> bytes:
    """Bytes that belong to a secret and these words alone (SHAKE256 over both, each with its length)."""
    digest = hashlib.shake_256()
    for word in (b"piebald secure aggregation", secret, *words):
        plain = word.encode() if isinstance(word, str) else str(word).encode() if isinstance(word, int) else word
        # with lengths, so that the words "ab", "c" and "a", "bc" give different keys
        digest.update(struct.pack("<Q", len(plain)) + plain)
    return digest.digest(length)


def private_key(root: bytes, purpose: str) -> bytes:
    """The private key that a root gives for a purpose."""
    return derive(root, "key", purpose)


def public_key(private: bytes) -> bytes:
    """The public key that belongs to a private one, 32 bytes."""
    return X25519PrivateKey.from_private_bytes(private).public_key().public_bytes_raw()


def is_public_key(theirs: bytes) -> bool:
    """Return whether keys can be agreed on with a public key; with a point of low order nobody can."""
    try:
        # any private key will do: X25519 makes each a multiple of 8, so a point of low order always gives zeros
        agree(bytes(KEY), theirs)
    except Declined:
        return False
    return True


def agree(private: bytes, theirs: bytes, *words: Words) -> bytes:
    """The 32 bytes that both sides come to (X25519, RFC 7748), for these words.

    Raises:
        Declined: the other key is none.
    """
    try:
        shared = X25519PrivateKey.from_private_bytes(private).exchange(X25519PublicKey.from_public_bytes(theirs))
    except ValueError:  # a point of low order: everybody would know what comes out
        raise Declined("a public key in the list is no key") from None
    # hashed with its purpose: the boxes of both directions between two clients have one X25519 output
    return derive(shared, *words)


def encrypt_box(key: bytes, text: bytes) -> bytes:
    """Text that only who has the key can read or change.  A key masks one text: the nonce is always 0."""
    return ChaCha20Poly1305(key).encrypt(bytes(12), text, None)


def decrypt_box(key: bytes, box: bytes) -> bytes:
    """Return what is in a box.

    Raises:
        Declined: it was made with another key, or changed.
    """
    try:
        return ChaCha20Poly1305(key).decrypt(bytes(12), box, None)
    except InvalidTag:
        raise Declined("a share was changed on its way, or made for another list of clients") from None


def add_masks(vector: np.ndarray[Any, Any], plus: Sequence[bytes], minus: Sequence[bytes]) -> None:
    """Add the masks of some seeds to a vector of unsigned numbers and take those of others away, in place.

    A mask is the key stream of AES-256 in counter mode under its seed, read as numbers of the vector's type; arithmetic
    wraps around.  A seed is used for one mask only.
    """
    # all streams run in step, so each piece of the vector is in cache while every mask is added: one pass over memory
    streams = [key_stream(seed) for seed in (*plus, *minus)]
    width = vector.dtype.itemsize
    zeros = bytes(min(len(vector), _PIECE) * width)
    for start in range(0, len(vector), _PIECE):
        piece = vector[start : start + _PIECE]
        text = memoryview(zeros)[: len(piece) * width]
        for place, stream in enumerate(streams):
            mask = np.frombuffer(stream.update(text), vector.dtype)
            if place < len(plus):
                piece += mask
            else:
                piece -= mask


def key_stream(seed: bytes) -> CipherContext:
    """Return what turns zeros into the key stream of AES-256 in counter mode under a seed of 32 bytes."""
    # the counter may begin at 0 each time, since a seed gives one stream only
    return Cipher(algorithms.AES256(seed), modes.CTR(bytes(16))).encryptor()


def round_stochastically(numbers: np.ndarray[Any, Any], seed: bytes) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Round up with the probability of the fraction, so that sums of many numbers stay right.

    Rounding to the nearest makes a bias of many small numbers: 0.3 of a thousand clients would add up to 0.

    Args:
        numbers: float64 [n], below 2^62 in absolute value.
        seed: 32 bytes; its key stream says which way each number goes, so the same seed rounds the same way again.
    """
    stream, rounded = key_stream(seed), np.empty(len(numbers), np.int64)
    for start in range(0, len(numbers), _PIECE):
        piece = numbers[start : start + _PIECE]
        # the top 53 bits times 2^-53 are exact in float64 and never reach 1; all 64 could be rounded up to it
        bits = np.frombuffer(stream.update(bytes(8 * len(piece))), dtype="<u8") >> np.uint64(11)
        # the fraction above the floor, also for negative numbers: truncation would round them towards 0
        below = np.floor(piece)
        rounded[start : start + _PIECE] = below.astype(np.int64) + (bits.astype(np.float64) * 2.0**-53 < piece - below)
    return rounded
