"""What clients hold, as columns with names: numbers with gaps, or text."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from piebald.contracts import Clients, HoldsRows, RowsAtSites, Split
from piebald.core import pytree
from piebald.core.errors import SettingError, shown, unknown
from piebald.core.moments import Floats
from piebald.data.clients.client_tables import is_table, read_table
from piebald.data.clients.convert import class_numbers
from piebald.data.partition import clients_from
from piebald.statistics.bounded_sums import as_text

TARGET = "target"  # the name of a column of targets that has none
MOST_COLUMNS = 4096
MOST_CODES = 100  # categories of a column that become columns


@dataclass(frozen=True, slots=True, eq=False)
class ClientColumns:
    """The rows of one client.

    Attributes:
        name: the client's name.
        rows: number of rows.
        numbers: columns of numbers [n] float64 by name; NaN where a value is missing.
        texts: columns of text [n] by name; None where a value is missing.
    """

    name: str
    rows: int
    numbers: Mapping[str, Floats]
    texts: Mapping[str, NDArray[np.object_]]

    def matrix(self, names: Sequence[str]) -> Floats:
        """Columns of numbers [n, d]."""
        return np.stack([self.numbers[name] for name in names], 1) if names else np.zeros((self.rows, 0))

    def text(self, name: str) -> NDArray[np.object_]:
        """A column as text [n]; whole numbers as such, "3" for 3.0."""
        if name in self.texts:
            return self.texts[name]
        return as_text(self.numbers[name])


def columns_of(
    source: Any, client: str | None, columns: Sequence[str] | None, split: Split, features: Sequence[str] | None = None
) -> list[ClientColumns]:
    """Each client's columns, from anything that holds rows.

    Args:
        source: a pandas DataFrame or the path of a table, with the column `client`; a mapping from clients' names to
            such tables of their own; `Clients`; or anything else that `clients_from` accepts.
        client: the column that names the client of each row.
        columns: the columns that are wanted; None for all.
        split: whose rows, where clients have splits; tables are taken whole.
        features: names of the inputs, where clients have no tables; "x0", "x1", ... by default.

    Raises:
        SettingError: there are no clients or columns, or clients hold different ones.
    """
    frames = _frames(source, client)
    if frames is not None:
        found = [_of_frame(name, frame, columns) for name, frame in frames.items()]
    else:
        if client is not None:
            raise SettingError(f"client names a column of a table, got a {type(source).__name__}: leave client out")
        holders: Clients = cast(Clients, source) if isinstance(source, HoldsRows) else clients_from(source)
        found = _of_clients(holders, split, features, columns)
    if not found:
        raise SettingError("there are no clients: give at least one")
    return _alike(found)


def _frames(source: Any, client: str | None) -> dict[str, Any] | None:
    """Each client's own table, None where the source has no tables."""
    if isinstance(source, Mapping) and source and all(is_frame(one) or _is_path(one) for one in source.values()):
        if client is not None:
            raise SettingError("client names a column, but each client has a table of its own: leave client out")
        return {str(name): read_table(Path(one)) if _is_path(one) else one for name, one in source.items()}
    table = read_table(Path(source)) if _is_path(source) else source
    if not is_frame(table):
        return None
    if client is None:
        raise SettingError(
            f"a table needs client='...', the column that names the client of each row: it has {_listed(table.columns)}"
        )
    if client not in table.columns:
        raise unknown("column", client, map(str, table.columns))
    if gaps := int(table[client].isna().sum()):
        raise SettingError(f"column {client!r} names no client in {gaps} of {len(table)} rows: drop these rows")
    return {str(name): part.drop(columns=client) for name, part in table.groupby(client, sort=True)}


def is_frame(value: Any) -> bool:
    """Whether something is a pandas DataFrame, without importing pandas."""
    return any(
        base.__module__.partition(".")[0] == "pandas" and base.__name__ == "DataFrame" for base in type(value).__mro__
    )


def _is_path(value: Any) -> bool:
    return isinstance(value, str | Path) and is_table(value)


def _listed(names: Any) -> str:
    return ", ".join(map(str, names))


def _of_frame(name: str, frame: Any, columns: Sequence[str] | None) -> ClientColumns:
    known = [str(column) for column in frame.columns]
    if len(set(known)) < len(known):
        twice = next(column for place, column in enumerate(known) if column in known[:place])
        raise SettingError(f"column {twice!r} of client {name!r} occurs twice: rename one of them")
    for column in columns or ():
        if column not in known:
            raise SettingError(f"client {name!r} has no column {column!r}: it has {_listed(known)}")
    numbers, texts = {}, {}
    for column in known if columns is None else columns:
        series = frame[column] if column in frame.columns else frame.iloc[:, known.index(column)]
        kind = getattr(series.dtype, "kind", "O")
        if kind in "biuf":
            numbers[column] = np.asarray(series.to_numpy(dtype=np.float64, na_value=np.nan))
        elif series.isna().all():  # nothing at all: whatever the other clients have there
            numbers[column] = np.full(len(series), np.nan)
        else:
            texts[column] = np.array(
                [None if gap else str(value) for value, gap in zip(series, series.isna(), strict=True)], dtype=object
            )
    return ClientColumns(name, len(frame), numbers, texts)


