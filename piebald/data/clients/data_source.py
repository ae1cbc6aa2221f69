"""Rows of the user's own, as an experiment file names them: a file, a folder, or a function.

The rows of one client of a run that is described elsewhere: of a site, or of a newcomer.

Rows in a file that all clients of a run have in common.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, Protocol, Self, cast, runtime_checkable

import numpy as np
import torch
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidatorFunctionWrapHandler,
    field_serializer,
    field_validator,
    model_validator,
)

from piebald.contracts import Clients, Rows
from piebald.contracts.data import public_rows_of
from piebald.core import pytree
from piebald.core.errors import SettingError, import_extra, unknown
from piebald.core.reading import read_arrays
from piebald.core.references import Reference, Text
from piebald.core.targets import IGNORED
from piebald.data.clients.client_tables import (
    BY_SHARES,
    ClientTable,
    Reading,
    files_of,
    is_table,
    read_table,
)
from piebald.data.clients.convert import Array, Collate, floats, is_several
from piebald.data.clients.owner import Owner, cleaned, read_owners
from piebald.data.clients.pairs import looking_alike
from piebald.data.clients.prepared import Standardisation
from piebald.data.clients.sources import clients_of_table, labelled, recoded, table_of
from piebald.data.clients.table_files import KINDS_OF_FILES, AsWritten
from piebald.data.clients.target_columns import PairOfColumns, target_columns
from piebald.data.partition import ByOwner, Iid
from piebald.data.partition.split import SplitSettings
from piebald.data.preparation.cleaning import Cleaning
from piebald.data.preparation.preparation import PrepareSettings
from piebald.data.sets.dataset import DataSet, Decoded, Owners
from piebald.data.sets.folders import IMAGES, audio_folder, image_folder, visible
from piebald.data.sets.named import named
from piebald.settings import plugins


class DataSource(BaseModel):
    """A data set by name, or a source of the user's own rows.

    Attributes:
        name: one of `data.names()`, or "module:name" for a function that returns a `DataSet`.
        source: a table (.csv, .tsv, .parquet, .xlsx, .dta, .sav, .sas7bdat, .sql) or several ("rows-*.csv";
            "*/rows.csv", whose folders, or "sites/*.*", whose files are clients where `client` is no column of them),
            an .npz file with arrays x and y (and owner, if wanted), a folder of images or WAV recordings (class/file,
            or client/class/file where `client` is given), a folder that Hugging Face's `save_to_disk` wrote, or
            "my_data.py:load" or "module:load" for a function without arguments. It returns a `DataSet`, `Clients`,
            (x, y), (x, y, owner), a table, or anything else that `clients_from` takes.
        client: the column that names the client of each row; in a folder, what the upper folders stand for; of a data
            set, or of rows that come with owners, the kind of owners that are the clients.
        target: the column to predict, or a list of several that are predicted together: numbers, or labels of 0 and 1;
            or { time = "column", event = "column" } of survival, or { count = "column", exposure = "column" } of rates
            for 1 unit of exposure, or for `per` of them.
        features: the columns to predict from, all others by default.
        weights: the column of a table that says how much each row counts in losses and scores, of finite numbers of at
            least 0; it is no input, and a row of weight 0 is left out.
        classes: names of the classes in the order of their numbers, sorted by default.
        positive: the class that is to be told from all others of a data set, which become one, "not" this class.
        regression: targets are numbers to predict, also where all of them are whole.
        tokens: inputs are whole numbers for an embedding layer.
        collate: "pad" fills up sequences of unequal length and makes masks; "stack" refuses them.
        length: length of filled-up sequences, by default that of the longest one.
        side, channels: height and width of images in a folder, in pixels, and 3 channels, or 1 for their mean.
        seconds, rate: length of recordings in a folder, and their samples per second.
        standardise: inputs as standard scores: "federated" computes mean and deviation of each number of an input from
            the training rows of all clients, which send their moments and no row; or a table of `mean` and
            `deviation`.  The constants are kept with the run, and all rows of all clients, and of newcomers, take them.
        public: a file of rows that all clients have and that are not secret, for methods that compare models on them:
            .npz with arrays x and y, or a table like that of the source.  In a federation each site names its own copy.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    name: Text | None = None
    source: Text | None = None
    client: str | None = None
    target: str | list[str] | None = None
    features: list[str] | None = Field(default=None, min_length=1)
    weights: str | None = None
    classes: list[str] | None = Field(default=None, min_length=1)
    positive: str | None = None
    regression: bool = False
    tokens: bool = False
    collate: Collate = "stack"
    length: int | None = Field(default=None, ge=1)
    side: int = Field(default=64, ge=1)
    channels: Literal[1, 3] = 3
    seconds: float = Field(default=1.0, gt=0)
    rate: int = Field(default=16_000, ge=1)
    standardise: Literal["federated"] | Standardisation | None = None
    public: str | None = None

    @field_validator("target", mode="wrap")
    @classmethod
    def _check_target(cls, target: Any, checked: ValidatorFunctionWrapHandler) -> Any:
        # as it is: pydantic would make a plain list of a pair
        columns = target_columns(target)
        return columns if isinstance(columns, PairOfColumns) else checked(columns)

    @field_serializer("target")
    def _told_target(self, target: str | list[str] | None) -> Any:
        return target.by_role if isinstance(target, PairOfColumns) else target

    @model_validator(mode="after")
    def _check_name_or_source(self) -> Self:
        # neither is fine until rows are read, as those of a federation lie at its sites
        if self.name is not None and self.source is not None:
            raise ValueError(
                "[data] has both name and source: give the name of a data set, or a source of your own, and not both"
            )
        return self

    @property
    def only_target(self) -> str | None:
        """The column to predict, for what takes a single one.

        Raises:
            SettingError: there are several.
        """
        if isinstance(self.target, list):
            raise SettingError(f"target in [data] names {len(self.target)} columns, which only networks predict "
                               f"together: name one of {', '.join(self.target)}")  # fmt: skip
        return self.target

    @property
    def where(self) -> str:
        """The source, for messages."""
        return str(self.source or f"data set {self.name!r}")

    @property
    def apart(self) -> tuple[str, ...]:
        """Columns that are no inputs unless features name them, besides those that have another role."""
        return ()

    def of_shape(self, shape: Any) -> Self:
        """Return the source, whose images or recordings have the shape of inputs where it does not say it itself."""
        changes = dict[str, Any]()
        lengths = shape if isinstance(shape, tuple | list) else ()
        if len(lengths) == 3 and lengths[1] == lengths[2]:
            changes = {"side": lengths[1], "channels": 1 if lengths[0] == 1 else 3}
        elif len(lengths) == 2 and lengths[0] == 1:
            changes = {"seconds": lengths[1] / self.rate}
        return self.model_copy(update={name: changes[name] for name in changes.keys() - self.model_fields_set})

    def load(
        self, split: SplitSettings | None = None, coded: bool = False, cleaning: Cleaning | None = None
    ) -> DataSet | Clients:
        """Read the rows: a data set to divide among clients, or clients where the source has them already.

        Args:
            split: how each client's rows are divided, which may name columns.
            coded: whether columns of tables are to be prepared, so that they may have gaps and text.
            cleaning: what is done to the columns of tables before all else.

        Raises:
            SettingError: there is no such source, it cannot be read, or holds something else.
        """
        return self.rows_of(self.read(() if cleaning is None else cleaning.as_written), split, coded, cleaning)

    def read(self, as_written: AsWritten = ()) -> Any:
        """Return the content of the source: a table, arrays, a data set, or the value of its function.

        Args:
            as_written: see `read_table`.

        Raises:
            SettingError: there is no such source, or it cannot be read.
        """
        if self.source is None:
            if self.name is None:
                raise SettingError(NO_SOURCE)
            return named(self.name)
        if isinstance(self.source, Reference):
            return plugins.call(self.source, "data source")
        return self.read_path(Path(self.source), as_written)

    def read_path(self, path: Path, as_written: AsWritten = ()) -> Any:
        """Return the content of the file or folder at a path, see `read`."""
        if path.is_dir():
            return self._folder(path)
        if files_of(path) == [path] and not path.is_file():
            raise SettingError(f"there is no file or folder {self.source!r}, and it is not 'my_data.py:load' either")
        if is_table(path):
            return read_table(path, self.client, as_written)
        if path.suffix == ".npz":
            return _arrays(path)
        raise SettingError(
            f"data must come from a table ({KINDS_OF_FILES}), an .npz file, a folder, or a function like "
            f"'my_data.py:load', got {self.source!r}"
        )

    def rows_of(
        self, value: Any, split: SplitSettings | None = None, coded: bool = False, cleaning: Cleaning | None = None
    ) -> DataSet | Clients:
        """The rows in a value that a file held or a function returned, of two classes where `positive` names one.

        Args:
            split: see `load`.
            value: a `DataSet`, `Clients`, a pandas DataFrame, a Hugging Face data set, (x, y), (x, y, owner), a torch
                data set of such pairs, or anything else that `clients_from` takes.
            coded, cleaning: see `load`.

        Raises:
            SettingError: it is something else, or settings do not fit it.
        """
        owners = cleaned(read_owners(value, pair=True), cleaning, self.client)
        if (clients := owners[0].clients) is not None:
            self._refuse("client", "target", "features", "weights", "regression")
            if split is not None:
                raise SettingError(f"{self.source} has clients with parts of their own: remove split")
            if self.positive is not None:
                self._against_rest(None, None, self.positive)
            return clients
        if (rows := owners[0].data_set) is not None:
            self._refuse_columns(owners)
            if self.positive is None:
                return rows
            y, classes = self._against_rest(rows.targets.numpy(), rows.classes, self.positive)
            return replace(rows, y=torch.from_numpy(y), classes=classes)
        division = split or BY_SHARES
        table = self.table_of(owners, division, coded)
        labels = self.labels_of(table)
        if owners[0].name is None:
            return self._data_set(table, *labels, "client" if owners[0].owners is not None else None)
        pooled = clients_of_table(table, division, labels=labels)
        pooled.division = split
        return pooled

    def table_of(self, owners: Sequence[Owner], split: SplitSettings = BY_SHARES, coded: bool = False) -> ClientTable:
        """The rows of owners, none of whom has `Clients`, as one table; see `rows_of`."""
        self._refuse_columns(owners)
        # of arrays it is what their owners are called
        client = self.client if owners[0].is_table or owners[0].data_set is not None else None
        reading = Reading(
            client, self.target, self.features, self.tokens, self.collate, self.length, split, coded=coded, owned=False,
            apart=self.apart, weights=self.weights,
        )  # fmt: skip
        return table_of(owners, reading)

    def labels_of(self, table: ClientTable) -> tuple[Any, list[str] | None]:
        """The targets of a table and their classes, two where `positive` names one; see `labelled`."""
        y, classes = labelled(table, self.classes, self.regression, str(self.source))
        return (y, classes) if self.positive is None else self._against_rest(y, classes, self.positive)

    def _data_set(self, table: ClientTable, y: Any, classes: list[str] | None, owner: str | None) -> DataSet:
        owner = self.client or owner
        return DataSet(
            name=Path(str(self.source)).name,
            x=pytree.mapped(torch.from_numpy, table.x),
            y=pytree.mapped(torch.from_numpy, y),
            classes=classes,
            owners={} if owner is None else {owner: Owners(table.client, table.names)},
            features=table.features,
            target=table.target,
            columns=table.columns,
            weights=None if table.weights is None else torch.from_numpy(table.weights),
            groups=None if table.keys is None else table.keys.group,
            keys=table.keys,
            source="your own",
        )

    def _against_rest(self, y: Any, classes: Sequence[str] | None, positive: str) -> tuple[Any, list[str]]:
        """Return targets [n] of two classes: the named one, which comes second, and all others."""
        if classes is None or not isinstance(y, np.ndarray) or y.ndim > 1:
            raise SettingError(
                f"positive names a class of the rows, and those of {self.where} have none: remove positive"
            )
        if positive not in classes:
            raise unknown("class", positive, classes)
        # it comes second, as class 1 is the positive one of scores such as AUC
        is_positive = (y == list(classes).index(positive)).astype(np.int64)
        return np.where(y == IGNORED, IGNORED, is_positive), [f"not {positive}", positive]

    def _folder(self, path: Path) -> Any:
        # before images are looked for: `save_to_disk` writes folders of files as well
        if any((path / name).is_file() for name in ("dataset_info.json", "state.json", "dataset_dict.json")):
            return _saved(path)
        if self.target is not None or self.features is not None:
            raise SettingError(f"{path} is a folder, whose classes are its folders: remove target and features")
        self._refuse("weights", "regression")
        suffixes = {file.suffix.lower() for file in visible(path, "*/*" if self.client is None else "*/*/*")}
        if ".wav" in suffixes and suffixes & set(IMAGES):
            raise SettingError(f"{path} holds images and WAV recordings: leave one of them")
        if ".wav" in suffixes:
            return audio_folder(path, self.seconds, self.rate, self.client)
        if suffixes & set(IMAGES):
            return image_folder(path, self.side, self.client, channels=self.channels)
        layout = "class/file" if self.client is None else f"{self.client}/class/file"
        raise SettingError(
            f"there are no images and no WAV recordings {layout} in {path}: put one folder per class there"
        )

    def _refuse_columns(self, owners: Sequence[Owner]) -> None:
        """Refuse settings of tables, where the rows of owners are none."""
        if not all(owner.is_table for owner in owners):
            self._refuse("target", "features", "weights", *([] if owners[0].data_set is None else ["regression"]))
            if owners[0].owners_by(self.client) is None:
                self._refuse("client")

    def _refuse(self, *names: str) -> None:
        """Refuse settings of tables, where the rows are none."""
        for name in names:
            if getattr(self, name) not in (None, False):
                has = "is about targets of a table or of arrays" if name == "regression" else "names columns of a table"
                raise SettingError(f"{name} {has}, which {self.where} does not have: remove {name}")


