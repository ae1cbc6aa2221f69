"""Tables with a client column: pandas, Hugging Face data sets, `flwr-datasets` partitioners.

The rows of a table divided as those of clients are, for what reads tables as they are.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from piebald.contracts import Split
from piebald.core import pytree
from piebald.core.arguments import checked
from piebald.core.errors import SettingError, shown, unknown
from piebald.data.clients.convert import Array, Collate, array, input_arrays, inputs
from piebald.data.clients.lists import Lists
from piebald.data.clients.owner import Owner
from piebald.data.clients.table_files import files_of as files_of
from piebald.data.clients.table_files import is_table as is_table
from piebald.data.clients.table_files import mixed_reason
from piebald.data.clients.table_files import read_table as read_table
from piebald.data.clients.target_columns import CountAndExposure, PairOfColumns, target_columns
from piebald.data.partition.leakage import SPLITS, RowKeys, three_ways, with_suspects
from piebald.data.partition.split import Ints, SplitSettings
from piebald.data.preparation.columns import (
    ROWS,
    CodedTable,
    RowsOfFile,
    are_labels,
    classes_of,
    factorized,
    guess_columns,
    row_number,
    truths_of,
)
from piebald.data.preparation.columns import numbers_of as column_numbers
from piebald.data.preparation.written_forms import warn_of_like_names

BY_SHARES = SplitSettings()
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class ClientTable:
    """Rows of all clients: inputs, unconverted targets, the client of each row, the clients' names.

    Inputs and targets are arrays, or tuples or dicts of arrays.

    `split` has the place of each row's part in `leakage.SPLITS`, where clients come with their own parts, and
    `keys` what columns say of how rows are divided; `origin` is the file, for messages.  `features` and `target` are
    the columns of inputs [n, d] and of targets, where these have names; `columns` says how inputs are columns of a
    table, where they are to be prepared.
    `words` are the texts of which `y` has places, where targets are text.
    `lacking` names the inputs that a client, by number, has not: its rows of them are zeros.
    `weights` say how much each row counts in a mean [n] float32, None where all count alike.
    """

    x: Any
    y: Any
    client: Ints
    names: Sequence[str]
    classes: Sequence[str] | None = None
    split: Ints | None = None
    keys: RowKeys | None = None
    origin: str = "the data"
    features: Sequence[str] | None = None
    target: str | Sequence[str] | None = None
    columns: CodedTable | None = None
    words: Sequence[str] | None = None
    lacking: Mapping[int, frozenset[str]] = field(default_factory=dict)
    weights: Array | None = None

    def of(self, number: int | None, name: str) -> ClientTable:
        """Return the rows of one client, of all where its number is None, as those of one with this name."""
        if number is None or len(self.names) == 1:
            return replace(self, client=np.zeros_like(self.client), names=[name])
        rows = np.flatnonzero(self.client == number)

        def own(values: Any) -> Any:
            return None if values is None else values[rows]

        columns = self.columns and replace(self.columns, labels=self.columns.labels_of(rows))
        keys = self.keys and self.keys.at(rows)
        return replace(self, x=pytree.mapped(own, self.x), y=pytree.mapped(own, self.y), split=own(self.split),
                       client=np.zeros(len(rows), dtype=np.int64), names=[name], keys=keys, columns=columns,
                       weights=own(self.weights),
                       lacking={0: names} if (names := self.lacking.get(number)) else {})  # fmt: skip


@dataclass(frozen=True, slots=True, eq=False)
class Reading:
    """What is taken of the rows that were given, and how.

    Attributes:
        client, target, features, weights, tokens, collate, length: see `clients_from`.
        split: how rows are divided, which may name columns.
        coded: whether the columns of tables are to be prepared, so that they may have gaps and text; else they are
            numbers.
        owned: whether a table must have a column of clients; without one, all its rows belong to one client.
        apart: columns that are no inputs unless features name them, besides those that have another role.
    """

    client: str | None = None
    target: str | Sequence[str] | Mapping[str, str | float] | None = None
    features: Sequence[str] | None = None
    tokens: bool = False
    collate: Collate = "stack"
    length: int | None = None
    split: SplitSettings = BY_SHARES
    coded: bool = False
    owned: bool = True
    apart: Sequence[str] = ()
    weights: str | None = None

    @property
    def roles(self) -> tuple[str, ...]:
        """Columns that are no inputs by their role, besides the client's and the targets."""
        return (*self.split.columns, *self.apart, *(() if self.weights is None else (self.weights,)))

    @property
    def targets(self) -> tuple[str, ...]:
        """The columns to predict, none where that is not said."""
        return () if self.target is None else (self.target,) if isinstance(self.target, str) else tuple(self.target)

    def __post_init__(self) -> None:
        object.__setattr__(self, "target", target_columns(self.target))


