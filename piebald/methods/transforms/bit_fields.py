"""Numbers of a few bits each, packed without gaps, and runs of ones; bytes from others are checked."""

from __future__ import annotations

from typing import Any

import numpy as np

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
Whole = np.ndarray[Any, np.dtype[np.int64]]

_PIECE = 1 << 16  # numbers whose bits are laid out at a time; a multiple of 8, so that pieces end at whole bytes


def size(count: int, bits: int) -> int:
    """Bytes of so many numbers of so many bits each."""
    return -(-count * bits // 8)


def pack(numbers: Whole, bits: int) -> Bytes:
    """Pack whole numbers [n] from 0 to 2^bits - 1, lowest bit first."""
    places = np.arange(bits)
    pieces = [
        np.packbits(((numbers[start : start + _PIECE, None] >> places) & 1).astype(np.uint8), bitorder="little")
        # numbers of no bits take no bytes
        for start in range(0, len(numbers) if bits else 0, _PIECE)
    ]
    return np.concatenate(pieces) if pieces else np.zeros(0, dtype=np.uint8)


def unpack(data: Bytes, count: int, bits: int) -> Whole:
    """The numbers [count] that `pack` packed.

    Raises:
        ValueError: there are more or fewer bytes, or bits behind the last number.
    """
    if len(data) != size(count, bits):
        raise ValueError(f"{len(data)} bytes, where {count:,} numbers of {bits} bits take {size(count, bits):,}")
    _check_rest(data, count * bits, 0)
    numbers, places = np.zeros(count, dtype=np.int64), np.arange(bits)
    step = _PIECE * bits // 8
    # numbers of no bits have a step of 0, which `range` refuses
    for piece, start in enumerate(range(0, len(data), max(step, 1))):
        flat = np.unpackbits(data[start : start + step], bitorder="little")
        here = min(_PIECE, count - piece * _PIECE)
        fields = flat[: here * bits].reshape(here, bits).astype(np.int64)
        numbers[piece * _PIECE : piece * _PIECE + here] = (fields << places).sum(1)
    return numbers


def pack_unary(numbers: Whole) -> Bytes:
    """Pack whole numbers [n] of at least 0, each as so many ones and a zero behind them; ones fill the last byte."""
    # ones in the rest of the last byte: a zero there would read as one more number
    bits = np.ones(-(-int(numbers.sum() + len(numbers)) // 8) * 8, dtype=np.uint8)
    bits[np.cumsum(numbers + 1) - 1] = 0
    return np.packbits(bits, bitorder="little")


def unpack_unary(data: Bytes, count: int) -> Whole:
    """The numbers [count] that `pack_unary` packed.

    Raises:
        ValueError: there are more or fewer, or more bytes than they need.
    """
    zeros = np.flatnonzero(np.unpackbits(data, bitorder="little") == 0)
    # exactly as long as needed, so that each sequence of numbers has one form only
    if len(zeros) != count or len(data) != (-(-int(zeros[-1] + 1) // 8) if count else 0):
        raise ValueError(f"{len(zeros):,} numbers in {len(data):,} bytes, where {count:,} are due")
    return np.diff(zeros, prepend=-1) - 1


def _check_rest(data: Bytes, used: int, size: int) -> None:
    """Refuse other bits than these behind the last one that is used, so that each number has one form only."""
    if used % 8 and len(data) and data[-1] >> (used % 8) != size:
        raise ValueError("bits behind the last number")
