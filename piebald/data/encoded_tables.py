"""Tables of people as numbers: what columns become."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from piebald.data.dataset import Owners
from piebald.data.prepared_files import prepared
from piebald.errors import SettingError

if TYPE_CHECKING:
    from pandas import DataFrame
    from torch import Tensor


def read_csv(folder: str, file: str, columns: Sequence[str]) -> DataFrame:
    """A prepared CSV file with these columns.

    Raises:
        SettingError: the file is not there, cannot be read, or lacks a column.
    """
    import pandas

    path = prepared(folder, file)
    try:
        frame = pandas.read_csv(path)
    except (OSError, EOFError, ValueError) as error:
        raise SettingError(f"{path} cannot be read as CSV, it may be damaged: replace it ({error})") from None
    return checked(frame, columns, str(path))


def checked(frame: DataFrame, columns: Sequence[str], where: str) -> DataFrame:
    """The table, if it has these columns.

    Raises:
        SettingError: it lacks one.
    """
    for column in columns:
        if column not in frame.columns:
            raise SettingError(f"{where} must have a column {column!r}, got {', '.join(map(str, frame.columns))}")
    return frame


def encode(
    frame: DataFrame, numbers: Sequence[str], words: Sequence[str], train: NDArray[np.bool_]
) -> tuple[Tensor, list[str]]:
    """Numbers as standard scores, by mean and deviation of training rows; words as one 0/1 column a value.

    Args:
        frame: the table.
        numbers: columns of numbers.
        words: columns of values without order, whose columns are called "column=value".
        train: which rows are for training [n].

    Returns:
        Inputs [n, features] float32 and the features' names.
    """
    names, columns = [], []
    for column in numbers:
        values = frame[column].to_numpy(dtype=np.float64)
        mean, deviation = values[train].mean(), values[train].std()
        names.append(column)
        columns.append((values - mean) / (deviation or 1.0))
    for column in words:
        values = frame[column].astype(str).to_numpy(dtype=str)
        for value in np.unique(values).tolist():
            names.append(f"{column}={value}")
            columns.append((values == value).astype(np.float64))
    return torch.from_numpy(np.stack(columns, 1).astype(np.float32)), names


def owners(frame: DataFrame, columns: Mapping[str, Mapping[Any, str] | None]) -> dict[str, Owners]:
    """Owners by columns of the table; a mapping says what values are called."""
    found = {}
    for column, names in columns.items():
        values = frame[column].to_numpy()
        if names is None and values.dtype.kind not in "iu":
            values = values.astype(str)
        present = None if names is None else {v: names.get(v, str(v)) for v in np.unique(values).tolist()}
        found[column] = Owners.of(values, present)
    return found


def decades(ages: NDArray[np.int64]) -> Owners:
    """Owners by decade of age: "20s", "30s", ..."""
    decade = ages // 10 * 10
    return Owners.of(decade, {value: f"{value}s" for value in np.unique(decade).tolist()})