def _columns(
    columns: Sequence[str], reading: Reading, owned: bool = False, origin: str = ""
) -> tuple[str, str, list[str]]:
    """The columns to use, after a check; if rows are `owned` already, the target column stands in for the client's."""
    features, target, others = reading.features, next(iter(reading.targets), None), reading.targets[1:]
    client = target if owned else reading.client
    for role, column in (("target", target), ("client", client)):
        if column is None:
            raise SettingError(
                f"a table needs {role}='...', the column that {_roles[role]}: it has {', '.join(columns)}"
            )
    assert client is not None  # for the type checker; refused above
    assert target is not None
    if isinstance(features, str):
        raise SettingError(f"features must be a list of columns, got {features!r}: write features=[{features!r}]")
    apart = (client, target, *others, *reading.roles)
    chosen = [column for column in columns if column not in apart] if features is None else list(features)
    weights = () if reading.weights is None else (reading.weights,)
    for column in (client, target, *others, *weights, *chosen):
        if column not in columns:
            raise SettingError(f"{origin}{unknown('column', column, columns)}")
    if not chosen:
        raise SettingError(f"there is no column to predict from: the table has only {', '.join(columns)}")
    if features is not None and (twice := next((name for name in chosen if chosen.count(name) > 1), None)):
        raise SettingError(f"features must be different columns, got {twice!r} twice")
    if client == target and not owned:
        raise SettingError(f"client and target must be different columns, got {client!r} for both")
    if client in others or len({*reading.targets}) < len(reading.targets):
        raise SettingError(f"targets must be different columns beside the client's, got {', '.join(reading.targets)}")
    if reading.weights in (client, target, *others):
        raise SettingError(f"weights must be a column beside the client's and the target's, got {reading.weights!r}")
    roles = [("client", client), *(("target", column) for column in (target, *others))]
    for role, column in (*roles, *(("weights", column) for column in weights)):
        if column in chosen:
            raise SettingError(f"features must not include the {role} column {column!r}: leave it out")
    return client, target, chosen


PREPARE = "prepare = 'federated' (an argument of clients_from, a line of an experiment file)"
_roles = {"client": "names the client of each row", "target": "is to be predicted"}


def from_frames(frames: Mapping[str, Any], reading: Reading) -> ClientTable:
    """Make a table from one of each client, see `from_frame`.

    Args:
        frames: a pandas DataFrame by client.
        reading: what is taken of them.

    Raises:
        SettingError: a column is in the tables of some clients only, or as for `from_frame`.
    """
    import pandas

    if empty := next((name for name, table in frames.items() if not len(table)), None):
        raise SettingError(f"the table of client {empty!r} has no rows: leave it out")
    wanted = None if reading.features is None else [*reading.targets, *reading.features, *reading.roles]
    # gaps of columns that are prepared can be filled, and nothing else can stand for a target or a weight
    check_same_columns(frames, [*reading.targets, *reading.roles] if reading.coded else wanted)
    warn_of_lacking(frames, wanted)
    frame = next(iter(frames.values()))
    # tables may have a column of this name themselves
    column = next(name for name in ("client", "client of the row") if name not in frame.columns)
    joined = pandas.concat([table.assign(**{column: name}) for name, table in frames.items()], ignore_index=True)
    # pandas keeps attributes only where all tables have the same ones
    joined.attrs = {ROWS: tuple(
        rows._replace(name=table.attrs.get("file") or f"the table of {name!r}") for name, table in frames.items()
        for rows in table.attrs.get(ROWS, (RowsOfFile(None, len(table), 1),))
    )}  # fmt: skip
    return from_frame(joined, replace(reading, client=column, owned=True))


