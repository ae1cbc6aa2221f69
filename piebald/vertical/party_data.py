"""The data of each party: rows of its own features, positions of co-occurring rows, and test rows.

They come from a data set that is divided, or from tables.  Each party reads only its own table; both have a key column,
which identifies the co-occurring rows in the same way at both parties and is empty in all other rows.  Both parties
sort these rows by their keys, and exchange only a digest of the keys.  How a table becomes inputs is fitted to its
training rows and stored, so that new rows become inputs alike.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict
from torch import Tensor

from piebald.core.arguments import checked_class
from piebald.core.errors import SettingError, unknown
from piebald.core.randomness import generator
from piebald.data import DataSet
from piebald.data.clients.client_tables import numbers_of
from piebald.data.clients.owner import read_owners, records_of
from piebald.data.clients.row_identity import UNKNOWN, Digests
from piebald.data.clients.table_files import read_table
from piebald.data.partition.vertical_split import Vertical, feature_names
from piebald.data.preparation.agreement import fitted
from piebald.data.preparation.cleaning import Cleaning
from piebald.data.preparation.column_models import CategoryColumn, Column, Numbers, NumericColumn
from piebald.data.preparation.columns import is_numeric
from piebald.data.preparation.preparation import Preparation
from piebald.data.sets.named import named
from piebald.vertical.match_keys import keys_of
from piebald.vertical.protocol import ROLES, Role
from piebald.vertical.transfer_methods import Split
from piebald.vertical.transfer_settings import PartyFile, PartyFiles, TransferData, TransferSettings

if TYPE_CHECKING:
    from pandas import DataFrame

log = logging.getLogger("piebald.vertical")

CREDIT = ("LIMIT_BAL", "SEX", "EDUCATION", "MARRIAGE", "AGE")
MOST_VALUES = 100  # of a column of categories, each of which becomes an input
Ints = NDArray[np.int64]
Texts = NDArray[np.str_]


class PartyPreparation(BaseModel):
    """How a party's table becomes inputs.

    Columns with stated bounds or values are prepared by these alone, whatever the rows hold; the others by the
    package's own plan: numbers become standard scores and categories 0/1 columns, gaps are filled.

    Attributes:
        features: names of the inputs.
        key: the column that names rows, "" for none.
        bounds: the least and the largest value of columns of numbers; what lies beyond counts as the bound.
        columns: how columns become inputs; None where inputs are taken as they are, by their names.
        as_written: whether a table's cells are read one by one: no cell says what kind of column another is in.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    features: tuple[str, ...]
    key: str = ""
    bounds: dict[str, tuple[float, float]] = {}
    columns: Preparation | None = None
    as_written: bool = False

    @classmethod
    def fitted(cls, frame: DataFrame, file: PartyFile, public: Role | None = None) -> Self:
        """Return the preparation of training rows.

        Args:
            frame: the training rows, with the columns of features.
            file: the settings of the file.
            public: the party all of whose columns must be stated; None lets the rows say the others.

        Raises:
            SettingError: a column is not stated, is stated as another kind than it is, or cannot be read.
        """
        stated = [name for name in frame.columns if name in file.bounds or name in file.values]
        others = [name for name in frame.columns if name not in stated]
        if public is not None and others:
            import pandas

            numbers = pandas.to_numeric(frame[others[0]], errors="coerce").notna()  # cells are text here
            kind = "bounds" if numbers.any() else "values"
            raise SettingError(
                f"column {others[0]!r} of {file.path} needs files.{public}.{kind}: with method.noise, no column may be "
                "prepared by the rows"
            )
        columns: list[Column] = [_stated(name, file) for name in stated]
        if others:
            columns += fitted(frame[others], one_hot=MOST_VALUES, columns=_kinds(frame[others])).columns
        prepared = Preparation(columns=columns, cleaning=file.cleaning)
        if prepared.embedded:
            many = next(
                column.name for column in columns if isinstance(column, CategoryColumn) and column.coding == "embedding"
            )
            raise SettingError(
                f"column {many!r} of {file.path} has more than {MOST_VALUES} different values: name the other columns "
                "in columns"
            )
        features, as_written = tuple(prepared.feature_names_out), public is not None
        return cls(features=features, key=file.key, bounds=dict(file.bounds), columns=prepared, as_written=as_written)

    def inputs(self, frame: DataFrame) -> Tensor:
        """Return the inputs [n, f], float64, of the rows of a table.

        Raises:
            SettingError: a column is missing, or a value cannot be read.
        """
        if self.columns is None:
            return torch.tensor(numbers_of(frame, self.features))
        import pandas

        if missing := [name for name in self.bounds if name not in frame.columns]:
            raise SettingError(f"the table has no column {missing[0]!r}, which the preparation reads: add it")
        stated = dict[str, Any]()
        for name, bounds in self.bounds.items():
            # a word among numbers counts as a gap, which is filled with the middle
            numbers = pandas.to_numeric(frame[name], errors="coerce").astype("float64")
            if 2 * (gaps := int(numbers.isna().sum())) > len(numbers):
                log.warning(
                    "column %r: %d of %d cells are no numbers, and count as the middle", name, gaps, len(numbers)
                )
            stated[name] = numbers.clip(*bounds)
        return torch.from_numpy(self.columns.transform(frame.assign(**stated)).astype("float64"))


