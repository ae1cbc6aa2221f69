"""Rows in a file that all clients of a run have in common."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, Self, runtime_checkable

from piebald.contracts import Clients, Rows
from piebald.contracts.data import public_rows_of
from piebald.core import pytree
from piebald.core.errors import SettingError
from piebald.data.clients.client_tables import is_table
from piebald.data.clients.convert import floats, target_arrays
from piebald.data.sets.dataset import DataSet

if TYPE_CHECKING:
    from piebald.data.clients.data_source import DataSource


@runtime_checkable
class TakesPublicRows(Protocol):
    """Clients that can be given rows which all of them have."""

    def with_public_rows(self, rows: Rows) -> Self:
        """The same clients with these public rows."""


def with_published(clients: Clients, source: DataSource, folder: Path | None = None) -> Clients:
    """Clients with the public rows of the file that `source.public` names.

    Args:
        clients: whose rows they must look like.
        source: with the file's name, and what is said of the columns of tables.
        folder: what the file's path is relative to, the working directory by default.

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
    return clients.with_public_rows(_looking_alike(_rows(source, path, clients), clients, who))


def _rows(source: DataSource, path: Path, clients: Clients) -> Rows:
    """The rows of the file, with the clients' numbers of classes."""
    table = is_table(path)
    more: dict[str, Any] = {"name": None, "source": str(path), "public": None, "standardise": None}
    more |= {"client": None, "target": source.target if table else None}  # they are nobody's
    more |= {"features": source.features if table else None, "regression": clients.classes is None}
    names = None if clients.classes is None else list(clients.classes)
    found = source.model_copy(update=more | {"classes": names})
    value = found.read()
    if isinstance(value, tuple):
        value = (value[0], target_arrays(value[1], source.public or "", names))
    elif source.client in value.columns:
        value = value.drop(columns=source.client)
    rows = found.rows_of(value)
    assert isinstance(rows, DataSet)
    return Rows(floats(pytree.mapped(lambda one: one[:], rows.x)), rows.y)


def _looking_alike(rows: Rows, clients: Clients, who: str) -> Rows:
    """The rows, after a comparison with those of a client."""
    own = next((found for client in range(len(clients)) if len(found := clients.rows(client, "train"))), None)
    if own is None:
        raise SettingError("no client has a training row")
    here, there = ((pytree.plain(pytree.form(one.x)), _types(one.y)) for one in (rows, own))
    if here != there:
        raise SettingError(
            f"{who} must look like the clients' rows, inputs {there[0]} with {there[1]} targets, got {here[0]} with "
            f"{here[1]} targets"
        )
    return rows


def _types(y: Any) -> str:
    leaves = [leaf for _, leaf in pytree.named_leaves(y)]
    return " and ".join(f"{str(one.dtype).removeprefix('torch.')} {list(one.shape[1:])}" for one in leaves)
