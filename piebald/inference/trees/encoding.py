"""Clients' columns as the numbers that trees see: gaps stay gaps, and text has a column for each category."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from piebald.contracts import Clients, Split
from piebald.core import pytree
from piebald.core.arguments import Share
from piebald.core.errors import SettingError, shown, unknown
from piebald.core.moments import Floats
from piebald.core.targets import IGNORED
from piebald.data.clients.client_tables import target_gaps
from piebald.data.clients.owner import Owner, is_frame, read_owners
from piebald.data.clients.prepared import PreparedClients, columns_of, prepared
from piebald.data.clients.sources import clients_from
from piebald.data.partition.leakage import SPLITS
from piebald.data.partition.split import SplitSettings
from piebald.data.preparation.columns import classes_of, factorized, in_order, numbers_of
from piebald.data.preparation.preparation import Preparation, PrepareSettings
from piebald.inference.columns import TARGET, named_inputs
from piebald.inference.trees.forest import MOST_COLUMNS, Floats32, Objective, Target

_MOST_CLASSES = 100


@dataclass(frozen=True, slots=True, eq=False)
class TreeRows:
    """The rows of one client.

    Attributes:
        name: the client's name.
        x: inputs [n, d] of each split, NaN for a gap.
        y: targets [n] of each split, a class as its number.
        weights: how much each row of a split counts [n]; without those whose rows count alike.
    """

    name: str
    x: Mapping[Split, Floats32]
    y: Mapping[Split, Floats]
    weights: Mapping[Split, Floats] = field(default_factory=dict)

    def pooled(self, others: Sequence[TreeRows]) -> TreeRows:
        """Return these rows and those of others, as of one client of this name."""
        clients = [self, *others]
        x: dict[Split, Floats32] = {split: np.concatenate([client.x[split] for client in clients]) for split in self.x}
        y: dict[Split, Floats] = {split: np.concatenate([client.y[split] for client in clients]) for split in self.y}
        weights: dict[Split, Floats] = {
            split: np.concatenate([client.weights.get(split, np.ones(len(client.y[split]))) for client in clients])
            for split in self.x if any(client.weights for client in clients)
        }  # fmt: skip
        return TreeRows(self.name, x, y, weights)


def usable(x: Floats32, missing: float | None, owner: str) -> Floats32:
    """Return inputs [n, d] as float32 with NaN for gaps.

    Args:
        x: the inputs.
        missing: a number that stands for a gap, None for none.
        owner: the owner of the rows in words, for the error message.

    Raises:
        SettingError: a number is infinite, or too large for float32.
    """
    # float32 is what xgboost compares with thresholds: in float64 a row could go to another side here
    inputs = np.ascontiguousarray(x, dtype=np.float32)
    if missing is not None:
        # after the conversion, since a number such as -0.1 is another one in float32 than in float64
        inputs = np.where(inputs == np.float32(missing), np.float32(np.nan), inputs)
    if np.isinf(inputs).any():
        column = int(np.nonzero(np.isinf(inputs).any(0))[0][0])
        raise SettingError(f"{owner} has a number in column {column} of the inputs that is infinite or above 3e38: "
                           "write a gap in its place")  # fmt: skip
    return inputs


@dataclass(frozen=True, slots=True, eq=False)
class Encoding:
    """The columns that trees see: those of a prepared table before they are scaled, or numbers as they are.

    Attributes:
        columns: their names, in order.
        missing: a number that stands for a gap, None for none.
        preparation: of the clients' tables, None where inputs are numbers already.
        scaled: whether trees see the inputs that the preparation makes, as those of sites do, gaps filled.
    """

    columns: list[str]
    missing: float | None
    preparation: Preparation | None = None
    scaled: bool = False

    @classmethod
    def of_table(cls, table: Mapping[str, Any]) -> Encoding:
        """Return the encoding that `table` has written; what is none raises KeyError, TypeError or ValueError."""
        missing, agreed = table["missing"], table["preparation"]
        preparation = None if agreed is None else Preparation(**agreed)
        columns = [*map(str, table["columns"])]
        return cls(columns, None if missing is None else float(missing), preparation, bool(table["scaled"]))

    def table(self) -> dict[str, Any]:
        """Return the encoding as JSON values."""
        agreed = None if self.preparation is None else self.preparation.model_dump()
        return {"columns": self.columns, "missing": self.missing, "preparation": agreed, "scaled": self.scaled}

    def inputs(self, rows: Any, client: str | None = None) -> Floats32:
        """Return the inputs [n, d] of rows.

        Args:
            rows: a pandas DataFrame, or inputs [n, d].
            client: whose they are.

        Raises:
            SettingError: a column is missing, a number is infinite, or there is another number of inputs.
        """
        if not is_frame(rows):
            x = np.asarray(rows)
        elif self.preparation is not None and self.scaled:
            x = self.preparation.transform(rows, client)
        elif self.preparation is not None:
            x = self.preparation.unscaled(rows, client).to_numpy(dtype=np.float64)
        else:
            if missing := [name for name in self.columns if name not in rows.columns]:
                raise unknown("column", missing[0], map(str, rows.columns))
            x = np.column_stack([numbers_of(rows[name]) for name in self.columns])
        if x.ndim != 2 or x.shape[1] != len(self.columns):
            raise SettingError(f"rows must be [n, {len(self.columns)}], got {list(x.shape)}")
        with np.errstate(over="ignore"):  # what is too large for float32 is refused as infinite
            return usable(x.astype(np.float32), self.missing, "the table" if client is None else f"client {client!r}")


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
    seed: int, missing: float | None, split: SplitSettings | None = None, prepare: Any = None,
    weights: str | None = None,
) -> TreeData:  # fmt: skip
    """Read rows; the arguments are those of `trees`.

    Raises:
        SettingError: an argument is wrong, or the target does not fit the objective.
    """
    name, dropped = TARGET if target is None else target, 0
    if columns is not None and not columns:
        raise SettingError("columns must name at least one column to predict from, got none: leave them out for all")
    if weights is not None and weights in (columns or ()):
        raise SettingError(f"columns must not include the weights {weights!r}: leave it out")
    if name in (columns or ()):
        raise SettingError(f"columns must not include the target {name!r}: leave it out")
    settings = prepare if isinstance(prepare, PrepareSettings) else PrepareSettings(**prepare or {})
    divided = {"validation": validation, "test": test, "split": split}
    given: dict[str, Any] = {argument: value for argument, value in divided.items() if value is not None}
    owners = read_owners(source, client, cleaning=settings.cleaning)
    clients = owners[0].clients
    if clients is not None:
        if weights is not None:
            raise SettingError("row_weights names a column of a table, and these clients have theirs: leave it out")
        # their splits may be kept for a test, which a second division would mix up
        if given:
            raise SettingError(
                f"{next(iter(given))} divides the rows of tables, and these clients have theirs: leave it out"
            )
        if columns_of(clients) is not None and not isinstance(clients, PreparedClients):
            clients = prepared(clients, settings, name, origin="the rows")
    else:
        # settings of a split bring their own seed
        given |= {} if split is not None else {"seed": seed}
        if owners[0].is_frame:
            goals = _targets(owners, name, named=target is not None)
            dropped = sum(int(target_gaps(goal).sum()) for goal in goals)
            given |= {"client": client, "target": name, "features": columns, "prepare": settings, "weights": weights}
            given |= _target_arguments(goals, name, objective)
            # the tables have only these columns from here on, under the names of the preparation
            columns = None
        elif weights is not None:
            raise SettingError("row_weights names a column of a table, and these rows are in none: leave it out")
        clients = clients_from(owners, **given)
    chosen, classes = target_of(clients, name, objective)
    encoding = _encoding(clients, columns, features, missing)
    rows = [_rows(clients, number, encoding, columns, features) for number in range(len(clients))]
    return TreeData(rows, encoding, chosen, name, classes, dropped)


def _targets(owners: Sequence[Owner], name: str, *, named: bool) -> list[Any]:
    """Return the column of targets of each table."""
    for owner in owners:
        if name not in owner.columns:
            raise (
                unknown("column", name, owner.columns) if named
                else SettingError(
                    f"name the column to predict, target (--target): there are {', '.join(owner.columns)}"
                )
            )  # fmt: skip
    return [owner.content[name] for owner in owners]


def _target_arguments(goals: Sequence[Any], name: str, objective: Objective | None) -> dict[str, Any]:
    """Return what `clients_from` is to know of the targets, so that they are what the objective takes.

    Raises:
        SettingError: classes are asked for, and the target has amounts.
    """
    import pandas

    if objective in (None, "regression"):
        return {"regression": objective == "regression"}
    # of all clients, since one of them may lack a class
    goal = pandas.concat(goals)
    if classes_of(goal) is not None:
        return {}
    values = np.unique(numbers_of(goal[~target_gaps(goal)]))
    if len(values) > _MOST_CLASSES or (values != np.round(values)).any():
        raise SettingError(
            f"under {objective!r} the target {name!r} must be at most {_MOST_CLASSES} whole numbers or names, got "
            f"numbers like {shown(float(values[0]))}"
        )
    return {"classes": in_order(factorized(goal)[1])}


def target_of(
    clients: Clients, name: str = TARGET, objective: Objective | None = None
) -> tuple[Target, tuple[str, ...]]:
    """Return the objective, and the names of the classes."""
    if clients.classes is None:
        if objective not in (None, "regression"):
            raise SettingError(
                f"under {objective!r} the target {name!r} must be classes, and it has numbers to predict"
            )
        return Target("regression"), ()
    classes = tuple(map(str, clients.classes))
    if objective == "regression":
        raise SettingError(f"the target {name!r} holds classes, so objective must be 'binary' or 'multiclass'")
    if len(classes) < 2 or (objective == "binary" and len(classes) != 2):
        raise SettingError(f"the target {name!r} must have two classes, or more under 'multiclass', got {len(classes)}")
    return Target(objective or ("binary" if len(classes) == 2 else "multiclass"), len(classes)), classes


def _encoding(
    clients: Clients, columns: Sequence[str] | None, features: Sequence[str] | None, missing: float | None
) -> Encoding:
    preparation = clients.preparation if isinstance(clients, PreparedClients) else None
    if isinstance(clients, PreparedClients):
        # no rows are needed to know the columns
        names = [*clients.preparation.unscaled(clients.raw(0, "train").head(0)).columns]
    else:
        names = list(named_inputs(clients.rows(0, "train").x, features))
    for column in columns or ():
        if column not in names:
            raise unknown("column", column, names)
    encoding = Encoding(names if columns is None else list(columns), missing, preparation)
    if not 0 < len(encoding.columns) <= MOST_COLUMNS:
        raise SettingError(f"trees are for 1 to {MOST_COLUMNS:,} columns, got {len(encoding.columns):,}")
    return encoding


def _rows(
    clients: Clients, number: int, encoding: Encoding, columns: Sequence[str] | None, features: Sequence[str] | None
) -> TreeRows:
    """Return a client's inputs and targets, without rows that have no target."""
    name = str(clients.names[number])
    x, y, weights = dict[Split, Floats32](), dict[Split, Floats](), dict[Split, Floats]()
    tables = clients if isinstance(clients, PreparedClients) else None
    for split in SPLITS:
        rows = (clients if tables is None else tables.unchanged).rows(number, split)
        if tables is None:
            named = named_inputs(rows.x, features)
            inputs: Any = np.column_stack([named[column] for column in encoding.columns])
        else:
            inputs = tables.raw(number, split)
        labels = pytree.single(rows.y, "trees").detach().cpu().double().reshape(-1).numpy()
        # a class that is not known is IGNORED, since whole numbers have no NaN; a regression may have that amount
        known = ~np.isnan(labels) & ((clients.classes is None) | (labels != IGNORED))
        x[split], y[split] = encoding.inputs(inputs, name)[known], labels[known]
        if rows.weight is not None:
            weights[split] = rows.weight.double().numpy()[known]
    return TreeRows(name, x, y, weights)
