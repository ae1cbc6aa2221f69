"""Tables with a client column: pandas, CSV and Parquet files, Hugging Face data sets, `flwr-datasets` partitioners.

Packages are imported only to read a file; objects that are passed in bring their own.
"""

from __future__ import annotations

import csv
import io
import re
import warnings
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from piebald.core.errors import SettingError, unknown
from piebald.core.reading.packed import unpacked
from piebald.core.reading.tables import check_text_table, read_parquet
from piebald.data.clients.convert import Array, array, input_arrays, inputs
from piebald.data.partition.split import Ints
from piebald.data.preparation.columns import CodedTable


@dataclass(frozen=True, slots=True, eq=False)
class ClientTable:
    """Rows of all clients: inputs, unconverted targets, the client of each row, the clients' names.

    Inputs and targets are arrays, or tuples or dicts of arrays.

    `split` has the place of each row's part in `three_way_split.SPLITS`, where clients come with their own parts.
    `columns` says how inputs are columns of a table, where they are to be prepared.
    """

    x: Any
    y: Any
    client: Ints
    names: Sequence[str]
    classes: Sequence[str] | None = None
    split: Ints | None = None
    columns: CodedTable | None = None


SEPARATORS = {".csv": ",", ".tsv": "\t"}
OTHERS = (",", ";", "\t")  # what files with these suffixes have as well
PARQUET = (".parquet", ".pq")


def is_frame(value: Any) -> bool:
    """Return whether something is a pandas DataFrame, without importing pandas."""
    return any(
        base.__module__.partition(".")[0] == "pandas" and base.__name__ == "DataFrame" for base in type(value).__mro__
    )


def is_table(path: str | Path) -> bool:
    """Return whether a path is that of a table, judged by its suffix."""
    return Path(str(path).removesuffix(".gz")).suffix.lower() in (*SEPARATORS, *PARQUET)


def files_of(path: Path) -> list[Path]:
    """Return the files that a path names: one, or several in order where its name has `*`, `?` or `[`."""
    several = not path.exists() and is_table(path) and any(letter in path.name for letter in "*?[")
    return sorted(file for file in path.parent.glob(path.name) if file.is_file()) if several else [path]


def read_table(path: Path, names: str | None = None) -> Any:
    """Read a CSV or Parquet file, or several with the same columns, as a pandas DataFrame.

    A text file may have commas, semicolons (with decimal commas or points) or tabs, and a byte order mark.

    Args:
        path: the file, or a pattern like rows-*.csv.
        names: a column of names, such as that of the client.  Its text is taken as it is written: "007" is not "7",
            and "NA" is a name.

    Raises:
        SettingError: the file is missing or cannot be read, a column has two places, or pyarrow is missing.
    """
    files = files_of(path)
    if files != [path]:
        return _joined(path, {file: read_table(file, names) for file in files})
    if not path.is_file():
        raise SettingError(f"there is no file {path}: give the path of a CSV or Parquet file")
    if not is_table(path):
        raise SettingError(f"a table must be a .csv, .tsv or .parquet file, got {path}: save it as one of them")
    suffix = Path(str(path).removesuffix(".gz")).suffix.lower()
    try:
        if suffix in PARQUET:
            return read_parquet(path)
        check_text_table(path, "".join(OTHERS))
        return _read_text(path, SEPARATORS[suffix], names)
    except UnicodeDecodeError:
        raise SettingError(f"{path} is no text in UTF-8: save it as UTF-8") from None
    except ImportError:
        raise SettingError(f"{path} is a Parquet file, which needs pyarrow: pip install pyarrow") from None
    except SettingError:
        raise
    except (OSError, EOFError, ValueError, OverflowError, MemoryError, zlib.error, csv.Error) as error:
        message = " ".join(str(error).split())
        raise SettingError(f"{path} cannot be read as a table, it may be damaged: replace it ({message})") from None