def check_same_columns(frames: Mapping[str, Any], wanted: Sequence[str] | None = None) -> None:
    """Refuse a column, one of those that are wanted, that is in the tables of some clients only."""
    for (first, frame), (name, other) in pairwise(frames.items()):
        differing = frame.columns.symmetric_difference(other.columns)
        if column := next((column for column in differing if wanted is None or column in wanted), None):
            holder, lacking = (first, name) if column in frame.columns else (name, first)
            raise SettingError(
                f"column {column!r} is in the table of client {holder!r} and not in that of {lacking!r}: add it "
                "there, or name the columns that all have"
            )


def warn_of_lacking(frames: Mapping[str, Any], wanted: Sequence[str] | None = None) -> list[str]:
    """Log a warning of each wanted column that some clients' tables lack, and return all columns."""
    columns = [*dict.fromkeys(column for frame in frames.values() for column in frame.columns)]
    for column in columns:
        lacking = [str(name) for name, frame in frames.items() if column not in frame.columns]
        if lacking and (wanted is None or column in wanted):
            _log.warning(
                "column %r is not in the table%s of %s, whose rows count as gaps in it",
                column, "s" * (len(lacking) > 1), shown(", ".join(lacking), 80)[1:-1],
            )  # fmt: skip
    return columns


def coded_owners(values: Array) -> tuple[Ints, list[str]]:
    """Codes [n] and names of the clients, sorted."""
    names, codes = np.unique(values, return_inverse=True)
    return codes.astype(np.int64), [str(name) for name in names.tolist()]


def by_client(owners: Sequence[Owner], client: str | None) -> dict[str, Any]:
    """Return the table of each client by name: of each owner, or of each value of a column of the only owner's table.

    Raises:
        SettingError: no column of clients is named, there is none of its name, or no row names a client.
    """
    if owners[0].name is not None:
        return {str(owner.name): owner.frame for owner in owners}
    frame = owners[0].frame
    if client is None:
        raise SettingError(
            f"a table needs client='...', the column that {_roles['client']}: it has {', '.join(owners[0].columns)}"
        )
    frame, codes, names = owners_of(frame, client)
    return {names[code]: rows.drop(columns=client) for code, rows in frame.groupby(codes)}


def owners_of(frame: Any, client: str) -> tuple[Any, Ints, list[str]]:
    """Return the rows whose client a column names, their clients as codes [n], and the clients' names.

    Raises:
        SettingError: there is no such column, or no row names a client.
    """
    if client not in frame.columns:
        raise unknown("column", client, map(str, frame.columns))
    frame = known(frame, client, "clients")
    return frame, *owners_in(frame[client])


def owners_in(series: Any) -> tuple[Ints, list[str]]:
    """Return the codes [n] and names of the clients in a column without gaps."""
    import pandas

    codes, different = pandas.factorize(series)  # few, where the column as text would take much memory
    places, names = coded_owners(plain(pandas.Series(different)))
    return places[codes], names


