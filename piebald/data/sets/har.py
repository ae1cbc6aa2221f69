"""UCI HAR: raw signals of a phone worn at the waist, 30 people, 6 activities."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from piebald.core.errors import SettingError
from piebald.data.sets.dataset import DataSet, Owners
from piebald.data.sets.download import is_prepared, official, read_npz
from piebald.data.sets.formats import read_numbers, read_zip

URL = "https://archive.ics.uci.edu/static/public/240/human+activity+recognition+using+smartphones.zip"
# UCI publishes no checksum; this is what several unrelated public projects have recorded of its archive.
CHECKSUM = "sha256:c00b803081a5c797cd5e4b83700a9810b38d53d9d84e01917e090e1fdbc81031"
INSIDE = "UCI HAR Dataset.zip"
SIGNALS = [f"{sensor}_{axis}" for sensor in ("body_acc", "body_gyro", "total_acc") for axis in "xyz"]
SAMPLES = 128  # in a window, 2.56 s at 50 Hz; the next window of a recording begins in the middle


def har() -> DataSet:
    """10,299 windows: x [10299, 9, 128] float32 (50 Hz; g and rad/s), 6 classes; nine people are for testing.

    Owners: "subject" (30 people) and "segment" (uninterrupted runs).  Neighbouring windows of a segment share half
    their samples, so a segment is never split between training and test.  Without the prepared file, the
    published archive is read (parsing its text takes a few seconds).

    Raises:
        SettingError: har/har_inertial.npz is missing and the archive cannot be downloaded, or a file is damaged.
    """
    fields = ("X", "y", "subject", "segment", "official_test", "activities")
    stored = read_npz("har", "har_inertial.npz", fields) if is_prepared("har", "har_inertial.npz") else _published()
    segments = Owners.of(stored["segment"])
    return DataSet(
        name="har",
        x=torch.from_numpy(stored["X"]),
        y=torch.from_numpy(stored["y"].astype(np.int64)),
        classes=[activity.lower() for activity in stored["activities"].tolist()],
        owners={"subject": Owners.of(stored["subject"]), "segment": segments},
        train=np.flatnonzero(~stored["official_test"]),
        test=np.flatnonzero(stored["official_test"]),
        groups=segments.codes,
        source="UCI Human Activity Recognition Using Smartphones, inertial signals",
        licence="CC BY 4.0; the original readme prohibits commercial use",
        citation="D. Anguita, A. Ghio, L. Oneto, X. Parra, J. L. Reyes-Ortiz, "
        "A Public Domain Dataset for Human Activity Recognition Using Smartphones, ESANN 2013",
    )


def _published() -> dict[str, NDArray[Any]]:
    """The arrays of the prepared file from the published archive (a zip inside a zip)."""
    path = official("har", URL, CHECKSUM)
    (inner,) = read_zip(path, [INSIDE], str(path))
    place = f"{INSIDE} in {path}"
    parts = [_part(inner, part, place) for part in ("train", "test")]
    x, y, subject = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    lines = read_zip(inner, ["activity_labels.txt"], place)[0].decode("utf-8").split()
    return {
        "X": x,
        "y": y - 1,
        "subject": subject,
        "segment": segments(x, subject),
        "official_test": np.repeat([False, True], [len(part[0]) for part in parts]),
        "activities": np.array(lines[1::2]),
    }


def _part(inner: bytes, part: str, place: str) -> tuple[NDArray[np.float32], NDArray[np.int64], NDArray[np.int64]]:
    """Signals [n, 9, 128], activities from 1 on and subjects of one published part."""
    names = [f"{signal}_{part}.txt" for signal in SIGNALS]
    texts = read_zip(inner, [*names, f"y_{part}.txt", f"subject_{part}.txt"], place)
    columns = [SAMPLES] * len(names) + [1, 1]
    tables = [
        read_numbers(text, width, f"{name} in {place}")
        for text, width, name in zip(texts, columns, [*names, "y", "subject"], strict=True)
    ]
    if len({len(table) for table in tables}) != 1:
        raise SettingError(f"the files of the {part} part in {place} must have a line for each window: replace it")
    *signals, y, subject = tables
    return np.stack(signals, 1).astype(np.float32), y[:, 0].astype(np.int64), subject[:, 0].astype(np.int64)


def segments(x: NDArray[np.float32], subject: NDArray[np.integer[Any]]) -> NDArray[np.int64]:
    """The uninterrupted segment of each window [n, channels, samples], numbered by first appearance.

    A window follows another of the same subject if its first half equals the other's second half, bit for bit.
    """
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components

    half = x.shape[2] // 2
    begins: dict[tuple[int, bytes], int] = {}
    for window, (person, head) in enumerate(zip(subject.tolist(), x[:, :, :half], strict=True)):
        begins.setdefault((person, head.tobytes()), window)
    tails = zip(subject.tolist(), x[:, :, half:], strict=True)
    after = [(window, begins.get((person, tail.tobytes()))) for window, (person, tail) in enumerate(tails)]
    links = np.array([(window, follower) for window, follower in after if follower is not None], dtype=np.int64)
    first, second = links.reshape(-1, 2).T
    graph = coo_array((np.ones(len(first)), (first, second)), shape=(len(x), len(x)))
    _, run = connected_components(graph, directed=False)
    return np.asarray(run, dtype=np.int64)