def _arrays(path: Path) -> tuple[Array, ...]:
    """The arrays x, y and, if it is there, owner of an .npz file."""
    stored = read_arrays(path)
    if not {"x", "y"} <= set(stored) <= {"x", "y", "owner"}:
        raise SettingError(f"{path} must hold arrays x and y, and owner if wanted, got {', '.join(stored) or 'none'}")
    return tuple(stored[name] for name in ("x", "y", "owner") if name in stored)


def _saved(path: Path) -> Any:
    """A data set that Hugging Face's `save_to_disk` wrote."""
    datasets = import_extra("datasets", "hf", f"{path} is a Hugging Face data set, which needs datasets")
    try:
        dataset = datasets.load_from_disk(str(path))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise SettingError(f"{path} cannot be read as a Hugging Face data set: {error}") from None
    if isinstance(dataset, dict):
        name = next(iter(dataset), "train")
        raise SettingError(f"{path} holds the splits {', '.join(dataset)}: name the folder of one, like {path / name}")
    return dataset


NO_SOURCE = "[data] has neither name nor source: give the name of a data set, or a source of your own"
_COLUMNS = (
    "target",
    "features",
    "weights",
    "tokens",
)  # what a source leaves to the run where it does not say it itself


@dataclass(frozen=True, slots=True)
class RunRows:
    """Statements of a run about the rows of its clients.

    Attributes:
        classes: names of the classes in the order of their numbers, None where there are none, or none are known.
        numbers: whether targets are numbers to predict.
        inputs: the shape of one input as clients have it, None where it is not known.
        columns: the experiment's section [data], whose columns a source takes where it names none itself.
        extractor: the frozen network that a client runs once over its inputs, None for none.
        prepare: how columns of tables become inputs, None for numbers as they are.
        split: how the rows are divided, None where the run does not say it.
    """

    classes: Sequence[str] | None = None
    numbers: bool = False
    inputs: Sequence[int] | None = None
    columns: Mapping[str, Any] = field(default_factory=dict)
    extractor: str | None = None
    prepare: PrepareSettings | None = None
    split: SplitSettings | None = None

    def columns_for(self, source: DataSource, owner: Owner) -> DataSource:
        """Return the source with the settings that it leaves to the run."""
        names = _COLUMNS if owner.is_table else ("tokens",)
        changes = {name: self.columns[name] for name in names if self.columns.get(name) and not getattr(source, name)}
        if owner.is_table and source.client is None and self.columns.get("client") in owner.columns:
            changes["client"] = self.columns["client"]  # no input; all rows are this client's
        return source.model_copy(update=changes)


