"""Top-k sparsification: the largest numbers of an update, and where they are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import numpy as np
from pydantic import Field
from torch import Tensor

from piebald.methods.transforms import positions
from piebald.methods.transforms.bit_fields import Bytes, Whole
from piebald.methods.transforms.compression import Numbers, WireContext, WithErrorFeedback, as_bytes, as_floats


class TopK(WithErrorFeedback):
    """Send the numbers of an update with the largest absolute values (Aji and Heafield 2017; Stich et al. 2018).

    Of t trained parameters, k = share * t are sent, rounded and at least one: their values as float32, then their
    positions as a bitmap, as int32 numbers or as gaps in Rice's code, whichever is shortest (`transforms.positions`).
    With share = 1 no positions are sent, and nothing is lost.

    Attributes:
        share: of the trained parameters that are sent, above 0 and up to 1.
    """

    why_not_summed: ClassVar[str] = "each client of top_k sends other numbers of its update:"

    share: float = Field(default=0.01, gt=0, le=1)

    def encode(
        self, wanted: Numbers, state: Mapping[str, Tensor], context: WireContext
    ) -> tuple[Bytes, Mapping[str, Tensor]]:
        places = largest(np.abs(wanted), count_of(self.share, len(wanted)))
        return np.concatenate([as_bytes(wanted[places]), positions.pack(places, len(wanted))]), {}

    def decode(self, body: Bytes, context: WireContext) -> Numbers:
        total = context.trained
        count = count_of(self.share, total)
        values, change = as_floats(body[: 4 * count]), np.zeros(total, dtype=np.float32)
        if len(values) != count:
            raise ValueError(f"{len(values):,} values, where {count:,} are due")
        change[positions.unpack(body[4 * count :], count, total)] = values
        return change


def count_of(share: float, total: int) -> int:
    """Return how many of `total` numbers a share of them is: at least one.

    Examples:
        >>> count_of(0.01, 250), count_of(0.01, 10)
        (2, 1)
    """
    return min(total, max(1, round(share * total)))


def largest(sizes: Numbers, count: int) -> Whole:
    """The positions [count] of the largest numbers, in increasing order; of equal ones the first count."""
    if count == len(sizes):
        return np.arange(count)
    # a partition is O(n), and where sizes are equal the positions do not depend on how it swaps
    least = np.partition(sizes, len(sizes) - count)[len(sizes) - count]
    above, equal = np.flatnonzero(sizes > least), np.flatnonzero(sizes == least)
    return np.sort(np.concatenate([above, equal[: count - len(above)]]))
