"""CIFAR-10: small color photographs of ten kinds of objects."""

from __future__ import annotations

from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from piebald.core.arguments import checked
from piebald.data.sets.dataset import DataSet, decode
from piebald.data.sets.download import is_prepared, official, read_npz
from piebald.data.sets.formats import read_cifar, read_members

URL = "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz"
CHECKSUM = "md5:c32a1d4ab5d03f1284b67883e8d87530"  # the author publishes MD5 only


@checked
def cifar10(test: Literal["exact", "jpeg"] = "exact") -> DataSet:
    """50,000 training photographs and a test part: x [51000 or 60000, 3, 32, 32] uint8, 10 classes.

    The test part is a choice, because the prepared files hold few exact test images; report it with every result.
    Without the prepared files, the published archive is read, with all 10,000 exact images.

    Args:
        test: "exact" for the first 1,000 images of the published test part, exact pixels; "jpeg" for all 10,000 after
            JPEG compression (30 dB), whose accuracy is not comparable with the published benchmark.

    Raises:
        SettingError: the files are not in cifar10/ and cannot be downloaded, or the test part does not exist.
    """
    if test == "exact" and not is_prepared("cifar10", "cifar10_train.npz"):
        return _published()
    train = read_npz("cifar10", "cifar10_train.npz", ("r_train", "y_train", "classes"))
    if test == "exact":
        held = read_npz("cifar10", "cifar10_test1k.npz", ("r_test", "y_test"))
        images = pixels(held["r_test"])
    else:
        held = read_npz("cifar10", "cifar10_test10k_jpeg.npz", ("jpeg", "offset", "y_test"))
        images = decode(held["jpeg"], held["offset"], "cifar10_test10k_jpeg.npz")
    called = "the first 1,000 images, exact pixels" if test == "exact" else "all 10,000 images after JPEG compression"
    y = np.concatenate([train["y_train"], held["y_test"]])
    return _data_set([pixels(train["r_train"]), images], y, train["classes"].tolist(), called)


def _published() -> DataSet:
    """The published archive: five training batches and a test batch, exact pixels."""
    path = official("cifar10", URL, CHECKSUM)
    batches = [f"data_batch_{number}.bin" for number in range(1, 6)]
    *parts, test, names = read_members(path, (*batches, "test_batch.bin", "batches.meta.txt"))
    x, y = read_cifar(b"".join(parts), 1, f"the training batches in {path}")
    x_test, y_test = read_cifar(test, 1, f"test_batch.bin in {path}")
    labels = np.concatenate([y, y_test])[:, 0]
    return _data_set([x, x_test], labels, names.decode("utf-8").split(), f"all {len(x_test):,} images, exact pixels")


def _data_set(images: list[NDArray[np.uint8]], y: NDArray[np.uint8], classes: list[str], test: str) -> DataSet:
    count = len(images[0])
    return DataSet(
        name="cifar10",
        x=torch.from_numpy(np.concatenate(images)),
        y=torch.from_numpy(y.astype(np.int64)),
        classes=classes,
        train=np.arange(count),
        test=np.arange(count, len(y)),
        source=f"CIFAR-10; test part: {test}",
        licence="none stated; research use with citation",
        citation="A. Krizhevsky, Learning Multiple Layers of Features from Tiny Images, 2009",
    )


def pixels(residuals: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """RGB images [n, 3, height, width] from residuals: sums along both axes and green added back, all modulo 256.

    Changes its argument in place, to save memory.
    """
    # uint8 sums wrap modulo 256, as the residuals were taken
    np.cumsum(residuals, axis=2, dtype=np.uint8, out=residuals)
    np.cumsum(residuals, axis=3, dtype=np.uint8, out=residuals)
    residuals[:, 0] += residuals[:, 1]
    residuals[:, 2] += residuals[:, 1]
    return residuals