def from_frame(frame: Any, reading: Reading) -> ClientTable:
    """Make a table from a pandas DataFrame.

    Args:
        frame: the rows.
        reading: what is taken of them.

    Raises:
        SettingError: a column that is missing, has gaps, or does not hold numbers.
    """
    import pandas

    if not_text := [column for column in frame.columns if not isinstance(column, str)]:
        raise SettingError(
            f"column names must be text, got {not_text[0]!r}: rename them with frame.rename(columns=str)"
        )
    client, split = reading.client, reading.split
    alone = not reading.owned and client is None
    owner, target, chosen = _columns(list(frame.columns), reading, alone, _origin(frame))
    if reading.features is None and (nameless := nameless_columns(chosen)):
        _log.warning(
            "%scolumn %r has no name, as pandas and R write row numbers: left out", _origin(frame), nameless[0]
        )
        chosen = [name for name in chosen if name not in nameless]
    origin = _origin(frame)
    if not len(frame):
        raise SettingError("the table must have at least one row, got none")
    _check_once(frame, [owner, target, *(() if reading.weights is None else (reading.weights,))])
    if reading.weights is not None:
        frame = _weighed(frame, reading.weights)
    frame, several = known(frame, owner, "clients"), reading.targets if len(reading.targets) > 1 else ()
    frame = known_together(frame, several) if several else known(frame, target, "targets")
    columns = None
    if reading.coded and not reading.tokens:
        _check_once(frame, chosen)
        columns, x = CodedTable.of(frame[chosen])
    else:
        x = inputs(numbers_of(frame, chosen, reading.tokens), "the table", reading.tokens)
    goal, words = frame[target], None
    if several:
        goal = target_numbers(frame, several)
        if isinstance(reading.target, CountAndExposure):
            goal[:, 1] /= reading.target.per
            if reason := reading.target.far_reason(goal):
                _log.warning("%s%s", origin, reason)
    elif getattr(goal.dtype, "kind", "O") in "biuf":
        if np.isinf(goal := plain(goal)).any():
            row = row_number(frame, int(np.argmax(np.isinf(goal))))
            raise SettingError(f"{origin}target {target!r} is infinite in row {row}: correct it, or leave the row out")
    elif guess_columns(goal.to_frame(target))[target] == "number":
        goal = column_numbers(goal)
    else:
        goal, different = pandas.factorize(goal)
        words = pandas.Series(different, dtype=object).astype(str).str.strip().tolist()
        warn_of_like_names([*dict.fromkeys(words)], origin, "classes")
    codes, names = owners_in(frame[owner]) if owner == client else _single_client(len(frame))
    warn_of_like_names(names, origin)
    keys = RowKeys.of_table(list(frame.columns), frame.__getitem__, split, client)
    keys = with_suspects(keys, frame, target, (client, *several[1:], *split.columns))
    y = array(goal, f"column {target!r}", "targets")
    about = frame.attrs.get("file", "the data")
    return ClientTable(
        x,
        y,
        codes,
        names,
        keys=keys,
        origin=about,
        features=chosen,
        target=(reading.target if isinstance(reading.target, PairOfColumns) else several) or target,
        columns=columns,
        words=words,
        weights=None if reading.weights is None else column_numbers(frame[reading.weights]).astype(np.float32),
    )


def _weighed(frame: Any, name: str) -> Any:
    """Return the rows that count: one of weight 0 is left out, as if it were not there.

    Raises:
        SettingError: a weight is no finite number of at least 0, or all are 0.
    """
    weights = column_numbers(frame[name])
    if (odd := ~(np.isfinite(weights) & (weights >= 0))).any():
        index = int(odd.argmax())
        raise SettingError(
            f"{_origin(frame)}weights {name!r} must be finite numbers of at least 0, got {weights[index]:g} in row "
            f"{row_number(frame, index)}: correct it, or leave the row out"
        )
    if not weights.any():
        raise SettingError(f"{_origin(frame)}all weights {name!r} are 0, so no row counts")
    if not weights.all():
        _log.warning(
            "%s%d of %d rows have the weight 0: left out", _origin(frame), int((weights == 0).sum()), len(frame)
        )
    return frame[weights > 0]


def target_numbers(frame: Any, names: Sequence[str]) -> Array:
    """Return several targets [n, k] as numbers, labels written as words such as yes and no as 1 and 0.

    Raises:
        SettingError: a column has words of another kind, or an infinite number.
    """
    columns, kinds = [], guess_columns(frame[list(names)])
    for name in names:
        if kinds[name] not in ("number", "boolean"):
            raise SettingError(
                f"{_origin(frame)}target {name!r} must have numbers, or yes and no, where several columns are "
                f"predicted, got {shown(str(plain(frame[name])[0]), 40)}: predict classes of words alone"
            )
        columns.append((column_numbers if kinds[name] == "number" else truths_of)(frame[name]))
    return np.stack(columns, axis=1)


