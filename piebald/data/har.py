"""UCI HAR: raw signals of a phone at the waist, 30 people, 6 activities."""

from __future__ import annotations

import numpy as np
import torch

from piebald.data.dataset import DataSet, Owners
from piebald.data.files import read_npz


def har() -> DataSet:
    """10,299 windows: x [10299, 9, 128] float32 (50 Hz; g and rad/s), 6 classes; nine people are for testing.

    Owners: "subject" (30 people) and "segment" (uninterrupted runs).  Neighbouring windows of a segment share half
    their samples, so a segment is never on both sides of a test.

    Raises:
        SettingError: har/har_inertial.npz is not there.
    """
    stored = read_npz("har", "har_inertial.npz", ("X", "y", "subject", "segment", "official_test", "activities"))
    segments = Owners.of(stored["segment"])
    return DataSet(
        name="har",
        x=torch.from_numpy(stored["X"]),
        y=torch.from_numpy(stored["y"].astype(np.int64)),
        classes=[activity.lower() for activity in stored["activities"].tolist()],
        owners={"subject": Owners.of(stored["subject"]), "segment": segments},
        train=np.flatnonzero(~stored["official_test"]),
        test=np.flatnonzero(stored["official_test"]),
        together=segments.codes,
        source="UCI Human Activity Recognition Using Smartphones, inertial signals",
        licence="CC BY 4.0; the original readme prohibits commercial use",
        citation="D. Anguita, A. Ghio, L. Oneto, X. Parra, J. L. Reyes-Ortiz, "
        "A Public Domain Dataset for Human Activity Recognition Using Smartphones, ESANN 2013",
    )
