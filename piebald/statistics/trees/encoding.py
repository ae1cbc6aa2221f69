"""Clients' columns as the numbers that trees see: gaps stay gaps, and text has a column for each category."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from piebald.contracts import Clients, HoldsRows, Split
from piebald.core.arguments import Share
from piebald.core.errors import SettingError, shown, unknown
from piebald.core.moments import Floats
from piebald.data.clients.client_tables import is_frame, read_table
from piebald.data.clients.divided_tables import parts_of
from piebald.data.clients.lists import Lists
from piebald.data.partition.split import Ints
from piebald.data.partition.split_settings import SplitSettings
from piebald.data.partition.three_way_split import SPLITS, check_shares, three_ways
from piebald.statistics.bounded_sums import as_text
from piebald.statistics.columns import TARGET, ClientColumns, categories_of, columns_of
from piebald.statistics.trees.forest import MOST_COLUMNS, Floats32
from piebald.statistics.trees.settings import Objective
from piebald.statistics.trees.targets import Target

_MOST_CLASSES = 100


@dataclass(frozen=True, slots=True, eq=False)
class TreeRows:
    """The rows of one client.

    Attributes:
        name: the client's name.
        x: inputs [n, d] of each split, NaN for a gap.
        y: targets [n] of each split, a class as its number.
    """

    name: str
    x: Mapping[Split, Floats32]
    y: Mapping[Split, Floats]

    def pooled(self, others: Sequence[TreeRows]) -> TreeRows:
        """Return these rows and those of others, as of one client of this name."""
        clients = [self, *others]
        x: dict[Split, Floats32] = {split: np.concatenate([client.x[split] for client in clients]) for split in self.x}
        y: dict[Split, Floats] = {split: np.concatenate([client.y[split] for client in clients]) for split in self.y}
        return TreeRows(self.name, x, y)


def usable(x: Floats32, missing: float | None, owner: str) -> Floats32:
    """Return inputs [n, d] as float32 with NaN for gaps.

    Args:
        x: the inputs.
        missing: a number that stands for a gap, None for none.
        owner: the owner of the rows in words, for the error message.

    Raises:
        SettingError: a number is infinite, or too large for float32.
    """
    inputs = np.ascontiguousarray(x, dtype=np.float32)
    if missing is not None:
        inputs = np.where(inputs == np.float32(missing), np.float32(np.nan), inputs)
    if np.isinf(inputs).any():
        column = int(np.nonzero(np.isinf(inputs).any(0))[0][0])
        raise SettingError(f"{owner} has a number in column {column} of the inputs that is infinite or above 3e38: "
                           "write a gap in its place")  # fmt: skip
    return inputs


@dataclass(frozen=True, slots=True)
class Encoding:
    """The columns of a table, and the columns that trees see of them.

    Attributes:
        numbers: columns of numbers.
        categories: the categories of columns of text; each becomes a column of 0 and 1, which is a gap where the text
            is missing.
        missing: a number that stands for a gap, None for none.
    """

    numbers: tuple[str, ...]
    categories: Mapping[str, tuple[str, ...]]
    missing: float | None

    @classmethod
    def of_table(cls, table: Mapping[str, Any]) -> Encoding:
        """Return the encoding that `table` has written; what is none raises KeyError, TypeError or ValueError."""
        categories = {str(name): tuple(map(str, values)) for name, values in table["categories"].items()}
        missing = table["missing"]
        return cls(tuple(map(str, table["numbers"])), categories, None if missing is None else float(missing))

    def table(self) -> dict[str, Any]:
        """Return the encoding as JSON values."""
        categories = {name: [*values] for name, values in self.categories.items()}
        return {"numbers": [*self.numbers], "categories": categories, "missing": self.missing}

    @property
    def columns(self) -> list[str]:
        """The names of the columns that trees see."""
        coded = [f"{name}={value}" for name, values in self.categories.items() for value in values]
        return [*self.numbers, *coded]

    def inputs(self, table: ClientColumns) -> Floats32:
        """Return the inputs [n, d] of a client.

        Raises:
            SettingError: a number is infinite.
        """
        columns = [table.numbers[name] for name in self.numbers]
        for name, values in self.categories.items():
            text = table.texts[name]
            gap = np.array([value is None for value in text], dtype=bool)
            columns += [np.where(gap, np.nan, (text == value).astype(np.float64)) for value in values]
        x = np.stack(columns, 1) if columns else np.zeros((table.rows, 0))
        with np.errstate(over="ignore"):  # what is too large for float32 is refused as infinite
            return usable(x.astype(np.float32), self.missing, f"client {table.name!r}")


@dataclass(frozen=True, slots=True, eq=False)
class TreeData:
    """The rows of all clients as trees see them.

    Attributes:
        clients: each client's rows.
        encoding: the columns of the tables, and those that trees see.
        target: the objective.
        name: name of the column that is predicted.
        classes: names of the classes, empty for a regression.
        dropped: rows without a target, which are left out.
    """

    clients: list[TreeRows]
    encoding: Encoding
    target: Target
    name: str
    classes: tuple[str, ...]
    dropped: int


def tree_data(
    source: Any, *, client: str | None, target: str | None, columns: Sequence[str] | None,
    features: Sequence[str] | None, objective: Objective | None, validation: Share | None, test: Share | None,
    seed: int, missing: float | None, split: SplitSettings | None = None,
) -> TreeData:  # fmt: skip
    """Read rows; the arguments are those of `trees`.

    Raises:
        SettingError: an argument is wrong, or the target does not fit the objective.
    """
    name = TARGET if target is None else target
    read_columns = _wanted_columns(columns, name)
    parts = None
    if isinstance(source, HoldsRows):
        for argument, value in (("validation", validation), ("test", test), ("split", split)):
            if value is not None:
                raise SettingError(
                    f"{argument} divides the rows of tables, and these clients have theirs: leave it out"
                )
        tables = {split: columns_of(source, client, read_columns, split, features) for split in SPLITS}
        class_names = cast(Clients, source).classes
    else:
        if split is not None:
            source, parts = _divided_table(source, split, client, name, objective == "regression")
            if validation is not None or test is not None:
                raise SettingError("test and validation belong into split, where that is given: leave them out")
            if read_columns is None:
                apart = (client, *split.columns)
                read_columns = [str(column) for column in source.columns if column not in apart]
        validation, test = validation or 0.0, 0.2 if test is None else test
        check_shares(validation, test)
        tables, class_names = {"train": columns_of(source, client, read_columns, "train", features)}, None
    every_table = [table for tables_of_split in tables.values() for table in tables_of_split]
    encoding = _encoding(every_table, name, missing)
    chosen, classes = _target(every_table, name, objective, class_names)
    rows = {split: [_rows(table, encoding, name, classes) for table in held] for split, held in tables.items()}
    used = sum(len(y) for held in rows.values() for _, y in held)
    # tables come whole; `Clients` have splits of their own
    if parts is not None:
        labelled = [_labelled(table, name, bool(classes)) for table in tables["train"]]
        held = [(x, y, part[has]) for (x, y), part, has in zip(rows["train"], parts, labelled, strict=True)]
        rows = {split: [(x[part == n], y[part == n]) for x, y, part in held] for n, split in enumerate(SPLITS)}
    elif len(rows) == 1:
        rows = _divided(rows["train"], bool(classes), validation or 0.0, test or 0.0, seed)
    clients = []
    for place, table in enumerate(tables["train"]):
        x: dict[Split, Floats32] = {split: held[place][0] for split, held in rows.items()}
        y: dict[Split, Floats] = {split: held[place][1] for split, held in rows.items()}
        clients.append(TreeRows(table.name, x, y))
    return TreeData(clients, encoding, chosen, name, classes, sum(table.rows for table in every_table) - used)


def _divided_table(
    source: Any, split: SplitSettings, client: str | None, target: str | None, regression: bool
) -> tuple[Any, list[Ints]]:
    """Return a table, and the place of each row's part in `SPLITS`, for one client after the other.

    Raises:
        SettingError: it is no table with a column of clients.
    """
    if isinstance(source, str | Path):
        source = read_table(Path(source), client)
    if not is_frame(source) or client is None:
        raise SettingError("split divides the rows of one table with a column client='...': leave it out")
    parts = parts_of(source, split, client, target, regression)
    return source, [parts[rows] for _, rows in sorted(source.groupby(client).indices.items())]


def _wanted_columns(columns: Sequence[str] | None, target: str) -> list[str] | None:
    """Return the columns to read, None for all."""
    if columns is None:
        return None
    if not columns:
        raise SettingError("columns must name at least one column to predict from, got none: leave them out for all")
    if target in columns:
        raise SettingError(f"columns must not include the target {target!r}: leave it out")
    return [*columns, target]


def _encoding(tables: Sequence[ClientColumns], target: str, missing: float | None) -> Encoding:
    first = tables[0]
    if target not in first.numbers and target not in first.texts:
        raise unknown("column", target, [*first.numbers, *first.texts])
    categories = categories_of(tables, [name for name in first.texts if name != target])
    numbers = tuple(name for name in first.numbers if name != target)
    encoding = Encoding(numbers, {name: tuple(values) for name, values in categories.items()}, missing)
    if not 0 < len(encoding.columns) <= MOST_COLUMNS:
        raise SettingError(f"trees are for 1 to {MOST_COLUMNS:,} columns, got {len(encoding.columns):,}")
    return encoding


def _target(
    tables: Sequence[ClientColumns], name: str, objective: Objective | None, class_names: Sequence[str] | None
) -> tuple[Target, tuple[str, ...]]:
    """Return the objective, and the names of the classes."""
    if name in tables[0].texts:
        if objective == "regression":
            raise SettingError(f"the target {name!r} holds text, so objective must be 'binary' or 'multiclass'")
        classes = tuple(class_names or categories_of(tables, [name])[name])
    else:
        values = np.unique(np.concatenate([table.numbers[name] for table in tables]))
        values = values[~np.isnan(values)]
        if np.isinf(values).any():
            raise SettingError(f"the target {name!r} has an infinite number: leave such rows out")
        if objective is None:
            objective = "binary" if set(values.tolist()) == {0.0, 1.0} else "regression"
        if objective == "regression":
            return Target("regression"), ()
        if (values != np.round(values)).any() or len(values) > _MOST_CLASSES:
            raise SettingError(
                f"under {objective!r} the target {name!r} must be at most {_MOST_CLASSES} whole numbers or names, got "
                f"numbers like {shown(float(values[0]))}"
            )
        classes = tuple(map(str, as_text(values)))
    if len(classes) < 2 or (objective == "binary" and len(classes) != 2):
        raise SettingError(f"the target {name!r} must have two classes, or more under 'multiclass', got {len(classes)}")
    return Target(objective or ("binary" if len(classes) == 2 else "multiclass"), len(classes)), classes


def _labelled(table: ClientColumns, target: str, classes: bool) -> NDArray[np.bool_]:
    """Return which rows [n] of a client have a target."""
    texts = classes or target in table.texts
    return np.array([text is not None for text in table.text(target)]) if texts else ~np.isnan(table.numbers[target])


def _rows(table: ClientColumns, encoding: Encoding, target: str, classes: tuple[str, ...]) -> tuple[Floats32, Floats]:
    """Return a client's inputs and targets, without rows that have no target."""
    if not classes:
        y = table.numbers[target]
    else:
        numbers = {name: float(number) for number, name in enumerate(classes)}
        texts = table.text(target)
        y = np.array([np.nan if text is None else numbers[text] for text in texts], dtype=np.float64)
    labelled = ~np.isnan(y)
    return encoding.inputs(table)[labelled], y[labelled]


def _divided(
    rows: Sequence[tuple[Floats32, Floats]], classes: bool, validation: float, test: float, seed: int
) -> dict[Split, list[tuple[Floats32, Floats]]]:
    """Divide the rows of tables as those of an experiment are divided."""
    targets = np.concatenate([y for _, y in rows])
    sizes = [len(y) for _, y in rows]
    lists = Lists.of(np.repeat(np.arange(len(rows)), sizes), len(rows))
    division = SplitSettings(validation=validation, test=test, seed=seed)
    parts = three_ways(lists, targets.astype(np.int64) if classes else None, division)
    starts = np.cumsum([0, *sizes])
    return {
        split: [(x[held[k] - starts[k]], y[held[k] - starts[k]]) for k, (x, y) in enumerate(rows)]
        for split, held in parts.items()
    }