def _joined(pattern: Path, tables: Mapping[Path, Any]) -> Any:
    """Return the rows of several tables one after the other.

    Raises:
        SettingError: there are none, or they have other columns.
    """
    import pandas

    if not tables:
        raise SettingError(f"no file is called like {pattern}: give the path of a CSV or Parquet file, or a pattern")
    first, columns = next((path, list(table.columns)) for path, table in tables.items())
    for path, table in tables.items():
        if odd := sorted({*map(str, table.columns)} ^ {*map(str, columns)}):
            raise SettingError(
                f"{first} and {path} must have the same columns, and {odd[0]!r} is in one of them alone: add it, or "
                "name these files apart"
            )
    return pandas.concat([table[columns] for table in tables.values()], ignore_index=True)


def _read_text(path: Path, separator: str, names: str | None) -> Any:
    """Read a CSV file with this separator, or with the one that its first line has instead."""
    import pandas

    def read(**options: Any) -> Any:
        with unpacked(path) as file:
            return pandas.read_csv(file, engine="c", **options)

    separator, header = _header(path, separator)
    if twice := next((column for column in header if column and header.count(column) > 1), None):
        raise SettingError(f"{path}: column {twice!r} occurs twice: rename one of them")
    options: dict[str, Any] = {"sep": separator, "index_col": False, "low_memory": False}
    with warnings.catch_warnings():
        warnings.simplefilter("error", pandas.errors.ParserWarning)
        try:
            frame = read(**options)
            if separator == ";":  # decimal commas are likely, and the reading with more columns of numbers is right
                with_commas = read(decimal=",", **options)
                frame = max(frame, with_commas, key=lambda table: table.select_dtypes("number").shape[1])
        except pandas.errors.ParserWarning:
            raise SettingError(f"{path} has rows of more values than its first line has names: name each") from None
        if names in header:
            alone: dict[str, Any] = {"usecols": [names], "dtype": str, "keep_default_na": False, "na_values": [""]}
            as_written = read(**options, **alone)
            frame[names] = _counted(as_written[names])
    return frame


def _header(path: Path, separator: str) -> tuple[str, list[str]]:
    """The separator of a file and the names in its first line."""
    names_by_separator: dict[str, list[str]] = {}
    for candidate in (separator, *OTHERS):
        with unpacked(path) as file, io.TextIOWrapper(file, encoding="utf-8-sig", newline="") as text:
            names_by_separator[candidate] = next(csv.reader(text, delimiter=candidate), [])
        if len(names_by_separator[candidate]) > 1:
            return candidate, names_by_separator[candidate]
    return separator, names_by_separator[separator]


def _counted(names: Any) -> Any:
    """Return names as numbers if all of them are whole numbers as Python writes them, so that 2 comes before 10."""
    # "007" and "+7" stay text, and 18 digits always fit into int64.
    whole = re.compile(r"0|-?[1-9]\d{0,17}")
    if names.isna().any() or not all(whole.fullmatch(name) for name in names):
        return names
    return names.astype("int64")


def _columns(
    columns: Sequence[str], client: str | None, target: str | None, features: Sequence[str] | None, owned: bool = False
) -> tuple[str, str, list[str]]:
    """The columns to use, after a check; if rows are `owned` already, the target column stands in for the client's."""
    client = target if owned else client
    for role, column in (("target", target), ("client", client)):
        if column is None:
            raise SettingError(
                f"a table needs {role}='...', the column that {_roles[role]}: it has {', '.join(columns)}"
            )
    assert client is not None  # for the type checker; refused above
    assert target is not None
    if isinstance(features, str):
        raise SettingError(f"features must be a list of columns, got {features!r}: write features=[{features!r}]")
    chosen = [column for column in columns if column not in (client, target)] if features is None else list(features)
    for column in (client, target, *chosen):
        if column not in columns:
            raise unknown("column", column, columns)
    if not chosen:
        raise SettingError(f"there is no column to predict from: the table has only {', '.join(columns)}")
    if features is not None and (twice := next((name for name in chosen if chosen.count(name) > 1), None)):
        raise SettingError(f"features must be different columns, got {twice!r} twice")
    if client == target and not owned:
        raise SettingError(f"client and target must be different columns, got {client!r} for both")
    for role, column in (("client", client), ("target", target)):
        if column in chosen:
            raise SettingError(f"features must not include the {role} column {column!r}: leave it out")
    return client, target, chosen


