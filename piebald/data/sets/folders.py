"""Your own files in folders: images and recordings, a folder for each class."""

from __future__ import annotations

import struct
import wave
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from piebald.core.arguments import Count, PathLike, Positive, checked
from piebald.core.errors import SettingError
from piebald.core.files import opened
from piebald.core.reading import FORMATS, picture
from piebald.data.sets.dataset import DataSet, Decoded, Owners

_BILINEAR = 2  # `PIL.Image.Resampling.BILINEAR`, without an import of Pillow
IMAGES = tuple(FORMATS)


@checked
def image_folder(
    folder: PathLike, side: Count = 64, owner: str | None = None, lazy: bool = False, channels: Literal[1, 3] = 3
) -> DataSet:
    """Images in folder/class/image, or in folder/owner/class/image if `owner` is given.

    Returns:
        x [n, channels, side, side] uint8 (resized, aspect ratio not kept), classes by their folders' names.

    Args:
        folder: the folder.
        side: height and width in pixels.
        owner: kind of owner that the upper folders stand for ("camera", "hospital"), or None without such folders.
        lazy: leave the images in their files and decode them at each access.
        channels: 3 for red, green and blue, or 1 for their mean.

    Raises:
        SettingError: there are no images, one cannot be read, or side is below 1.
    """
    return _data_set(Path(folder), IMAGES, owner, lambda path: _image(path, side, channels), lazy)


_LONGEST = 1 << 28  # samples of a recording, a gigabyte


@checked
def audio_folder(
    folder: PathLike, seconds: Positive = 1.0, rate: Count = 16_000, owner: str | None = None, lazy: bool = False
) -> DataSet:
    """WAV recordings in folder/class/file, or in folder/owner/class/file if `owner` is given.

    In the layout of Speech Commands (a speaker's id before "_nohash_" in each file's name) speakers also become the
    owners "speaker".

    Returns:
        x [n, 1, seconds * rate] float32 in [-1, 1]: the first channel, cut or padded with silence.

    Args:
        folder: the folder.
        seconds: length of each input.
        rate: samples per second; files with another rate are refused.
        owner: kind of owner that the upper folders stand for ("room", "device"), or None without such folders.
        lazy: leave the recordings in their files and decode them at each access.

    Raises:
        SettingError: there are no recordings, one cannot be read or has another rate, or the length is not from 1 to
            2^28 samples.
    """
    length = round(seconds * rate)
    if not 1 <= length <= _LONGEST:
        raise SettingError(f"seconds * rate must be from 1 to {_LONGEST} samples, got {seconds} * {rate}")
    return _data_set(Path(folder), (".wav",), owner, lambda path: recording(path, length, rate), lazy)


def visible(folder: Path, pattern: str) -> Iterator[Path]:
    """Yield the paths in a folder that fit a pattern, without names of other programs, like .ipynb_checkpoints."""
    for path in folder.glob(pattern):
        if not any(part.startswith(".") for part in path.relative_to(folder).parts):
            yield path


def _data_set(
    folder: Path, suffixes: Sequence[str], owner: str | None, read: Callable[[Path], NDArray[np.generic]], lazy: bool
) -> DataSet:
    depth = 2 if owner is None else 3
    pattern = "/".join("*" * depth)
    files = sorted(path for path in visible(folder, pattern) if path.suffix.lower() in suffixes and path.is_file())
    if not files:
        layout = "class/file" if owner is None else f"{owner}/class/file"
        raise SettingError(
            f"there is no file {layout} ({', '.join(suffixes)}) in {folder}: put one folder per class there"
        )
    classes, y = np.unique([path.parent.name for path in files], return_inverse=True)
    owners = {} if owner is None else {owner: Owners.of(np.array([path.parent.parent.name for path in files]))}
    speakers = [path.name.partition("_nohash_") for path in files]
    if all(nohash for _, nohash, _ in speakers):
        owners["speaker"] = Owners.of(np.array([speaker for speaker, _, _ in speakers]))
    # the first file says the shape and type of all, so a lazy data set reads no other one
    first = read(files[0])
    kind = torch.uint8 if first.dtype == np.uint8 else torch.float32
    x = Decoded(len(files), first.shape, kind, lambda row: read(files[row]))
    return DataSet(
        name=folder.resolve().name,
        x=x if lazy else x[:],
        y=torch.from_numpy(y.astype(np.int64)),
        classes=classes.tolist(),
        owners=owners,
        source=f"{len(files)} files of your own",
    )


def _image(path: Path, side: int, channels: int) -> NDArray[np.uint8]:
    with picture(path, FORMATS[path.suffix.lower()], str(path)) as image:
        small = image.convert("RGB").resize((side, side), _BILINEAR)
        pixels = np.asarray(small, dtype=np.uint8).transpose(2, 0, 1)
        return pixels if channels == 3 else pixels.mean(0, keepdims=True).round().astype(np.uint8)


def recording(path: Path, length: int, rate: int) -> NDArray[np.float32]:
    """One WAV file [1, length] in [-1, 1]: the first channel, cut or padded with silence.

    Raises:
        SettingError: the file cannot be read, or has another rate.
    """
    try:
        with opened(path) as file, wave.open(file, "rb") as wav:
            recorded, width, channels = wav.getframerate(), wav.getsampwidth(), wav.getnchannels()
            raw = wav.readframes(length)
    except (OSError, EOFError, ValueError, struct.error, wave.Error) as error:
        raise SettingError(f"{path} cannot be read as WAV: replace it or leave it out ({error})") from None
    if recorded != rate:
        raise SettingError(f"{path} has {recorded} samples per second, not {rate}: convert it, or pass rate={recorded}")
    if width not in (1, 2, 4):
        raise SettingError(f"{path} has samples of {8 * width} bits, which must be 8, 16 or 32: convert it")
    # a file that was cut off may end within a sample
    values = np.frombuffer(
        raw[: len(raw) // (width * channels) * width * channels], {1: "u1", 2: "<i2", 4: "<i4"}[width]
    )
    mono = values.reshape(-1, channels)[:, 0].astype(np.float64)
    # samples of 8 bits have no sign in WAV, and 128 is silence
    mono = (mono - 128) / 128 if width == 1 else mono / float(1 << (8 * width - 1))
    filled = np.zeros((1, length), dtype=np.float32)
    filled[0, : len(mono)] = mono
    return filled
