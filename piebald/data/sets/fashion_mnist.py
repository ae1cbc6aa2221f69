"""Fashion-MNIST: small gray photographs of ten kinds of clothes."""

from __future__ import annotations

import numpy as np
import torch

from piebald.core.errors import SettingError
from piebald.data.sets.dataset import DataSet
from piebald.data.sets.download import official
from piebald.data.sets.formats import read_idx

URL = "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com"
# The authors publish MD5 only.
CHECKSUMS = {
    "train-images-idx3-ubyte.gz": "md5:8d4fb7e6c68d591d4c3dfef9ec88bf0d",
    "train-labels-idx1-ubyte.gz": "md5:25c81989df183df01b3e8a0aad5dffbe",
    "t10k-images-idx3-ubyte.gz": "md5:bef4ecab320f06d8554ea6380940ec79",
    "t10k-labels-idx1-ubyte.gz": "md5:bb300cfdad3c16e7a12a480ee83cd310",
}
CLASSES = ["t-shirt", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle boot"]


def fashion_mnist() -> DataSet:
    """70,000 photographs: x [70000, 1, 28, 28] uint8, 10 classes; the last 10,000 are for testing.

    Raises:
        SettingError: the files are not in fashion_mnist/ and cannot be downloaded.
    """
    arrays = [read_idx(official("fashion_mnist", f"{URL}/{file}", check)) for file, check in CHECKSUMS.items()]
    x, y, x_test, y_test = arrays
    if x.ndim != 3 or x_test.shape[1:] != x.shape[1:] or (len(x), len(x_test)) != (len(y), len(y_test)):
        raise SettingError("the files in fashion_mnist/ do not fit together: replace them")
    return DataSet(
        name="fashion_mnist",
        x=torch.from_numpy(np.concatenate([x, x_test])[:, None]),
        y=torch.from_numpy(np.concatenate([y, y_test]).astype(np.int64)),
        classes=CLASSES,
        train=np.arange(len(x)),
        test=np.arange(len(x), len(x) + len(x_test)),
        source="Zalando Research, Fashion-MNIST",
        licence="MIT",
        citation="H. Xiao, K. Rasul, R. Vollgraf, Fashion-MNIST: a Novel Image Dataset for Benchmarking Machine "
        "Learning Algorithms, 2017",
    )
