"""Columns of a table that say how its rows are divided: groups, order, strata and parts, as numbers of rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

import numpy as np

from piebald.core.errors import SettingError, shown, unknown
from piebald.data.partition.split import Bools, Ints
from piebald.data.partition.split_settings import SplitSettings
from piebald.data.preparation.columns import row_number
from piebald.data.preparation.written_forms import date_readings

PARTS = ("train", "validation", "test")


@dataclass(frozen=True, slots=True, eq=False)
class RowKeys:
    """Numbers of each row [n] by which rows are divided; None where nothing of the kind is asked for.

    Attributes:
        group: equal for rows that stay together.
        order: increasing with the order.
        stratum: equal for rows of which the same share is taken.
        part: the place of the row's part in "train", "validation", "test".
        columns: candidates of columns whose values may name something that several rows belong to, by name.
        content: equal for rows that are equal in all columns.
        local: whether equal groups of two clients are two groups.
    """

    group: Ints | None = None
    order: Ints | None = None
    stratum: Ints | None = None
    part: Ints | None = None
    columns: Mapping[str, Ints] = field(default_factory=dict)
    content: Ints | None = None
    local: bool = False

    @classmethod
    def of_table(
        cls, names: Sequence[str], values: Callable[[str], Any], split: SplitSettings, client: str | None
    ) -> Self:
        """Return the keys of a table's rows.

        Args:
            names: of its columns.
            values: returns a column as a pandas Series.
            split: the settings, which name columns.
            client: the column of the client, None where all rows are of one client.

        Raises:
            SettingError: there is no such column, or it has a value that cannot be used.
        """
        # groups by the client, too, are those of each client, whose own table need not repeat its name
        local = client in split.groups and len(split.groups) > 1
        groups = [name for name in split.groups if not local or name != client]
        if client is None and set(groups) & set(names):
            groups = [name for name in groups if name in names]
        stratum = split.stratify if isinstance(split.stratify, str) else None
        for name in (*groups, *filter(None, (split.order, split.column, stratum))):
            if name not in names:
                raise unknown("column (split)", name, names)
        if groups and split.column is not None:
            own = split.groups if local else groups
            _refuse_cut(values(split.column), split.column, codes_of([values(name) for name in own], own), own)
        return cls(
            group=codes_of([values(name) for name in groups], groups) if groups else None,
            local=local,
            order=None if split.order is None else _ranks(values(split.order), split.order),
            stratum=None if stratum is None else codes_of([values(stratum)], [stratum]),
            part=None if split.column is None else _parts(values(split.column), split.column),
        )

    def at(self, rows: Ints | Bools) -> Self:
        """Return the keys of some rows."""
        chosen = {name: getattr(self, name) for name in ("group", "order", "stratum", "part", "content")}
        picked: Any = {name: None if value is None else value[rows] for name, value in chosen.items()}
        return replace(self, **picked, columns={name: codes[rows] for name, codes in self.columns.items()})


def codes_of(columns: Sequence[Any], names: Sequence[str]) -> Ints:
    """Return a number [n] for the values of a row in some columns, the same wherever the values are the same.

    It is a hash of the values as text, so that a site and a simulation number them alike.

    Raises:
        SettingError: a value is missing.
    """
    import pandas

    texts = []
    for series, name in zip(columns, names, strict=True):
        _refuse_gaps(series, name)
        numbers = getattr(series.dtype, "kind", "O") in "iuf"
        # whole numbers may be float at another site, where 3.0 must have the code of 3
        whole = numbers and bool((series == series.round()).all())
        text = (series.astype("int64") if whole else series).astype(str).str.strip()
        texts.append(text.to_numpy(dtype=object))
    # a separator that no text has, or "ab", "c" and "a", "bc" would be one group
    joined = texts[0] if len(texts) == 1 else np.array(["\x1f".join(row) for row in zip(*texts, strict=True)], object)
    return pandas.util.hash_array(joined, categorize=True).view(np.int64)


def _refuse_gaps(series: Any, name: str) -> None:
    gaps = np.flatnonzero(series.isna().to_numpy())
    if len(gaps):
        raise SettingError(
            f"column {name!r} divides the rows and has no value in row {row_number(series, gaps[0])}"
            f"{_others(len(gaps))}: fill it in, or leave these rows out"
        )


def _others(count: int) -> str:
    return f" and in {count - 1} more" if count > 1 else ""


def _ranks(series: Any, name: str) -> Ints:
    """Return the rank [n] of each value, numbers or dates; equal values have the same.

    Raises:
        SettingError: a value is missing, or is no date, or dates may be read in two ways.
    """
    _refuse_gaps(series, name)
    kind = getattr(series.dtype, "kind", "O")
    values = series if kind in "biufMm" else _dates(series, name)
    return np.unique(values.to_numpy(), return_inverse=True)[1].astype(np.int64)


def _dates(series: Any, name: str) -> Any:
    import pandas

    texts = series.astype(str).str.strip()
    # times with offsets from UTC are put on one clock, or their order would be that of local times
    dates = pandas.to_datetime(texts, format="ISO8601", errors="coerce", utc=True)
    readings = date_readings(texts) if dates.isna().any() else {}
    if len(readings) > 1:
        raise SettingError(
            f"dates of column {name!r} like {texts.iloc[0]!r} may be read as {' or '.join(readings)}: write them as "
            "2024-12-31"
        )
    dates = next(iter(readings.values()), dates)
    if len(gaps := np.flatnonzero(dates.isna().to_numpy())):
        raise SettingError(
            f"column {name!r} has {shown(texts.iloc[gaps[0]], 40)} in row {row_number(series, gaps[0])}"
            f"{_others(len(gaps))}, which is no date or number to sort by: write dates as 2024-12-31"
        )
    return dates


def _refuse_cut(series: Any, name: str, group: Ints, groups: Sequence[str]) -> None:
    """Refuse a column of parts that puts rows of one group [n] into several."""
    part = _parts(series, name)
    # rows of a group come one after the other, so a group that is cut has two parts side by side
    order = np.lexsort((part, group))
    cut = (group[order][1:] == group[order][:-1]) & (part[order][1:] != part[order][:-1])
    if cut.any():
        # the first rows of the file, whatever the order of the groups' codes
        rows = min(sorted(order[place : place + 2].tolist()) for place in np.flatnonzero(cut))
        here, there = (f"{PARTS[part[row]]} in row {row_number(series, row)}" for row in rows)
        raise SettingError(
            f"column {name!r} says {here} and {there}, which are one group by {shown(', '.join(groups), 40)}: correct "
            "it, or leave column or group out of [split]"
        )


def _parts(series: Any, name: str) -> Ints:
    _refuse_gaps(series, name)
    words = series.astype(str).str.strip().str.lower()
    part = words.map({word: place for place, word in enumerate(PARTS)})
    if part.isna().any():
        row = int(np.flatnonzero(part.isna().to_numpy())[0])
        raise SettingError(
            f"column {name!r} must say train, validation or test in each row, got {shown(series.iloc[row], 40)} in row "
            f"{row_number(series, row)}{_others(int(part.isna().sum()))}"
        )
    return np.asarray(part.to_numpy(dtype=np.int64))
