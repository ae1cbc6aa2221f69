"""MNIST with the writer of each digit, from QMNIST: clients are real people."""

from __future__ import annotations

import numpy as np
import torch

from piebald.data.dataset import DataSet, Owners
from piebald.data.files import read_npz

POPULATIONS = {0: "census employees", 4: "high-school students"}


def mnist_writers() -> DataSet:
    """70,000 digits: x [70000, 1, 28, 28] uint8, 10 classes, in MNIST's order; the last 10,000 are for testing.

    Owners: "writer" (539 in the training part, 297 others in the test part) and "population" (two kinds of people).

    Raises:
        SettingError: mnist_writers/mnist_writers.npz is not there.
    """
    fields = ("x", "y", "writer", "hsf")
    stored = read_npz(
        "mnist_writers", "mnist_writers.npz", [f"{field}_{part}" for field in fields for part in ("train", "test")]
    )
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
