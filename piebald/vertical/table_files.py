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
from piebald.data.clients.owner import read_owners, records_of
from piebald.data.preparation.columns import factorized
from piebald.vertical.match_keys import check_precise
from piebald.vertical.party_data import Ints, PartyHolding
from piebald.vertical.party_preparation import PartyPreparation
from piebald.vertical.protocol import ROLES, Role
from piebald.vertical.transfer_settings import PartyFile, PartyFiles

if TYPE_CHECKING:
    from pandas import DataFrame, Series

Texts = NDArray[np.str_]


def load(files: PartyFiles, role: Role, test: float, seed: int, public: bool = False) -> PartyHolding:
    """Load one party's data, as `PartyPreparation` prepares it.

    Args:
        files: files of the settings; only this party's is read.
        role: role of the party.
        test: share of the target's rows without a key that is held out, and of which those with a label score the
            result; without a column of labels all its rows are predicted, and nothing is scored.
        seed: seed of that choice.
        public: whether all columns must be prepared by stated bounds and values, so that no value of a row changes
            how others are prepared, or whether the table can be used.

    Raises:
        SettingError: there is no such file, or a column is missing or holds unusable values.
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
    labels = None if file.label is None else _labels(frame[file.label], file, role, public)
    held_out = scored = np.zeros(len(frame), dtype=bool)
    if role == "target" and labels is not None:
        held_out[_held_out(keys, test, seed)] = True
        scored = _scored(held_out, labels, file, public)
    chosen = _features(frame, file)
    # fitted to training rows alone: held-out rows must not shape the inputs that they are scored by
    preparation = PartyPreparation.fitted(frame.loc[~held_out, chosen], file, role if public else None)
    x = preparation.inputs(frame)
    # held-out rows have no place among the training rows
    number = np.cumsum(~held_out) - 1  # position among the training rows
    nothing = torch.zeros(0, dtype=torch.float64)
    return PartyHolding(
        x=x[~held_out],
        y=torch.from_numpy(labels) if role == "source" and labels is not None else None,
        overlap=number[place],
        features=preparation.features,
        test=x[scored] if scored.any() else x if role == "target" else x[:0],
        test_y=torch.from_numpy(labels[scored]) if scored.any() and labels is not None else nothing,
        # in the order of keys and not of rows, so that both parties' tables may be sorted in any way
        keys=hashlib.blake2b("\n".join(keys[place]).encode(), digest_size=16).hexdigest(),
        records=records_of(owners, role),
        place=Path(file.path).resolve().parent,
        preparation=preparation,
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


def _labels(column: Series[Any], file: PartyFile, role: Role, public: bool) -> NDArray[np.float64]:
    """Return labels -1 and 1 [n], and 0 for the target's rows without a label."""
    texts = _texts(column, file)
    if public:
        if file.positive is None:
            raise SettingError(
                f"files.{role}.positive is missing: with method.noise, the rows must not say which label is the "
                "positive one; all other labels are negative"
            )
    elif role == "source" and (gaps := int((texts == "").sum())):
        raise SettingError(
            f"column {file.label!r} of {file.path} has no value in {gaps} of {len(texts)} rows: drop these rows"
        )
    values = np.unique(texts[texts != ""]).tolist()
    positive = values[-1] if file.positive is None and values else str(file.positive)
    if not public and (len(values) != 2 or positive not in values):
        shown = ", ".join(values[:5]) + (", ..." if len(values) > 5 else "")
        allowed = "two values" if file.positive is None else f"two values, one of them {positive!r}"
        raise SettingError(f"column {file.label!r} of {file.path} must have {allowed}, got {shown or 'none'}")
    signs: NDArray[np.float64] = np.where(texts == positive, 1.0, -1.0)
    if role == "target":
        signs[texts == ""] = 0.0
    return signs


def _held_out(keys: Texts, test: float, seed: int) -> Ints:
    """Return the target's held-out rows, a share of those without a key, with labels or not.

    A label has no say in which rows these are: else the chunks of all rows, which noise hides one row in, would follow
    from whether a single label is there.
    """
    # rows with a key are trained on, so they cannot be held out
    free = np.flatnonzero(keys == "")
    return np.sort(generator(seed, "transfer", "test").permutation(free)[: round(len(free) * test)])


def _scored(
    held_out: NDArray[np.bool_], labels: NDArray[np.float64], file: PartyFile, public: bool
) -> NDArray[np.bool_]:
    """Return which rows [n] score the result: the held-out ones with labels, none where these are all alike."""
    scored: NDArray[np.bool_] = held_out & (labels != 0)
    if len(np.unique(labels[scored])) == 2:
        return scored
    if public:
        return np.zeros_like(scored)
    raise SettingError(
        f"{file.path} must have rows of both labels without a key to score the result, got {int(scored.sum())} "
        "labelled rows among those held out: leave files.target.label out, or take a larger data.test"
    )


def _features(frame: DataFrame, file: PartyFile) -> list[str]:
    """Return the columns of features."""
    chosen = list(file.columns or [str(name) for name in frame.columns if name not in (file.key, file.label)])
    if not chosen:
        raise SettingError(f"{file.path} must have a column besides key and label, got none")
    if odd := [name for name in (*file.bounds, *file.values) if name not in chosen]:
        raise SettingError(f"column {odd[0]!r} of {file.path} has bounds or values and is no feature")
    return chosen


def _texts(column: Series[Any], file: PartyFile) -> Texts:
    """Return a column as text, "" for gaps; whole numbers get no decimal point, although gaps make them floats."""
    check_precise(column, f"column {column.name!r} of {file.path}")
    codes, different = factorized(column)
    # the last one is for gaps, whose code is -1
    return np.array([*different, ""], dtype=np.str_)[codes]
