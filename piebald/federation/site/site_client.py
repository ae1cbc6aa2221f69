"""A run at one site, and the ledger of the site's rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from piebald.contracts import Clients
from piebald.data.clients.owner import Owner, records_of
from piebald.data.clients.row_identity import UNKNOWN, Digests
from piebald.federation.site.site_rows import SPLITS
from piebald.methods.client_work import ClientWork
from piebald.privacy.ledger import FOLDER, Head, RowLedger


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
