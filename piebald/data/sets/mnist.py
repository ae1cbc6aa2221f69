"""MNIST: handwritten digits, without their writers."""

from __future__ import annotations

import dataclasses

from piebald.data.sets.dataset import DataSet
from piebald.data.sets.download import is_prepared
from piebald.data.sets.idx_images import idx_images
from piebald.data.sets.mnist_writers import CHECKSUMS, MNIST, mnist_writers


def mnist() -> DataSet:
    """70,000 digits: x [70000, 1, 28, 28] uint8, 10 classes; the last 10,000 are for testing.

    They are those of `mnist_writers`, whose prepared file is taken where it is there.

    Raises:
        SettingError: the files are not in mnist/ and cannot be downloaded.
    """
    if is_prepared("mnist_writers", "mnist_writers.npz"):
        return dataclasses.replace(mnist_writers(), name="mnist", owners={}, source="MNIST", citation=_CITATION)
    return idx_images(
        "mnist",
        MNIST,
        CHECKSUMS,
        classes=[str(digit) for digit in range(10)],
        source="MNIST",
        licence="CC BY-SA 3.0",
        citation=_CITATION,
    )


_CITATION = "Y. LeCun, L. Bottou, Y. Bengio, P. Haffner, Gradient-based learning applied to document recognition, 1998"
