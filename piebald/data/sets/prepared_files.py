"""Prepared files on disk, found through PIEBALD_DATA and read without unpickling anything."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from piebald.core.errors import SettingError
from piebald.core.reading.packed import read_arrays

VARIABLE = "PIEBALD_DATA"


def prepared(folder: str, file: str) -> Path:
    """The path of a prepared file.

    Raises:
        SettingError: the variable is not set, or the file is missing; the message says where to put it.
    """
    root = os.environ.get(VARIABLE)
    if not root:
        raise SettingError(
            f"the data set in {folder}/{file} needs {VARIABLE}, which is not set: "
            f"put the file in a folder {folder}/ and set {VARIABLE} to the folder above it"
        )
    path = Path(root) / folder / file
    if not path.is_file():
        raise SettingError(
            f"there is no file {path}: put {file} there, or set {VARIABLE} to the folder that has {folder}/{file}"
        )
    return path


def is_prepared(folder: str, file: str) -> bool:
    """Return whether a prepared file exists."""
    root = os.environ.get(VARIABLE)
    return bool(root) and (Path(str(root)) / folder / file).is_file()


def read_npz(folder: str, file: str, arrays: Sequence[str]) -> dict[str, NDArray[Any]]:
    """Read named arrays of a prepared npz file.

    Raises:
        SettingError: the file is missing, is damaged, or lacks an array.
    """
    return read_arrays(prepared(folder, file), arrays)
