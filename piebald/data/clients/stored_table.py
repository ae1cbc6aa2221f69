"""Tables that are read in chunks: their columns lie in arrays that need not fit into memory."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from piebald.core import tensor_store
from piebald.core.tensor_store import large_array
from piebald.data.preparation.columns import coded_words, is_categorical

_ROWS = 1 << 16  # of the first array, which doubles from then on
_TEXT = np.dtype(object)


def joined_chunks(chunks: Iterable[Any], rows: int = _ROWS) -> Any:
    """Return the rows of several pandas DataFrames with the same columns, one after the other.

    Large ones are written to a file as they come, where text becomes categories (`coded_words`).

    Args:
        chunks: the tables, one at least.
        rows: how many there are in all, if that is known.
    """
    import pandas

    remaining, held = iter(chunks), list[Any]()
    for chunk in remaining:
        held.append(chunk)
        if len(held) > 1 and sum(table.size for table in held) > tensor_store.CELLS:
            break
    else:
        return pandas.concat(held, ignore_index=True) if len(held) > 1 else held[0]
    table = _StoredTable([*chunk.columns], rows)
    # taken out one by one, so that a chunk's memory is free when its rows are stored
    while held:
        table.append(held.pop(0))
    for chunk in remaining:
        table.append(chunk)
    return table.frame()


class _StoredTable:
    """Columns that grow, with eight bytes for a cell: a number, a moment, or the place of a text among different ones.

    Args:
        names: the columns.
        rows: for which there is room at first.
    """

    def __init__(self, names: list[str], rows: int) -> None:
        self._names, self._rows = names, 0
        self._cells = large_array((len(names), rows), np.int64)
        self._dtypes = [np.dtype(np.float64)] * len(names)
        self._empty = [True] * len(names)  # columns that have no value so far
        self._words: list[dict[Any, int]] = [{} for _ in names]  # the places of texts
        self._categories: set[int] = set()  # columns that are categories whatever their values

    def append(self, chunk: Any) -> None:
        """Add the rows of a table."""
        rows = self._rows + len(chunk)
        if rows > self._cells.shape[1]:
            # doubled, so that each cell is copied about once, however many chunks come
            grown = large_array((len(self._names), max(rows, 2 * self._cells.shape[1])), np.int64)
            # column by column, so that one alone is in memory
            for index in range(len(self._names)):
                grown[index, : self._rows] = self._cells[index, : self._rows]
            self._cells = grown
        for index in range(len(self._names)):
            series = chunk.iloc[:, index]
            if is_categorical(series):
                self._categories.add(index)
            self._append(index, _plain(series))
        self._rows = rows

    def frame(self) -> Any:
        """Return the rows as a pandas DataFrame."""
        import pandas

        columns = {index: pandas.Series(self._column(index), copy=False) for index in range(len(self._names))}
        frame = pandas.DataFrame(columns, copy=False)
        frame.columns = self._names
        return frame

    def _append(self, place: int, series: Any) -> None:
        """Add the values of a column, whose kind is the one that fits all of its values so far."""
        own, new, empty = self._dtypes[place], series.dtype, bool(series.isna().all())
        new = new if isinstance(new, np.dtype) and series.dtype.kind in "biufM" else _TEXT
        if empty:
            dtype = _with_gaps(own)
        elif self._empty[place]:
            dtype = _with_gaps(new) if self._rows else new
        else:
            dtype = own if own == new else _common(own, new)
        if dtype != own and self._rows:
            # a copy, since new values are written over the same bytes
            written = series.__class__(np.array(self._values(place, own)[: self._rows]))
            self._write(place, 0, written, dtype, self._empty[place])
        self._write(place, self._rows, series, dtype, empty)
        self._dtypes[place], self._empty[place] = dtype, self._empty[place] and empty

    def _write(self, place: int, first: int, series: Any, dtype: np.dtype[Any], empty: bool) -> None:
        import pandas

        rows = slice(first, first + len(series))
        if dtype != _TEXT:
            gap = np.datetime64("NaT") if dtype.kind == "M" else np.nan
            self._values(place, dtype)[rows] = gap if empty else series.to_numpy()
            return
        codes, different = pandas.factorize(series)
        if series.dtype.kind == "b" or isinstance(next(iter(different), None), bool):
            different = [*map(str, different)]  # pandas takes categories of booleans for booleans
        words = self._words[place]
        # the last one is for gaps, whose code is -1
        places = np.array([*(words.setdefault(word, len(words)) for word in different), -1], dtype=np.int32)
        self._values(place, dtype)[rows] = places[codes]

    def _values(self, place: int, dtype: np.dtype[Any]) -> Any:
        """Return the cells of a column as what they hold, from their first byte on."""
        return self._cells[place].view(np.int32 if dtype == _TEXT else dtype)[: self._cells.shape[1]]

    def _column(self, place: int) -> Any:
        import pandas

        dtype, words = self._dtypes[place], [*self._words[place]]
        values = self._values(place, dtype)[: self._rows]
        if dtype != _TEXT:
            return values
        if place in self._categories:
            return pandas.Categorical.from_codes(values, pandas.Index(words))
        return coded_words(values, words)


def _plain(series: Any) -> Any:
    """Return a column in NumPy's own type where it has numbers in one of pandas'."""
    dtype = getattr(series.dtype, "numpy_dtype", None)
    if dtype is None or dtype.kind not in "biuf" or (dtype.kind == "b" and series.isna().any()):
        return series
    return series.astype(np.float64 if series.isna().any() else dtype)


def _with_gaps(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the kind of a column of some kind that has gaps as well, as pandas has it."""
    return np.dtype(np.float64) if dtype.kind in "iu" else _TEXT if dtype.kind == "b" else dtype


def _common(first: np.dtype[Any], second: np.dtype[Any]) -> np.dtype[Any]:
    """Return the kind of a column that has values of both, as pandas joins columns."""
    alike = all(dtype.kind in "iuf" for dtype in (first, second)) or all(dtype.kind == "M" for dtype in (first, second))
    return np.result_type(first, second) if alike else _TEXT
