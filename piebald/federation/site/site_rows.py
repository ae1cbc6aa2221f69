"""The rows of a site, from the source in its settings; a run at one site, and the ledger of the site's rows."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from pydantic import Field, model_validator

from piebald.contracts import Clients, Rows, Split
from piebald.contracts.data import column_names, public_rows_of
from piebald.core import pytree
from piebald.core.errors import SettingError
from piebald.core.objective import Objective
from piebald.core.references import USERS, module_file, module_name
from piebald.core.tensor_store import blocks
from piebald.data.clients.client_tables import files_of
from piebald.data.clients.data_source import NO_SOURCE, DataSource, RunRows, client_among, with_published
from piebald.data.clients.owner import Owner, cleaned, counted_records, read_owners, records_of
from piebald.data.clients.prepared import PreparedClients, coded_rows, columns_of, preparation_of, warn_of_values
from piebald.data.clients.row_identity import UNKNOWN, Digests
from piebald.data.clients.table_files import AsWritten
from piebald.data.embeddings import embedded_by
from piebald.data.partition.split import SplitSettings, division_of
from piebald.data.preparation.answers import Table, parsed_numbers
from piebald.data.preparation.cleaning import Cleaning, Rules
from piebald.data.preparation.columns import CodedTable, guess_columns
from piebald.data.preparation.preparation import PrepareSettings
from piebald.methods.client_work import ClientWork
from piebald.privacy.ledger import FOLDER, Head, RowLedger

SPLITS: tuple[Split, ...] = ("train", "validation", "test")


class SiteSource(DataSource):
    """Source of a site's rows: what an experiment's [data] takes, and how the rows are divided.

    A function may also return the site's own parts, {"train": (x, y), "validation": (x, y), "test": (x, y)}, or tables
    in their places.

    Attributes:
        client: the column, or the kind of owners, that says whose a row is, where the source has rows of others, too:
            the site takes those with its own name.
        key: the column of a table by which a row is known, whatever else it holds, so that questions about it are
            counted on when columns are added or values corrected; no input unless features name it.  By default a row
            is known by all that it holds.
        person: the column of a table that says whose a row is, where a person has several: no person then has more
            than the stated share of a sum that leaves without noise; no input unless features name it.
        cleaning: rules for columns of this site alone, in place of the run's, as in [prepare]; nobody else learns them.
        target, features, regression, tokens: for a table, those of the experiment's [data] by default.
        side, channels, seconds: of images and recordings in a folder, by default those of the run's inputs.
        test, validation: shares of the rows to hold out, where they are not divided yet.
    """

    key: str | None = None
    person: str | None = None
    cleaning: Rules | None = None
    test: float = Field(default=0.2, ge=0, lt=1)
    validation: float = Field(default=0.1, ge=0, lt=1)

    @model_validator(mode="after")
    def _check_site(self) -> Self:
        if self.name is None and self.source is None:
            raise ValueError(NO_SOURCE)
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

    @property
    def apart(self) -> tuple[str, ...]:
        """See `DataSource`."""
        return tuple(name for name in (self.key, self.person) if name is not None)

    def records(self, owners: Sequence[Owner], site: str) -> Digests:
        """Return the digests of the rows of a site, see `owner.records_of`."""
        if not all(owner.is_table for owner in owners):
            self._refuse("key", "person")
        return records_of(owners, site, self.client, self.key)

    def rows_per_person(self, owners: Sequence[Owner], site: str) -> int:
        """Return the most rows that one person has at a site.

        Raises:
            SettingError: the column of persons does not tell them apart.
        """
        if self.person is None:
            return 1
        _, counts = counted_records(owners, site, self.client, self.person)
        if not len(counts):
            raise SettingError(f"column {self.person!r} names no persons: correct person in [data] of site.toml")
        return int(counts.max())

    def division(self, split: SplitSettings | None) -> SplitSettings:
        """Return how the rows are divided among parts: as a run says, in sizes that the site states."""
        sizes = {"test": self.test, "validation": self.validation}
        if split is None:
            return SplitSettings(**sizes)
        stated = {name: size for name, size in sizes.items() if name in self.model_fields_set}
        if split.hold_out is not None:  # of a client that trains
            stated = {"test": split.test_amount, **stated}
        return split.with_(**stated, hold_out=None, test_only=[])


class SiteRows:
    """All clients by name, with the rows of one of them (`contracts.Clients`).

    Attributes:
        records: digests of these rows as the site has them, each once; none where nothing identifies them.
        rows_per_person: the most rows of one person, 1 where nothing says whose a row is.
        division: how the run says that they are divided, None where it does not.
        features: the names of the inputs, None where they have none.
        unlike: sentences about columns of numbers far outside of those that all sites have agreed on.
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
        self.features: Sequence[str] | None = None
        self.unlike: Sequence[str] = ()
        self.public_rows, self.records, self.rows_per_person = public, records, 1
        self._number, self._rows = number, rows
        # no rows, but with the shapes and types of rows
        self._none = rows["train"][:0]

    def __len__(self) -> int:
        return len(self.names)

    def rows(self, client: int, split: Split) -> Rows:
        """Return the rows of a split; none for other clients."""
        return self._rows[split] if client == self._number else self._none

    def forget_misfits(self, split: Split, objective: Objective, outputs: Sequence[int]) -> None:
        """Give rows whose targets a loss cannot take none; a loss of the user's own may take whatever it is given."""
        if objective.domain is not None:
            rows = self._rows[split]
            known = replace(rows, y=objective.domain.without_misfits(rows.y, outputs))
            self._rows = {**self._rows, split: known}

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
        length: int | None,
    ) -> None:  # fmt: skip
        kind = torch.float32 if classes is None else torch.int64
        form = torch.zeros(1) if length is None else torch.zeros(length, dtype=torch.int64)  # numbers, or token ids
        blank = {}
        for split in SPLITS:
            y = pytree.single(clients.rows(0, split).y, "prepare")
            # numbers are 1, which is also a time and an event, and a count and an exposure
            blank[split] = Rows(form.repeat(len(y), 1), torch.full(y.shape, float(classes is None), dtype=kind))
        super().__init__(names, number, blank, classes)
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
    own = SiteRows(names, number, rows, clients.classes, public_rows_of(clients), records, division_of(clients))
    own.features = _features(clients)
    return own