def known_together(frame: Any, names: Sequence[str]) -> Any:
    """Return the rows that have a value in all of several targets; of labels, which may be unknown, in one of them."""
    numbers = target_numbers(frame, names)
    gaps = np.isnan(numbers)
    lacking = gaps.all(1) if are_labels(numbers) else gaps.any(1)
    if lacking.all():
        raise SettingError(f"{_origin(frame)}no row has a value in the targets {', '.join(names)}")
    if lacking.any():
        _log.warning(
            "%stargets have no value in %d of %d rows: these rows are left out",
            _origin(frame),
            lacking.sum(),
            len(frame),
        )
    return frame[~lacking]


def nameless_columns(names: Sequence[str]) -> list[str]:
    """Return the columns whose place in the first line of a file is empty, as pandas calls them."""
    return [*filter(re.compile(r"Unnamed: \d+").fullmatch, names)]


def numbers_of(frame: Any, columns: Sequence[str], whole: bool = False) -> Array:
    """Return columns of a pandas DataFrame that hold numbers without gaps [n, d], as float64, or whole as they are.

    Raises:
        SettingError: a column is missing, occurs twice, has gaps, or does not hold numbers.
    """
    import pandas

    if missing := [column for column in columns if column not in frame.columns]:
        raise unknown("column", missing[0], map(str, frame.columns))
    check_complete(frame, columns, f"set {PREPARE}, by which all clients fill gaps alike")
    for column in columns:
        series = frame[column]
        if getattr(series.dtype, "kind", "O") not in "biuf":
            words = series[pandas.to_numeric(series, errors="coerce").isna()]
            reason = mixed_reason(series) or (
                f"column {column!r} must hold numbers, got {series.dtype} like {[*words, *series][0]!r}: set "
                f"{PREPARE}, by which all clients encode it alike, or leave it out of features"
            )
            raise SettingError(f"{_origin(frame)}{reason}")
    chosen = frame[list(columns)]
    values = np.asarray(chosen.to_numpy() if whole else chosen.to_numpy(dtype=np.float64))
    if not whole and len(endless := np.argwhere(np.isinf(values))):
        row, column = endless[0]
        raise SettingError(
            f"{_origin(frame)}column {columns[column]!r} is infinite in row {row_number(frame, row)}: fill it in, or "
            "drop such rows"
        )
    return values


def _origin(frame: Any) -> str:
    """Return the file of a table, for messages."""
    return f"{frame.attrs['file']}: " if "file" in frame.attrs else ""


def _check_once(frame: Any, columns: Sequence[str]) -> None:
    """Refuse columns that occur twice."""
    if twice := next((column for column in columns if getattr(frame[column], "ndim", 1) != 1), None):
        raise SettingError(f"{_origin(frame)}column {twice!r} occurs twice: rename one of them")


def target_gaps(series: Any) -> NDArray[np.bool_]:
    """Return whether each row [n] has no target: an empty cell, "?", "NA" and the like."""
    if getattr(series.dtype, "kind", "O") in "biuf":
        return np.asarray(series.isna().to_numpy())
    return factorized(series)[0] < 0


def known(frame: Any, column: str, what: str) -> Any:
    """Return the rows that have a value in a column, and say how many are left out.

    Args:
        frame: the rows.
        column: of them.
        what: the column has, "clients" or "targets".

    Raises:
        SettingError: no row has a value.
    """
    gaps = target_gaps(frame[column]) if what == "targets" else frame[column].isna().to_numpy()  # "NA" is a name
    if not gaps.any():
        return frame
    if gaps.all():
        raise SettingError(f"{_origin(frame)}column {column!r} has no value in any row: there is nothing to learn")
    _log.warning(
        "%s%s: column %r has no value in %d of %d rows (row %s%s): these rows are left out",
        _origin(frame), what, column, gaps.sum(), len(frame), row_number(frame, int(np.argmax(gaps))),
        ", ..." if gaps.sum() > 1 else "",
    )  # fmt: skip
    return frame[~gaps]


