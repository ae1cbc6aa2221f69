"""Paillier's scheme with noise from a small hidden subgroup: keys, encryption by the owner and by others, decryption.

Enc(m) = (1 + n m) h^a mod n^2.  p = 2 s u + 1 with a secret prime s of 224 or 256 bits, q likewise, and h is of order
2 s modulo p^2.  So a is short, a table of h's powers makes encryption cheap, and c^(2 s) modulo p^2 is free of noise: a
quarter of the usual exponent p - 1 (Paillier 1999, section 6; Ma, Han, Lei 2021).  The owner computes modulo p^2 and
q^2 separately and combines the halves.

Assumption: without the factors of n, noise of this subgroup cannot be distinguished from any other n-th residue.
The best known attack looks for a collision in the subgroup, 2^112 or 2^128 multiplications.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from piebald.core.errors import SettingError, install
from piebald.vertical.encryption.backend import InvalidMessage

WINDOW = 8  # bits of an exponent per entry of a table
ORDER = {2048: 224, 3072: 256}  # bits of s, by those of n: a collision search is as hard as factoring n
SPARE = 64  # bits of an exponent beyond the order of h, so that h^a is uniform up to 2^-SPARE


def library() -> Any:
    """Return gmpy2.

    Raises:
        SettingError: it is not installed.
    """
    try:
        import gmpy2
    except ImportError:
        raise SettingError(f"backend 'paillier' needs gmpy2, which is not installed: {install('he')}") from None
    return gmpy2


class Powers:
    """Powers of one base, from a table: entry [i][j] is base^(j 256^i)."""

    def __init__(self, base: Any, modulus: Any, bits: int) -> None:
        self.modulus, self._rows = modulus, []
        for _ in range(-(-bits // WINDOW)):
            row = [library().mpz(1)]
            for _ in range((1 << WINDOW) - 1):
                row.append(row[-1] * base % modulus)
            self._rows.append(row)
            base = row[-1] * base % modulus

    def power(self, exponent: int) -> Any:
        """Return base^exponent, for an exponent of up to `bits` bits."""
        power: Any = 1
        for row, digit in zip(self._rows, exponent.to_bytes(len(self._rows), "little"), strict=True):
            if digit:
                power = power * row[digit] % self.modulus
        return power


class PublicKey:
    """The public numbers n and h.

    Args:
        n: product of two primes, with `bits` bits.
        h: base of the noise.
        bits: 2048 (112-bit security) or 3072 (128-bit).

    Raises:
        InvalidMessage: the numbers are not a valid key.
    """

    def __init__(self, n: Any, h: Any, bits: int) -> None:
        gmpy2 = library()
        self.n, self.h, self.bits, self.square = n, h, bits, n * n
        valid = n.bit_length() == bits and n % 2 and not gmpy2.is_prime(n) and not gmpy2.is_power(n)
        if not valid or not 1 < h < self.square or gmpy2.gcd(h, n) != 1 or h % n in (1, n - 1):
            raise InvalidMessage("the public key is damaged or made with other parameters")
        self._powers: Powers | None = None

    def obfuscator(self) -> Any:
        """Return an encryption of 0."""
        bits = 2 * ORDER[self.bits] + SPARE
        if self._powers is None:
            self._powers = Powers(self.h, self.square, bits)
        return self._powers.power(secrets.randbits(bits))

    def encrypt(self, message: Any) -> Any:
        """Encrypt a number modulo n."""
        return (1 + self.n * message) * self.obfuscator() % self.square


class PrivateKey:
    """An owner's private key, which cannot be saved.

    Args:
        bits: number of bits of n.
    """

    def __init__(self, bits: int) -> None:
        gmpy2 = library()
        (p, s), (q, r) = _prime(bits // 2, ORDER[bits]), _prime(bits // 2, ORDER[bits])
        while gmpy2.gcd(p - 1, q - 1) != 2:
            q, r = _prime(bits // 2, ORDER[bits])
        n = p * q
        y = gmpy2.mpz(secrets.randbelow(int(n - 2)) + 2)
        residue = gmpy2.powmod(y, (p - 1) // s * ((q - 1) // r) // 2, n)  # of order s modulo p, and r modulo q
        self.public = PublicKey(n, gmpy2.powmod(-residue % (n * n), n, n * n), bits)
        self._halves = [_Half(gmpy2, *primes, self.public) for primes in ((p, s), (q, r))]
        self._order = int(2 * s * r)
        self._lift = p**2 * gmpy2.invert(p**2, q**2)  # 0 modulo p^2, 1 modulo q^2
        self._join = p * gmpy2.invert(p, q)

    def encrypt(self, messages: Sequence[Any]) -> list[Any]:
        """Encrypt numbers modulo n; the cost is about one multiplication modulo p^2 for every 8 bits."""
        first, second = self._halves
        ciphertexts = []
        for message in messages:
            exponent = secrets.randbelow(self._order)
            low, high = first.noise(exponent), second.noise(exponent)
            noise = (low + (high - low) * self._lift) % self.public.square
            ciphertexts.append((1 + self.public.n * message) * noise % self.public.square)
        return ciphertexts

    def decrypt(self, ciphertexts: Sequence[Any]) -> list[Any]:
        """Decrypt ciphertexts, modulo p and modulo q on two threads."""
        run: Callable[[_Half], list[Any]] = lambda half: half.decrypt(ciphertexts)  # noqa: E731
        with ThreadPoolExecutor(2) as pool:
            low, high = pool.map(run, self._halves)
        n = self.public.n
        # the Chinese remainder theorem
        return [(mod_p + (mod_q - mod_p) * self._join) % n for mod_p, mod_q in zip(low, high, strict=True)]


class _Half:
    """The key modulo one of the two primes, p; h is of order 2 s there."""

    def __init__(self, gmpy2: Any, p: Any, s: Any, public: PublicKey) -> None:
        self.p, self.square, self._order, self._gmpy2 = p, p * p, 2 * s, gmpy2
        self._powers = Powers(public.h % self.square, self.square, int(self._order).bit_length())
        # c^(2 s) = (1 + n)^(2 s m) = 1 + 2 s m n modulo p^2
        self._factor = gmpy2.invert(self._order * (public.n // p), p)

    def noise(self, exponent: int) -> Any:
        """Return h^exponent modulo p^2."""
        return self._powers.power(int(exponent % self._order))

    def decrypt(self, ciphertexts: Sequence[Any]) -> list[Any]:
        self._gmpy2.get_context().allow_release_gil = True  # of this thread
        powers = self._gmpy2.powmod_base_list(
            [ciphertext % self.square for ciphertext in ciphertexts], self._order, self.square
        )
        return [(power - 1) // self.p * self._factor % self.p for power in powers]


def _prime(bits: int, order: int) -> tuple[Any, Any]:
    """Return random primes p = 2 s u + 1 with its two highest bits set, and s of `order` bits; u is odd."""
    gmpy2 = library()
    s = gmpy2.mpz(4)
    while not gmpy2.is_prime(s, 40):
        s = gmpy2.mpz(secrets.randbits(order) | 1 << (order - 1) | 1)
    low, high = -(-3 * (1 << (bits - 2)) // (2 * s)), (1 << bits) // (2 * s)
    while True:
        p = 2 * s * (gmpy2.mpz(low + secrets.randbelow(int(high - low))) | 1) + 1
        if p.bit_length() == bits and gmpy2.is_prime(p, 40):
            return p, s
