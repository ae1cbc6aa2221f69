"""The rows of owners that gave pairs of inputs and targets, as one table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from piebald.contracts import Rows, Split
from piebald.core import pytree
from piebald.core.errors import SettingError, shown
from piebald.data.clients import convert
from piebald.data.clients.client_tables import ClientTable, Reading, coded_owners
from piebald.data.clients.owner import Owner, given
from piebald.data.partition.leakage import SPLITS


def from_pairs(given_by: Sequence[Owner], reading: Reading) -> ClientTable:
    """Make a table from the pairs of clients, of whom all or none are divided, or from one of several clients' rows.

    Args:
        given_by: who gave the pairs.
        reading: what is taken of them.

    Raises:
        SettingError: a client has other rows than the first one, or none, or an array cannot be used.
    """
    raw_pieces = [_Piece(owner.name or "", owner.split or "train", *owner.pair(), owner.who) for owner in given_by]
    if reading.collate == "pad":
        to = convert.lengths([(piece.who, piece.x, piece.y) for piece in raw_pieces], reading.length)
        raw_pieces = [piece.of(*convert.padded((piece.who, piece.x, piece.y), to)) for piece in raw_pieces]
    pieces = [piece.of(*converted(piece.x, piece.y, piece.who, reading.tokens)) for piece in raw_pieces]
    pieces, lacking = _completed(pieces)
    _check_alike(pieces)
    sizes = [pytree.count(piece.x) for piece in pieces]
    first, data_set = given_by[0], given_by[0].data_set
    if (owners := first.owners_by(reading.client)) is not None:
        codes, names = coded_owners(_owner_of_each(owners, sizes[0]))
    else:
        names = list(dict.fromkeys(piece.name for piece in pieces))
        place = {name: number for number, name in enumerate(names)}
        codes = np.repeat([place[piece.name] for piece in pieces], sizes)
    return ClientTable(
        _joined([piece.x for piece in pieces]),
        _joined([piece.y for piece in pieces]),
        codes,
        names,
        None if data_set is None else data_set.classes,
        None if first.split is None else np.repeat([SPLITS.index(piece.split) for piece in pieces], sizes),
        None if data_set is None else data_set.keys,
        lacking={names.index(name): inputs for name, inputs in lacking.items()},
    )


def _owner_of_each(value: Any, rows: int) -> convert.Array:
    """The owners of rows, as an array of names or numbers [n]."""
    try:
        owner = convert.array(value, "the data", "owners")
        got = f"{owner.dtype} {list(owner.shape)}"
    except SettingError:
        owner, got = np.empty(0, dtype=object), shown(value)
    if owner.shape != (rows,) or owner.dtype.kind not in "biuU":
        raise SettingError(
            f"owners must be one name or whole number for each of the {rows} rows, got {got}: where some have none, "
            "leave these rows out"
        )
    return owner


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
    return (convert.kind(y), y.shape[1:]) if isinstance(y, np.ndarray) else pytree.kinds(y)


def pair(member: Any, who: str, tokens: bool, to: convert.Lengths | None = None) -> tuple[Any, Any]:
    """Inputs and targets of one client, each an array, or a tuple or dict of arrays; filled up to lengths, if given."""
    x, y = given(member, who)
    return converted(*((x, y) if to is None else convert.padded((who, x, y), to)), who, tokens)


def looking_alike(rows: Rows, like: Rows, who: str) -> Rows:
    """Return rows that are no client's, after a comparison with those of clients."""

    def described(side: Rows) -> str:
        # columns that are still to be prepared are float64
        x = pytree.mapped(lambda leaf: leaf[:0].float() if leaf.is_floating_point() else leaf, side.x)
        return f"{pytree.rows_of(x)} with targets {pytree.rows_of(side.y)}"

    got, expected = described(rows), described(like)
    if got != expected:
        raise SettingError(f"{who} must look like the clients' rows, {expected}, got {got}")
    return rows


def converted(x: Any, y: Any, who: str, tokens: bool) -> tuple[Any, Any]:
    """Inputs and targets as arrays to train on; `tokens` as in `clients_from`."""
    x = convert.input_arrays(x, who, tokens)
    if not convert.is_several(y):
        y = convert.array(y, who, "targets")
    if convert.kind(y) != "text":
        y = convert.target_arrays(y, who)  # so that the error about a bad number names its client
    rows, targets = pytree.count(x), pytree.count(y)
    if rows != targets:
        raise SettingError(f"{who} has {rows} inputs but {targets} targets: give each row one of both")
    if not rows:
        raise SettingError(f"{who} has no rows: leave it out")
    return x, y