@checked_class
@dataclass(frozen=True, eq=False)
class PartyHolding:
    """The data of one party.

    Attributes:
        x: features [n, f], float64.
        y: labels, -1 or 1 [n]; None at the target.
        overlap: positions in `x` of the co-occurring rows, in the same order at both parties.
        features: names of the features.
        test: features of held-out rows; of all the target's rows if no labels are known.
        test_y: labels of the held-out rows, used only to score the result and never part of the protocol.  Empty if
            none are known.
        keys: digest of the co-occurring rows' keys, which must be the same at both parties; "" if rows have no keys.
        records: digests of the rows as they were read, none where nothing identifies them.
        place: the folder that the rows lie in, None where they have none.
        preparation: how a table's columns become `x`, None where inputs are taken as they are.
        own_y: at the target, the labels of `x` that it has itself, -1 or 1, and 0 for unknown [n].  They are no part of
            the protocol, and say what the target can do without a partner.
    """

    x: Tensor
    y: Tensor | None
    overlap: Ints
    features: tuple[str, ...]
    test: Tensor
    test_y: Tensor
    keys: str = ""
    records: Digests = field(default_factory=UNKNOWN.copy)
    place: Path | None = None
    preparation: PartyPreparation | None = None
    own_y: Tensor | None = None

    @property
    def alone(self) -> Ints:
        """Positions in `x` of the rows that are not co-occurring."""
        return np.setdiff1d(np.arange(len(self.x)), self.overlap)

    def check(self, role: Role, settings: TransferSettings) -> None:
        """Refuse batches larger than this party's data, and labels other than -1 and 1."""
        method = settings.method
        if isinstance(method, Split) and self.x.shape[1] >= method.inputs + (role == "target"):
            raise SettingError(
                f"the {role} has {self.x.shape[1]} inputs, got method.inputs = {method.inputs}: take more, at the "
                "source one more than it has, or name fewer columns"
            )
        if len(self.alone) < settings.batch and not method.joint:
            raise SettingError(
                f"batch must be at most {len(self.alone)}, the number of the {role}'s rows that are not co-occurring "
                f"(those have batches of their own), got {settings.batch}"
            )
        if len(self.overlap) < settings.overlap_batch:
            raise SettingError(
                f"overlap_batch must be at most the {len(self.overlap)} co-occurring rows, got {settings.overlap_batch}"
            )
        if not bool(torch.isfinite(self.x).all()):
            raise SettingError(f"the {role}'s inputs must be finite numbers: fill in or leave out what is none")
        if (self.y is None) != (role == "target"):
            raise SettingError(f"the source must have labels and the target none, got them the other way at the {role}")
        if self.y is not None and not bool(torch.isin(self.y, torch.tensor([-1.0, 1.0])).all()):
            raise SettingError("labels must be -1 or 1")


def _stated(name: str, file: PartyFile) -> Column:
    """Return a column that is prepared by its stated bounds, to numbers from -1 to 1, or by its stated values."""
    if name in file.bounds:
        least, largest = file.bounds[name]
        middle, half = (least + largest) / 2, (largest - least) / 2
        return NumericColumn(name=name, values=Numbers(median=middle, mean=middle, deviation=half))
    # any other value, and a gap, is one more category
    return CategoryColumn(name=name, categories=sorted({*file.values[name]}), rare=True)


def _kinds(frame: DataFrame) -> dict[str, str]:
    """Return the kinds of columns that are not guessed: numbers are features, whatever they may stand for."""
    return {str(name): "number" for name in frame.columns if is_numeric(frame[name])}


