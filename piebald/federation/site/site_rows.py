"""The rows of a site, from the source in its settings."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self, cast

import numpy as np
import torch
from pydantic import Field, model_validator

from piebald.contracts import Clients, HoldsRows, Rows, Split
from piebald.contracts.data import public_rows_of
from piebald.core import pytree
from piebald.core.errors import SettingError
from piebald.core.references import USERS, module_name
from piebald.core.stored_vectors import blocks
from piebald.data.clients.client_tables import BY_SHARES, ClientTable, Reading, files_of
from piebald.data.clients.convert import is_several
from piebald.data.clients.data_source import DataSource
from piebald.data.clients.owner import Owner, read_owners, records_of
from piebald.data.clients.pairs import from_pairs
from piebald.data.clients.prepared import PreparedClients, coded_rows, columns_of, warn_of_values
from piebald.data.clients.published_rows import with_published
from piebald.data.clients.row_identity import UNKNOWN, Digests
from piebald.data.clients.sources import clients_of_table, recoded
from piebald.data.embeddings.embedded import embedded_by
from piebald.data.partition import ByOwner, Iid
from piebald.data.partition.split_settings import SplitSettings, division_of
from piebald.data.preparation.answers import Table, parsed_numbers
from piebald.data.preparation.columns import CodedTable, guess_columns
from piebald.data.preparation.settings import PrepareSettings
from piebald.data.sets.dataset import DataSet
from piebald.data.sets.decoded import Decoded

SPLITS: tuple[Split, ...] = ("train", "validation", "test")
_COLUMNS = ("target", "features", "tokens")  # what a site leaves to the run where it does not say it itself


class SiteSource(DataSource):
    """Source of a site's rows: what an experiment's [data] takes, and how the rows are divided.

    A function may also return the site's own parts, {"train": (x, y), "validation": (x, y), "test": (x, y)}, or tables
    in their places.

    Attributes:
        client: the column, or the kind of owners, that says whose a row is, where the source has rows of others, too:
            the site takes those with its own name.
        target, features, regression, tokens: for a table, those of the experiment's [data] by default.
        side, channels, seconds: of images and recordings in a folder, by default those of the run's inputs.
        test, validation: shares of the rows to hold out, where they are not divided yet.
    """

    test: float = Field(default=0.2, ge=0, lt=1)
    validation: float = Field(default=0.1, ge=0, lt=1)

    @model_validator(mode="after")
    def _check_site(self) -> Self:
        if self.standardise is not None:
            raise ValueError(
                "standardise is set in the experiment, so that all sites have the same constants: remove it from the "
                "site's settings"
            )
        if (self.collate == "pad") != (self.length is not None):
            raise ValueError(
                f"collate = 'pad' and length belong together, so that all sites have the same length, got "
                f"{self.collate!r} and length {self.length!r}: give both, or none"
            )
        return self

    def refuse_columns(self) -> None:
        """Refuse settings of tables, for arrays.

        Raises:
            SettingError: one is set.
        """
        self._refuse("client", "target", "features")

    @property
    def where(self) -> str:
        """The source, for messages."""
        return str(self.source or self.name)


@dataclass(frozen=True, slots=True)
class RunRows:
    """Statements of a run about the rows of its sites.

    Attributes:
        classes: names of the classes in the order of their numbers, None where there are none, or none are known.
        numbers: whether targets are numbers to predict.
        inputs: the shape of one input as sites have it, None where it is not known.
        columns: the experiment's section [data], whose columns a site takes where it names none itself.
        extractor: the frozen network that a site runs once over its inputs, None for none.
        prepare: how columns of tables become inputs, None for numbers as they are.
        split: how the site's rows are divided, None where the site says it.
    """

    classes: Sequence[str] | None = None
    numbers: bool = False
    inputs: Sequence[int] | None = None
    columns: Mapping[str, Any] = field(default_factory=dict)
    extractor: str | None = None
    prepare: PrepareSettings | None = None
    split: SplitSettings | None = None

    def division(self, source: SiteSource) -> SplitSettings:
        """Return how the rows of a source are divided among parts: as the run says, in sizes that the site states."""
        sizes = {"test": source.test, "validation": source.validation}
        if self.split is None:
            return SplitSettings(**sizes)
        stated = {name: size for name, size in sizes.items() if name in source.model_fields_set}
        if self.split.hold_out is not None:  # of a client that trains
            stated = {"test": self.split.test_amount, **stated}
        return self.split.with_(**stated, hold_out=None, test_only=[])


class SiteRows:
    """All clients by name, with the rows of one of them (`contracts.Clients`).

    Attributes:
        records: digests of these rows as the site has them, each once; none where nothing identifies them.
        division: how the run says that they are divided, None where it does not.
    """

    def __init__(
        self,
        names: Sequence[str],
        number: int,
        rows: Mapping[Split, Rows],
        classes: Sequence[str] | None,
        public: Rows | None = None,
        records: Digests = UNKNOWN,
        division: SplitSettings | None = None,
    ):
        self.names, self.classes, self.division = names, classes, division
        self.common: Rows | None = None
        self.public_rows, self.records = public, records
        self._number, self._rows = number, rows
        # no rows, but with the shapes and types of rows
        self._none = rows["train"][:0]

    def __len__(self) -> int:
        return len(self.names)

    def rows(self, client: int, split: Split) -> Rows:
        """Return the rows of a split; none for other clients."""
        return self._rows[split] if client == self._number else self._none

    def size(self, client: int, split: Split) -> int:
        """Number of rows."""
        return len(self.rows(client, split))

    def counts(self, client: int, split: Split) -> Sequence[int] | None:
        """Not disclosed."""
        return None


class UnpreparedRows(SiteRows):
    """A site's rows before all sites agree on their preparation: blank ones for the run, tables for questions."""

    def __init__(
        self, names: Sequence[str], number: int, clients: Clients, columns: CodedTable, classes: Sequence[str] | None,
        records: Digests, length: int | None,
    ) -> None:  # fmt: skip
        kind = torch.float32 if classes is None else torch.int64
        form = torch.zeros(1) if length is None else torch.zeros(length, dtype=torch.int64)  # numbers, or token ids
        blank = {split: Rows(form.repeat(n := len(clients.rows(0, split)), 1), torch.zeros(n, dtype=kind))
                 for split in SPLITS}  # fmt: skip
        super().__init__(names, number, blank, classes, records=records)
        self._clients, self._columns = clients, columns

    def table(self, client: int, split: Split) -> Table:
        """See `contracts.data.HasTables`; a site has the rows of one client alone."""
        frame, y = coded_rows(self._clients, self._columns, 0, split)
        classes = self._clients.classes
        if classes is None:
            return Table(frame, y)
        labels = pytree.single(self._clients.rows(0, split).y, "prepare").long()
        return Table(frame, y, classes, torch.bincount(labels[labels >= 0], minlength=len(classes)).numpy())


