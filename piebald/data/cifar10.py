"""CIFAR-10: small colour photographs of ten kinds of things."""

from __future__ import annotations

from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from piebald.data.dataset import DataSet
from piebald.data.files import read_npz
from piebald.data.images import decode
from piebald.errors import unknown

TESTS = ("exact", "jpeg")


def cifar10(test: Literal["exact", "jpeg"] = "exact") -> DataSet:
    """50,000 training photographs and a test part: x [51000 or 60000, 3, 32, 32] uint8, 10 classes.

    The test part is a choice, because the prepared files hold few exact test images.  Say which one a number was
    measured on.

    Args:
        test: "exact" for the first 1,000 images of the published test part, exact pixels; "jpeg" for all 10,000 after
            JPEG compression (30 dB), whose accuracy is not the published benchmark's.

    Raises:
        SettingError: the files in cifar10/ are not there, or there is no such test part.
    """
    if test not in TESTS:
        raise unknown("test part of cifar10", test, TESTS)
    train = read_npz("cifar10", "cifar10_train.npz", ("r_train", "y_train", "classes"))
    if test == "exact":
        held = read_npz("cifar10", "cifar10_test1k.npz", ("r_test", "y_test"))
        images = pixels(held["r_test"])
    else:
        held = read_npz("cifar10", "cifar10_test10k_jpeg.npz", ("jpeg", "offset", "y_test"))
        images = decode(held["jpeg"], held["offset"], "cifar10_test10k_jpeg.npz")
    count = len(train["y_train"])
    return DataSet(
        name="cifar10",
        x=torch.from_numpy(np.concatenate([pixels(train["r_train"]), images])),
        y=torch.from_numpy(np.concatenate([train["y_train"], held["y_test"]]).astype(np.int64)),
        classes=train["classes"].tolist(),
        train=np.arange(count),
        test=np.arange(count, count + len(images)),
        source="CIFAR-10; test part: "
        + ("the first 1,000 images, exact pixels" if test == "exact" else "all 10,000 images after JPEG compression"),
        licence="none stated; research use with citation",
        citation="A. Krizhevsky, Learning Multiple Layers of Features from Tiny Images, 2009",
    )


def pixels(residuals: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """RGB images [n, 3, height, width] from residuals: sums along both axes and green added back, all modulo 256.

    Changes what it is given, to need no more memory than one copy.
    """
    np.cumsum(residuals, axis=2, dtype=np.uint8, out=residuals)
    np.cumsum(residuals, axis=3, dtype=np.uint8, out=residuals)
    residuals[:, 0] += residuals[:, 1]
    residuals[:, 2] += residuals[:, 1]
    return residuals
