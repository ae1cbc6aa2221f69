"""Images stored as JPEG, one after another in one array of bytes."""

from __future__ import annotations

import io

import numpy as np
import torch
from numpy.typing import NDArray

from piebald.core.errors import SettingError
from piebald.core.reading.images import picture
from piebald.data.sets.decoded import Decoded


def lazily(stored: NDArray[np.uint8], offset: NDArray[np.int64], where: str) -> Decoded:
    """The same images as `decode`, decoded on access."""

    def read(row: int) -> NDArray[np.uint8]:
        file = stored[offset[row] : offset[row + 1]]
        image: NDArray[np.uint8] = decode(file, np.array([0, len(file)]), where)[0]
        return image

    return Decoded(len(offset) - 1, read(0).shape, torch.uint8, read)


def decode(stored: NDArray[np.uint8], offset: NDArray[np.int64], where: str) -> NDArray[np.uint8]:
    """Decode RGB images [n, 3, height, width] of one size.

    Args:
        stored: bytes of the files, concatenated.
        offset: start of each file, and the end of the last one [n + 1].
        where: name of the file, for the error message.

    Raises:
        SettingError: an image cannot be decoded, or sizes differ.
    """
    images: NDArray[np.uint8] | None = None
    for number in range(len(offset) - 1):
        file = io.BytesIO(stored[offset[number] : offset[number + 1]].tobytes())
        try:
            with picture(file, "JPEG", "it") as image:
                pixels = np.asarray(image.convert("RGB"))
        except SettingError as error:
            raise SettingError(f"{where}: image {number} cannot be decoded: {error}") from None
        if images is None:
            images = np.empty((len(offset) - 1, 3, *pixels.shape[:2]), dtype=np.uint8)
        if pixels.shape[:2] != images.shape[2:]:
            raise SettingError(f"{where}: images must be of one size, got {images.shape[2:]} and {pixels.shape[:2]}")
        images[number] = pixels.transpose(2, 0, 1)
    return np.empty((0, 3, 0, 0), dtype=np.uint8) if images is None else images
