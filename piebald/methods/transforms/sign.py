"""Signs with a scale: one bit for each number."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import numpy as np
from torch import Tensor

from piebald.methods.transforms import bit_fields
from piebald.methods.transforms.bit_fields import Bytes
from piebald.methods.transforms.compression import Numbers, WireContext, WithErrorFeedback, as_bytes, as_floats


class Sign(WithErrorFeedback):
    """Send the sign of each number, and for each tensor the mean of the absolute values (Karimireddy et al. 2019).

    EF-signSGD, algorithm 1: C(p) = |p|_1 / d * sign(p), for each tensor of the model by itself, since their scales
    differ.  Zero counts as positive.  Without error feedback these are scaled signs, which need not converge.
    """

    why_not_summed: ClassVar[str] = "the signs of each client have another scale:"

    def encode(
        self, wanted: Numbers, state: Mapping[str, Tensor], context: WireContext
    ) -> tuple[Bytes, Mapping[str, Tensor]]:
        sizes = _sizes(context)
        starts = np.cumsum([0, *sizes[:-1]])
        # in float64, as the sum over a large tensor would lose its last terms in float32
        scales = np.add.reduceat(np.abs(wanted), starts, dtype=np.float64) / sizes
        return np.concatenate([as_bytes(scales), bit_fields.pack((wanted >= 0).astype(np.int64), 1)]), {}

    def decode(self, body: Bytes, context: WireContext) -> Numbers:
        sizes = _sizes(context)
        scales = as_floats(body[: 4 * len(sizes)])
        if len(scales) != len(sizes):
            raise ValueError(f"{len(scales):,} scales, where {len(sizes):,} are due")
        signs = bit_fields.unpack(body[4 * len(sizes) :], context.trained, 1)
        return (np.repeat(scales, sizes) * (2 * signs - 1)).astype(np.float32)


def _sizes(context: WireContext) -> list[int]:
    """Numbers of each trained tensor that is shared, without those of empty ones."""
    slots = [slot for slot in context.layout.slots if slot.stop <= context.trained]
    # `reduceat` returns a single element, not 0, for an empty segment
    return [slot.stop - slot.start for slot in slots if slot.stop > slot.start]
