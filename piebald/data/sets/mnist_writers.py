"""MNIST with the writer of each digit, from QMNIST: clients are real people."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from piebald.core.errors import SettingError
from piebald.data.sets.dataset import DataSet, Owners
from piebald.data.sets.download import is_prepared, official, read_npz
from piebald.data.sets.formats import read_idx

# MNIST's own site no longer serves files; this is torchvision's copy.
MNIST = "https://ossci-datasets.s3.amazonaws.com/mnist"
QMNIST = "https://raw.githubusercontent.com/facebookresearch/qmnist/master"
CHECKSUMS = {  # MD5, as torchvision pins them
    "train-images-idx3-ubyte.gz": "md5:f68b3c2dcbeaaa9fbdd348bbdeb94873",
    "train-labels-idx1-ubyte.gz": "md5:d53e105ee54ea40749a09fcbcd1e9432",
    "t10k-images-idx3-ubyte.gz": "md5:9fb629c4189551a2d022fa330f9573f3",
    "t10k-labels-idx1-ubyte.gz": "md5:ec29112dd5afa0611ce80d1b7f02629c",
}
WRITERS = {
    "qmnist-train-labels-idx2-int.gz": "md5:0058f8dd561b90ffdd0f734c6a30e5e4",
    "qmnist-test-labels-idx2-int.gz": "md5:5b5b05890a5e13444e108efe57b788aa",
}

POPULATIONS = {0: "census employees", 4: "high-school students"}


def mnist_writers() -> DataSet:
    """70,000 digits: x [70000, 1, 28, 28] uint8, 10 classes, in MNIST's order; the last 10,000 are for testing.

    Owners: "writer" (539 in the training part, 297 others in the test part) and "population" (two kinds of people).
    Without the prepared file, MNIST and QMNIST's labels are downloaded and joined.

    Raises:
        SettingError: mnist_writers/mnist_writers.npz is missing and the files cannot be downloaded, or do not match.
    """
    fields = ("x", "y", "writer", "hsf")
    here = is_prepared("mnist_writers", "mnist_writers.npz")
    names = [f"{field}_{part}" for field in fields for part in ("train", "test")]
    stored = read_npz("mnist_writers", "mnist_writers.npz", names) if here else _published()
    x, y, writer, series = (np.concatenate([stored[f"{field}_train"], stored[f"{field}_test"]]) for field in fields)
    train = len(stored["y_train"])
    return DataSet(
        name="mnist_writers",
        x=torch.from_numpy(x[:, None]),
        y=torch.from_numpy(y.astype(np.int64)),
        classes=[str(digit) for digit in range(10)],
        owners={"writer": Owners.of(writer), "population": Owners.of(series, POPULATIONS)},
        train=np.arange(train),
        test=np.arange(train, len(y)),
        source="MNIST images with the writers and form series of QMNIST",
        licence="MNIST: CC BY-SA 3.0; QMNIST: BSD",
        citation="C. Yadav, L. Bottou, Cold Case: The Lost MNIST Digits, NeurIPS 2019; "
        "Y. LeCun, L. Bottou, Y. Bengio, P. Haffner, Gradient-based learning applied to document recognition, 1998",
    )


def _published() -> dict[str, NDArray[Any]]:
    """The arrays of the prepared file from MNIST's images and QMNIST's columns digit, series, writer, ..."""
    arrays = [read_idx(official("mnist_writers", f"{MNIST}/{file}", check)) for file, check in CHECKSUMS.items()]
    written = [read_idx(official("mnist_writers", f"{QMNIST}/{file}", check)) for file, check in WRITERS.items()]
    stored: dict[str, NDArray[Any]] = {}
    parts: list[tuple[str, NDArray[Any], NDArray[Any], NDArray[Any]]] = [
        ("train", arrays[0], arrays[1], written[0]),
        ("test", arrays[2], arrays[3], written[1]),
    ]
    for part, x, y, table in parts:
        table = table[: len(y)]  # QMNIST's test part has more rows after MNIST's 10,000
        if x.ndim != 3 or table.ndim != 2 or not len(x) == len(y) == len(table) or (table[:, 0] != y).any():
            raise SettingError(f"the {part} files in mnist_writers/ do not fit together: replace them")
        stored |= {f"x_{part}": x, f"y_{part}": y, f"hsf_{part}": table[:, 1], f"writer_{part}": table[:, 2]}
    return stored
