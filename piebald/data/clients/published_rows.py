"""Rows in a file that all clients of a run have in common."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Protocol, Self, runtime_checkable

import torch

from piebald.contracts import Clients, Rows
from piebald.contracts.data import public_rows_of
from piebald.core import pytree
from piebald.core.errors import SettingError
from piebald.data.clients.client_tables import is_table
from piebald.data.clients.convert import floats
from piebald.data.clients.data_source import DataSource
from piebald.data.clients.own_rows import RunRows, own_table
from piebald.data.clients.owner import read_owners
from piebald.data.clients.pairs import looking_alike

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
        raise SettingError(f"{who} must be a .npz file with arrays x and y, or a .csv, .tsv or .parquet table")
    client_rows = next((held for client in range(len(clients)) if len(held := clients.rows(client, "train"))), None)
    if client_rows is None:
        raise SettingError("no client has a training row")
    return clients.with_public_rows(looking_alike(_rows(source, path, clients, run), client_rows, who))


def _rows(source: DataSource, path: Path, clients: Clients, run: RunRows) -> Rows:
    """The rows of the file, with the clients' numbers of classes."""
    changes = dict.fromkeys(("name", "client", "classes", "public", "standardise"))
    if not is_table(path):
        changes |= dict.fromkeys(("target", "features"))
    published = source.model_copy(update=changes | {"source": str(path)})
    # rows that all have are nobody's, and a column of clients would be read as a feature
    columns = {**run.columns, "client": source.client or run.columns.get("client")}
    said = replace(run, classes=clients.classes, numbers=clients.classes is None, columns=columns)
    table, (y, _) = own_table(read_owners(published.read(), pair=True), published, "", said)
    x, y = (pytree.mapped(torch.from_numpy, tree) for tree in (table.x, y))
    return Rows(floats(x), y)
