"""FG-Net: encrypted traffic of 53 mobile apps, two captures a fortnight apart."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from piebald.data.sets.dataset import DataSet, Owners
from piebald.data.sets.download import read_npz

FULL_PACKET = 1500  # bytes of an Ethernet frame's payload


def traffic() -> DataSet:
    """52,356 flows: x [52356, 1, 30] float32, scaled sizes of the first packets, 53 classes (apps).

    There is no published test part.  Owners: "capture" (D1, D2), "version" (74 app versions) and "trace" (sessions of
    about 30 s).  Flows of one trace form a group, so they are never split between training and test.

    Raises:
        SettingError: fgnet_traffic/fgnet_traffic.npz is missing.  The authors publish about 14,000 JSON files in a
            repository and no archive, so it cannot be downloaded; its content is described in the reference of prepared
            data.
    """
    fields = ("size", "app", "capture", "version", "trace", "apps", "captures", "versions")
    stored = read_npz("fgnet_traffic", "fgnet_traffic.npz", fields)
    called = {field: dict(enumerate(stored[f"{field}s"].tolist())) for field in ("capture", "version")}
    traces = Owners.of(stored["trace"])
    return DataSet(
        name="traffic",
        x=torch.from_numpy(scale_sizes(stored["size"])[:, None]),
        y=torch.from_numpy(stored["app"].astype(np.int64)),
        classes=stored["apps"].tolist(),
        owners={
            "capture": Owners.of(stored["capture"], called["capture"]),
            "version": Owners.of(stored["version"], called["version"]),
            "trace": traces,
        },
        groups=traces.codes,
        source="FG-Net's open data set of mobile-app traffic",
        licence="none stated; the authors open the data and ask for a citation",
        citation="M. Jiang et al., Accurate mobile-app fingerprinting using flow-level relationship with graph neural "
        "networks, Computer Networks 2022, 109309",
    )


def scale_sizes(size: NDArray[np.int16]) -> NDArray[np.float32]:
    """Signed packet sizes in bytes as float32: sign * log(1 + |size|) / log(1 + 1500).

    A full packet is +-1 and "no more packets" 0.  The logarithm separates small packets (acknowledgements and requests
    distinguish apps better than the many full ones) and keeps joined segments of up to 32,000 bytes below 1.42.
    """
    scaled = np.sign(size) * np.log1p(np.abs(size.astype(np.float64))) / np.log1p(FULL_PACKET)
    return np.asarray(scaled, dtype=np.float32)