def _of_clients(
    clients: Clients, split: Split, features: Sequence[str] | None, columns: Sequence[str] | None
) -> list[ClientColumns]:
    if isinstance(clients, RowsAtSites) and clients.elsewhere:
        raise SettingError(
            "rows are at the sites of a federation: ask them with piebald statistics FILE --credentials FOLDER"
        )
    found = []
    for client in range(len(clients)):
        rows = clients.rows(client, split)
        numbers = named_inputs(rows.x, features)
        texts: dict[str, NDArray[np.object_]] = {}
        labels = class_numbers(rows.y)
        if clients.classes is not None and labels is not None:
            classes = list(clients.classes)
            texts[TARGET] = np.array([classes[label] for label in labels.tolist()], dtype=object)
        elif isinstance(rows.y, Tensor):
            flat = rows.y.detach().cpu().double().reshape(len(rows), -1).numpy()
            own = [TARGET] if flat.shape[1] == 1 else [f"{TARGET}{place}" for place in range(flat.shape[1])]
            numbers |= {name: flat[:, place] for place, name in enumerate(own)}
        for column in columns or ():
            if column not in numbers and column not in texts:
                raise unknown("column", column, [*numbers, *texts])
        wanted = [*numbers, *texts] if columns is None else columns
        found.append(
            ClientColumns(
                str(clients.names[client]),
                len(rows),
                {name: numbers[name] for name in wanted if name in numbers},
                {name: texts[name] for name in wanted if name in texts},
            )
        )
    return found


def named_inputs(x: Any, features: Sequence[str] | None) -> dict[str, Floats]:
    """Inputs of one tensor [n, ...], flattened, as columns with names.

    Raises:
        SettingError: names are not as many as numbers, or there are too many.
    """
    flat = pytree.single(x, "statistics of inputs").detach().cpu().to(torch.float64)
    flat = flat.reshape(len(flat), math.prod(flat.shape[1:]))  # of a split without rows, too
    width = flat.shape[1]
    if features is not None and len(features) != width:
        raise SettingError(f"features must name each of the {width} numbers of an input, got {len(features)} names")
    if width > MOST_COLUMNS:
        raise SettingError(f"statistics are for tables of at most {MOST_COLUMNS:,} columns, got {width:,}")
    names = [f"x{place}" for place in range(width)] if features is None else features
    return {name: flat[:, place].numpy() for place, name in enumerate(names)}


def _alike(clients: list[ClientColumns]) -> list[ClientColumns]:
    """Clients with the same columns, a column of numbers at one being one at all.

    Raises:
        SettingError: they have different columns, or text where another has numbers.
    """
    wanted = [*clients[0].numbers, *clients[0].texts]
    if not wanted:
        raise SettingError("there is no column: give at least one")
    texts = {name for one in clients for name in one.texts}
    found = []
    for one in clients:
        own = {*one.numbers, *one.texts}
        if missing := sorted({*wanted} - own) or sorted(own - {*wanted}):
            raise SettingError(
                f"clients must have the same columns, but {shown(missing[0])} is not in the tables of both "
                f"{clients[0].name!r} and {one.name!r}: add it, or name the columns that you want"
            )
        for name in sorted(texts & {*one.numbers}):
            if not np.isnan(one.numbers[name]).all():
                holder = next(other for other in clients if name in other.texts)
                value = next(value for value in holder.texts[name] if value is not None)
                raise SettingError(
                    f"column {name!r} must hold numbers at all clients or text at all: client {one.name!r} has "
                    f"numbers, client {holder.name!r} has text like {shown(value, 30)}"
                )
        empty = {name: np.full(one.rows, None, dtype=object) for name in texts & {*one.numbers}}
        numbers = {name: one.numbers[name] for name in wanted if name not in texts}
        found.append(ClientColumns(one.name, one.rows, numbers, {**one.texts, **empty}))
    return found


def categories(clients: Sequence[ClientColumns], names: Sequence[str]) -> dict[str, list[str]]:
    """The categories of columns of text at any client, sorted.

    Raises:
        SettingError: there are more than a model can have a coefficient or a column for.
    """
    found = {}
    for name in names:
        values = {str(value) for one in clients for value in one.texts[name].tolist() if value is not None}
        if len(values) > MOST_CODES:
            raise SettingError(f"column {name!r} has {len(values):,} categories, at most {MOST_CODES} are allowed")
        found[name] = sorted(values)
    return found