_roles = {"client": "names the client of each row", "target": "is to be predicted"}


def owners(values: Array) -> tuple[Ints, list[str]]:
    """Codes [n] and names of the clients, sorted."""
    names, codes = np.unique(values, return_inverse=True)
    return codes.astype(np.int64), [str(name) for name in names.tolist()]


def from_frame(
    frame: Any,
    client: str | None,
    target: str | None,
    features: Sequence[str] | None,
    tokens: bool = False,
    *,
    owned: bool = True,
    coded: bool = False,
) -> ClientTable:
    """Make a table from a pandas DataFrame.

    Args:
        frame: the rows.
        client, target, features, tokens: see `clients_from`.
        owned: whether there must be a client column; without one, all rows belong to one client.
        coded: whether the columns are to be prepared, so that they may have gaps and text; else they are numbers.

    Raises:
        SettingError: a column that is missing, has gaps, or does not hold numbers.
    """
    if not_text := [column for column in frame.columns if not isinstance(column, str)]:
        raise SettingError(
            f"column names must be text, got {not_text[0]!r}: rename them with frame.rename(columns=str)"
        )
    owner, target, chosen = _columns(list(frame.columns), client, target, features, not owned and client is None)
    if features is None and (nameless := next(filter(re.compile(r"Unnamed: \d+").fullmatch, chosen), None)):
        raise SettingError(
            f"the table has a column without a name ({nameless}), as pandas writes row numbers: save it with "
            "index=False, or list the columns to predict from in features"
        )
    if not len(frame):
        raise SettingError("the table must have at least one row, got none")
    for column in (owner, target, *chosen):
        series = frame[column]
        if getattr(series, "ndim", 1) != 1:
            raise SettingError(f"column {column!r} occurs twice: rename one of them")
        if (gaps := int(series.isna().sum())) and not (coded and column in chosen):
            remedy = "set prepare = 'federated'" if column in chosen else "fill them in"
            raise SettingError(
                f"column {column!r} has no value in {gaps} of {len(frame)} rows: {remedy}, or drop these rows"
            )
    for column in () if coded else chosen:
        series = frame[column]
        if getattr(series.dtype, "kind", "O") not in "biuf":
            raise SettingError(
                f"column {column!r} must hold numbers, got {series.dtype} like {_no_number(series)!r}: set "
                "prepare = 'federated', by which all clients encode it alike, or leave it out of features"
            )
    columns = None
    if coded:
        columns, x = CodedTable.of(frame[chosen])
    else:
        numbers = frame[chosen].to_numpy() if tokens else frame[chosen].to_numpy(dtype=np.float64)
        x = inputs(numbers, "the table", tokens)
    goal = frame[target]
    if getattr(goal.dtype, "kind", "O") not in "biuf":
        goal = goal.astype(str)
    codes, names = owners(_plain(frame[owner])) if owner == client else _single_client(len(frame))
    return ClientTable(x, array(_plain(goal), f"column {target!r}", "targets"), codes, names, columns=columns)


def _no_number(series: Any) -> Any:
    """Return the first value of a column that is not a number; one word among numbers makes it a column of text."""
    return next((value for value in series if not _is_number(value)), series.iloc[0])


def _is_number(value: Any) -> bool:
    try:
        float(value)
    except (TypeError, ValueError):
        return False
    return True


def _single_client(rows: int) -> tuple[Ints, list[str]]:
    """Codes and names of rows that all belong to one client without a name."""
    return np.zeros(rows, dtype=np.int64), [""]


def _plain(series: Any) -> Array:
    """A column as numbers where it has numbers (pandas' own types, too), else as text."""
    kind = getattr(series.dtype, "kind", "O")
    if kind in "biuf":
        return np.asarray(series.to_numpy(dtype=getattr(series.dtype, "numpy_dtype", series.dtype)))
    return np.asarray(series.astype(str).to_numpy(dtype=object), dtype=str)


