"""Clients from a list or dict of pairs: arrays, tensors, torch data sets, or all three parts of each client."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from piebald.contracts import Rows, Split
from piebald.core import pytree
from piebald.core.errors import SettingError, shown, unknown
from piebald.data.clients.client_tables import ClientTable, owners
from piebald.data.clients.collate import Collate, Lengths, lengths, padded
from piebald.data.clients.convert import Array, array, input_arrays, is_several, kind, target_arrays
from piebald.data.partition.three_way_split import SPLITS

ALLOWED = (
    "a list or dict of (x, y) pairs or torch data sets, (x, y, owner) with the owner of each row, a pandas DataFrame, "
    "the path of a CSV or Parquet file, a Hugging Face Dataset, or a flwr-datasets partitioner"
)


def from_owned(
    source: Sequence[Any], tokens: bool = False, collate: Collate = "stack", length: int | None = None
) -> ClientTable:
    """Make a table from (x, y, owner): inputs [n, ...], targets [n, ...] and the name of each row's client [n].

    Raises:
        SettingError: lengths differ, or an array cannot be used.
    """
    raw = ("the data", source[0], source[1])
    x, y = pair((source[0], source[1]), "the data", tokens, lengths([raw], length) if collate == "pad" else None)
    codes, names = owners(_owner_of_each(source[2], pytree.count(x)))
    return ClientTable(x, y, codes, names)


def _owner_of_each(value: Any, rows: int) -> Array:
    """The owners of rows, as an array of names or numbers [n]."""
    try:
        owner = array(value, "the data", "owners")
        got = f"{owner.dtype} {list(owner.shape)}"
    except SettingError:
        owner, got = np.empty(0, dtype=object), shown(value)
    if owner.shape != (rows,) or owner.dtype.kind not in "biuU":
        raise SettingError(
            f"owners must be one name or whole number for each of the {rows} rows, got {got}: where some have none, "
            "leave these rows out"
        )
    return owner


def from_pairs(source: Any, tokens: bool, collate: Collate = "stack", length: int | None = None) -> ClientTable:
    """Make a table from clients: each a pair (x, y), a torch data set, or its parts {"train": (x, y), "test": ...}.

    Raises:
        SettingError: a client has other rows than the first one, or none; only some clients give their parts.
    """
    if isinstance(source, list) and len(source) == 3 and all(_is_array(part) for part in source[:2]):
        raise SettingError("got a list of arrays: write (x, y, owner), with the owner of each row, as a tuple")
    if isinstance(source, tuple | list) and len(source) == 2 and all(_is_array(part) for part in source):
        raise SettingError(
            "got one pair (x, y), which would be the data of a single client: pass a list of pairs, like "
            "[(x, y)], or (x, y, owner), or deal it to clients with a partition, like "
            "Iid(clients=10).split(DataSet(...))"
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
    divided = [_is_divided(member) for member in members]
    if any(divided) and not all(divided):
        raise SettingError(
            f"client {names[divided.index(False)]!r} is not divided into {', '.join(SPLITS)} but client "
            f"{names[divided.index(True)]!r} is: divide all of them, or none"
        )
    raw_pieces = [piece for name, member in zip(names, members, strict=True) for piece in _pieces(name, member)]
    if without := [name for name in names if name not in {piece.name for piece in raw_pieces}]:
        raise SettingError(f"client {without[0]!r} has no rows: leave it out")
    if collate == "pad":
        to = lengths([(piece.who, piece.x, piece.y) for piece in raw_pieces], length)
        raw_pieces = [piece.of(*padded((piece.who, piece.x, piece.y), to)) for piece in raw_pieces]
    pieces = [piece.of(*converted(piece.x, piece.y, piece.who, tokens)) for piece in raw_pieces]
    pieces, lacking = _completed(pieces)
    _check_alike(pieces)
    sizes = [pytree.count(piece.x) for piece in pieces]
    place = {name: number for number, name in enumerate(names)}
    return ClientTable(
        _joined([piece.x for piece in pieces]),
        _joined([piece.y for piece in pieces]),
        np.repeat([place[piece.name] for piece in pieces], sizes),
        names,
        split=np.repeat([SPLITS.index(piece.split) for piece in pieces], sizes) if any(divided) else None,
        lacking={place[name]: names for name, names in lacking.items()},
    )


class _Piece(NamedTuple):
    """The rows of one client, or of one of its parts."""

    name: str
    split: Split
    x: Any
    y: Any
    who: str

    def of(self, x: Any, y: Any) -> _Piece:
        """The piece with other inputs and targets."""
        return self._replace(x=x, y=y)


def _completed(pieces: Sequence[_Piece]) -> tuple[list[_Piece], dict[str, frozenset[str]]]:
    """Fill up inputs by name that some clients lack with zeros, and return which client lacks which."""
    named = [piece.x for piece in pieces if isinstance(piece.x, Mapping)]
    forms = {name: leaf for x in named for name, leaf in x.items()}
    if len(named) < len(pieces) or all(x.keys() == forms.keys() for x in named):
        return list(pieces), {}
    completed, lacking = [], dict[str, frozenset[str]]()
    for piece in pieces:
        names = frozenset(forms.keys() - piece.x.keys())
        if lacking.setdefault(piece.name, names) != names:
            raise SettingError(
                f"{piece.who} lacks other inputs than the client's other rows: give all of its parts the same inputs"
            )
        count = pytree.count(piece.x)
        zeros = {name: np.zeros((count, *forms[name].shape[1:]), forms[name].dtype) for name in names}
        # in one order of names at all clients, since parts are joined leaf by leaf
        x = {name: piece.x[name] if name in piece.x else zeros[name] for name in forms}
        completed.append(piece._replace(x=x))
    return completed, {name: names for name, names in lacking.items() if names}


def _joined(trees: Sequence[Any]) -> Any:
    return pytree.mapped(lambda *parts: np.concatenate(parts), *trees)


def _is_divided(member: Any) -> bool:
    return isinstance(member, Mapping)


def _pieces(name: str, member: Any) -> list[_Piece]:
    who = f"client {name!r}"
    for part in member if _is_divided(member) else ():
        if part not in SPLITS:
            raise unknown(f"part of {who} called", part, SPLITS)
    if not _is_divided(member):
        return [_Piece(name, "train", *given(member, who), who)]
    splits: list[Split] = [split for split in SPLITS if split in member]
    parts = [_Piece(name, split, *given(member[split], f"{who}, {split}"), f"{who}, {split}") for split in splits]
    return [part for part in parts if not (_is_empty(part.x) and _is_empty(part.y))]  # as if it were not there


def _is_empty(value: Any) -> bool:
    first = next((leaf for _, leaf in pytree.named_leaves(value)), ())
    return hasattr(first, "__len__") and len(first) == 0


def _check_alike(pieces: Sequence[_Piece]) -> None:
    """Refuse rows of different shapes and types."""
    first = pieces[0]
    for piece in pieces[1:]:
        if pytree.kinds(piece.x) != pytree.kinds(first.x):
            raise SettingError(
                f"all clients need inputs of one shape and type, got {pytree.rows_of(first.x)} from {first.who} and "
                f"{pytree.rows_of(piece.x)} from {piece.who}: pad, resize or convert them to one form"
            )
        if _target_kinds(piece.y) != _target_kinds(first.y):
            raise SettingError(
                f"all clients need targets of one kind, got {pytree.rows_of(first.y)} from {first.who} and "
                f"{pytree.rows_of(piece.y)} from {piece.who}: convert them to one form"
            )


def _target_kinds(y: Any) -> Any:
    return (kind(y), y.shape[1:]) if isinstance(y, np.ndarray) else pytree.kinds(y)


def is_owned(source: Any) -> bool:
    """Return whether a source is (x, y, owner) and not a tuple of clients."""
    if not isinstance(source, tuple) or len(source) != 3 or isinstance(source[2], tuple | Mapping):
        return False
    # A list of names or numbers is no client.
    named = isinstance(source[2], list) and all(isinstance(owner, str | int) for owner in source[2])
    return named or all(_is_array(part) or is_several(part) for part in source[:2])


def _is_array(value: Any) -> bool:
    # by the name of the module, which need not be installed
    return isinstance(value, np.ndarray | torch.Tensor) or type(value).__module__.partition(".")[0] == "pandas"


def pair(member: Any, who: str, tokens: bool, to: Lengths | None = None) -> tuple[Any, Any]:
    """Inputs and targets of one client, each an array, or a tuple or dict of arrays; filled up to lengths, if given."""
    x, y = given(member, who)
    return converted(*((x, y) if to is None else padded((who, x, y), to)), who, tokens)


def given(member: Any, who: str) -> tuple[Any, Any]:
    """Inputs and targets of one client as they were given.

    Args:
        member: a pair (x, y), `Rows`, or a map-style torch data set of pairs.
        who: the client, for messages.
    """
    if isinstance(member, Rows):
        member = (member.x, member.y)
    elif isinstance(member, torch.utils.data.TensorDataset):
        # all at once, where its items would be read one by one
        member = member.tensors
    elif type(member).__module__.partition(".")[0] == "pandas":
        raise SettingError(
            f"{who} is a table: give its inputs and targets as a pair, like (table[['age', 'dose']], table['ill']), or "
            "all clients in one table with a column that names the client"
        )
    elif hasattr(member, "__getitem__") and not isinstance(
        member, tuple | list | np.ndarray | torch.Tensor | Mapping | str
    ):
        member = _read(member, who)
    if not isinstance(member, tuple | list) or len(member) != 2:
        got = f"{len(member)} values" if isinstance(member, tuple | list) else f"a {type(member).__name__}"
        raise SettingError(f"{who} must be a pair (x, y) or a torch data set of such pairs, got {got}")
    return member[0], member[1]


def converted(x: Any, y: Any, who: str, tokens: bool) -> tuple[Any, Any]:
    """Inputs and targets as arrays to train on; `tokens` as in `clients_from`."""
    x = input_arrays(x, who, tokens)
    if not is_several(y):
        y = array(y, who, "targets")
    if kind(y) != "text":
        y = target_arrays(y, who)  # so that the error about a bad number names its client
    rows, targets = pytree.count(x), pytree.count(y)
    if rows != targets:
        raise SettingError(f"{who} has {rows} inputs but {targets} targets: give each row one of both")
    if not rows:
        raise SettingError(f"{who} has no rows: leave it out")
    return x, y


def _read(dataset: Any, who: str) -> tuple[Any, Any]:
    """All items of a map-style data set, stacked where they are of one shape."""
    if not hasattr(dataset, "__len__"):
        raise SettingError(f"{who} is a {type(dataset).__name__} without a length: pass a map-style data set")
    items = [dataset[place] for place in range(len(dataset))]
    if not items:
        raise SettingError(f"{who} has no rows: leave it out")
    if not isinstance(items[0], tuple | list) or len(items[0]) != 2:
        raise SettingError(f"{who}: items of a data set must be pairs (x, y), got {type(items[0]).__name__}")
    x, y = zip(*items, strict=True)
    return _together(x, who, "inputs"), _together(y, who, "targets")


def _together(values: Sequence[Any], who: str, role: str) -> Any:
    """The inputs or the targets of many items: arrays, or lists where rows differ in length."""
    first = values[0]
    if isinstance(first, Mapping):
        return {str(name): _together([item[name] for item in values], f"{who}, {name!r}", role) for name in first}
    if isinstance(first, tuple) and all(isinstance(part, torch.Tensor | np.ndarray) for part in first):
        return tuple(_together(part, who, role) for part in zip(*values, strict=True))
    if not isinstance(first, torch.Tensor | np.ndarray | np.generic | list | tuple | float | int | str):
        raise SettingError(
            f"{who}: {role} must be tensors or arrays, got {type(first).__name__}: "
            f"give the data set a transform that returns tensors"
        )
    rows = [np.asarray(row) for row in values]
    return np.stack(rows) if len({row.shape for row in rows}) == 1 else rows
