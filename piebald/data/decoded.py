"""Inputs that stay in their files and are decoded when somebody asks for rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

KINDS = {torch.uint8: np.uint8, torch.float32: np.float32}


class Decoded:
    """Looks like a tensor [n, ...] to whoever takes rows of it; nothing is decoded before that, and nothing is kept.

    A row is decoded each time it is asked for, so a pass over the rows costs a decoding of all of them.  `x[:]` is the
    tensor itself, decoded once, where there is room for it.

    Args:
        count: how many rows.
        shape: of one row.
        dtype: of the decoded rows, uint8 or float32.
        read: a row's number to the row [shape].

    Raises:
        IndexError: a row that is not there.
    """

    def __init__(
        self, count: int, shape: Sequence[int], dtype: torch.dtype, read: Callable[[int], NDArray[Any]]
    ) -> None:
        self.shape = torch.Size((count, *shape))
        self.dtype = dtype
        self._read = read

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: int | slice | Tensor | NDArray[Any] | Sequence[int]) -> Tensor:
        """One row [...], or rows [m, ...] in the order asked for."""
        if isinstance(rows, int):
            return self[[range(len(self))[rows]]][0]
        if isinstance(rows, Tensor):
            rows = rows.numpy()
        places = np.arange(len(self))[rows].tolist()
        made = np.empty((len(places), *self.shape[1:]), dtype=KINDS[self.dtype])
        for place, row in enumerate(places):
            made[place] = self._read(row)
        return torch.from_numpy(made)

    def dim(self) -> int:
        """Axes, with that of the rows."""
        return len(self.shape)
