"""The identity of rows: a digest of each row by what it holds, however it is stored and whatever it is called.

All numbers count as float64, so that 1, 1.0 and "1" are the same, dates as moments in UTC, and all else as its text;
arrays of a row, such as images, count as their numbers in order.  The order of rows and of single columns, and their
names, make no difference, and neither does the column that `piebald match` adds.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from piebald.core import pytree
from piebald.core.files import opened
from piebald.data.preparation.columns import GAPS, is_inexact

Digests = NDArray[np.uint64]  # one of each row [n]
UNKNOWN: Digests = np.zeros(0, dtype=np.uint64)  # of rows that nothing identifies
SHARED_ID = "shared_id"  # a column of names drawn anew in each match, which say nothing of a row
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]{4,}>")  # in the text of an object that says nothing else of it
_MOMENT = r"\d{4}-\d{2}-\d{2}([T ]\d{2}:\d{2}(:\d{2}(\.\d+)?)?(Z|[+-]\d{2}:?\d{2})?)?"
_WHOLE = r"[+-]?\d{16,40}"  # numbers that float64 may not have
_SAME = (
    dict.fromkeys(GAPS, "")
    | dict.fromkeys(["True", "true", "TRUE"], "1")
    | dict.fromkeys(["False", "false", "FALSE"], "0")
)  # texts that readers may take for something else
_TEXTS = 1 << 16  # of which digests are made at a time
_MOST_COLUMNS = 4096  # of an array [n, d] whose columns are taken as those of a table
_BLOCK = 1 << 24  # numbers of arrays that are converted at once


class UnidentifiedError(Exception):
    """Rows that nothing identifies: their text would be another one in another process."""


def row_digests(columns: Iterable[Any]) -> Digests:
    """Return a digest of each row [n].

    Args:
        columns: what the rows hold: columns of tables, arrays, tensors or lists, [n, ...] each.

    Raises:
        UnidentifiedError: nothing identifies them.
    """
    total: Digests | None = None
    with np.errstate(over="ignore"):  # sums of hashes are meant to wrap around at 2**64
        for column in columns:
            digests = _digests(column)
            total = digests if total is None else total + digests
    if total is None:
        raise UnidentifiedError
    return total


def fingerprint(columns: Iterable[tuple[str, Any]]) -> str:
    """Return a digest of some columns [n, ...] with their names, in the order of columns and rows."""
    digest = hashlib.blake2b(digest_size=16)
    for name, column in columns:
        digest.update(repr(name).encode())
        column = _plain(column)
        for single in column.T if _is_flat(column) else [column]:
            digest.update(_digests(single).astype("<u8").tobytes())
    return digest.hexdigest()


def _is_flat(column: Any) -> bool:
    """Return whether an array or a tensor [n, d] has columns as those of a table."""
    return getattr(column, "ndim", 0) == 2 and column.shape[1] <= _MOST_COLUMNS


def digests_of_files(files: Iterable[Any]) -> Digests:
    """Return a digest of each file's content."""

    def content(path: Any) -> bytes:
        with opened(path) as file:
            return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=8)).digest()

    return np.frombuffer(b"".join(map(content, files)), dtype="<u8").astype(np.uint64)


def leaves(part: Any) -> list[Any]:
    """Return inputs or targets, of one array or several, as columns of rows; rows that are listed are one column."""
    if getattr(part, "ndim", 1) == 2 and hasattr(part, "items") and hasattr(part, "columns"):
        return [column for _, column in part.items()]
    listed = isinstance(part, tuple) and not all(hasattr(leaf, "shape") for leaf in part)
    return [part] if listed or not isinstance(part, Mapping | tuple) else pytree.leaves(part)


def _plain(column: Any) -> Any:
    """Return a column of pandas as it is, inputs that stay in their files, too, and all else as a NumPy array."""
    if isinstance(column, torch.Tensor):
        column = column.detach().cpu()
        column = (column.float() if column.dtype == torch.bfloat16 else column).resolve_conj().resolve_neg().numpy()
    if not isinstance(column, np.ndarray):
        return column if hasattr(column, "shape") else _as_array(column)
    # older files store text as bytes
    return np.char.decode(column, "utf-8", "replace") if column.dtype.kind == "S" else column


def _digests(column: Any) -> Digests:
    """Return a digest of each cell, or of each row's array, [n]."""
    column = _plain(column)
    if hasattr(column, "to_numpy"):
        return _of_cells(column)
    if not isinstance(column, np.ndarray):
        return _of_arrays(column)
    if column.ndim == 1:
        return _of_cells(column)
    if _is_flat(column) and column.dtype.kind != "c":
        return row_digests(column.T) if column.size else np.zeros(len(column), dtype=np.uint64)
    return _of_arrays(column) if column.dtype.kind in "biufc" else _of_cells(_as_objects(column))


def _as_array(values: Sequence[Any]) -> NDArray[Any]:
    try:
        array = np.asarray(values)
        # a list of unequal kinds would become text of all
        return array if array.dtype.kind in "biufcO" and array.ndim else _as_objects(values)
    except ValueError:
        return _as_objects(values)


