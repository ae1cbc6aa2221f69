"""Clients from your own data: arrays, torch data sets, tables in memory or in files, Hugging Face data sets, and
`flwr-datasets` partitioners.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from piebald.contracts import Rows
from piebald.errors import SettingError
from piebald.partition.client_tables import (
    Table,
    from_frame,
    from_hub,
    from_partitioner,
    is_table,
    read_table,
)
from piebald.partition.convert import Array, array, floats, inputs, kind, targets
from piebald.partition.lists import Lists
from piebald.partition.pooled_clients import PooledClients
from piebald.partition.three_way_split import check_shares, three_ways

ALLOWED = (
    "a list or dict of (x, y) pairs or torch data sets, a pandas DataFrame, the path of a CSV or Parquet file, "
    "a Hugging Face Dataset, or a flwr-datasets partitioner"
)


def clients_from(
    source: Any,
    *,
    client: str | None = None,
    target: str | None = None,
    features: Sequence[str] | None = None,
    test: float = 0.2,
    validation: float = 0.0,
    seed: int = 0,
    names: Sequence[str] | None = None,
    classes: Sequence[str] | None = None,
    common: Any = None,
    tokens: bool = False,
    server_rows: Any = None,
) -> PooledClients:
    """Make clients from your own data.

    Inputs become float32; uint8 images ([n, h, w] or [n, channels, h, w]) are scaled to [0, 1] and get a channel axis.
    Whole-number, boolean and text targets are classes and become int64 (text in sorted order, unless `classes` gives
    another order); real targets are numbers to predict and become float32.

    Args:
        source: a list, or a dict from client names, of (x, y) arrays or tensors or of map-style torch data sets; or a
            table with a row for each example: a pandas DataFrame, the path of a CSV (".csv", ".tsv", also ".gz") or
            Parquet file, or a Hugging Face `datasets.Dataset`; or a `flwr_datasets` partitioner that has its data set,
            whose partitions become the clients.
        client: the column of a table that names the client of each row.
        target: the column of a table to predict.
        features: the columns of a table to predict from, by default all others.
        test: share of each client's rows held out for testing, in [0, 1), the same for every class.
        validation: share of each client's rows for validation.  A client's only row is always for training.
        seed: seed of the choice of rows.
        names: a name for each client; from the dict or the client column by default.
        classes: names of the classes in the order of their numbers.
        common: a test set (x, y) that belongs to no client; by default the union of all clients' test rows.
        tokens: inputs are whole numbers for an embedding layer (token ids of a text) and become int64, not float32.
        server_rows: rows (x, y) that the server keeps for itself, for methods that need a few trusted rows.

    Raises:
        SettingError: the data cannot be used; the message names the client or the column.
    """
    check_shares(validation, test)
    table = _table(source, client, target, features, tokens)
    names = _different(table.names if names is None else names)
    text = kind(table.y) == "text"
    named = classes or table.classes or (np.unique(table.y).tolist() if text else None)
    y = targets(table.y, "the data", named)
    if named is None and y.dtype == np.int64:
        named = [str(number) for number in range(int(y.max()) + 1)]
    label = y if y.dtype == np.int64 and y.ndim == 1 else None
    parts = three_ways(Lists.of(table.client, len(table.names)), label, validation, test, seed)

    def extra(who: str, rows: Any) -> Rows:
        return _extra(who, rows, table, named, y.dtype, tokens)

    return PooledClients(
        torch.from_numpy(table.x),
        torch.from_numpy(y),
        parts,
        names=names,
        classes=None if named is None or y.dtype != np.int64 else [str(name) for name in named],
        common=np.sort(parts["test"].values) if common is None else extra("common", common),
        server_rows=None if server_rows is None else extra("server_rows", server_rows),
    )


def _table(source: Any, client: str | None, target: str | None, features: Sequence[str] | None, tokens: bool) -> Table:
    """Rows of all clients from any allowed source."""
    if isinstance(source, str | Path) and is_table(source):
        source = read_table(Path(source))
    if _made_by(source, "pandas") and hasattr(source, "columns"):
        return from_frame(source, client, target, features, tokens)
    if _made_by(source, "flwr_datasets"):
        return from_partitioner(source, client, target, features, tokens)
    if _made_by(source, "datasets"):
        return from_hub(source, client, target, features, tokens)
    for argument, value in (("client", client), ("target", target), ("features", features)):
        if value is not None:
            raise SettingError(
                f"{argument} names columns of a table, got a {type(source).__name__}: leave {argument} out"
            )
    return _from_pairs(source, tokens)


def _made_by(value: Any, package: str) -> bool:
    """Whether a value's class comes from a package, without importing the package."""
    return any(base.__module__.split(".")[0] == package for base in type(value).__mro__)


def _different(names: Sequence[str]) -> list[str]:
    """Names as text, all different: they identify clients in rng keys and in the run folder."""
    texts = [str(name) for name in names]
    if len(set(texts)) < len(texts):
        twice = next(text for place, text in enumerate(texts) if text in texts[:place])
        raise SettingError(f"clients must have different names, got {twice!r} twice: rename one of them")
    return texts


