"""The rows of one client of a run that is described elsewhere: of a site, or of a newcomer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import numpy as np
import torch

from piebald.contracts import Clients
from piebald.core.errors import SettingError
from piebald.data.clients.client_tables import BY_SHARES, ClientTable
from piebald.data.clients.convert import is_several
from piebald.data.clients.data_source import DataSource
from piebald.data.clients.owner import Owner
from piebald.data.clients.sources import clients_of_table, recoded
from piebald.data.partition import ByOwner, Iid
from piebald.data.partition.split_settings import SplitSettings
from piebald.data.preparation.settings import PrepareSettings
from piebald.data.sets.dataset import DataSet
from piebald.data.sets.decoded import Decoded

_COLUMNS = ("target", "features", "tokens")  # what a source leaves to the run where it does not say it itself


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
            source = source.model_copy(update={"client": None, "target": None, "features": None})
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
