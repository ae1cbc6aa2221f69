"""A party's own table as its data, from a CSV or Parquet file.  Each party reads only its own file.

Both tables have a key column.  It identifies the co-occurring rows in the same way at both parties, and is empty in all
other rows.  Both parties sort these rows by their keys, and exchange only a digest of the keys.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from piebald.core.errors import SettingError, unknown
from piebald.core.randomness import generator
from piebald.data.clients.client_tables import check_complete, numbers_of
from piebald.data.clients.owner import read_owners, records_of
from piebald.data.preparation.columns import factorized
from piebald.data.sets.encoded_tables import encode
from piebald.vertical.party_data import Ints, PartyHolding
from piebald.vertical.protocol import ROLES, Role
from piebald.vertical.transfer_settings import PartyFile, PartyFiles

if TYPE_CHECKING:
    from pandas import DataFrame, Series

MAX_VALUES = 100  # largest number of different values in a text column
Texts = NDArray[np.str_]


def load(files: PartyFiles, role: Role, test: float, seed: int, public: bool = False) -> PartyHolding:
    """Load one party's data.  Numbers become standard scores, and each value of a text column a 0/1 column.

    Columns with stated bounds or values are prepared by these, and not by the rows.

    Args:
        files: files of the settings; only this party's is read.
        role: role of the party.
        test: share of the target's rows without a key that is held out, and of which those with a label score the
            result; without a column of labels all its rows are predicted, and nothing is scored.
        seed: seed of that choice.
        public: whether all columns must be prepared by stated bounds and values.

    Raises:
        SettingError: there is no such file, or a column is missing, has gaps, or holds unusable values.
    """
    file = getattr(files, role)
    if file is None:
        raise SettingError(f"files.{role} is missing: give path and key of the {role}'s table under [files.{role}]")
    if role == "source" and file.label is None:
        raise SettingError("files.source.label is missing: name the column of the source's table to predict")
    owners = read_owners(Path(file.path))
    frame = owners[0].frame
    _check_columns(frame, file)
    keys, place = _keys(frame[file.key], file)
    labels = None if file.label is None else _labels(frame[file.label], file, role)
    held_out = np.zeros(len(frame), dtype=bool)
    if role == "target" and labels is not None:
        held_out[_held_out(labels, keys, file, test, seed)] = True
    scored = held_out if labels is None else held_out & (labels != 0)
    x, names = _features(frame, file, ~held_out, role if public else None)
    # held-out rows have no place among the training rows
    number = np.cumsum(~held_out) - 1  # position among the training rows
    nothing = torch.zeros(0, dtype=torch.float64)
    return PartyHolding(
        x=x[~held_out],
        y=torch.from_numpy(labels) if role == "source" and labels is not None else None,
        overlap=number[place],
        features=tuple(names),
        test=x[scored] if scored.any() else x if role == "target" else x[:0],
        test_y=torch.from_numpy(labels[scored]) if scored.any() and labels is not None else nothing,
        # in the order of keys and not of rows, so that both parties' tables may be sorted in any way
        keys=hashlib.blake2b("\n".join(keys[place]).encode(), digest_size=16).hexdigest(),
        records=records_of(owners, role),
        place=Path(file.path).resolve().parent,
    )


def both(files: PartyFiles, test: float, seed: int, public: bool = False) -> dict[Role, PartyHolding]:
    """Load both parties' data, if both files are on this machine.

    Raises:
        SettingError: as for `load`, or the tables do not name the same co-occurring rows.
    """
    held: dict[Role, PartyHolding] = {role: load(files, role, test, seed, public) for role in ROLES}
    if held["source"].keys != held["target"].keys:
        of_source, of_target = (len(held[role].overlap) for role in ROLES)
        same = of_source == of_target
        counts = f"{of_source} each, not the same" if same else f"{of_source} and {of_target}"
        raise SettingError(
            f"the two tables must have the same keys in their co-occurring rows, got {counts}: "
            "leave the key empty in rows that only one party has"
        )
    return held


def _check_columns(frame: DataFrame, file: PartyFile) -> None:
    if not len(frame):
        raise SettingError(f"{file.path} must have at least one row, got none")
    for column in (file.key, file.label, *(file.columns or ())):
        if column is not None and column not in frame.columns:
            raise unknown(f"column of {file.path} called", column, map(str, frame.columns))
    for role, column in (("key", file.key), ("label", file.label)):
        if column is not None and column in (file.columns or ()):
            raise SettingError(f"columns of {file.path} must not include the {role} {column!r}: leave it out")


def _keys(column: Series[Any], file: PartyFile) -> tuple[Texts, Ints]:
    """Return the keys [n], "" for rows without one, and the positions of co-occurring rows in the order of keys."""
    keys = _texts(column, file)
    place = np.flatnonzero(keys != "")
    place = place[np.argsort(keys[place], kind="stable")]
    twice = keys[place][:-1][keys[place][1:] == keys[place][:-1]]
    if len(twice):
        raise SettingError(
            f"key {str(twice[0])!r} is in two rows of {file.path}: each co-occurring row needs a key of its own"
        )
    return keys, place


def _labels(column: Series[Any], file: PartyFile, role: Role) -> NDArray[np.float64]:
    """Return labels -1 and 1 [n], and 0 for the target's rows without a label."""
    texts = _texts(column, file)
    if role == "source" and (gaps := int((texts == "").sum())):
        raise SettingError(
            f"column {file.label!r} of {file.path} has no value in {gaps} of {len(texts)} rows: drop these rows"
        )
    values = np.unique(texts[texts != ""]).tolist()
    positive = values[-1] if file.positive is None and values else str(file.positive)
    if len(values) != 2 or positive not in values:
        shown = ", ".join(values[:5]) + (", ..." if len(values) > 5 else "")
        allowed = "two values" if file.positive is None else f"two values, one of them {positive!r}"
        raise SettingError(f"column {file.label!r} of {file.path} must have {allowed}, got {shown or 'none'}")
    signs: NDArray[np.float64] = np.where(texts == "", 0.0, np.where(texts == positive, 1.0, -1.0))
    return signs