def client_among(
    owners: Sequence[Owner], source: DataSource, name: str, run: RunRows, division: SplitSettings, number: int = 0
) -> tuple[Clients, int]:
    """Return clients, one of which has the rows of a name, and its number among them.

    Args:
        owners: who gave rows.
        source: what they were read from.
        name: the name of the client.
        run: what the run says of them.
        division: how they are divided, where they are not yet.
        number: number of the client in the run.

    Raises:
        SettingError: the rows cannot be used, or none are this client's.
    """
    rows, kind = owners[0].data_set, source.client
    if owners[0].clients is not None:
        clients = cast(Clients, source.rows_of(owners[0].clients, run.split))
        return clients, number_of(clients.names, name, source)
    if rows is not None and _stays(rows):
        data_set = cast(DataSet, source.rows_of(rows))
        if run.classes is not None and data_set.classes is not None:
            y = recoded(data_set.targets.numpy(), data_set.classes, run.classes, source.where)
            data_set = replace(data_set, y=torch.from_numpy(y), classes=list(run.classes))
        split = (Iid(clients=1) if kind is None else ByOwner(owner=kind)).split(data_set, division)
        return split, 0 if kind is None else number_of(split.names, name, source)
    if owners[0].name is not None:
        names = list(dict.fromkeys(str(owner.name) for owner in owners))
        own = names[number_of(names, name, source)]
        owners = [replace(owner, name=None) for owner in owners if owner.name == own]
    if owners[0].split is not None:
        has_tables = any(owner.is_table or owner.data_set is not None for owner in owners)
        owners = [replace(owner, name=name, content=_pair(owner, source, name, run)) for owner in owners]
        if has_tables:  # whose columns are chosen by now
            source = source.model_copy(update=dict.fromkeys(("client", "target", "features", "weights")))
        if all(owner.split != "train" for owner in owners):
            raise SettingError(f"{source.where} returned no rows to train on: it must return a 'train' part")
    table, labels = own_table(owners, source, name, run, coded=run.prepare is not None)
    # the same rows as in a simulation
    first = 0 if run.split is None else number
    return clients_of_table(table, division, labels=labels, first=first), 0


