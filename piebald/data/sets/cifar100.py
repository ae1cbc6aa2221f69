"""CIFAR-100: small color photographs of a hundred kinds of objects, in twenty superclasses."""

from __future__ import annotations

import numpy as np
import torch

from piebald.data.sets.dataset import DataSet, Owners
from piebald.data.sets.download import official
from piebald.data.sets.formats import read_cifar, read_members

URL = "https://www.cs.toronto.edu/~kriz/cifar-100-binary.tar.gz"
CHECKSUM = "md5:03b5dce01913d631647c71ecec9e9cb8"  # the author publishes MD5 only


def cifar100() -> DataSet:
    """60,000 photographs: x [60000, 3, 32, 32] uint8, 100 classes; the last 10,000 are for testing.

    Owners: "group" (twenty coarse classes of five classes each).

    Raises:
        SettingError: the file is not in cifar100/ and cannot be downloaded.
    """
    path = official("cifar100", URL, CHECKSUM)
    train, test, fine, coarse = read_members(
        path, ("train.bin", "test.bin", "fine_label_names.txt", "coarse_label_names.txt")
    )
    x, label = read_cifar(train, 2, f"train.bin in {path}")
    x_test, label_test = read_cifar(test, 2, f"test.bin in {path}")
    labels = np.concatenate([label, label_test]).astype(np.int64)
    groups = dict(enumerate(coarse.decode("utf-8").split()))
    return DataSet(
        name="cifar100",
        x=torch.from_numpy(np.concatenate([x, x_test])),
        y=torch.from_numpy(labels[:, 1].copy()),
        classes=fine.decode("utf-8").split(),
        owners={"group": Owners.of(labels[:, 0], groups)},
        train=np.arange(len(x)),
        test=np.arange(len(x), len(labels)),
        source="CIFAR-100, binary version",
        licence="none stated; research use with citation",
        citation="A. Krizhevsky, Learning Multiple Layers of Features from Tiny Images, 2009",
    )
