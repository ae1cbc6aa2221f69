"""The one door for rows: whatever is given becomes owners, before anything is chosen of what they gave."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch

from piebald.contracts import Clients, HoldsRows, Rows, Split, shown_digest
from piebald.contracts.data import public_rows_of, rows_digest
from piebald.core import pytree
from piebald.core.errors import SettingError, unknown
from piebald.data.clients.convert import is_several
from piebald.data.clients.prepared import preparation_of
from piebald.data.clients.row_identity import (
    SHARED_ID,
    UNKNOWN,
    Digests,
    UnidentifiedError,
    digests_of_files,
    fingerprint,
    leaves,
    row_digests,
)
from piebald.data.clients.table_files import is_table, read_table
from piebald.data.partition.leakage import SPLITS
from piebald.data.partition.split import Ints, division_of
from piebald.data.preparation.cleaning import Cleaning, Rules
from piebald.data.preparation.preparation import Preparation
from piebald.data.sets.dataset import DataSet

if TYPE_CHECKING:
    from piebald.data.preparation.answers import Table

ALLOWED = (
    "a list or dict of (x, y) pairs or torch data sets, (x, y, owner) with the owner of each row, a pandas DataFrame, "
    "the path of a CSV or Parquet file, a Hugging Face Dataset, or a flwr-datasets partitioner"
)
_log = logging.getLogger("piebald.data")
_READ_TWICE = 20  # items of a data set, which may be changed at random whenever they are read


@dataclass(frozen=True, slots=True, eq=False)
class Owner:
    """What one owner gave, or several whose rows lie together, as it was given.

    Attributes:
        name: the owner's name, None where nobody said it.
        content: a pandas DataFrame, a Hugging Face data set, a `DataSet`, `Clients`, a folder, a torch data set of
            pairs, `Rows`, or a pair (x, y).
        split: the part of the owner's rows that these are, None where they are not divided yet.
        owners: the name of each row's owner [n], where several have rows among them.
    """

    name: str | None
    content: Any
    split: Split | None = None
    owners: Any = None

    @property
    def who(self) -> str:
        """The owner and the part, for messages."""
        who = "the data" if self.name is None else f"client {self.name!r}"
        return who if self.split is None else f"{who}, {self.split}"

    @property
    def is_frame(self) -> bool:
        """True if the content is a pandas DataFrame."""
        return is_frame(self.content)

    @property
    def is_hub(self) -> bool:
        """True if the content is a Hugging Face data set."""
        return made_by(self.content, "datasets")

    @property
    def is_table(self) -> bool:
        """True if the content has columns with names."""
        return self.is_frame or self.is_hub

    @property
    def clients(self) -> Clients | None:
        """The content where it is `Clients`, whose rows are divided already."""
        return cast(Clients, self.content) if isinstance(self.content, HoldsRows) else None

    @property
    def data_set(self) -> DataSet | None:
        """The content where it is a `DataSet`, which knows its owners and classes."""
        return self.content if isinstance(self.content, DataSet) else None

    @property
    def is_empty(self) -> bool:
        """True if the content is a pair without rows."""
        is_pair = isinstance(self.content, (tuple, list, Rows, torch.utils.data.TensorDataset))
        return is_pair and all(map(_is_empty, self.pair()))

    @property
    def columns(self) -> list[str]:
        """The names of the columns, none where the content has no table."""
        names = self.content.columns if self.is_frame else self.content.column_names if self.is_hub else ()
        return [str(name) for name in names]

    def pair(self) -> tuple[Any, Any]:
        """Inputs and targets as they were given, see `given`."""
        return given(self.content if self.data_set is None else (self.data_set.x, self.data_set.y), self.who)

    @property
    def frame(self) -> Any:
        """A table as a pandas DataFrame."""
        return self.content if self.is_frame else self.content.to_pandas()

    @property
    def classes(self) -> list[str] | None:
        """The names of the classes in the order of their numbers, None where there are none, or nobody said them."""
        classes = getattr(self.content, "classes", None)
        return None if classes is None else [str(name) for name in classes]

    @property
    def preparation(self) -> Preparation | None:
        """What the rows of clients were prepared by: kinds, units, ranges and categories of columns, and gaps."""
        return preparation_of(self.clients)

    def digests(self, site: str, kind: str | None = None, key: str | None = None) -> Digests:
        """Return a digest of each row [n] that is the site's, of all where none is; none where nothing identifies them.

        What a run chooses makes no difference: neither columns, nor classes, nor the size of images.

        Args:
            site: name of the owner whose rows count.
            kind: the column, or the kind of owners, that says whose a row is.
            key: the column of a table by which a row is known, whatever else it holds; None takes all columns.
        """
        if isinstance(self.content, Path):
            folder = self.content / site if kind is not None and (self.content / site).is_dir() else self.content
            return digests_of_files(path for path in sorted(folder.rglob("*")) if path.is_file())
        if key is not None and key not in self.columns:
            raise unknown("column", key, self.columns)
        blocks = [
            [column for name, column in block if name == key or (key is None and name != SHARED_ID)]
            for block in self._columns_of(site)
        ]
        try:
            self._check_steady(blocks)
            digests = np.concatenate([UNKNOWN, *map(row_digests, blocks)])
        except UnidentifiedError:
            return UNKNOWN
        owners = self.owners_by(kind)
        is_own = np.array([] if owners is None else [str(owner) == site for owner in owners], dtype=np.bool_)
        return digests[is_own] if is_own.any() else digests  # a single owner may have another name

    def fingerprint(self, number: int = 0, tables: Sequence[Table] = ()) -> str:
        """Return a digest of the whole: of all rows in order, their columns and owners, and what is known of them.

        Args:
            number: the one of `Clients` whose rows, divided and prepared, are taken.
            tables: its rows as tables, where they are still to be prepared.

        Raises:
            UnidentifiedError: nothing identifies the rows.
        """
        values: list[Any] = [self.classes or []]
        if (clients := self.clients) is None:
            owners = [] if self.owners is None else [("", np.asarray(self.owners))]
            values += [fingerprint([*block, *owners]) for block in self._columns_of("")]
            return shown_digest(values, {}).hex()
        division, prepared = division_of(clients), self.preparation
        values += [[*map(str, clients.names)], rows_digest(public_rows_of(clients))]
        values += [None if settings is None else settings.model_dump(mode="json") for settings in (division, prepared)]
        values += [rows_digest(clients.rows(number, split)) for split in SPLITS]
        for table in tables:
            columns = [(name, table.frame[name]) for name in table.frame.columns]
            columns += [] if table.y is None else [("", table.y)]
            values += [fingerprint(columns), table.classes and [*table.classes]]
        return shown_digest(values, {}).hex()

    def _columns_of(self, site: str) -> Iterator[list[tuple[str, Any]]]:
        """Yield the rows as columns [n, ...] by name: all at once, or of one of `Clients`, the first by default."""
        if self.is_table:
            yield [(str(name), column) for name, column in self.frame.items()]
            return
        pairs = [] if self.clients is not None else [self.pair()]
        if self.clients is not None:
            names = [str(name) for name in self.clients.names]
            rows = [self.clients.rows(names.index(site) if site in names else 0, split) for split in SPLITS]
            pairs = [(part.x, part.y) for part in rows if len(part)]
        for pair in pairs:
            yield [(role, column) for role, tree in zip("xy", pair, strict=True) for column in leaves(tree)]

    def owners_by(self, kind: str | None) -> Any:
        """Return the name of each row's owner [n], None where there is one.

        Args:
            kind: the column, or the kind of owners, that says whose a row is.
        """
        if self.is_table:
            return self.frame.iloc[:, self.columns.index(kind)] if kind in self.columns else None
        if self.data_set is not None and str(kind) in self.data_set.owners:
            owners = self.data_set.owners[str(kind)]
            return np.array(owners.names)[owners.codes]
        return self.owners

    def _check_steady(self, blocks: Sequence[Sequence[Any]]) -> None:
        """Refuse items of a data set that are other ones whenever they are read."""
        rows = self.content
        if isinstance(rows, torch.utils.data.Dataset):
            places = range(min(_READ_TWICE, len(blocks[0][0])))
            again = given(torch.utils.data.Subset(rows, places), self.who)
            first = row_digests(column[: len(places)] for column in blocks[0])
            if not np.array_equal(row_digests(column for tree in again for column in leaves(tree)), first):
                raise UnidentifiedError


def records_of(owners: Sequence[Owner], site: str, kind: str | None = None, key: str | None = None) -> Digests:
    """Return the digests of a site's rows, each once, increasing; none where some are identified by nothing.

    Args:
        owners: who gave rows; those of the site's name count alone, where one of them has it.
        site, kind, key: see `Owner.digests`.
    """
    return counted_records(owners, site, kind, key)[0]


def counted_records(
    owners: Sequence[Owner], site: str, kind: str | None = None, key: str | None = None
) -> tuple[Digests, Ints]:
    """Return `records_of` and how many rows have each of the digests; arguments are the same."""
    own = [owner for owner in owners if owner.name == site] or owners
    digests = [owner.digests(site, kind, key) for owner in own]
    return np.unique(np.concatenate(digests) if all(map(len, digests)) else UNKNOWN, return_counts=True)


def read_owners(
    source: Any, client: str | None = None, *, pair: bool = False, parts: bool = False,
    cleaning: Cleaning | None = None,
) -> list[Owner]:  # fmt: skip
    """Return the owners of the rows in anything that holds rows.

    Args:
        source: see `clients_from`; or a `DataSet`, or `Clients`, whose rows are not fetched; or owners already.
        client: the column that names the client of each row of a table.
        pair: whether one pair (x, y) or torch data set is accepted as the rows of one owner.
        parts: whether a dict of parts, or a list [x, y], is one owner's.
        cleaning: what is done to the columns of tables before all else; owners that are given are clean already.

    Raises:
        SettingError: it holds no rows, or rows of some clients in another way than those of others.
    """
    if isinstance(source, list) and source and all(isinstance(owner, Owner) for owner in source):
        return source
    return cleaned(_as_given(source, client, pair, parts, cleaning), cleaning, client)


def cleaned(
    owners: Sequence[Owner], cleaning: Cleaning | None, client: str | None = None, site: str | None = None
) -> list[Owner]:
    """Return owners with their tables cleaned, and log what was changed in how many rows.

    Args:
        owners: as they gave their rows.
        cleaning: the rules, None for none.
        client: the column that names the client of each row of the only table.
        site: whose rows they are, where nothing in them says so.

    Raises:
        SettingError: there are no tables, no column or client of a name, or a value cannot be read.
    """
    if cleaning is None:
        return [*owners]
    clean, columns, names = list[Owner](), set[str](), set[str | None]()
    for owner in owners:
        if not owner.is_frame:
            raise SettingError(
                f"{', '.join(Rules.model_fields)} of [prepare] clean the columns of tables, and {owner.who} has none: "
                "leave them out"
            )
        who: Any = owner.name if owner.name is not None else site
        if owner.name is None and client is not None and client in owner.columns:
            series = owner.content[client]
            # as the names of clients are made of it
            who = np.where(series.isna(), "", [str(value) for value in series.tolist()])
        columns |= {*owner.columns}
        names |= {who} if isinstance(who, str | None) else {*who}
        frame, told = cleaning.applied(owner.content, who)
        _log.warning("cleaned by the rules %s: %s", cleaning.digest, "; ".join(told) or "nothing to change")
        clean.append(replace(owner, content=frame))
    if lacking := next((name for name in cleaning.all_changed if name not in columns), None):
        raise unknown("column, which [prepare] cleans,", lacking, sorted(columns))
    strangers = [] if site is not None else [name for name in cleaning.by_site if name not in names]
    if strangers and None not in names:
        raise unknown("client, which by_site of [prepare] names,", strangers[0], sorted(map(str, names)))
    return clean


def _as_given(
    source: Any, client: str | None, pair: bool, parts: bool, cleaning: Cleaning | None
) -> list[Owner]:  # fmt: skip
    """Return the owners of rows as they gave them; arguments are those of `read_owners`."""
    as_written = () if cleaning is None else cleaning.as_written
    if isinstance(source, Path) or is_table_path(source):
        source = read_table(Path(source), client, as_written)
    single = pair and (isinstance(source, torch.utils.data.Dataset | Rows) or _is_pair(source, parts))
    if is_frame(source) or made_by(source, "datasets") or isinstance(source, DataSet | HoldsRows) or single:
        return [Owner(None, source)]
    if made_by(source, "flwr_datasets"):
        return _of_partitioner(source, client)
    if _is_owned(source):
        return [Owner(None, source[:2], owners=source[2])]
    if parts and isinstance(source, Mapping) and ("train" in source or set(source) <= set(SPLITS)):
        return [*_of_member(None, source, as_written)]
    members = _members(source)
    if client is not None and any(is_frame(member) or is_table_path(member) for member in members.values()):
        raise SettingError("client names a column, but each client has a table of its own: leave client out")
    divided = {name: isinstance(member, Mapping) for name, member in members.items()}
    if len({*divided.values()}) > 1:
        whole, split = (next(name for name in divided if divided[name] is is_split) for is_split in (False, True))
        raise SettingError(
            f"client {whole!r} is not divided into {', '.join(SPLITS)} but client {split!r} is: divide all of them, or "
            "none"
        )
    return [owner for name, member in members.items() for owner in _of_member(name, member, as_written)]


def _members(source: Any) -> dict[str, Any]:
    """Return what each client gave, by its name."""
    if isinstance(source, tuple | list) and all(map(_is_array, source[:2])):
        if len(source) == 3 and isinstance(source, list):
            raise SettingError("got a list of arrays: write (x, y, owner), with the owner of each row, as a tuple")
        if len(source) == 2:
            raise SettingError(
                "got one pair (x, y), which would be the data of a single client: pass a list of pairs, like "
                "[(x, y)], or (x, y, owner), or deal it to clients with a partition, like "
                "Iid(clients=10).split(DataSet(...))"
            )
    if not isinstance(source, Mapping | list | tuple):
        raise SettingError(f"clients must come from {ALLOWED}, got {type(source).__name__}")
    if not source:
        raise SettingError(f"there must be at least one client, got an empty {type(source).__name__}: pass {ALLOWED}")
    named = source if isinstance(source, Mapping) else dict(enumerate(source))
    return dict(zip(different_names([*named]), named.values(), strict=True))


def different_names(names: Sequence[Any]) -> list[str]:
    """Names as text, all different: they identify clients in rng keys and in the run folder."""
    texts = [str(name) for name in names]
    if len(set(texts)) < len(texts):
        twice = next(text for index, text in enumerate(texts) if text in texts[:index])
        raise SettingError(f"clients must have different names, got {twice!r} twice: rename one of them")
    return texts


def _of_member(name: str | None, member: Any, as_written: Collection[str] = ()) -> Iterator[Owner]:
    """Yield what one client gave, part by part where it is divided, without parts that have no rows."""
    if not isinstance(member, Mapping):
        yield Owner(name, read_table(Path(member), None, as_written) if isinstance(member, str | Path) else member)
        return
    for part in member:
        if part not in SPLITS:
            raise unknown(f"part of {Owner(name, None).who} called", part, SPLITS)
    parts = [Owner(name, member[split], split) for split in SPLITS if split in member]
    held = [part for part in parts if not part.is_empty]
    if not held:
        raise SettingError(f"{Owner(name, None).who} has no rows: leave it out")
    yield from held


def _of_partitioner(partitioner: Any, client: str | None) -> list[Owner]:
    """Return the partitions of a `flwr_datasets` partitioner that has its data set.

    Clients are named by the ids that the partitioner divides by, or else by the numbers of their partitions.

    Raises:
        SettingError: it is not a partitioner, or has no data set or no rows.
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
        partitions = [partitioner.load_partition(number) for number in range(partitioner.num_partitions)]
    except AttributeError as error:
        raise SettingError(
            f"the partitioner has no data set yet ({error}): set partitioner.dataset, or load one partition of its "
            "FederatedDataset first"
        ) from None
    ids = getattr(partitioner, "partition_id_to_natural_id", None) or {}
    owners = [Owner(str(ids.get(number, number)), rows) for number, rows in enumerate(partitions) if len(rows)]
    if not owners:
        raise SettingError("the partitioner's data set must have at least one row, got none")
    return owners


