"""FEMNIST: digits and letters by writer, as LEAF prepares them."""

from __future__ import annotations

import os
import string
from pathlib import Path

import numpy as np
import torch

from piebald.core.errors import SettingError
from piebald.data.sets.dataset import DataSet, Owners
from piebald.data.sets.download import VARIABLE
from piebald.data.sets.formats import read_leaf


def femnist() -> DataSet:
    """Characters: x [n, 1, 28, 28] float32 in [0, 1], 62 classes, by "writer".

    Reads the JSON files of LEAF in femnist/train/ and femnist/test/.  LEAF's own `preprocess.sh` makes them
    from NIST Special Database 19; they are not published, so they cannot be downloaded.

    Raises:
        SettingError: the files are missing or not in LEAF's format.
    """
    root = os.environ.get(VARIABLE)
    if not root:
        raise SettingError(
            f"femnist needs {VARIABLE}, which is not set: run LEAF's data/femnist/preprocess.sh, put its train and "
            f"test folders in femnist/, and set {VARIABLE} to the folder above it"
        )
    parts = [read_leaf(Path(root) / "femnist" / part) for part in ("train", "test")]
    x = np.concatenate([rows for part in parts for rows in part[0]])
    if x.ndim != 2 or x.shape[1] != 28 * 28:
        raise SettingError(
            f"images in femnist/ must be lists of 784 numbers, got {list(x.shape[1:])}: prepare them again"
        )
    writers = [user for _, labels, users in parts for user, numbers in zip(users, labels, strict=True) for _ in numbers]
    trained = sum(len(numbers) for numbers in parts[0][1])
    return DataSet(
        name="femnist",
        x=torch.from_numpy(x.reshape(-1, 1, 28, 28)),
        y=torch.from_numpy(np.concatenate([numbers for part in parts for numbers in part[1]])),
        classes=list(string.digits + string.ascii_uppercase + string.ascii_lowercase),
        owners={"writer": Owners.of(np.array(writers))},
        train=np.arange(trained),
        test=np.arange(trained, len(x)),
        source="LEAF's FEMNIST, from NIST Special Database 19",
        licence="NIST Special Database 19: public domain; LEAF: BSD 2-clause",
        citation="S. Caldas et al., LEAF: A Benchmark for Federated Settings, 2018",
    )