def rows_of_one(clients: Clients, number: int) -> SiteRows:
    """Return one client's rows of a partition, without those of the others."""
    rows = {split: clients.rows(number, split) for split in SPLITS}
    names = [str(clients.names[n]) for n in range(len(clients))]
    records = records_of([Owner(None, clients)], names[number])
    return SiteRows(names, number, rows, clients.classes, public_rows_of(clients), records, division_of(clients))


def own_rows(
    source: SiteSource, folder: Path, site: str, run: RunRows, names: Sequence[str], number: int = 0
) -> SiteRows:
    """Load a site's own rows.

    Args:
        source: where they are, relative to `folder`.
        folder: folder of the source.
        site: name of the site.
        run: what the run says of them.
        names: names of all clients.
        number: client number of this site.

    Raises:
        SettingError: they cannot be read, or have another form.
    """
    owners, records = _owners(source, folder, site, run)
    clients, client = _client(owners, source, folder, site, run, number)
    if (columns := columns_of(clients)) is not None:
        agreed = None if run.prepare is None else run.prepare.agreed
        if agreed is None:
            warn_of_values(clients, columns, run.prepare or PrepareSettings(), f"the rows {source.where}")
            length = None if run.prepare is None else run.prepare.length
            return UnpreparedRows(names, number, clients, columns, run.classes, records, length)
        prepared = PreparedClients(clients, columns, agreed, computed=False)
        prepared.names = [names[number]]  # by which numbers are harmonised
        clients = prepared
    rows = {split: clients.rows(client, split) for split in SPLITS}
    if run.split is not None and number in run.split.untrained(names):
        whole, none = (
            Rows(*(pytree.joined([getattr(rows[split], leaf) for split in SPLITS]) for leaf in "xy")),
            rows["train"][:0],
        )
        rows = {"train": none, "validation": none, "test": whole}
    return SiteRows(names, number, rows, run.classes, public_rows_of(clients), records, run.split)