def _from_pairs(source: Any, tokens: bool) -> Table:
    if isinstance(source, tuple | list) and len(source) == 2 and all(_is_array(part) for part in source):
        raise SettingError(
            "got one pair (x, y), which would be the data of a single client: pass a list of pairs, like "
            "[(x, y)], or deal it to clients with a partition, like Iid(clients=10).split(DataSet(...))"
        )
    if isinstance(source, Mapping):
        names, members = [str(name) for name in source], list(source.values())
    elif isinstance(source, list | tuple):
        members = list(source)
        names = [str(number) for number in range(len(members))]
    else:
        raise SettingError(f"clients must come from {ALLOWED}, got {type(source).__name__}")
    if not members:
        raise SettingError(f"there must be at least one client, got an empty {type(source).__name__}: pass {ALLOWED}")
    pairs = [_pair(member, f"client {name!r}", tokens) for name, member in zip(names, members, strict=True)]
    for name, (x, y) in zip(names[1:], pairs[1:], strict=True):
        first_x, first_y = pairs[0]
        if x.shape[1:] != first_x.shape[1:] or x.dtype != first_x.dtype:
            raise SettingError(
                f"all clients need inputs of one shape and type, got {_shape(first_x)} from client {names[0]!r} "
                f"and {_shape(x)} from client {name!r}: pad, resize or convert them to one form"
            )
        if kind(y) != kind(first_y) or y.shape[1:] != first_y.shape[1:]:
            raise SettingError(
                f"all clients need targets of one kind, got {_shape(first_y)} from client {names[0]!r} "
                f"and {_shape(y)} from client {name!r}: convert them to one form"
            )
    x, y = (np.concatenate(arrays) for arrays in zip(*pairs, strict=True))
    sizes = [len(targets) for _, targets in pairs]
    return Table(x, y, np.repeat(np.arange(len(pairs)), sizes), names)


def _shape(values: Array) -> str:
    return f"{values.dtype} rows {list(values.shape[1:])}"


def _is_array(value: Any) -> bool:
    return isinstance(value, np.ndarray | torch.Tensor)


def _pair(member: Any, who: str, tokens: bool) -> tuple[Array, Array]:
    if isinstance(member, Rows):
        member = (member.x, member.y)
    elif isinstance(member, torch.utils.data.TensorDataset):
        member = member.tensors
    elif hasattr(member, "__getitem__") and not isinstance(
        member, tuple | list | np.ndarray | torch.Tensor | Mapping | str
    ):
        member = _read(member, who)
    if not isinstance(member, tuple | list) or len(member) != 2:
        what = f"{len(member)} values" if isinstance(member, tuple | list) else f"a {type(member).__name__}"
        raise SettingError(f"{who} must be a pair (x, y) or a torch data set of such pairs, got {what}")
    x, y = inputs(member[0], who, tokens), array(member[1], who, "targets")
    if len(x) != len(y):
        raise SettingError(f"{who} has {len(x)} inputs but {len(y)} targets: give each row one of both")
    if not len(x):
        raise SettingError(f"{who} has no rows: leave it out")
    if kind(y) != "text":
        y = targets(y, who)  # so that the error about a bad number names its client
    return x, y


def _read(dataset: Any, who: str) -> tuple[Any, Any]:
    """All items of a map-style data set, stacked."""
    if not hasattr(dataset, "__len__"):
        raise SettingError(f"{who} is a {type(dataset).__name__} without a length: pass a map-style data set")
    items = [dataset[place] for place in range(len(dataset))]
    if not items:
        raise SettingError(f"{who} has no rows: leave it out")
    if not isinstance(items[0], tuple | list) or len(items[0]) != 2:
        raise SettingError(f"{who}: items of a data set must be pairs (x, y), got {type(items[0]).__name__}")
    x, y = zip(*items, strict=True)
    if not isinstance(x[0], torch.Tensor | np.ndarray | list | tuple | float | int):
        raise SettingError(
            f"{who}: inputs must be tensors or arrays, got {type(x[0]).__name__}: "
            f"give the data set a transform that returns tensors"
        )
    try:
        return np.stack([np.asarray(one) for one in x]), np.asarray(
            [one.item() if hasattr(one, "item") else one for one in y]
        )
    except ValueError:
        raise SettingError(
            f"{who}: items must have inputs of one shape and one target each: pad or resize them"
        ) from None


def _extra(who: str, rows: Any, table: Table, classes: Sequence[str] | None, dtype: Any, tokens: bool) -> Rows:
    x, y = _pair(rows, who, tokens)
    y = targets(y, who, classes)
    if x.shape[1:] != table.x.shape[1:] or x.dtype != table.x.dtype or y.dtype != dtype:
        raise SettingError(
            f"{who} must look like the clients' rows, {_shape(table.x)} and {dtype} targets, "
            f"got {_shape(x)} and {y.dtype}"
        )
    return Rows(floats(torch.from_numpy(x)), torch.from_numpy(y))
