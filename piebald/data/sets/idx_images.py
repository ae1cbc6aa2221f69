"""Data sets of gray images in MNIST's form: four files, images and labels for training and for testing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from piebald.core.errors import SettingError
from piebald.data.sets.dataset import DataSet
from piebald.data.sets.download import official
from piebald.data.sets.formats import read_idx


def idx_images(name: str, url: str, checksums: Mapping[str, str], **about: Any) -> DataSet:
    """Read a data set of images [n, 1, height, width] uint8, whose test rows come last.

    Args:
        name: the data set's name, and that of the folder of its files.
        url: where the files are published.
        checksums: of the files by name: images and labels for training, then for testing.
        about: further fields of the `DataSet`.

    Raises:
        SettingError: a file is not there and cannot be downloaded, or they do not fit together.
    """
    x, y, x_test, y_test = [read_idx(official(name, f"{url}/{file}", check)) for file, check in checksums.items()]
    if x.ndim != 3 or x_test.shape[1:] != x.shape[1:] or (len(x), len(x_test)) != (len(y), len(y_test)):
        raise SettingError(f"the files in {name}/ do not fit together: replace them")
    return DataSet(
        name=name,
        x=torch.from_numpy(np.concatenate([x, x_test])[:, None]),
        y=torch.from_numpy(np.concatenate([y, y_test]).astype(np.int64)),
        train=np.arange(len(x)),
        test=np.arange(len(x), len(x) + len(x_test)),
        **about,
    )