def rows_before_a_run(source: SiteSource, folder: Path, site: str) -> SiteRows:
    """Load a site's own rows before a run has said which classes there are: those that the targets name are taken.

    Args:
        source: where they are, relative to `folder`.
        folder: folder of the source.
        site: name of the site.

    Raises:
        SettingError: they cannot be read.
    """
    run = RunRows(prepare=PrepareSettings())  # columns of any kind, of which sites may agree later
    owners, records = _owners(source, folder, site, run)
    clients, client = _client(owners, source, folder, site, run)
    if (columns := columns_of(clients)) is not None:
        tables = {split: coded_rows(clients, columns, client, split)[0] for split in SPLITS}
        kinds = guess_columns(tables["train"])
        for table in tables.values():  # refuses a word among amounts now
            for rows in blocks(len(table)):
                parsed_numbers(table[rows], kinds, [], {})
    return SiteRows(
        [site], 0, {split: clients.rows(client, split) for split in SPLITS}, clients.classes, records=records
    )


def _owners(source: SiteSource, folder: Path, site: str, run: RunRows) -> tuple[list[Owner], Digests]:
    """Return who gave the rows of a source, and the digests of the site's own, before a server chooses anything."""
    owners = read_owners(_read(source, folder, run), pair=True, parts=True)
    path = None if source.source is None or ":" in source.source else folder / source.source
    # pictures are known by their files, since the run says in which size they are read
    are_pictures = path is not None and path.is_dir() and not owners[0].is_hub
    identified = [Owner(None, path)] if are_pictures else owners
    return owners, records_of(identified, site, source.client)


def place_of(source: DataSource, folder: Path) -> Path | None:
    """Return the folder that a site's rows lie in, None for those of an installed module or a named data set."""
    if source.source is None:
        return None
    path, colon, _ = source.source.rpartition(":")
    if colon and not path.endswith(".py"):
        return None
    return (folder / (path if colon else source.source)).resolve().parent


def missing_source(source: SiteSource, folder: Path, allowed: Collection[str] | None) -> str | None:
    """Return why the source of a site's rows cannot be used, or None.

    Args:
        source: where they are, relative to `folder`.
        folder: folder of the source.
        allowed: modules that the site's policy names, None for all.
    """
    if source.source is None:
        return None
    path, colon, _ = source.source.rpartition(":")
    if colon and not path.endswith(".py"):
        # with the dot: who allows `rows` does not allow `rows_of_others`
        names = [module_name(plugin) for plugin in allowed or ()]
        if allowed is None or any(path == module or path.startswith(f"{module}.") for module in names):
            return None
        return f"this site's policy does not allow the module {path!r}: name it in plugins of [policy], if you trust it"
    place = folder / (path if colon else source.source)
    if place.exists() or files_of(place) not in ([place], []):
        return None
    return f"there is no file or folder {str(place)!r} with this site's rows: correct [data] in site.toml, or --data"


