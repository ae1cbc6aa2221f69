"""Inputs that stay in their files and are decoded on access, among them images stored as JPEG in one array of bytes."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from piebald.core.arguments import Whole, checked_class
from piebald.core.errors import SettingError, about
from piebald.core.reading import picture

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
            # `range` takes numbers from the end as well, and raises IndexError as a tensor does
            return self[[range(len(self))[rows]]][0]
        if isinstance(rows, Tensor):
            rows = rows.numpy()
        # masks, slices and numbers all become places, by NumPy's rules
        places = np.arange(len(self))[rows].tolist()
        decoded = np.empty((len(places), *self.shape[1:]), dtype=KINDS[self.dtype])
        for index, row in enumerate(places):
            decoded[index] = self._read(row)
        return torch.from_numpy(decoded)

    def dim(self) -> int:
        """Number of axes, including that of the rows."""
        return len(self.shape)


def lazily(stored: NDArray[np.uint8], offset: NDArray[np.int64], place: str) -> Decoded:
    """The same images as `decode`, decoded on access."""

    def read(row: int) -> NDArray[np.uint8]:
        file = stored[offset[row] : offset[row + 1]]
        image: NDArray[np.uint8] = decode(file, np.array([0, len(file)]), place)[0]
        return image

    return Decoded(len(offset) - 1, read(0).shape, torch.uint8, read)


def decode(stored: NDArray[np.uint8], offset: NDArray[np.int64], place: str) -> NDArray[np.uint8]:
    """Decode RGB images [n, 3, height, width] of one size.

    Args:
        stored: bytes of the files, concatenated.
        offset: start of each file, and the end of the last one [n + 1].
        place: name of the file, for the error message.

    Raises:
        SettingError: an image cannot be decoded, or sizes differ.
    """
    images: NDArray[np.uint8] | None = None
    for number in range(len(offset) - 1):
        file = io.BytesIO(stored[offset[number] : offset[number + 1]].tobytes())
        with about(f"{place}: image {number} cannot be decoded"), picture(file, "JPEG", "it") as image:
            pixels = np.asarray(image.convert("RGB"))
        if images is None:
            images = np.empty((len(offset) - 1, 3, *pixels.shape[:2]), dtype=np.uint8)
        if pixels.shape[:2] != images.shape[2:]:
            raise SettingError(f"{place}: images must be of one size, got {images.shape[2:]} and {pixels.shape[:2]}")
        images[number] = pixels.transpose(2, 0, 1)
    return np.empty((0, 3, 0, 0), dtype=np.uint8) if images is None else images