def check_complete(frame: Any, columns: Sequence[str], remedy: str) -> None:
    """Refuse columns that occur twice or have gaps."""
    _check_once(frame, columns)
    for column in columns:
        series = frame[column]
        if gaps := int(series.isna().sum()):
            row, others = row_number(frame, int(series.isna().to_numpy().argmax())), ", ..." * (gaps > 1)
            place = "" if gaps == len(frame) else f" (row {row}{others})"
            raise SettingError(
                f"{_origin(frame)}column {column!r} has no value in {gaps} of {len(frame)} rows{place}: {remedy}, or "
                "drop these rows"
            )


def _single_client(rows: int) -> tuple[Ints, list[str]]:
    """Codes and names of rows that all belong to one client without a name."""
    return np.zeros(rows, dtype=np.int64), [""]


def plain(series: Any) -> Array:
    """Return a column as numbers where it has numbers (pandas' own types, too), else as text."""
    kind = getattr(series.dtype, "kind", "O")
    if kind in "biuf":
        return np.asarray(series.to_numpy(dtype=getattr(series.dtype, "numpy_dtype", series.dtype)))
    return np.asarray(series.astype(str).to_numpy(dtype=object), dtype=str)


def from_hub(owners: Sequence[Owner], reading: Reading) -> ClientTable:
    """Make a table from Hugging Face data sets: numeric columns, or one column of arrays or images.

    Args:
        owners: one split of a data set each: a single one, or that of each client.
        reading: what is taken of them.

    Raises:
        SettingError: several splits at once, a streamed data set, or a column that is missing, ragged or not numeric.
    """
    for dataset in (owner.content for owner in owners):
        if isinstance(dataset, dict):
            raise SettingError(
                f"pass one split of the data set, like dataset[{next(iter(dataset), 'train')!r}], not all of them"
            )
        if not hasattr(dataset, "select_columns") or not hasattr(dataset, "__len__"):
            raise SettingError(
                f"a streamed data set ({type(dataset).__name__}) has no length: load it without streaming=True"
            )
        if not len(dataset):
            raise SettingError("the data set must have at least one row, got none")
    if owners[0].name is None:
        alone = not reading.owned and reading.client is None
        x, y, owner, classes, keys = _hub_rows(owners[0].content, reading, owned=alone)
        codes, names = _single_client(len(y)) if alone else coded_owners(owner)
    else:
        from datasets import concatenate_datasets

        x, y, _, classes, keys = _hub_rows(
            concatenate_datasets([owner.content for owner in owners]), reading, owned=True
        )
        codes = np.repeat(np.arange(len(owners)), [len(owner.content) for owner in owners])
        names = [str(owner.name) for owner in owners]
    return ClientTable(x, y, codes, names, classes, keys=keys)


def _hub_rows(
    dataset: Any, reading: Reading, *, owned: bool
) -> tuple[Any, Array, Array, Sequence[str] | None, RowKeys]:
    """Inputs, targets, clients (the targets again if rows are `owned` already), names of classes, and keys."""
    import pandas

    named, names = None if owned else reading.client, list(dataset.column_names)
    client, target, chosen = _columns(names, reading, owned)
    keys = RowKeys.of_table(names, lambda column: pandas.Series(dataset[column][:]), reading.split, named)
    # the client's column stands for the target's where rows are owned, and must be named once
    rows = dataset.select_columns([*dict.fromkeys([client, target, *chosen])]).with_format("numpy")[:]
    described = dataset.features
    columns = [_input_column(rows[column], column, described[column]) for column in chosen]
    if len(columns) > 1 and any(column.ndim > 1 for column in columns):
        x = input_arrays(dict(zip(chosen, columns, strict=True)), "the data set")  # inputs by the names of columns
    else:
        x = inputs(
            np.stack(columns, 1) if columns[0].ndim == 1 else columns[0], f"column {chosen[0]!r}", reading.tokens
        )
    y = array(_simple(rows[target], target), f"column {target!r}", "targets")
    owner = _simple(rows[client], client)
    if client != target and (called := getattr(described[client], "names", None)):  # numbers of a ClassLabel
        owner = np.array(called)[owner]
    return x, y, owner, getattr(described[target], "names", None), keys