def _features(clients: Clients) -> Sequence[str] | None:
    """Return the names of inputs, for the site's own log, which names the column of a sum that is not told."""
    agreed = preparation_of(clients)
    return column_names(clients)[0] if agreed is None else agreed.feature_names_out


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
    rows = _rows_for_run(owners, source, folder, site, run, names, number)
    rows.records, rows.rows_per_person = records, source.rows_per_person(owners, site)
    return rows


def _rows_for_run(
    owners: Sequence[Owner], source: SiteSource, folder: Path, site: str, run: RunRows, names: Sequence[str],
    number: int,
) -> SiteRows:  # fmt: skip
    """Return a site's own rows as a run has them; arguments are those of `own_rows`."""
    clients, client = _client(owners, source, folder, site, run, number)
    unlike = list[str]()
    if (columns := columns_of(clients)) is not None:
        agreed = None if run.prepare is None else run.prepare.agreed
        if agreed is None:
            warn_of_values(clients, columns, run.prepare or PrepareSettings(), f"the rows {source.where}")
            length = None if run.prepare is None else run.prepare.length
            return UnpreparedRows(names, number, clients, columns, run.classes, length)
        prepared = PreparedClients(clients, columns, agreed, computed=False)
        prepared.names = [names[number]]  # by which numbers are harmonised
        unlike, clients = list(agreed.outside_of_training(prepared.raw(client, "train"))), prepared
    rows = {split: clients.rows(client, split) for split in SPLITS}
    if run.split is not None and number in run.split.untrained(names):
        parts, none = [rows[split] for split in SPLITS], rows["train"][:0]
        whole = Rows(*(pytree.joined([getattr(part, leaf) for part in parts]) for leaf in "xy"))
        if none.weight is not None:
            whole = replace(whole, weight=torch.cat([part.weight for part in parts if part.weight is not None]))
        rows = {"train": none, "validation": none, "test": whole}
    own = SiteRows(names, number, rows, run.classes, public_rows_of(clients), division=run.split)
    own.features, own.unlike = _features(clients), unlike
    return own


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
    own = {split: clients.rows(client, split) for split in SPLITS}
    held = SiteRows([site], 0, own, clients.classes, records=records)
    held.rows_per_person = source.rows_per_person(owners, site)
    return held


