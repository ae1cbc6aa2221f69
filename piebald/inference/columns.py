"""The rows of clients as columns with names: numbers with gaps, or text."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray

from piebald.contracts import Clients, Rows, RowsAtSites, Split
from piebald.core import pytree
from piebald.core.errors import SettingError, shown, unknown
from piebald.core.moments import Floats, Moments
from piebald.data.clients.client_tables import by_client, warn_of_lacking
from piebald.data.clients.convert import class_numbers
from piebald.data.clients.owner import read_owners
from piebald.data.clients.prepared import columns_of as coded_columns
from piebald.data.clients.prepared import frame_of
from piebald.data.partition import clients_from
from piebald.data.preparation.answers import KindsAnswer, KindsQuestion, answer, common_kinds, date_forms
from piebald.data.preparation.columns import dates_of, numbers_of, truths_of, words_of
from piebald.data.preparation.preparation import PrepareSettings
from piebald.data.preparation.written_forms import common_units

TARGET = "target"  # the name of a column of targets that has no name
MOST_COLUMNS = 4096
MOST_CODES = 100  # categories of a column that become columns
_CODE = re.compile(r"-?[\d.]+(e[+-]?\d+)?")  # a number as `as_text` writes it


@dataclass(frozen=True, slots=True, eq=False)
class ClientColumns:
    """The rows of one client.

    Attributes:
        name: the client's name.
        rows: number of rows.
        numbers: columns of numbers [n] float64 by name, of dates in days since 1970, and of booleans as 1 and 0; NaN
            where a value is missing.
        texts: columns of text [n] by name; None where a value is missing.
        dates: the columns of numbers that are of dates.
    """

    name: str
    rows: int
    numbers: Mapping[str, Floats]
    texts: Mapping[str, NDArray[np.object_]]
    dates: frozenset[str] = frozenset()

    def text(self, name: str) -> NDArray[np.object_]:
        """Return a column as text [n]; "3" for 3.0."""
        if name in self.texts:
            return self.texts[name]
        return as_text(self.numbers[name])


def client_names(client: str | None) -> set[str]:
    """Return the names by which columns may ask for the client of a row, where no column has them.

    Args:
        client: the column that names the clients of rows, None where there is none.
    """
    return {"client", client or "site"}


def as_text(values: Floats) -> NDArray[np.object_]:
    """Return numbers as categories [rows]: "3" for 3.0, others to six digits, None for missing ones."""
    import pandas as pd

    places, different = pd.factorize(values)
    # the last one is for gaps, whose place is -1
    return np.array([*map(_text, different.tolist()), None], dtype=object)[places]


def check_codes(name: str, categories: Sequence[str]) -> None:
    """Refuse categories of a column of numbers that are no numbers, which no row has.

    Raises:
        SettingError: a category is a word.
    """
    # "NaN" and "inf" parse as numbers in Python and are none here: hence the pattern and not `float`
    if word := next((word for word in categories if not _CODE.fullmatch(word)), None):
        raise SettingError(
            f"column {name!r} has numbers, and {shown(word, 30)} is none: write its categories as numbers, "
            "which are 0 and 1 for words that mean false and true"
        )


def _text(value: float) -> str:
    # codes that were read as floats, since a column had gaps, must match categories that are written as "3"
    return str(int(value)) if value.is_integer() else f"{value:g}"


def asked_owners(
    source: Any, client: str | None, prepare: PrepareSettings | Mapping[str, Any] | None, apart: Collection[str | None]
) -> Any:
    """Return the rows that a question is about as the settings of [prepare] read them: cleaned, and gaps empty.

    Args:
        source, client: see `columns_of`.
        prepare: the settings; None takes rows as they are.
        apart: columns that stay as they are after cleaning.
    """
    if prepare is None:
        return source
    settings = prepare if isinstance(prepare, PrepareSettings) else PrepareSettings(**prepare)
    owners = read_owners(source, client, cleaning=settings.cleaning)
    return [replace(owner, content=settings.read(owner.content, apart)) if owner.is_frame else owner
            for owner in owners]  # fmt: skip


def columns_of(
    source: Any, client: str | None, columns: Sequence[str] | None, split: Split,
    features: Sequence[str] | None = None, optional: Collection[str] = (),
) -> list[ClientColumns]:  # fmt: skip
    """Return the columns of each client, from anything that holds rows.

    Args:
        source: a pandas DataFrame or the path of a table, with the column `client`; a mapping from clients' names to
            such tables of their own; `Clients`; or anything else that `clients_from` accepts.
        client: the column that names the client of each row.
        columns: names of columns; None for all.
        split: the split, where clients have splits; tables are taken whole.
        features: names of the inputs, where clients have no tables; "x0", "x1", ... by default.
        optional: those of the columns that need not be there.

    Raises:
        SettingError: there are no clients or columns, or clients hold different ones.
    """
    owners = read_owners(source, client)
    if owners[0].is_table:
        tables = _of_frames(by_client(owners, client), columns, optional)
    else:
        if client is not None:
            raise SettingError(f"client names a column of a table, got a {type(source).__name__}: leave client out")
        # clients that hold rows keep their splits; all else is divided anew by `clients_from`
        held = owners[0].clients
        tables = _of_clients(clients_from(owners) if held is None else held, split, features, columns, optional)
    if not tables:
        raise SettingError("there are no clients: give at least one")
    if not tables[0].numbers and not tables[0].texts:
        raise SettingError("there is no column: give at least one")
    return tables


def _of_frames(
    frames: Mapping[str, Any], columns: Sequence[str] | None, optional: Collection[str] = ()
) -> list[ClientColumns]:
    """Return the columns of tables, which have the kinds that clients would agree on before a training.

    Booleans are 1 and 0 whatever words a client has for them, and dates are days since 1970.

    Raises:
        SettingError: a column occurs twice, is missing in a table, or has a value of another kind or in another unit.
    """
    chosen = {client: _chosen(client, frame, columns) for client, frame in frames.items()}
    for column in columns or ():
        if column not in optional and not any(column in frame.columns for frame in chosen.values()):
            client, frame = next(iter(frames.items()))
            raise SettingError(
                f"client {client!r} has no column {column!r}: it has {', '.join(map(str, frame.columns))}"
            )
    held = warn_of_lacking(chosen)
    chosen = {client: frame.reindex(columns=held) for client, frame in chosen.items()}
    answers = [cast(KindsAnswer, answer(KindsQuestion(), frame)) for frame in chosen.values()]
    # by all clients' answers: a column that has only 0 and 1 at one client may have amounts at another
    kinds, units = common_kinds(answers), {client: held.units for client, held in zip(chosen, answers, strict=True)}
    tables, dates = list[ClientColumns](), frozenset(name for name, kind in kinds.items() if kind == "date")
    for client, frame in chosen.items():
        numbers, texts = dict[str, Floats](), dict[str, NDArray[np.object_]]()
        for name, kind in kinds.items():
            series = frame[name]
            if kind == "date":
                numbers[name] = dates_of(series, (), date_forms(name, units))["days"]
            elif kind == "boolean":
                numbers[name] = truths_of(series)
            elif kind in ("number", None):
                plain = series.dtype.kind in "biuf"  # infinite numbers are counted
                numbers[name] = series.to_numpy(np.float64, na_value=np.nan) if plain else numbers_of(series)
            else:
                texts[name] = words_of(series)
        tables.append(ClientColumns(client, len(frame), numbers, texts, dates))
    signed = {name for held in answers for name in held.units if kinds.get(name) == "number"}
    # numbers about 100 times those of a client that writes per cent show that a unit is missing
    common_units({name: [Moments.of(table.numbers[name][:, None]) for table in tables] for name in signed}, units)
    return tables


def _chosen(client: str, frame: Any, columns: Sequence[str] | None) -> Any:
    """Return the columns of a client's table that are wanted, with text as names."""
    names = [str(column) for column in frame.columns]
    if len(set(names)) < len(names):
        twice = next(column for index, column in enumerate(names) if column in names[:index])
        raise SettingError(f"column {twice!r} of client {client!r} occurs twice: rename one of them")
    named = frame.set_axis(names, axis=1)
    # a name that was given twice is one column
    return named if columns is None else named[[name for name in dict.fromkeys(columns) if name in names]]