def _client(
    owners: Sequence[Owner], source: SiteSource, folder: Path, site: str, run: RunRows, number: int = 0
) -> tuple[Clients, int]:
    """Return clients, one of which has the site's rows, from what was read, and its number among them."""
    clients, client = _raw_client(owners, source, site, run, number)
    if source.public is not None:
        columns = [name for name in _COLUMNS if run.columns.get(name) and not getattr(source, name)]
        clients = with_published(
            clients, source.model_copy(update={name: run.columns[name] for name in columns}), folder
        )
    return (clients, client) if run.extractor is None else (embedded_by(clients, run.extractor), client)


def _raw_client(
    owners: Sequence[Owner], source: SiteSource, site: str, run: RunRows, number: int
) -> tuple[Clients, int]:
    rows, kind = owners[0].content, source.client
    if isinstance(rows, HoldsRows):
        clients = cast(Clients, source.rows_of(rows, run.split))
        return clients, _number(clients.names, site, source)
    if isinstance(rows, DataSet) and _stays(rows):
        data_set = cast(DataSet, source.rows_of(rows))
        if run.classes is not None and data_set.classes is not None:
            y = recoded(data_set.targets.numpy(), data_set.classes, run.classes, source.where)
            data_set = replace(data_set, y=torch.from_numpy(y), classes=list(run.classes))
        split = (Iid(clients=1) if kind is None else ByOwner(owner=kind)).split(data_set, run.division(source))
        return split, 0 if kind is None else _number(split.names, site, source)
    if owners[0].name is not None:
        names = list(dict.fromkeys(str(owner.name) for owner in owners))
        own = names[_number(names, site, source)]
        owners = [replace(owner, name=None) for owner in owners if owner.name == own]
    if owners[0].split is not None:
        has_tables = any(owner.is_table or isinstance(owner.content, DataSet) for owner in owners)
        owners = [replace(owner, name=site, content=_pair(owner, source, site, run)) for owner in owners]
        if has_tables:  # whose columns are chosen by now
            source = source.model_copy(update={"client": None, "target": None, "features": None})
        if all(owner.split != "train" for owner in owners):
            raise SettingError(f"{source.where} returned no rows to train on: it must return a 'train' part")
    table, labels = _own_table(owners, source, site, run, coded=run.prepare is not None)
    # the same rows as in a simulation
    first = 0 if run.split is None else number
    return clients_of_table(table, run.division(source), labels=labels, first=first), 0


def _stays(rows: DataSet) -> bool:
    """Return whether a data set is divided as it is: its rows are in files, or it says how they are divided."""
    return isinstance(rows.x, Decoded) or rows.test is not None or (rows.groups is not None and rows.keys is None)


def _own_table(
    owners: Sequence[Owner], source: SiteSource, site: str, run: RunRows, coded: bool = False
) -> tuple[ClientTable, tuple[Any, Sequence[str] | None]]:
    """Return the site's own rows as a table, and their targets as numbers with the names of their classes."""
    rows, kind = owners[0].content, source.client
    if isinstance(rows, DataSet):
        data_set = cast(DataSet, source.rows_of(rows))
        named = None if kind is None else np.array(data_set.owners[kind].names)[data_set.owners[kind].codes]
        owner = Owner(None, (data_set.x, data_set.y), owners=named)
        table = replace(from_pairs([owner], Reading()), classes=data_set.classes, keys=data_set.keys)
        source = source.model_copy(update={"positive": None})  # its two classes are the only ones by now
    else:
        source = _with_columns_of(run, source, owners[0])
        table = source.table_of(owners, run.split or BY_SHARES, coded)
    alone = kind is None and owners[0].owners is None
    table = table.of(None if alone else _number(table.names, site, source), site)
    # what has names is told by them; numbers, and text of tables, are those of the run
    has_names = table.classes is not None or owners[0].is_hub or source.positive is not None
    amounts = source.regression or (run.numbers and not is_several(table.y))
    changes = {"classes": source.classes or (None if has_names else run.classes), "regression": amounts}
    y, classes = source.model_copy(update=changes).labels_of(table)
    if classes is not None and run.classes is not None:
        y, classes = recoded(y, classes, run.classes, source.where), list(run.classes)
    return table, (y, classes)


