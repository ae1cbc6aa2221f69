"""Signs that test rows are known from training: columns that name what several rows belong to, and equal rows."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from piebald.contracts import Split
from piebald.data.clients.lists import Lists
from piebald.data.partition.row_keys import RowKeys
from piebald.data.partition.split import Floats, Ints
from piebald.data.preparation.columns import LARGEST, is_called_identifier

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