def own_table(
    owners: Sequence[Owner], source: DataSource, name: str, run: RunRows, coded: bool = False
) -> tuple[ClientTable, tuple[Any, Sequence[str] | None]]:
    """Return the rows of one client as a table, and their targets as numbers with the names of their classes.

    Args:
        owners, source, name, run: see `client_among`.
        coded: whether columns of tables are to be prepared, so that they may have gaps and text.

    Raises:
        SettingError: the rows cannot be used, or have a class that the run has not.
    """
    alone = source.client is None and owners[0].owners is None
    source = run.columns_for(source, owners[0])
    if owners[0].is_table and source.target is None:
        raise SettingError(
            f"{source.where} is a table: name the column to predict, target in [data] of site.toml, or --target "
            f"COLUMN; it has {', '.join(owners[0].columns)}"
        )
    table = source.table_of(owners, run.split or BY_SHARES, coded)
    table = table.of(None if alone else number_of(table.names, name, source), name)
    # what has names is told by them; numbers, and text of tables, are those of the run
    has_names = table.classes is not None or owners[0].is_hub or source.positive is not None
    amounts = source.regression or (run.numbers and not is_several(table.y))
    changes = {"classes": source.classes or (None if has_names else run.classes), "regression": amounts}
    y, classes = source.model_copy(update=changes).labels_of(table)
    if classes is not None and run.classes is not None:
        y, classes = recoded(y, classes, run.classes, source.where), list(run.classes)
    return table, (y, classes)