def _pair(owner: Owner, source: SiteSource, site: str, run: RunRows) -> Any:
    """Return inputs and targets of a part, by the names of classes where they come from a table or a data set."""
    if not owner.is_table and not isinstance(owner.content, DataSet):
        return owner.content
    table, (y, classes) = _own_table([replace(owner, name=None, split=None)], source, site, run)
    return table.x, y if classes is None else np.array(classes)[y]


def _read(source: SiteSource, folder: Path, run: RunRows) -> Any:
    """Return the content of the source."""
    if source.source is None:
        return source.read()
    path, colon, function = source.source.rpartition(":")
    if colon and path.endswith(".py"):
        load = loader(folder / path, function)
        return _run_user_code(load, f"{path}:{function}")
    if colon:
        return source.model_copy(update={"source": USERS.mark(source.source)}).read()
    place, shape, changes = folder / source.source, run.inputs or (), dict[str, Any]()
    if len(shape) == 3 and shape[1] == shape[2]:
        form = {"side": shape[1], "channels": 1 if shape[0] == 1 else 3}
        changes |= {name: value for name, value in form.items() if name not in source.model_fields_set}
    if len(shape) == 2 and shape[0] == 1 and "seconds" not in source.model_fields_set:
        changes["seconds"] = shape[1] / source.rate
    return source.model_copy(update=changes).read_path(place)


def _with_columns_of(run: RunRows, source: SiteSource, owner: Owner) -> SiteSource:
    """Return the source with the settings that it leaves to the run."""
    names = _COLUMNS if owner.is_table else ("tokens",)
    changes = {name: run.columns[name] for name in names if run.columns.get(name) and not getattr(source, name)}
    if owner.is_table:
        columns = list(owner.content.columns if owner.is_frame else owner.content.column_names)
        if source.client is None and run.columns.get("client") in columns:
            changes["client"] = run.columns["client"]  # no input; all rows are this site's
        if source.target is None and "target" not in changes:
            raise SettingError(
                f"{source.where} is a table: name the column to predict, target in [data] of site.toml, or --target "
                f"COLUMN; it has {', '.join(map(str, columns))}"
            )
    return source.model_copy(update=changes)


def _number(names: Sequence[str], site: str, source: SiteSource) -> int:
    """The number of the client with the site's name; a single one may have another name."""
    listed = [str(name) for name in names]
    if site in listed:
        return listed.index(site)
    if len(listed) == 1 and source.client is None:
        return 0
    names_shown = f"{', '.join(map(repr, listed[:5]))}{f' and {len(listed) - 5} more' if len(listed) > 5 else ''}"
    kind = "client" if source.client is None else f"row whose {source.client} is"
    raise SettingError(f"{source.where} has no {kind} {site!r}, which is the name of this site, but {names_shown}")


def loader(path: Path, name: str) -> Callable[[], Any]:
    """Import a function from the site's own Python file."""
    spec = importlib.util.spec_from_file_location("site_data", path)
    if not path.is_file() or spec is None or spec.loader is None:
        raise SettingError(f"there is no file {str(path)!r} to load the site's data with")
    module = importlib.util.module_from_spec(spec)
    execute = spec.loader.exec_module
    _run_user_code(lambda: execute(module), str(path))
    function_of_file = getattr(module, name, None)
    if not callable(function_of_file):
        raise SettingError(f"{path} has no function {name!r}: name one that returns (x, y)")
    return function_of_file  # type: ignore[no-any-return]


def _run_user_code(call: Callable[[], Any], reference: str) -> Any:
    """Run the site's own code; what it raises, and that it ends the process, becomes one sentence."""
    try:
        return call()
    except (Exception, SystemExit) as error:
        raise SettingError(f"{reference} fails, so the site has no rows: {type(error).__name__}: {error}") from error
