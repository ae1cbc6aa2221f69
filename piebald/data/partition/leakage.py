"""Signs that test rows are known from training: columns that name what several rows belong to, and equal rows.

Columns of a table that say how its rows are divided: groups, order, strata and parts, as numbers of rows.

Train, validation and test split of every client.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self, get_args

import numpy as np
from numpy.typing import NDArray

from piebald.contracts import Split
from piebald.core.errors import SettingError, shown, unknown
from piebald.core.randomness import key
from piebald.data.clients.lists import Lists
from piebald.data.partition.split import (
    Amount,
    Bools,
    Floats,
    Ints,
    SplitSettings,
    folds_of,
    forward_chain,
    hold_out,
    units,
)
from piebald.data.preparation.columns import LARGEST, is_called_identifier, row_number
from piebald.data.preparation.written_forms import date_readings

SPLITS: tuple[Split, ...] = get_args(Split)


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
        rows = min(sorted(order[index : index + 2].tolist()) for index in np.flatnonzero(cut))
        here, there = (f"{SPLITS[part[row]]} in row {row_number(series, row)}" for row in rows)
        raise SettingError(
            f"column {name!r} says {here} and {there}, which are one group by {shown(', '.join(groups), 40)}: correct "
            "it, or leave column or group out of [split]"
        )


def _parts(series: Any, name: str) -> Ints:
    _refuse_gaps(series, name)
    words = series.astype(str).str.strip().str.lower()
    part = words.map({word: index for index, word in enumerate(SPLITS)})
    if part.isna().any():
        row = int(np.flatnonzero(part.isna().to_numpy())[0])
        raise SettingError(
            f"column {name!r} must say train, validation or test in each row, got {shown(series.iloc[row], 40)} in row "
            f"{row_number(series, row)}{_others(int(part.isna().sum()))}"
        )
    return np.asarray(part.to_numpy(dtype=np.int64))


_FEWEST, _MOST_ROWS = 5, 20  # values of an identifier, and rows of each in the mean
_ALIKE = 0.5  # variance within the values of an identifier, as a share of the variance of all rows
_LOOKED_AT = 50  # columns
_MOST_PAIRS = 0.5  # of rows that are equal by chance, up to which equal rows mean something
_LARGEST = 2_000_000  # rows of tables that are looked at

_log = logging.getLogger(__name__)


def with_suspects(keys: RowKeys, frame: Any, target: str | None, apart: Sequence[str | None]) -> RowKeys:
    """Return the keys of a table's rows with columns that look like identifiers, and with a number of each content.

    Args:
        keys: the keys.
        frame: the table, a pandas DataFrame.
        target: the column to predict.
        apart: columns that say whose a row is or how rows are divided.
    """
    if not 1 < len(frame) <= _LARGEST:
        return keys
    columns = {name: series for name, series in frame.items() if name not in apart and _is_plain(series)}
    counts = {name: int(series.nunique()) for name, series in columns.items()}
    unique = {name for name, series in columns.items() if counts[name] == len(frame) and _names_things(series)}
    # a number of each row would tell copies apart
    compared = frame[[name for name in columns if name not in unique]]
    content = _hashed(compared)
    if content is not None and _equal_by_chance(compared, content) > _MOST_PAIRS:
        content = None
    return replace(keys, columns=identifiers(frame[list(columns)], target), content=content)


def _equal_by_chance(frame: Any, content: Ints) -> float:
    """Return how many pairs of rows would be equal if the columns of different rows were independent."""
    different = frame.iloc[np.unique(content, return_index=True)[1]]  # copies would make all values look common
    chance, rows = 1.0, len(different)
    for name in different:
        counts = different[name].value_counts(dropna=False).to_numpy()
        equal = float((counts * (counts - 1)).sum()) / max(rows * (rows - 1), 1)
        few = len(counts) <= _MOST_ROWS and _names_things(different[name])
        chance *= max(equal, 1 / len(counts)) if few else equal  # of k values, at least one pair in k is equal
    return chance * len(frame) ** 2 / 2


def identifiers(frame: Any, target: str | None) -> dict[str, Ints]:
    """Return columns of text or whole numbers whose values seem to name what several rows belong to, as codes [n].

    Their values have several rows each, but not many.  They are called like identifiers, or rows of one value are
    alike in other columns, or in the target; of numbers, much more than rows of neighbouring values, since rows of
    nearly the same weight are alike, too.  A missing value has the code -1.
    """
    import pandas

    numbers = frame.select_dtypes("number").iloc[:, :_LOOKED_AT]
    codes_by_name = {}
    for name, series in list(frame.items())[:_LOOKED_AT]:
        if name == target or not _names_things(series):
            continue
        # whole numbers may be amounts, of which neighbouring ones are alike without naming anything
        measured = getattr(series.dtype, "kind", "O") in "iu"
        codes, values = pandas.factorize(series, sort=measured)
        held = codes >= 0
        rows = np.bincount(codes[held], minlength=len(values))
        repeated = rows[rows > 1].sum()
        # few values are categories, values of one row each betray nothing, and those of many rows are categories, too
        if len(values) < _FEWEST or repeated < 0.1 * held.sum() or held.sum() > _MOST_ROWS * len(values):
            continue
        goal = None if target is None or target not in frame else pandas.factorize(frame[target])[0]
        others = numbers.drop(columns=[name, target], errors="ignore").to_numpy(dtype=np.float64, na_value=np.nan)
        if is_called_identifier(str(name)) or _alike(codes, others, goal, measured):
            codes_by_name[str(name)] = codes.astype(np.int64)
    return codes_by_name


def _names_things(series: Any) -> bool:
    """Return whether a column has text or whole numbers, which can be names."""
    return getattr(series.dtype, "kind", "O") in "iuOUT" and series.dtype != bool


def _is_plain(series: Any) -> bool:
    """Return whether the values of a column can be compared."""
    return getattr(series, "ndim", 1) == 1 and not (
        getattr(series.dtype, "kind", "O") == "O" and any(isinstance(value, list | dict) for value in series.head())
    )


def _alike(codes: Ints, others: Floats, goal: Ints | None, measured: bool) -> bool:
    """Return whether rows of one value are alike: in most columns of numbers [n, d], or nearly always in the target.

    Args:
        codes: the place of each row's value [n], in the order of the values where they are measured.
        others: the columns of numbers.
        goal: the number of each row's target, if there is one.
        measured: whether values may be amounts, so that rows of one must be more alike than rows of neighbours.
    """
    rows = np.bincount(codes[codes >= 0])
    several = (codes >= 0) & (rows[codes] > 1)
    codes = np.unique(codes[several], return_inverse=True)[1]
    rows = np.bincount(codes)
    first = np.unique(codes, return_index=True)[1]  # a row of each value
    if goal is not None and len(np.unique(goal)) <= _MOST_ROWS:
        # a column more than there are classes: a missing target is -1, which counts in the last one
        table = np.zeros((len(rows), int(goal.max()) + 2))
        np.add.at(table, (codes, goal[several]), 1)
        common = np.bincount(goal[goal >= 0]) / max(len(goal), 1)
        # neighbouring amounts have nearly always the same target; those of people's numbers differ as any two do
        unlike = not measured or (np.diff(goal[several][first]) != 0).mean() >= _ALIKE * (1 - (common**2).sum())
        # where one class has nearly all rows, rows of any value agree in it
        if unlike and (table.max(1) / rows).mean() >= 0.95 > common.max():
            return True
    values = others[several]
    # sums of squares stay finite; a missing value compares as false, so its column is dropped as well
    values = values[:, (np.abs(values) < LARGEST).all(0)] if values.size else values
    spread = values.var(0) if values.size else np.zeros(0)
    values, spread = values[:, spread > 0] if values.size else values, spread[spread > 0]
    if not len(spread) or len(rows) < 3:
        return False
    sums = np.zeros((len(rows), values.shape[1]))
    np.add.at(sums, codes, values)
    # divided by the degrees of freedom: each value's mean takes one
    within = ((values - (sums / rows[:, None])[codes]) ** 2).sum(0) / max(len(values) - len(rows), 1)
    if measured:  # what is left of a row beside the mean of its neighbours, one and a half times a variance
        spread = np.minimum(spread, (np.diff(values[first], 2, axis=0) ** 2).mean(0) / 4 / 1.5)
    # a few columns that vary much within a value would decide a mean
    return bool(np.median(within / np.maximum(spread, 1e-300)) < _ALIKE)


def _hashed(frame: Any) -> Ints | None:
    import pandas

    if not frame.shape[1]:
        return None
    return np.asarray(pandas.util.hash_pandas_object(frame, index=False).to_numpy()).view(np.int64)


def warn_of_leaks(parts: Mapping[Split, Lists], keys: RowKeys) -> None:
    """Log a warning of each sign that rows for validation or testing are known from rows for training."""
    for sentence in leaks(parts, keys):
        _log.warning("split: %s", sentence)


def leaks(parts: Mapping[Split, Lists], keys: RowKeys) -> Iterator[str]:
    """Yield a sentence for each sign that rows for validation or testing are known from rows for training."""
    train, tests = parts["train"].values, np.concatenate([parts["validation"].values, parts["test"].values])
    if not len(train) or not len(tests):
        return
    for name, codes in keys.columns.items():
        crossing = np.intersect1d(codes[train], codes[tests])
        # -1 is a missing value, which rows do not share as they share a name
        if count := int((crossing >= 0).sum()):
            yield (
                f"column {name!r} looks like an identifier, and {count} of its {codes.max() + 1} values have rows for "
                f"training as well as for testing, so that a model may recognise them: set group = {name!r} in [split]"
            )
    if keys.content is not None and (equal := int(np.isin(keys.content[tests], keys.content[train]).sum())):
        yield (
            f"{equal} of {len(tests)} rows for testing or validation are equal to a row for training in all columns: "
            "remove copies, or give a column that says which rows belong together as group in [split]"
        )
    if keys.group is not None and not keys.local:
        rows = np.concatenate([lists.values for lists in parts.values()])
        client = np.concatenate([lists.clients for lists in parts.values()])
        pairs = np.unique(np.stack([keys.group[rows], client]), axis=1)[0]
        if shared := int((np.unique(pairs, return_counts=True)[1] > 1).sum()):
            yield (
                f"{shared} groups have rows at several clients and are taken as the same ones, on one side at all of "
                "them: where each client numbers its own, set group to a list of the client's column and this one"
            )


NO_KEYS = RowKeys()


def check_split(split: Split) -> None:
    """Refuse what is no split's name."""
    if not isinstance(split, str) or split not in SPLITS:
        raise unknown("split", split, SPLITS)


