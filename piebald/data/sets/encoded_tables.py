"""Encoding of tables with columns of numbers and text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from piebald.core.errors import SettingError
from piebald.core.reading import DAMAGE, check_text_table, unpacked
from piebald.data.sets.dataset import Owners
from piebald.data.sets.download import prepared

if TYPE_CHECKING:
    from pandas import DataFrame
    from torch import Tensor


def read_csv(folder: str, file: str, columns: Sequence[str]) -> DataFrame:
    """Read a prepared CSV file with these columns.

    Raises:
        SettingError: the file is missing, cannot be read, or lacks a column.
    """
    import pandas

    path = prepared(folder, file)
    try:
        check_text_table(path, ",")
        with unpacked(path) as content:
            frame = pandas.read_csv(content, engine="c")
    except (*DAMAGE, ValueError) as error:
        raise SettingError(f"{path} cannot be read as CSV, it may be damaged: replace it ({error})") from None
    return checked(frame, columns, str(path))


def checked(frame: DataFrame, columns: Sequence[str], place: str) -> DataFrame:
    """Check that a table has these columns, and return it.

    Raises:
        SettingError: it lacks a column.
    """
    for column in columns:
        if column not in frame.columns:
            raise SettingError(f"{place} must have a column {column!r}, got {', '.join(map(str, frame.columns))}")
    return frame


def encode(
    frame: DataFrame, numbers: Sequence[str], texts: Sequence[str], train: NDArray[np.bool_]
) -> tuple[Tensor, list[str]]:
    """Encode numbers as standard scores, by mean and deviation of training rows, and text as 0/1 columns.

    Args:
        frame: the table.
        numbers: columns of numbers.
        texts: columns of categories; each value becomes a column called "column=value".
        train: mask of the training rows [n].

    Returns:
        Inputs [n, features] float32 and the features' names.
    """
    import pandas

    values = frame[[*numbers]].to_numpy(dtype=np.float64)
    # of training rows alone, or test rows would have a say in the inputs
    mean, deviation = values[train].mean(0), values[train].std(0)
    scores = (values - mean) / np.where(deviation > 0, deviation, 1.0)
    table = pandas.DataFrame(scores, columns=[*numbers])
    # by position: joined by index, rows of a table whose index repeats would multiply
    for column in texts:
        table[column] = frame[column].astype(str).to_numpy()
    table = pandas.get_dummies(table, columns=[*texts], prefix_sep="=", dtype=float)
    return torch.from_numpy(table.to_numpy(dtype=np.float32, copy=True)), [*table.columns]


def owners(frame: DataFrame, columns: Mapping[str, Mapping[Any, str] | None]) -> dict[str, Owners]:
    """Owners by columns of the table; a mapping gives names to values."""
    kinds = {}
    for column, names in columns.items():
        values = frame[column].to_numpy()
        # a column of text with gaps holds floats (NaN), which cannot be sorted among text
        if names is None and values.dtype.kind not in "iu":
            values = values.astype(str)
        present = None if names is None else {v: names.get(v, str(v)) for v in np.unique(values).tolist()}
        kinds[column] = Owners.of(values, present)
    return kinds


def decades(ages: NDArray[np.int64]) -> Owners:
    """Owners by decade of age: "20s", "30s", ..."""
    decade = ages // 10 * 10
    return Owners.of(decade, {value: f"{value}s" for value in np.unique(decade).tolist()})
