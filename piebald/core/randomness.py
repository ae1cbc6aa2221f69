"""Randomness from (seed, client, version), never from the order in which things happen; and noise that protects.

Every draw starts from a `key`: a 64-bit number hashed from what the draw is for.  Two runtimes that ask for the same
draw get the same numbers, whatever they did before, so a run can be cut, resumed, reordered or spread over machines.

Noise that protects is Gaussian, comes from a cryptographic generator, and is rounded so that no low-order bit depends
on the data.  torch's CPU generator has 32 bits of seed, so whoever holds one noisy vector can try them all.  Here the
bits are the key stream of AES-256 in counter mode.  In a real federation its key comes from the operating system, fresh
for each task; in a simulation it is derived from the run's seed, so that a run can be repeated.  The bits of two draws
from one key are the same on one machine with one version of NumPy, whatever engine asks for them; another processor may
round logarithms and cosines otherwise.

Method: 53-bit uniforms go through the transform of Box and Muller in float64.  Gaussians in floating point are porous:
which numbers can occur depends on what the noise was added to (Mironov 2012; Jin et al. 2022, "Are we there yet? Timing
and floating-point attacks on differential privacy systems").  So the noisy value is rounded to a multiple of 2^-20
standard deviations.  Each multiple collects about 2^30 values of float64, the rounding is a function of the noisy value
alone, and the grid depends on the standard deviation, not on the data.  The tails end at 8.57 standard deviations.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import secrets
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from numpy.typing import NDArray
from torch import Tensor

from piebald.core.machine import float64_device, moved

_LARGEST = (1 << 64) - 1  # of a whole number among the words


def key(*words: int | str) -> int:
    """A 64-bit key from integers and strings; the same words give the same key on every machine and version.

    Examples:
        >>> key("train", 1, 7) == key("train", 1, 7), key("train", 1, 7) == key("train", 17)
        (True, False)
    """
    return _hashed(8, words)


def long_key(*words: int | str) -> int:
    """A 256-bit key from the same words, for what protects: `NoiseSource` takes it.  A secret is a word of text,
    since whole numbers count modulo 2^64.
    """
    return _hashed(32, words)


def _hashed(size: int, words: Sequence[int | str]) -> int:
    parts = list[bytes]()
    for word in words:
        if isinstance(word, str):
            text = word.encode()
            # a tag and a length for each word: without them ("ab", "c") and ("a", "bc") would give one key
            parts += (b"s", len(text).to_bytes(4, "little"), text)
        else:
            parts += (b"i", (int(word) & _LARGEST).to_bytes(8, "little"))  # keys are words too, and fill 64 bits
    return int.from_bytes(hashlib.blake2b(b"".join(parts), digest_size=size).digest(), "little")


def generator(*words: int | str) -> np.random.Generator:
    """A NumPy generator (counter-based Philox) that belongs to these words alone."""
    return np.random.Generator(np.random.Philox(key=key(*words)))


class _Reused(threading.local):
    """A generator of each thread that begins anew with every key: making one takes three times as long as a draw."""

    def __init__(self) -> None:
        self._philox = np.random.Philox(key=0)
        self._generator, self._fresh = np.random.Generator(self._philox), self._philox.state

    def at(self, number: int) -> np.random.Generator:
        """The generator, as if made with this key."""
        self._fresh["state"]["key"][0] = number
        self._philox.state = self._fresh
        return self._generator


_reused = _Reused()


def brief_generator(*words: int | str) -> np.random.Generator:
    """Return `generator(*words)`, sooner, but valid only until this thread asks for another one here."""
    return _reused.at(key(*words))


def permutation(count: int, *words: int | str) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """The numbers below `count` in a random order: what `generator(*words)` would draw first, sooner."""
    return brief_generator(*words).permutation(count)


def torch_generator(*words: int | str) -> torch.Generator:
    """A CPU torch generator that belongs to these words alone."""
    import torch

    return torch.Generator().manual_seed(key(*words) >> 1)  # torch takes at most 63 bits without a sign


@contextlib.contextmanager
def torch_seed(seed: int, device: torch.device | None = None) -> Iterator[None]:
    """Seed PyTorch's default generators of the CPU and of a device inside a `with` block, and restore them after it.

    `torch.manual_seed` seeds all accelerators.  Where one has not been initialised, it queues the call with the stack
    of its caller, which takes longer than a step of a small model.

    Args:
        seed: at most 63 bits.
        device: whose generator is seeded beside the CPU's; None seeds the CPU's alone.
    """
    import torch

    accelerators = [device] if device is not None and device.type == "cuda" else []
    with torch.random.fork_rng(devices=accelerators):
        torch.default_generator.manual_seed(seed)
        for accelerator in accelerators:
            with torch.cuda.device(accelerator):
                torch.cuda.manual_seed(seed)
        yield


def select(clients: Sequence[int] | NDArray[np.int64], count: int, *words: int | str) -> list[int]:
    """A seeded choice without repetition, in increasing order; depends on the clients offered and `words` alone.

    Examples:
        >>> chosen = select(range(100), 5, 1, 0)
        >>> len(chosen), chosen == sorted(chosen), chosen == select(range(100), 5, 1, 0)
        (5, True, True)
    """
    if count >= len(clients):
        return sorted(map(int, clients))
    chosen = brief_generator("select", *words).choice(len(clients), count, replace=False)
    return sorted(int(clients[int(index)]) for index in chosen)


KEY = 32  # bytes of a key


GRID = 20  # the grid is 2^-GRID standard deviations, or less


_PIECE = 1 << 14  # pairs made at a time: they stay in the processor's cache, which is twice as fast


class NoiseSource:
    """A stream of noise that belongs to one key.

    Args:
        key: 32 bytes; whoever knows them can subtract the noise.

    Examples:
        >>> one, again = NoiseSource.repeatable(7), NoiseSource.repeatable(7)
        >>> bool((one.gaussian(3) == again.gaussian(3)).all())
        True
    """

    def __init__(self, key: bytes) -> None:
        if len(key) != KEY:
            raise ValueError(f"key must have {KEY} bytes, got {len(key)}")
        # the counter may begin at 0, since each stream has a key of its own
        self._stream = Cipher(algorithms.AES256(key), modes.CTR(bytes(16))).encryptor()

    @classmethod
    def fresh(cls) -> NoiseSource:
        """Noise from the operating system's randomness, which nobody can make again."""
        return cls(secrets.token_bytes(KEY))

    @classmethod
    def repeatable(cls, key: int) -> NoiseSource:
        """Return the noise of a key of `core.randomness`, of up to 256 bits: the same key gives the same noise."""
        return cls(hashlib.blake2b(key.to_bytes(KEY, "little"), digest_size=KEY, person=b"piebald noise").digest())

    def uniform(self, count: int) -> np.ndarray[Any, np.dtype[np.float64]]:
        """Return independent uniform multiples [count] of 2^-53 in [0, 1)."""
        # the upper 53 of 64 bits fill the mantissa of a float64 exactly
        bits = np.frombuffer(self._stream.update(bytes(8 * count)), dtype="<u8") >> np.uint64(11)
        return bits.astype(np.float64) * 2.0**-53

    def gaussian(self, count: int) -> np.ndarray[Any, np.dtype[np.float64]]:
        """Return independent standard Gaussians [count], in float64 and not rounded."""
        # Box and Muller give Gaussians in pairs; of an odd number the last one is dropped
        pairs = (count + 1) // 2
        numbers = np.empty(2 * pairs)
        for start in range(0, pairs, _PIECE):
            size = min(_PIECE, pairs - start)
            uniform = self.uniform(2 * size)
            radius = np.sqrt(-2.0 * np.log(uniform[:size] + 2.0**-53))  # of (0, 1]
            angle = uniform[size:] * (2.0 * math.pi)
            numbers[2 * start : 2 * start + size] = radius * np.cos(angle)
            numbers[2 * start + size : 2 * (start + size)] = radius * np.sin(angle)
        return numbers[:count]

    def add_to(self, vector: Tensor, deviation: float) -> Tensor:
        """A vector with noise of this standard deviation added to each number, rounded to the grid.

        Args:
            vector: any shape, on any device.
            deviation: above 0.
        """
        return hidden(vector, torch.from_numpy(self.gaussian(vector.numel())).view(vector.shape), deviation)


def hidden(vector: Tensor, gaussian: Tensor, deviation: float) -> Tensor:
    """A vector with noise of this standard deviation added, rounded to the grid.

    Args:
        vector: any shape, on any device.
        gaussian: standard Gaussians of the same shape, float64; they may be overwritten.
        deviation: above 0.
    """
    # a power of two, so that dividing by the grid and multiplying with it round nothing
    grid = grid_of(deviation)
    wide = float64_device(vector.device)
    noisy = moved(gaussian, wide).mul_(deviation).add_(vector.to(wide))
    return noisy.div_(grid).round_().mul_(grid).to(vector.dtype).to(vector.device)


def grid_of(deviation: float) -> float:
    """The power of two that noisy values are multiples of, at most 2^-20 standard deviations."""
    return 2.0 ** (math.floor(math.log2(deviation)) - GRID)
