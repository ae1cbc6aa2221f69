"""Fashion-MNIST: small gray photographs of ten kinds of clothes."""

from __future__ import annotations

from piebald.data.sets.dataset import DataSet
from piebald.data.sets.idx_images import idx_images

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
    return idx_images(
        "fashion_mnist",
        URL,
        CHECKSUMS,
        classes=CLASSES,
        source="Zalando Research, Fashion-MNIST",
        licence="MIT",
        citation="H. Xiao, K. Rasul, R. Vollgraf, Fashion-MNIST: a Novel Image Dataset for Benchmarking Machine "
        "Learning Algorithms, 2017",
    )