def division(data: DataSet) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the source's features and those of both parties, for data sets whose features have a natural division.

    credit: the source knows the person, bills and payments; the target the person and the repayment history.
    census: the source knows age, sex, race, origin and the household; the target age, sex and race, and work.
    Other tables: every other feature, nothing in common.
    """
    names = feature_names(data)
    if data.name == "credit":
        return (*CREDIT, *(name for name in names if "AMT" in name)), CREDIT
    if data.name == "census":
        both = tuple(name for name in names if name == "age" or name.startswith(("sex=", "race=")))
        home = ("marital-status=", "relationship=", "native-country=", "education=")
        household = tuple(name for name in names if name.startswith(home) or name in ("fnlwgt", "education-num"))
        return (*both, *household), both
    return tuple(names[::2]), ()


def load(settings: TransferData, seed: int) -> dict[Role, PartyHolding]:
    """Load a data set and divide it between both parties, for experiments and demonstrations."""
    data = named(settings.name)
    if data.inputs.dim() != 2 or data.classes is None or len(data.classes) != 2:
        raise SettingError(f"data.name must be a table with two classes, like credit or census, got {settings.name!r}")
    return divide(data, settings, seed)


def divide(data: DataSet, settings: TransferData, seed: int) -> dict[Role, PartyHolding]:
    """Divide any table with two classes between both parties; the second class is the positive one."""
    of_source, both = division(data)
    of_source, both = settings.source or of_source, settings.common if settings.common is not None else both
    train, test = train_test_rows(data, settings.test, seed)
    if len(train) < settings.overlap:
        raise SettingError(f"data.overlap must be at most the {len(train)} training rows, got {settings.overlap}")
    features = tuple(dict.fromkeys((*of_source, *both)))
    split = Vertical(
        overlap=settings.overlap, features=features, common=both, active_share=settings.source_share, seed=seed
    )
    parties, names = split.split(data, train), feature_names(data)
    # -1 and 1, as the Taylor loss has them
    signs = 2.0 * data.targets.double() - 1
    return {
        role: PartyHolding(
            x=party.x.double(),
            y=None if party.y is None else signs[party.ids],
            overlap=np.searchsorted(party.ids, parties.overlap),
            features=party.features,
            test=data.inputs[test][:, [names.index(name) for name in party.features]].double(),
            test_y=signs[test],
        )
        for role, party in zip(ROLES, (parties.active, parties.passive), strict=True)
    }


def train_test_rows(data: DataSet, share: float, seed: int) -> tuple[Ints, Ints]:
    """Return row numbers for training and for testing: the published split, or a share drawn by the seed."""
    if data.train is not None and data.test is not None:
        return data.train, data.test
    order = generator(seed, "transfer", "test").permutation(len(data))
    cut = round(len(data) * share)
    return np.sort(order[cut:]), np.sort(order[:cut])


def load_one(
    files: PartyFiles, role: Role, test: float, seed: int, public: bool = False, joint: bool = False
) -> PartyHolding:
    """Load one party's data, as `PartyPreparation` prepares it.

    Args:
        files: files of the settings; only this party's is read.
        role: role of the party.
        test: share of the target's rows without a key that is held out, and of which those with a label score the
            result; without a column of labels all its rows are predicted, and nothing is scored.
        seed: seed of that choice.
        public: whether all columns must be prepared by stated bounds and values, so that no value of a row changes
            how others are prepared, or whether the table can be used.
        joint: whether both parties predict together, so that held-out rows are co-occurring ones, the same at both.

    Raises:
        SettingError: there is no such file, or a column is missing or holds unusable values.
    """
    file = files.of(role)
    if role == "source" and file.label is None:
        raise SettingError("files.source.label is missing: name the column of the source's table to predict")
    if public and file.prepare is not None and (file.prepare.parse or file.prepare.unit):
        raise SettingError(
            f"files.{role}.prepare: with method.noise, no row may say whether the table can be read: leave out parse "
            "and unit"
        )
    frame = read_owners(_read(file, public), cleaning=file.cleaning)[0].frame
    _check_columns(frame, file)
    keys, place = keys_in(frame, file.key, file.path)
    labels = None if file.label is None else _labels(frame, file, role, public)
    held_out = np.zeros(len(frame), dtype=bool)
    tested = np.zeros(0, dtype=np.int64)
    if joint:  # by their places in the order of keys, which both know
        last = np.sort(generator(seed, "transfer", "test").permutation(len(place))[: round(len(place) * test)])
        place, tested = np.delete(place, last), place[last]
        held_out[tested] = True
    elif role == "target" and labels is not None:
        held_out[_held_out(keys, test, seed)] = True
        scored = _scored(held_out, labels, file, public)
        tested = np.flatnonzero(scored)
    chosen = _features(frame, file)
    # fitted to training rows alone: held-out rows must not shape the inputs that they are scored by
    preparation = PartyPreparation.fitted(frame.loc[~held_out, chosen], file, role if public else None)
    x = preparation.inputs(frame)
    # of co-occurring rows all are scored, or none, as the source does not know which of them have a label
    known = role == "target" and labels is not None and {*labels[tested]} == {-1.0, 1.0}
    # held-out rows have no place among the training rows
    number = np.cumsum(~held_out) - 1  # position among the training rows
    nothing = torch.zeros(0, dtype=torch.float64)
    return PartyHolding(
        x=x[~held_out],
        y=torch.from_numpy(labels[~held_out]) if role == "source" and labels is not None else None,
        overlap=number[place],
        features=preparation.features,
        test=x[tested] if len(tested) or joint or role == "source" else x,
        test_y=torch.from_numpy(labels[tested]) if len(tested) and labels is not None and known else nothing,
        keys=digest_of_keys(keys[place]),
        records=records_in(Path(file.path), role, file.cleaning, _read(file, public)),
        place=Path(file.rows or file.path).resolve().parent,
        preparation=preparation,
        own_y=None if role == "source" or labels is None else torch.from_numpy(labels)[~held_out],
    )


def read_cells(path: Path, key: str) -> Any:
    """Return the rows of a table whose text stays as it is written, but for the keys, which both parties read alike."""
    columns = read_table(path, None, "all").columns
    return read_table(path, None, {*columns} - {key})


def _read(file: PartyFile, public: bool) -> Any:
    """Return what the rows are read from.

    With `public`, the kind of a column, and how its numbers are written, must not be found out from all cells: one of
    them would say how all rows are read.  So text stays as it is written, and each cell is read by itself.
    """
    if not public:
        return Path(file.path)
    frame = read_cells(Path(file.path), file.key)
    if file.label in frame.columns and is_numeric(labels := frame[file.label]):  # of a file whose columns have types
        frame[file.label] = labels.where(labels.abs() < 2.0**53)  # beyond, keys are refused
    return frame


def records_in(rows: Any, role: Role, cleaning: Cleaning | None, cells: Any = None) -> Digests:
    """Return the digests of rows as they are read without rules: no rule makes them others for the ledger.

    Args:
        rows: a pandas DataFrame, or the path of a table.
        role: the party that has them.
        cleaning: the rules, by which it is read where it cannot be without.
        cells: the same rows, read cell by cell, where the rules are applied to these.
    """
    try:
        return records_of(read_owners(rows), role)
    except SettingError:  # only the rules say how it is read
        return records_of(read_owners(rows if cells is None else cells, cleaning=cleaning), role)


def load_files(
    files: PartyFiles, roles: Sequence[Role], test: float, seed: int, public: bool = False, joint: bool = False
) -> dict[Role, PartyHolding]:
    """Load the data of parties whose files are on this machine.

    Raises:
        SettingError: as for `load_one`, or the tables do not name the same co-occurring rows.
    """
    held = {role: load_one(files, role, test, seed, public, joint) for role in roles}
    if len({one.keys for one in held.values()}) > 1:
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


def keys_in(frame: DataFrame, column: str, where: str) -> tuple[Texts, Ints]:
    """Return the keys [n], "" for rows without one, and the positions of co-occurring rows in the order of keys.

    Raises:
        SettingError: there is no such column, or two rows have the same key; `where` names the table.
    """
    keys = np.array(keys_of(frame, [column], ["exact"]), dtype=np.str_)
    index = np.flatnonzero(keys != "")
    index = index[np.argsort(keys[index], kind="stable")]
    twice = keys[index][:-1][keys[index][1:] == keys[index][:-1]]
    if len(twice):
        raise SettingError(
            f"key {str(twice[0])!r} is in two rows of {where}: each co-occurring row needs a key of its own"
        )
    return keys, index


def digest_of_keys(keys: Texts) -> str:
    """Return a digest of keys in their own order, not that of rows: both parties' tables may be sorted in any way."""
    return hashlib.blake2b("\n".join(keys).encode(), digest_size=16).hexdigest()


def _labels(frame: DataFrame, file: PartyFile, role: Role, public: bool) -> NDArray[np.float64]:
    """Return labels -1 and 1 [n], and 0 for the target's rows without a label."""
    texts = np.array(keys_of(frame, [str(file.label)], ["exact"]), dtype=np.str_)
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