def number_of(names: Sequence[str], name: str, source: DataSource) -> int:
    """Return the number of the client with a name; a single one may have another name."""
    listed = [str(other) for other in names]
    if name in listed:
        return listed.index(name)
    if len(listed) == 1 and source.client is None:
        return 0
    shown = f"{', '.join(map(repr, listed[:5]))}{f' and {len(listed) - 5} more' if len(listed) > 5 else ''}"
    kind = "client" if source.client is None else f"row whose {source.client} is"
    raise SettingError(f"{source.where} has no {kind} {name!r}, which is the name of this site, but {shown}")


def _stays(rows: DataSet) -> bool:
    """Return whether a data set is divided as it is: its rows are in files, or it says how they are divided."""
    return isinstance(rows.x, Decoded) or rows.test is not None or (rows.groups is not None and rows.keys is None)


def _pair(owner: Owner, source: DataSource, name: str, run: RunRows) -> Any:
    """Return inputs and targets of a part, by the names of classes where they come from a table or a data set."""
    if not owner.is_table and owner.data_set is None:
        return owner.content
    table, (y, classes) = own_table([replace(owner, name=None, split=None)], source, name, run)
    return table.x, y if classes is None else np.array(classes)[y]


_NO_RUN = RunRows()


@runtime_checkable
class TakesPublicRows(Protocol):
    """Clients that can be given rows which all of them have."""

    def with_public_rows(self, rows: Rows) -> Self:
        """The same clients with these public rows."""