def _as_objects(values: Any) -> NDArray[np.object_]:
    array = np.empty(len(values), dtype=object)
    for row, value in enumerate(values):
        array[row] = value
    return array


def _of_cells(column: Any) -> Digests:
    """Return a digest of each cell [n] of a column, whose gaps are alike however they are written."""
    import pandas
    from pandas.api.types import is_numeric_dtype

    series = pandas.Series(column).reset_index(drop=True)
    if isinstance(series.dtype, pandas.SparseDtype):
        series = pandas.Series(np.asarray(series))
    if is_numeric_dtype(series) and series.dtype.kind != "c" and not is_inexact(series):
        return _of_numbers(series.to_numpy(np.float64, na_value=np.nan))
    try:
        codes, different = pandas.factorize(series)  # few, where the texts of all rows would take much memory
        values = [*different]
    except TypeError:  # arrays and lists, which have no hash
        codes, values = np.arange(len(series)), [*series.to_numpy(dtype=object)]
    words = [*map(_cell, values), ""]  # the last one is for gaps, whose code is -1
    # in pieces, which take less memory: of each text by itself
    pieces = [_of_texts(words[start : start + _TEXTS]) for start in range(0, len(words), _TEXTS)]
    return np.concatenate(pieces)[codes]


def _of_texts(words: Sequence[str]) -> Digests:
    """Return a digest of each text [n], of numbers and dates what they say.

    A word or a gap in another row makes text of a column's numbers, which are the same rows as before.
    """
    import pandas

    texts = pandas.Series(words, dtype=object)
    digests = np.asarray(pandas.util.hash_array(texts.to_numpy()), dtype=np.uint64)
    numbers = pandas.to_numeric(texts, errors="coerce").to_numpy(np.float64)
    is_number = ~np.isnan(numbers) | (texts == "").to_numpy()
    for row in np.flatnonzero(texts.str.fullmatch(_WHOLE)):
        is_number[row] = int(texts[row]) == int(numbers[row])
    digests[is_number] = _of_numbers(numbers[is_number])
    moments = pandas.to_datetime(
        texts[texts.str.fullmatch(_MOMENT)], utc=True, errors="coerce", format="ISO8601"
    ).dropna()  # what is no date, such as 2024-02-31, stays text
    elapsed = moments.dt.as_unit("us").astype("int64").to_numpy()
    digests[moments.index] = pandas.util.hash_array(elapsed) + moments.dt.nanosecond.to_numpy(np.uint64)
    return digests


def _cell(value: Any) -> str:
    """Return the text of a cell without blanks around it, "" for a gap, and 1 and 0 for booleans."""
    if value is None or (value != value) is True:
        return ""
    text = str(value if isinstance(value, str) else _text(value)).strip()
    return _SAME.get(text, text)


def _of_numbers(numbers: NDArray[np.float64]) -> Digests:
    import pandas

    plain = numbers + 0.0  # -0.0 is 0.0
    plain[np.isnan(plain)] = np.nan  # of which there are several
    return np.asarray(pandas.util.hash_array(plain), dtype=np.uint64)


def _of_arrays(arrays: Any) -> Digests:
    """Return a digest of each row's array [n]."""
    digests = np.zeros(len(arrays), dtype=np.uint64)
    rows = max(_BLOCK // max(int(np.prod(arrays.shape[1:])), 1), 1)
    for first in range(0, len(arrays), rows):
        for row, numbers in enumerate(np.asarray(arrays[first : first + rows]), first):
            digests[row] = _hash(_text(numbers).encode() if numbers.dtype == object else _bytes(numbers))
    return digests


def _bytes(numbers: NDArray[Any]) -> bytes:
    wide = numbers.astype(np.complex128 if numbers.dtype.kind == "c" else np.float64) + 0.0
    return repr(wide.shape).encode() + wide.tobytes()


def _hash(content: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little")


def _text(value: Any) -> str:
    """Return the text of a value that is no number by itself.

    Raises:
        UnidentifiedError: it is the address of an object.
    """
    if isinstance(value, np.number | np.bool_):
        value = value.item()  # np.float32(0.1) is another number than 0.1
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu().numpy()
    if isinstance(value, np.ndarray) and value.dtype.kind in "biufc":
        return str(_hash(_bytes(value)))
    if isinstance(value, Mapping):
        return "{" + ",".join(sorted(f"{name}:{_text(part)}" for name, part in value.items())) + "}"
    if isinstance(value, set | frozenset):  # whose order is another one in each process
        return "{" + ",".join(sorted(map(_text, value))) + "}"
    if isinstance(value, list | tuple | np.ndarray):
        if all(isinstance(part, int | float | np.number) for part in value):
            return str(_hash(_bytes(np.asarray(value, dtype=np.float64))))
        return "[" + ",".join(map(_text, value)) + "]"
    if hasattr(value, "tobytes") and hasattr(value, "size") and not isinstance(value, np.generic):  # an image
        return f"{value.size}{_hash(bytes(value.tobytes()))}"
    text = str(value)
    if _ADDRESS.search(text):
        raise UnidentifiedError
    return text