def from_partitioner(
    partitioner: Any, client: str | None, target: str | None, features: Sequence[str] | None, tokens: bool = False
) -> ClientTable:
    """Make a table from the partitions of a `flwr_datasets` partitioner that has its data set.

    Clients are named by the ids that the partitioner divides by, or else by the numbers of their partitions.

    Raises:
        SettingError: it is not a partitioner, has no data set or no rows, or a column is wrong.
    """
    if client is not None:
        raise SettingError("client names a column, but the partitioner assigns rows to clients: leave client out")
    # Looked up on the class: without a data set the property itself raises AttributeError.
    if not all(hasattr(type(partitioner), name) for name in ("load_partition", "num_partitions")):
        raise SettingError(
            f"got a {type(partitioner).__name__} of flwr_datasets: pass a partitioner, "
            "like federated_dataset.partitioners['train']"
        )
    try:
        parts = [partitioner.load_partition(number) for number in range(partitioner.num_partitions)]
    except AttributeError as error:
        raise SettingError(
            f"the partitioner has no data set yet ({error}): set partitioner.dataset, or load one partition of its "
            "FederatedDataset first"
        ) from None
    from datasets import concatenate_datasets

    held = [number for number, part in enumerate(parts) if len(part)]
    if not held:
        raise SettingError("the partitioner's data set must have at least one row, got none")
    joined = concatenate_datasets([parts[number] for number in held])
    x, y, _, classes = _hub_rows(joined, None, target, features, tokens, owned=True)
    ids = getattr(partitioner, "partition_id_to_natural_id", None) or {}
    code = np.repeat(np.arange(len(held)), [len(parts[number]) for number in held])
    return ClientTable(x, y, code, [str(ids.get(number, number)) for number in held], classes)


def from_hub(
    dataset: Any,
    client: str | None,
    target: str | None,
    features: Sequence[str] | None,
    tokens: bool = False,
    *,
    owned: bool = True,
) -> ClientTable:
    """Make a table from a Hugging Face `datasets.Dataset`: numeric columns, or one column of arrays or images.

    Args:
        dataset: one split of a data set.
        client, target, features, tokens: see `clients_from`.
        owned: whether there must be a client column; without one, all rows belong to one client.

    Raises:
        SettingError: several splits at once, a streamed data set, or a column that is missing, ragged or not numeric.
    """
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
    alone = not owned and client is None
    x, y, owner, classes = _hub_rows(dataset, client, target, features, tokens, owned=alone)
    codes, names = _single_client(len(y)) if alone else owners(owner)
    return ClientTable(x, y, codes, names, classes)


def _hub_rows(
    dataset: Any, client: str | None, target: str | None, features: Sequence[str] | None, tokens: bool, *, owned: bool
) -> tuple[Any, Array, Array, Sequence[str] | None]:
    """Inputs, targets, clients (the targets again if rows are `owned` already) and the names of classes."""
    client, target, chosen = _columns(list(dataset.column_names), client, target, features, owned)
    rows = dataset.select_columns([*dict.fromkeys([client, target, *chosen])]).with_format("numpy")[:]
    described = dataset.features
    columns = [_input_column(rows[column], column, described[column]) for column in chosen]
    if len(columns) > 1 and any(column.ndim > 1 for column in columns):
        x = input_arrays(dict(zip(chosen, columns, strict=True)), "the data set")  # inputs by the names of columns
    else:
        x = inputs(np.stack(columns, 1) if columns[0].ndim == 1 else columns[0], f"column {chosen[0]!r}", tokens)
    y = array(_simple(rows[target], target), f"column {target!r}", "targets")
    owner = _simple(rows[client], client)
    if client != target and (called := getattr(described[client], "names", None)):  # numbers of a ClassLabel
        owner = np.array(called)[owner]
    return x, y, owner, getattr(described[target], "names", None)


def _simple(values: Any, column: str) -> Array:
    """A column of numbers or text without gaps."""
    found = np.asarray(values)
    if found.dtype == object:
        if gaps := sum(value is None for value in found.flat):
            raise SettingError(
                f"column {column!r} has no value in {gaps} of {len(found)} rows: drop them with dataset.filter"
            )
        found = found.astype(str)
    return found


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