def _of_clients(
    clients: Clients, split: Split, features: Sequence[str] | None, columns: Sequence[str] | None,
    optional: Collection[str],
) -> list[ClientColumns]:  # fmt: skip
    if isinstance(clients, RowsAtSites) and clients.elsewhere:
        raise SettingError(
            "rows are at the sites of a federation: ask them with piebald statistics FILE --credentials FOLDER"
        )
    # fetched once: the columns and the targets below are of the same rows
    rows_of = [clients.rows(client, split) for client in range(len(clients))]
    coded = coded_columns(clients)
    if coded is None:
        inputs = [named_inputs(rows.x, features) for rows in rows_of]
        tables = [ClientColumns(str(name), len(rows), numbers, {}) for name, rows, numbers in
                  zip(clients.names, rows_of, inputs, strict=True)]  # fmt: skip
    else:  # columns of a table, as a run would prepare them
        frames = {str(name): frame_of(coded, rows) for name, rows in zip(clients.names, rows_of, strict=True)}
        tables = _of_frames(frames, None)
    return [
        _with_targets(table, rows, clients.classes, columns, optional)
        for table, rows in zip(tables, rows_of, strict=True)
    ]


def _with_targets(
    table: ClientColumns, rows: Rows, classes: Sequence[str] | None, columns: Sequence[str] | None,
    optional: Collection[str],
) -> ClientColumns:  # fmt: skip
    """Return the columns that are wanted of inputs and targets, of which classes are text."""
    numbers, texts, labels = dict(table.numbers), dict(table.texts), class_numbers(rows.y)
    if classes is not None and labels is not None:
        names = list(classes)
        # names of classes and not their numbers, which have no order that a mean could be of
        texts[TARGET] = np.array([names[label] for label in labels.tolist()], dtype=object)
    else:
        numbers |= target_columns(rows.y)
    for column in columns or ():
        if column not in numbers and column not in texts and column not in optional:
            raise unknown("column", column, [*numbers, *texts])
    if columns is not None:
        numbers = {name: numbers[name] for name in columns if name in numbers}
        texts = {name: texts[name] for name in columns if name in texts}
    return replace(table, numbers=numbers, texts=texts)


