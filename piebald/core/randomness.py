"""Randomness from (seed, client, version), never from the order in which things happen.

Every draw starts from a `key`: a 64-bit number hashed from what the draw is for.  Two runtimes that ask for the same
draw get the same numbers, whatever they did before, so a run can be cut, resumed, reordered or spread over machines.
"""

from __future__ import annotations

import contextlib
import hashlib
import threading
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

_LARGEST = (1 << 64) - 1  # of a whole number among the words


def key(*words: int | str) -> int:
    """A 64-bit key from integers and strings; the same words give the same key on every machine and version.

    Examples:
        >>> key("train", 1, 7) == key("train", 1, 7), key("train", 1, 7) == key("train", 17)
        (True, False)
    """
    return _hashed(8, words)


def long_key(*words: int | str) -> int:
    """A 256-bit key from the same words, for what protects: `noise.NoiseSource` takes it.  A secret is a word of text,
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
    return sorted(int(clients[int(place)]) for place in chosen)
