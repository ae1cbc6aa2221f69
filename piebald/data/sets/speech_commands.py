"""Speech Commands: one-second recordings of 35 words, by speaker."""

from __future__ import annotations

import os
import shutil
import tarfile
import tempfile
import zlib
from pathlib import Path

import numpy as np
import torch

from piebald.core.errors import SettingError
from piebald.core.files import read_text
from piebald.data.sets.dataset import DataSet, Decoded, Owners
from piebald.data.sets.download import VARIABLE, cache, official
from piebald.data.sets.folders import recording

FOLDER = "speech_commands"
URL = "https://storage.googleapis.com/download.tensorflow.org/data/speech_commands_v0.02.tar.gz"
CHECKSUM = "sha256:af14739ee7dc311471de98f5f9d2c9191b18aedfe957f4a6ff791c709868ff58"  # as TensorFlow Datasets pins it
RATE = 16_000
TESTS = "testing_list.txt"


def speech_commands() -> DataSet:
    """105,829 recordings of version 2: x [n, 1, 16000] float32 in [-1, 1], 35 classes (words); 11,005 for testing.

    Owners: "speaker".  The published test part has other speakers than the rest, all of which is for training here
    (the published validation list is not used: clients hold out their own rows).  The recordings stay in their files
    (3.5 GB) and are decoded on access.

    Reads the unpacked folder speech_commands/ in PIEBALD_DATA or in the cache, or downloads and unpacks the
    published archive (2.4 GB).

    Raises:
        SettingError: the folder is missing and the archive cannot be downloaded, or has no recordings.
    """
    folder = _folder()
    # _background_noise_ has long recordings that are no words
    files = sorted(path for path in folder.glob("*/*.wav") if not path.parent.name.startswith("_"))
    if not files:
        raise SettingError(f"there is no recording word/file.wav in {folder}: unpack the archive there again")
    try:
        tests = set(read_text(folder / TESTS).split())
    except (OSError, ValueError) as error:
        raise SettingError(f"{folder / TESTS} cannot be read: unpack the archive again ({error})") from None
    classes, y = np.unique([path.parent.name for path in files], return_inverse=True)
    tested = np.array([f"{path.parent.name}/{path.name}" in tests for path in files])
    return DataSet(
        name="speech_commands",
        x=Decoded(len(files), (1, RATE), torch.float32, lambda row: recording(files[row], RATE, RATE)),
        y=torch.from_numpy(y.astype(np.int64)),
        classes=classes.tolist(),
        owners={"speaker": Owners.of(np.array([path.name.partition("_nohash_")[0] for path in files]))},
        train=np.flatnonzero(~tested),
        test=np.flatnonzero(tested),
        source="Speech Commands, version 0.02",
        licence="CC BY 4.0",
        citation="P. Warden, Speech Commands: A Dataset for Limited-Vocabulary Speech Recognition, 2018",
    )


def _folder() -> Path:
    """The unpacked folder, created if missing."""
    root = os.environ.get(VARIABLE)
    unpacked = cache() / FOLDER / "unpacked"
    for folder in ([Path(root) / FOLDER] if root else []) + [unpacked]:
        if (folder / TESTS).is_file():
            return folder
    archive = official(FOLDER, URL, CHECKSUM)
    unpacked.parent.mkdir(parents=True, exist_ok=True)
    # Unpacked in a temporary folder and renamed, so that a folder of this name is complete.
    temporary = Path(tempfile.mkdtemp(dir=unpacked.parent))
    try:
        with tarfile.open(archive, "r:gz") as opened:
            opened.extractall(temporary, filter="data")
        # it lacks the list of tests, or it would have been returned above
        if unpacked.exists():
            shutil.rmtree(unpacked)
        temporary.replace(unpacked)
    except (OSError, EOFError, zlib.error, tarfile.TarError) as error:
        raise SettingError(f"{archive} cannot be unpacked: make room, or delete it and try again ({error})") from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return unpacked
