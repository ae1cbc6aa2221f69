"""Paillier's scheme with quick obfuscators: keys, encryption by the owner and by others, decryption by parts.

Enc(m) = (1 + n m) h^a mod n^2 with h = -(y^2)^n: short exponents a and a table of h's powers make encryption cheap
(Damgard, Jurik, Nielsen 2010, section 4.2).  The owner works modulo p^2 and q^2 apart and puts the halves together.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from piebald.errors import SettingError
from piebald.transfer.backends.base import Garbled

WINDOW = 8  # bits of an exponent that one entry of a table answers for


def library() -> Any:
    """gmpy2.

    Raises:
        SettingError: it is not installed.
    """
    try:
        import gmpy2
    except ImportError:
        raise SettingError(
            "backend 'paillier' needs gmpy2, which is not installed: pip install 'piebald[he]'"
        ) from None
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
        """base^exponent, for an exponent of up to `bits` bits."""
        found: Any = 1
        for row, digit in zip(self._rows, exponent.to_bytes(len(self._rows), "little"), strict=True):
            if digit:
                found = found * row[digit] % self.modulus
        return found


class PublicKey:
    """What everybody may know: n and h.

    Args:
        n: product of two primes, of `bits` bits.
        h: the base of obfuscators.
        bits: 2048 (112-bit security) or 3072 (128-bit).

    Raises:
        Garbled: these numbers are not a key.
    """

    def __init__(self, n: Any, h: Any, bits: int) -> None:
        gmpy2 = library()
        self.n, self.h, self.bits, self.square = n, h, bits, n * n
        if n.bit_length() != bits or n % 2 == 0 or gmpy2.is_prime(n) or not 1 < h < self.square or gmpy2.gcd(h, n) != 1:
            raise Garbled("the other party's public key is damaged or made with other parameters")
        self._powers: Powers | None = None

    def obfuscator(self) -> Any:
        """An encryption of 0; its exponent has half as many bits as n."""
        if self._powers is None:
            self._powers = Powers(self.h, self.square, self.bits // 2)
        return self._powers.power(secrets.randbits(self.bits // 2))

    def encrypt(self, message: Any) -> Any:
        """A ciphertext of a number modulo n."""
        return (1 + self.n * message) * self.obfuscator() % self.square


class PrivateKey:
    """An owner's key.  It has no way to be written down.

    Args:
        bits: of n.
    """

    def __init__(self, bits: int) -> None:
        gmpy2 = self._gmpy2 = library()
        p = _prime(bits // 2)
        q = _prime(bits // 2)
        while p == q or gmpy2.gcd(p - 1, q - 1) != 2:
            q = _prime(bits // 2)
        n = p * q
        y = gmpy2.mpz(secrets.randbelow(int(n - 2)) + 2)
        self.public = PublicKey(n, gmpy2.powmod(-(y * y) % (n * n), n, n * n), bits)
        self._halves = [_Half(gmpy2, mine, n, self.public.h, bits) for mine in (p, q)]
        self._lift = p**2 * gmpy2.invert(p**2, q**2)  # 0 modulo p^2, 1 modulo q^2
        self._join = p * gmpy2.invert(p, q)

    def encrypt(self, messages: Sequence[Any]) -> list[Any]:
        """Ciphertexts of numbers modulo n, about as quick as a multiplication modulo p^2 for every 8 bits."""
        first, second = self._halves
        found = []
        for message in messages:
            low, high = first.obfuscator(), second.obfuscator()
            noise = (low + (high - low) * self._lift) % self.public.square
            found.append((1 + self.public.n * message) * noise % self.public.square)
        return found

    def decrypt(self, ciphertexts: Sequence[Any]) -> list[Any]:
        """The numbers in ciphertexts, modulo p and modulo q on two threads."""
        run: Callable[[_Half], list[Any]] = lambda half: half.decrypt(ciphertexts)  # noqa: E731
        with ThreadPoolExecutor(2) as pool:
            low, high = pool.map(run, self._halves)
        n = self.public.n
        return [(one + (other - one) * self._join) % n for one, other in zip(low, high, strict=True)]


class _Half:
    """The key modulo one of the two primes."""

    def __init__(self, gmpy2: Any, p: Any, n: Any, h: Any, bits: int) -> None:
        self.p, self.square, self._gmpy2 = p, p * p, gmpy2
        self._powers = Powers(h % self.square, self.square, bits // 2)
        # L((1 + n)^(p-1)) = (p - 1) n / p = -n / p modulo p
        self._factor = gmpy2.invert(-(n // p) % p, p)

    def obfuscator(self) -> Any:
        return self._powers.power(secrets.randbelow(int(self.p - 1)))

    def decrypt(self, ciphertexts: Sequence[Any]) -> list[Any]:
        self._gmpy2.get_context().allow_release_gil = True  # of this thread
        powers = self._gmpy2.powmod_base_list([one % self.square for one in ciphertexts], self.p - 1, self.square)
        return [(power - 1) // self.p * self._factor % self.p for power in powers]


def _prime(bits: int) -> Any:
    """A random prime with its two highest bits set, 3 modulo 4."""
    gmpy2 = library()
    while True:
        found = gmpy2.mpz(secrets.randbits(bits) | 3 << (bits - 2) | 3)
        if gmpy2.is_prime(found, 40):
            return found
