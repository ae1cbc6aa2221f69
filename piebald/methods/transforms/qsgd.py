"""QSGD: numbers rounded at random to a few levels."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import numpy as np
from pydantic import Field
from torch import Tensor

from piebald.core.randomness import generator
from piebald.methods.transforms import bit_fields
from piebald.methods.transforms.bit_fields import Bytes
from piebald.methods.transforms.compression import LossyCompressor, Numbers, WireContext, as_bytes, as_floats


class Qsgd(LossyCompressor):
    """Round numbers to a few levels at random, with the numbers as expectation (Alistarh et al. 2017, section 3.1).

    Each bucket v of numbers is sent as its length |v| and, for each number, one of the levels -s ... s with
    s = 2^(bits - 1) - 1: the two nearest to s v_i / |v|, with probabilities such that their mean is that.  So what
    arrives is unbiased, and its variance in a bucket of d numbers is at most min(d / s^2, sqrt(d) / s) |v|^2 (lemma
    3.1); no memory is needed.  Levels take `bits` bits each, where the paper uses Elias' codes, and a length takes four
    bytes.  What is drawn follows from the run's seed, the client and the version: it protects nothing.

    Attributes:
        bits: of a number, from 2 to 16; 2 are the levels -1, 0 and 1.
        bucket: numbers that share a length, at least 1.
    """

    why_not_summed: ClassVar[str] = "the levels of qsgd have another length at each client:"

    bits: int = Field(default=4, ge=2, le=16)
    bucket: int = Field(default=512, ge=1)

    @property
    def keeps_clip(self) -> bool:
        return False  # rounded up, an update may be longer

    @property
    def levels(self) -> int:
        """s, the levels on each side of zero."""
        return (1 << (self.bits - 1)) - 1

    def encode(
        self, wanted: Numbers, state: Mapping[str, Tensor], context: WireContext
    ) -> tuple[Bytes, Mapping[str, Tensor]]:
        starts = np.arange(0, len(wanted), self.bucket)
        exact = wanted.astype(np.float64)
        # rounded to float32 before use, since that is what the receiver multiplies by
        lengths = np.sqrt(np.add.reduceat(exact * exact, starts)).astype(np.float32)
        # a bucket of zeros has the length 0, and its levels are 0
        scaled = exact * self.levels / np.maximum(self._spread(lengths, len(wanted)), 1e-300)
        below = np.floor(scaled)
        draws = generator("qsgd", context.seed, context.client, context.version).random(len(wanted))
        # a rounded length may be a little too short for the largest number, whose level would not fit the bits
        levels = np.clip(np.nan_to_num(below + (draws < scaled - below)), -self.levels, self.levels)
        return np.concatenate([
            as_bytes(lengths),
            # shifted, since bit fields hold no negative numbers
            bit_fields.pack(levels.astype(np.int64) + self.levels, self.bits),
        ]), {}  # fmt: skip

    def decode(self, body: Bytes, context: WireContext) -> Numbers:
        total = context.trained
        head = 4 * -(-total // self.bucket)
        lengths = as_floats(body[:head])
        if 4 * len(lengths) != head:
            raise ValueError(f"{len(lengths):,} lengths, where {head // 4:,} are due")
        levels = bit_fields.unpack(body[head:], total, self.bits) - self.levels
        # 2^bits codes for 2^bits - 1 levels: the last code is one that no honest client sends
        if bool((levels > self.levels).any()):
            raise ValueError("a level that does not exist")
        return (levels / self.levels * self._spread(lengths, total)).astype(np.float32)

    def _spread(self, lengths: Numbers, total: int) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        """Each bucket's length at each of its numbers [total]."""
        # a bucket longer than the vector must not take memory for what is cut off again
        return np.repeat(lengths.astype(np.float64), min(self.bucket, total))[:total]