def is_frame(value: Any) -> bool:
    """Return whether something is a pandas DataFrame, without importing pandas."""
    return made_by(value, "pandas") and hasattr(value, "columns")


def is_table_path(value: Any) -> bool:
    """Return whether something is the path of a table."""
    return isinstance(value, str | Path) and is_table(value)


def made_by(value: Any, package: str) -> bool:
    """Return whether a value's class comes from a package, without importing the package."""
    return any(base.__module__.partition(".")[0] == package for base in type(value).__mro__)


def _is_pair(value: Any, listed: bool) -> bool:
    # ((x, y), (x, y)) are two clients, and (x, y) is one.
    kinds = tuple | list if listed else tuple
    return isinstance(value, kinds) and len(value) == 2 and not isinstance(value[0], tuple)


def _is_owned(source: Any) -> bool:
    """Return whether a source is (x, y, owner) and not a tuple of clients."""
    if not isinstance(source, tuple) or len(source) != 3 or isinstance(source[2], tuple | Mapping):
        return False
    # A list of names or numbers is no client.
    named = isinstance(source[2], list) and all(isinstance(owner, str | int) for owner in source[2])
    return named or all(_is_array(part) or is_several(part) for part in source[:2])


def _is_array(value: Any) -> bool:
    return isinstance(value, np.ndarray | torch.Tensor) or made_by(value, "pandas")


def _is_empty(value: Any) -> bool:
    first = next((leaf for _, leaf in pytree.named_leaves(value)), ())
    return hasattr(first, "__len__") and len(first) == 0


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
    elif made_by(member, "pandas"):
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


def _read(dataset: Any, who: str) -> tuple[Any, Any]:
    """All items of a map-style data set, stacked where they are of one shape."""
    if not hasattr(dataset, "__len__"):
        raise SettingError(f"{who} is a {type(dataset).__name__} without a length: pass a map-style data set")
    items = [dataset[index] for index in range(len(dataset))]
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