def _simple(values: Any, column: str) -> Array:
    """A column of numbers or text without gaps."""
    cells = np.asarray(values)
    if cells.dtype == object:
        if gaps := sum(value is None for value in cells.flat):
            raise SettingError(
                f"column {column!r} has no value in {gaps} of {len(cells)} rows: drop them with dataset.filter"
            )
        cells = cells.astype(str)
    return cells


def _input_column(values: Any, column: str, described: Any) -> Array:
    numbers = np.asarray(values) if not isinstance(values, list) else array(values, f"column {column!r}", "inputs")
    if numbers.dtype.kind not in "biuf":
        raise SettingError(
            f"column {column!r} must hold numbers or arrays of one shape, got {described}: "
            f"encode it with dataset.map, or leave it out of features"
        )
    if type(described).__name__ == "Image" and numbers.ndim == 4:  # Pillow's order is height, width, channels
        numbers = numbers.transpose(0, 3, 1, 2)
    if getattr(described, "dtype", None) == "uint8":  # the format widens small integers; images must stay uint8
        numbers = numbers.astype(np.uint8)
    return numbers


@checked
def train_validation_test_split(
    table: Any,
    split: SplitSettings | Mapping[str, Any] | str | None = None,
    *,
    client: str | None = None,
    target: str | None = None,
    regression: bool = False,
) -> dict[Split, Any]:
    """Divide the rows of a table into one table for each split, as `clients_from` and `[split]` divide them.

    Args:
        table: a pandas DataFrame, or the path of a table; gaps and text are left as they are.
        split: `SplitSettings`, or a table of them, or the name of a column of parts.
        client: the column that names the client of each row; None where all are of one.
        target: the column by whose classes rows are stratified, if it has classes.
        regression: the target has numbers to predict, also where all of them are whole.

    Returns:
        pandas DataFrames of the rows "train", "validation" and "test".

    Raises:
        SettingError: there is no such column, or settings do not fit the table.

    Examples:
        >>> import pandas
        >>> visits = pandas.DataFrame({"patient": list("aabbccdd"), "dose": range(8), "ill": list("yynnyynn")})
        >>> parts = train_validation_test_split(visits, {"group": "patient", "test": 0.5}, target="ill")
        >>> {name: len(part) for name, part in parts.items()}
        {'train': 4, 'validation': 0, 'test': 4}
    """
    frame = read_table(Path(table), client) if isinstance(table, str | Path) else table
    if not hasattr(frame, "columns"):
        raise SettingError(f"table must be a pandas DataFrame or the path of a table, got {shown(table)}")
    parts = parts_of(frame, SplitSettings.of(split), client, target, regression)
    return {name: frame[parts == index] for index, name in enumerate(SPLITS)}


def parts_of(
    frame: Any, split: SplitSettings, client: str | None, target: str | None, regression: bool = False
) -> Ints:
    """Return the place of each row's part [n] in `SPLITS`, -1 for none; see `train_validation_test_split`."""
    names = [str(name) for name in frame.columns]
    for column in (client, target):
        if column is not None and column not in names:
            raise unknown("column", column, names)
    kept = frame.reset_index(drop=True)
    for column, what in ((client, "clients"), (target, "targets")):
        kept = kept if column is None else known(kept, column, what)
    codes, own = owners_in(kept[client]) if client is not None else (np.zeros(len(kept), dtype=np.int64), [""])
    keys = RowKeys.of_table(names, kept.__getitem__, split, client)
    keys = with_suspects(keys, kept, target, (client, *split.columns))
    label = None if target is None or regression else _classes(kept[target])
    parts = np.full(len(frame), -1, dtype=np.int64)
    for index, rows in enumerate(three_ways(Lists.of(codes, len(own)), label, split, keys, names=own).values()):
        parts[kept.index.to_numpy()[rows.values]] = index
    return parts


def _classes(series: Any) -> Ints | None:
    """Return the class [n] of each target, -1 where it is missing, None of amounts."""
    classes = classes_of(series)
    if classes is None:
        return None
    codes, words = factorized(series.astype(int) if series.dtype == bool else series)
    return np.array([*map(classes.index, words), -1])[codes]
