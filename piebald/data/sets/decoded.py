"""Inputs that stay in their files and are decoded on access."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from piebald.core.arguments import Whole, checked_class

KINDS = {torch.uint8: np.uint8, torch.float32: np.float32}


@checked_class
class Decoded:
    """Inputs that can be indexed like a tensor [n, ...]; rows are decoded on access and not kept.

    A row is decoded at each access, so a pass over the data decodes all rows.  `x[:]` is a tensor with all rows,
    decoded once, if they fit into memory.

    Args:
        count: number of rows.
        shape: shape of one row.
        dtype: type of the decoded rows, uint8 or float32.
        read: function from a row's number to the row [shape].

    Raises:
        IndexError: a row does not exist.
    """

    def __init__(
        self, count: Whole, shape: Sequence[int], dtype: torch.dtype, read: Callable[[int], NDArray[Any]]
    ) -> None:
        self.shape = torch.Size((count, *shape))
        self.dtype = dtype
        self._read = read

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: int | slice | Tensor | NDArray[Any] | Sequence[int]) -> Tensor:
        """One row [...], or rows [m, ...] in the given order."""
        if isinstance(rows, int):
            return self[[range(len(self))[rows]]][0]
        if isinstance(rows, Tensor):
            rows = rows.numpy()
        places = np.arange(len(self))[rows].tolist()
        decoded = np.empty((len(places), *self.shape[1:]), dtype=KINDS[self.dtype])
        for place, row in enumerate(places):
            decoded[place] = self._read(row)
        return torch.from_numpy(decoded)

    def dim(self) -> int:
        """Number of axes, including that of the rows."""
        return len(self.shape)