def with_published(clients: Clients, source: DataSource, folder: Path | None = None, run: RunRows = _NO_RUN) -> Clients:
    """Clients with the public rows of the file that `source.public` names.

    Args:
        clients: whose rows they must look like.
        source: with the file's name, and what is said of the columns of tables.
        folder: what the file's path is relative to, the working directory by default.
        run: what is said elsewhere of the columns.

    Raises:
        SettingError: there is no such file, its rows do not look like the clients', or there are public rows already.
    """
    public, who = source.public, f"public = {source.public!r}"
    if public is None:
        return clients
    if public_rows_of(clients) is not None:
        raise SettingError(
            f"{who}: there are public rows already, from the partition or the source: leave one of both out"
        )
    if not isinstance(clients, TakesPublicRows):
        raise SettingError(
            f"{who} cannot be added to clients of your own class: give them a property public_rows of their own"
        )
    path = (folder or Path()) / public
    if not path.is_file() or not (is_table(path) or path.suffix == ".npz"):
        raise SettingError(f"{who} must be a .npz file with arrays x and y, or a table ({KINDS_OF_FILES})")
    client_rows = next((held for client in range(len(clients)) if len(held := clients.rows(client, "train"))), None)
    if client_rows is None:
        raise SettingError("no client has a training row")
    return clients.with_public_rows(looking_alike(_rows(source, path, clients, run), client_rows, who))


def _rows(source: DataSource, path: Path, clients: Clients, run: RunRows) -> Rows:
    """The rows of the file, with the clients' numbers of classes."""
    changes = dict.fromkeys(("name", "client", "classes", "public", "standardise"))
    if not is_table(path):
        changes |= dict.fromkeys(("target", "features", "weights"))
    published = source.model_copy(update=changes | {"source": str(path)})
    # rows that all have are nobody's, and a column of clients would be read as a feature
    columns = {**run.columns, "client": source.client or run.columns.get("client")}
    said = replace(run, classes=clients.classes, numbers=clients.classes is None, columns=columns)
    table, (y, _) = own_table(read_owners(published.read(), pair=True), published, "", said)
    x, y = (pytree.mapped(torch.from_numpy, tree) for tree in (table.x, y))
    return Rows(floats(x), y)