def three_ways(
    lists: Lists,
    label: Ints | None,
    split: SplitSettings,
    keys: RowKeys = NO_KEYS,
    *,
    names: Sequence[str] = (),
    first: int = 0,
) -> dict[Split, Lists]:
    """Divide each client's rows into train, validation and test; a client with a single row keeps it for training.

    Args:
        lists: row numbers of each client, positions in `label` and `keys`.
        label: class of each row, or None.
        split: the settings.
        keys: what the settings say of each row.
        names: of the clients, where settings name clients.
        first: number of the client of the first list: the choice depends on it, the seed and the client's own rows.

    Raises:
        SettingError: settings name no client, or rows have no classes to be stratified by.
    """
    split.refuse_several()
    if split.stratify is True and label is None:
        raise SettingError("split: stratify = true needs classes, and targets are none: name a column, or leave it out")
    rows, client = lists.values, lists.clients
    stratum, group, order, fixed = (
        None if column is None else column[rows] for column in (keys.stratum, keys.group, keys.order, keys.part)
    )
    if stratum is None and label is not None and split.stratify is not False:
        stratum = label[rows]
    place = SPLITS.index
    part: NDArray[np.integer] = np.zeros(len(rows), dtype=np.int8) if fixed is None else fixed.astype(np.int8)

    def choose(name: Split, open_rows: Bools, amount: Amount | Floats) -> None:
        """Move an amount of each client's rows to a part, out of those that are open."""
        rows_left: Any = slice(None) if open_rows.all() else open_rows
        # one client's numbers are one number broadcast, which a mask would write out for each row
        owner = client[rows_left] if len(lists) > 1 else client[: np.count_nonzero(open_rows)]
        chosen = hold_out(
            owner + first if first else owner,
            amount,
            key(split.seed, "split", name),
            *(None if column is None else column[rows_left] for column in (stratum, group, order)),
        )
        open_rows[open_rows] = chosen
        part[open_rows] = place(name)

    if split.fold is not None and split.folds is not None and order is not None:
        side = forward_chain(client, split.folds, split.fold, order, group)
        part[side == 0], part[side > 0] = place("test"), -1  # later rows are in no part
    elif split.fold is not None and split.folds is not None:
        folds = folds_of(client + first, split.folds, key(split.seed, "folds"), stratum, group)
        part[folds == split.fold] = place("test")
    elif fixed is None:
        choose("test", part == 0, split.test_amount)
    if split.validation and not (part == place("validation")).any():
        amount = split.validation
        if isinstance(amount, float) and isinstance(split.test_amount, float) and split.fold is None and fixed is None:
            amount = amount / (1 - split.test_amount)  # both shares are of all rows
        elif isinstance(amount, float):
            size = np.bincount(client, minlength=len(lists))
            tested = np.bincount(client[part == place("test")], minlength=len(lists))
            share_left = 1 - tested / np.maximum(size, 1)
            # a share of all rows of the client as one of those that are left; a client that only tests has none left
            amount = np.minimum(amount / np.maximum(share_left, 1e-9), 1.0)[client][part == 0]
        choose("validation", part == 0, amount)
    alone = np.isin(client, split.untrained(names))
    # after all choices, since all rows of a client that does not train are for testing
    part[alone] = place("test")
    if group is not None and not keys.local:
        part = _together(part, client, group, alone)
    parts: dict[Split, Lists] = {name: lists.where(part == place(name)) for name in SPLITS}
    warn_of_leaks(parts, keys)
    return parts


def _together(part: NDArray[np.integer], client: Ints, group: Ints, alone: Bools) -> NDArray[np.integer]:
    """Return the part of each row where a group lies at several clients: it has one, that of its client with most rows.

    A client that does not train counts before all others.
    """
    first, unit = units(client, group)
    rows = np.bincount(unit)
    order = np.lexsort((client[first], -rows, ~alone[first], group[first]))  # of units: the first of a group decides
    of_group = group[first][order]
    begins = np.r_[True, of_group[1:] != of_group[:-1]] if len(order) else np.zeros(0, dtype=bool)
    decided = part[first][order][begins][np.cumsum(begins) - 1]
    by_unit = np.empty_like(decided)
    by_unit[order] = decided
    return np.asarray(by_unit[unit])
