"""Positions among many numbers as bytes: a bitmap, int32 numbers, or gaps in Rice's code, whichever is shortest.

Gaps between k of t positions that lie anywhere are geometric, for which Golomb's codes are optimal (Golomb 1966; for
sparse updates Sattler et al. 2019, "Robust and communication-efficient federated learning from non-iid data").  A gap g
is written as its lowest b bits and, in unary, the rest of it; b is the number of bits for which that is shortest.  One
in a hundred positions takes 8.1 bits so, where an int32 takes 32 and a bitmap 100.
"""

from __future__ import annotations

import numpy as np

from piebald.methods.transforms import bit_fields
from piebald.methods.transforms.bit_fields import Bytes, Whole

_BITMAP, _NUMBERS, _GAPS = 0, 1, 2


def pack(positions: Whole, total: int) -> Bytes:
    """Pack strictly increasing positions [k] below `total`; the first byte says how.  All or none of them take none."""
    # both ends know the number of positions, and there is only one way to choose none or all
    if len(positions) in (0, total):
        return np.zeros(0, dtype=np.uint8)
    forms = {_BITMAP: -(-total // 8), _GAPS: 1 + _gap_bytes(positions, bits := _best_bits(positions, total))}
    # int32 positions go up to 2^31 - 1
    if total <= 1 << 31:
        forms[_NUMBERS] = 4 * len(positions)
    form = min(forms, key=lambda form_name: forms[form_name])
    if form == _BITMAP:
        marks = np.zeros(total, dtype=np.uint8)
        marks[positions] = 1
        body = np.packbits(marks, bitorder="little")
    elif form == _NUMBERS:
        body = positions.astype("<i4").view(np.uint8)
    else:
        gaps = _gaps(positions)
        # Rice's code: the low bits of a gap as they are, the rest in unary
        low = bit_fields.pack(gaps & ((1 << bits) - 1), bits)
        body = np.concatenate([np.array([bits], dtype=np.uint8), low, bit_fields.pack_unary(gaps >> bits)])
    return np.concatenate([np.array([form], dtype=np.uint8), body])


def unpack(data: Bytes, count: int, total: int) -> Whole:
    """The positions [count] that `pack` packed, in any of its forms.

    Raises:
        ValueError: these are not so many different positions below `total`, in increasing order.
    """
    if count in (0, total):
        if len(data):
            raise ValueError(f"{len(data):,} bytes of positions, where none are due")
        return np.arange(count)
    # -1 is no form, so missing bytes are refused like any unknown form
    form, body = (int(data[0]), data[1:]) if len(data) else (-1, data)
    if form == _BITMAP:
        if len(body) != -(-total // 8):
            raise ValueError(f"a bitmap of {len(body):,} bytes for {total:,} numbers")
        positions = np.flatnonzero(np.unpackbits(body, bitorder="little"))
    elif form == _NUMBERS:
        if len(body) != 4 * count:
            raise ValueError(f"{len(body):,} bytes of positions, where {4 * count:,} are due")
        positions = body.copy().view("<i4").astype(np.int64)
    elif form == _GAPS:
        positions = _from_gaps(body, count, total)
    else:
        raise ValueError("positions in no known form")
    if len(positions) != count:
        raise ValueError(f"{len(positions):,} positions, where {count:,} are due")
    # positions come from a client and index the server's memory; repeated ones would overwrite a value
    if positions[0] < 0 or positions[-1] >= total or not bool((np.diff(positions) > 0).all()):
        raise ValueError(f"positions that are not increasing from 0 to {total - 1:,}")
    return positions


def _gaps(positions: Whole) -> Whole:
    """Return how many positions lie between each and the one before it."""
    return np.diff(positions, prepend=-1) - 1


def _gap_bytes(positions: Whole, bits: int) -> int:
    ones = int((_gaps(positions) >> bits).sum())
    return bit_fields.size(len(positions), bits) - (-(ones + len(positions)) // 8)


def _best_bits(positions: Whole, total: int) -> int:
    # all widths are tried, at most 64 passes over k gaps; the first of equals, so that packing is deterministic
    return min(range(total.bit_length()), key=lambda bits: _gap_bytes(positions, bits))


def _from_gaps(body: Bytes, count: int, total: int) -> Whole:
    # 255 is refused below, so an empty body needs no branch of its own
    bits = int(body[0]) if len(body) else 255
    low = bit_fields.size(count, bits)
    # checked before anything is unpacked: unary code of a hostile client must not take memory beyond that of true gaps
    most = 1 + low + bit_fields.size(count + (total >> bits), 1)  # ones stand for numbers that are left out
    if bits > total.bit_length() or not 1 + low <= len(body) <= most:
        raise ValueError("gaps between positions that cannot be read")
    high = bit_fields.unpack_unary(body[1 + low :], count)
    if int(high.max()) > total >> bits:  # before anything is computed with it, which could wrap around
        raise ValueError(f"positions that are not increasing from 0 to {total - 1:,}")
    gaps = (high << bits) + bit_fields.unpack(body[1 : 1 + low], count, bits)
    return np.cumsum(gaps + 1) - 1