def _held_out(labels: NDArray[np.float64], keys: Texts, file: PartyFile, test: float, seed: int) -> Ints:
    """Return the target's held-out rows, a share of those without a key, with labels or not.

    A label has no say in which rows these are: else the chunks of all rows, which noise hides one row in, would follow
    from whether a single label is there.
    """
    # rows with a key are trained on, so they cannot be held out
    free = np.flatnonzero(keys == "")
    chosen = np.sort(generator(seed, "transfer", "test").permutation(free)[: round(len(free) * test)])
    if len(np.unique(labels[chosen][labels[chosen] != 0])) != 2:
        raise SettingError(
            f"{file.path} must have rows of both labels without a key to score the result, "
            f"got {int((labels[free] != 0).sum())} labelled rows: "
            "leave files.target.label out, or take a larger data.test"
        )
    return chosen


def _features(
    frame: DataFrame, file: PartyFile, train: NDArray[np.bool_], public: Role | None
) -> tuple[torch.Tensor, list[str]]:
    """Return inputs [n, f] and their names; `public` is the party whose columns must all have bounds or values."""
    chosen = list(file.columns or [str(name) for name in frame.columns if name not in (file.key, file.label)])
    if not chosen:
        raise SettingError(f"{file.path} must have a column besides key and label, got none")
    check_complete(frame, chosen, "fill them in, or name the other columns in columns")
    numbers = [name for name in chosen if frame[name].dtype.kind in "biuf"]
    texts = [name for name in chosen if name not in numbers]
    numbers_of(frame, numbers)  # refuses infinite ones
    for name in texts:
        if name not in file.values and (count := frame[name].astype(str).nunique()) > MAX_VALUES:
            raise SettingError(
                f"column {name!r} of {file.path} has {count} different values, more than {MAX_VALUES}: "
                "name the other columns in columns"
            )
    for kind, fitting, stated in (("bounds", numbers, file.bounds), ("values", texts, file.values)):
        if public is not None and (lacking := [name for name in fitting if name not in stated]):
            raise SettingError(
                f"column {lacking[0]!r} of {file.path} needs files.{public}.{kind}: with method.noise, no column may "
                "be prepared by the rows"
            )
        if odd := [name for name in stated if name not in fitting]:
            what = "numbers" if kind == "bounds" else "text"
            raise SettingError(f"column {odd[0]!r} of {file.path} has {kind} and is no feature of {what}")
    columns, names, prepared = [], list[str](), {*file.bounds, *file.values}
    for name, (least, largest) in file.bounds.items():
        inside = np.clip(frame[name].to_numpy(dtype=np.float64), least, largest)
        columns.append(2 * (inside - least) / (largest - least) - 1)
        names.append(name)
    for name, values in file.values.items():
        columns += [(frame[name].astype(str) == value).to_numpy(dtype=np.float64) for value in values]
        names += [f"{name}={value}" for value in values]
    numbers, texts = ([name for name in kind if name not in prepared] for kind in (numbers, texts))
    if numbers or texts:
        # fitted to training rows alone: held-out rows must not shape the inputs that they are scored by
        x, encoded = encode(frame, numbers, texts, train)
        columns += list(x.double().numpy().T)
        names += encoded
    return torch.from_numpy(np.stack(columns, 1)), names


def _texts(column: Series[Any], file: PartyFile) -> Texts:
    """Return a column as text, "" for gaps; whole numbers get no decimal point, although gaps make them floats."""
    # beyond 2^53, floating point skips whole numbers, and two keys could read alike
    if column.dtype.kind == "f" and (column.abs() >= 2.0**53).any():
        raise SettingError(f"column {column.name!r} of {file.path} holds numbers of more than 15 digits: quote them")
    codes, different = factorized(column)
    # the last one is for gaps, whose code is -1
    return np.array([*different, ""], dtype=np.str_)[codes]
