"""Scores of single rows as text: one bit for each where all are 0 or 1, else 32."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from piebald.core.errors import RunFolderError


def packed(values: Sequence[float]) -> str:
    """Return values as text.

    Examples:
        >>> packed([1.0, 0.0, 1.0]), packed([0.5])
        ('3:oA==', 'AAAAPw==')
    """
    array = np.asarray(values, dtype="<f4")
    if bool(((array == 0) | (array == 1)).all()):
        return f"{len(array)}:{base64.b64encode(np.packbits(array.astype(bool)).tobytes()).decode()}"
    return base64.b64encode(array.tobytes()).decode()


def unpacked(text: str) -> NDArray[np.float64]:
    """Return the values [n] of a text.

    Raises:
        RunFolderError: it is none.

    Examples:
        >>> unpacked("3:oA==").tolist(), unpacked("AAAAPw==").tolist()
        ([1.0, 0.0, 1.0], [0.5])
    """
    count, _, bits = text.rpartition(":")
    try:
        data = base64.b64decode(bits, validate=True)
        if not count:
            return np.frombuffer(data, dtype="<f4").astype(np.float64)
        values = np.unpackbits(np.frombuffer(data, dtype=np.uint8)).astype(np.float64)[: int(count)]
        if len(values) == int(count):
            return values
    except (binascii.Error, ValueError):
        pass
    raise RunFolderError("the table row_score holds scores that are none: restore the folder from a copy")