def _owners(source: SiteSource, folder: Path, site: str, run: RunRows) -> tuple[list[Owner], Digests]:
    """Return who gave the rows of a source, and the digests of the site's own, before a server chooses anything."""
    cleaning = None if run.prepare is None else run.prepare.cleaning
    if source.cleaning is not None:
        cleaning = (cleaning or Cleaning()).with_site(site, source.cleaning)
    try:
        owners = read_owners(_read(source, folder, run), pair=True, parts=True)
    except SettingError:
        if cleaning is None:
            raise
        # what only rules can read is known by what is written, whichever the rules are
        owners = read_owners(_read(source, folder, run, "all"), pair=True, parts=True)
    path = None if source.source is None or ":" in source.source else folder / source.source
    if path is not None and path.is_dir() and not owners[0].is_hub:
        # pictures are known by their files, since the run says in which size they are read
        return owners, source.records([Owner(None, path)], site)
    records = source.records(owners, site)
    if len(records) and ":" in source.where:
        # a function of one's own may return other rows at each call, which nothing identifies then
        again = read_owners(_read(source, folder, run), pair=True, parts=True)
        records = records if np.array_equal(records, source.records(again, site)) else UNKNOWN
    if cleaning is not None:
        # rows are known by what they hold before a server's rules change them, or its questions would count anew
        given = read_owners(_read(source, folder, run, cleaning.as_written), pair=True, parts=True)
        owners = cleaned(given, cleaning, source.client, site)
    return owners, records


def place_of(source: DataSource, folder: Path) -> Path | None:
    """Return the folder that a site's rows lie in, or the module that makes them; None for a data set of Piebald's.

    Args:
        source: where they are.
        folder: folder of the source.
    """
    path, colon, _ = str(source.source or source.name).rpartition(":")
    if source.source is None and not colon:
        return None  # which anybody may download
    if not colon or path.endswith(".py"):
        return (folder / (path if colon else str(source.source))).resolve().parent
    # of the package, since looking for a module in it would import it
    file = module_file(path.partition(".")[0])
    return Path(file).resolve().parent if file is not None and Path(file).is_file() else None


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
    clients, client = client_among(owners, source, site, run, source.division(run.split), number)
    clients = with_published(clients, source, folder, run)
    return (clients, client) if run.extractor is None else (embedded_by(clients, run.extractor), client)


def _read(source: SiteSource, folder: Path, run: RunRows, as_written: AsWritten = ()) -> Any:
    """Return the content of the source, see `read_table`."""
    if source.source is None:
        return source.read()
    path, colon, function = source.source.rpartition(":")
    if colon and path.endswith(".py"):
        load = loader(folder / path, function)
        return _run_user_code(load, f"{path}:{function}")
    if colon:
        return source.model_copy(update={"source": USERS.mark(source.source)}).read()
    return source.of_shape(run.inputs).read_path(folder / source.source, as_written)


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


@dataclass(frozen=True, slots=True, eq=False)
class SiteClient:
    """A run at one site, rebuilt from its terms.

    Attributes:
        work: the model, the trainer and the transforms; with clients' models where a task may be about any of them.
        clients: all clients' names, and this site's rows alone.
        client: this site's client number.
        begins: digest of the private numbers that a first task may bring where updates are masked, see `RunTerms`.
        records: digests of this site's rows as it has them, before anything that a server chooses; None takes those of
            the rows that are trained on.
        rows_per_person: the most rows of one person, 1 where nothing says whose a row is.
        place: the folder that the rows lie in, None where they have none.
    """

    work: ClientWork
    clients: Clients
    client: int
    begins: str = ""
    records: Digests | None = None
    rows_per_person: int = 1
    place: Path | None = None

    @property
    def unlike(self) -> Sequence[str]:
        """How this site's training rows differ from those that all sites agreed on, for this site alone."""
        return self.clients.unlike if isinstance(self.clients, SiteRows) else ()

    def ledger(self, state: Path, log: str = "", head: Callable[[], Head | None] = lambda: None) -> RowLedger:
        """The ledger of the rows; arguments are those of `row_ledger`.

        Raises:
            SettingError: it cannot be read.
        """
        return row_ledger(self.clients, self.client, self.records, state, self.place, log, head)


def row_ledger(
    clients: Clients, client: int, records: Digests | None, state: Path, place: Path | None, log: str = "",
    head: Callable[[], Head | None] = lambda: None,
) -> RowLedger:  # fmt: skip
    """The ledger of a client's rows.

    Args:
        clients, client, records, place: see `SiteClient`.
        state: what the site keeps, in its credentials.
        log, head: name of the site's audit log, and its end.

    Raises:
        SettingError: it cannot be read.
    """
    folders = [state, *([] if place is None else [place / FOLDER])]
    row_records = rows_of(clients, client) if records is None else records
    return RowLedger(row_records, folders, str(clients.names[client]), log, head)


def rows_of(clients: Clients, client: int) -> Digests:
    """The digests of a client's rows, none where it has none or nothing identifies them."""
    has_rows = any(len(clients.rows(client, split)) for split in SPLITS)
    return records_of([Owner(None, clients)], str(clients.names[client])) if has_rows else UNKNOWN
