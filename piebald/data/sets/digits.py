"""Handwritten digits, 8x8, from scikit-learn: small, real and always available."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import torch

from piebald.data.sets.dataset import DataSet


def digits() -> DataSet:
    """1,797 digits: x [1797, 1, 8, 8] float32 in [0, 1], 10 classes; no published test part, no writers."""
    stored = _stored()
    return DataSet(
        name="digits",
        x=torch.from_numpy((stored.images / 16).astype(np.float32)[:, None]),
        y=torch.from_numpy(stored.target.astype(np.int64)),
        classes=[str(digit) for digit in range(10)],
        source="scikit-learn's load_digits, the test part of UCI Optical Recognition of Handwritten Digits",
        licence="CC BY 4.0",
        citation="E. Alpaydin, C. Kaynak, Optical Recognition of Handwritten Digits, UCI repository, 1998",
    )


@cache
def _stored() -> Any:
    """scikit-learn's file, which is text and so slow to read; `digits` copies its arrays."""
    from sklearn.datasets import load_digits

    return load_digits()