def named_inputs(x: Any, features: Sequence[str] | None) -> dict[str, Floats]:
    """Return inputs of one tensor [n, ...], flattened, as columns with names.

    Raises:
        SettingError: there are too many columns, or another number of names.
    """
    flat = pytree.single(x, "statistics of inputs").detach().cpu().to(torch.float64)
    flat = flat.reshape(len(flat), math.prod(flat.shape[1:]))  # -1 cannot stand for the width where there are no rows
    return {name: flat[:, index].numpy() for index, name in enumerate(input_names(flat.shape[1], features))}


def input_names(width: int, features: Sequence[str] | None, targets: int = 0) -> Sequence[str]:
    """Return the names of inputs, "x0", "x1", ... by default.

    Args:
        width: how many numbers an input has.
        features: their names, None for the default.
        targets: how many numbers a target has, which counts as columns, too.

    Raises:
        SettingError: there are too many columns, or another number of names.
    """
    # before a name or a column is made: images have so many inputs that statistics would fill the memory
    if width + targets > MOST_COLUMNS:
        raise SettingError(f"statistics are for at most {MOST_COLUMNS:,} columns, got {width + targets:,}")
    if features is not None and len(features) != width:
        raise SettingError(f"features must name each of the {width} numbers of an input, got {len(features)} names")
    return [f"x{index}" for index in range(width)] if features is None else features


def target_columns(targets: Any) -> dict[str, Floats]:
    """Return targets of one or several tensors [n, ...] as columns, "target" or "target0", "target1", ...

    Targets that have names, such as a time and an event, keep them.
    """
    parts = dict(targets) if isinstance(targets, Mapping) else {TARGET: targets}
    if isinstance(targets, tuple):
        parts = {f"{TARGET}{index}": part for index, part in enumerate(targets)}
    columns: dict[str, Floats] = {}
    for name, part in parts.items():
        flat = pytree.single(part, "statistics of targets").detach().cpu().double()
        # without rows -1 cannot stand for the width
        flat = flat.reshape(len(flat), math.prod(flat.shape[1:]))
        wide = flat.shape[1] != 1
        columns |= {f"{name}{index}" if wide else str(name): column.numpy() for index, column in enumerate(flat.T)}
    return columns
