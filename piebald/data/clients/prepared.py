"""Clients whose rows are those of other clients, changed in the same way at each: prepared tables, standard scores.

Standard scores of inputs: each client's rows less one mean and divided by one deviation, the same at all clients.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch
from pydantic import ConfigDict, Field, model_validator
from torch import Tensor

from piebald.contracts import Clients, InMemory, Rows, RowsAtSites, Split
from piebald.contracts.component import WordedModel
from piebald.core import pytree
from piebald.core.arguments import Positive, checked, checked_class
from piebald.core.errors import SettingError, about, shown
from piebald.core.moments import Moments, merged
from piebald.core.objective import OF_PAIRS, Objective, speaks_in_unit
from piebald.core.tensor_store import blocks, large_array
from piebald.data.clients.pooled_clients import PooledClients
from piebald.data.clients.table_files import gap_code_reasons, mixed_reason
from piebald.data.clients.target_columns import CountAndExposure
from piebald.data.clients.view import ClientsView
from piebald.data.preparation.columns import CodedRows, CodedTable, factorized, guess_columns
from piebald.data.preparation.preparation import NumberTarget, Preparation, PrepareSettings
from piebald.data.preparation.written_forms import VALUES_LOG

if TYPE_CHECKING:
    import pandas as pd

    from piebald.data.preparation.answers import Answer, Question


log = logging.getLogger("piebald.data")
_values_log = logging.getLogger(VALUES_LOG)
_SHOWN = 50  # clients in a table of gaps


class ChangedClients(ClientsView):
    """Clients whose rows `change` makes from those of other clients (`contracts.Clients`).

    Args:
        clients: the clients with the rows as they are.
        computed: whether the change was computed from these clients' rows, and so discloses something about them.
    """

    def __init__(self, clients: Clients, computed: bool) -> None:
        super().__init__(clients)
        self.computed = computed
        self._pool: Rows | None = None

    def change(self, rows: Rows, client: int | None = None) -> Rows:
        """Return rows as a model reads them, where it is known whose they are by the client's number."""
        raise NotImplementedError

    @property
    def unchanged(self) -> Clients:
        """The clients with the rows as they are."""
        return self._clients

    @property
    def by_client(self) -> bool:
        """True if the change is not the same at all clients."""
        return False

    @property
    def common(self) -> Rows | None:
        """A test set that belongs to no client, or None."""
        # rows of no client have no constants of their own
        return None if self.by_client else self._changed(super().common)

    @property
    def server_rows(self) -> Rows | None:
        """Rows that the server keeps for itself, or None."""
        return self._changed(super().server_rows)

    @property
    def public_rows(self) -> Rows | None:
        """Rows that all clients have, or None."""
        return self._changed(super().public_rows)

    def in_memory(self) -> bool:
        """Return whether the pool is in memory."""
        return super().in_memory() and not self.by_client

    def pool(self) -> Rows:
        """All rows."""
        if self._pool is None:
            self._pool = self.change(super().pool())
        return self._pool

    def rows(self, client: int, split: Split) -> Rows:
        """The rows of one split; empty where the client has none."""
        if self.in_memory():
            return self.pool()[torch.from_numpy(self.indices(client, split))]
        return self.change(super().rows(client, split), client)

    def _changed(self, rows: Rows | None) -> Rows | None:
        return None if rows is None else self.change(rows)

    def of(self, clients: Clients) -> Self:
        """Return other clients with rows of the same pool, changed in the same way."""
        # the prepared pool is shared: rows of the same pool are prepared once
        changed = copy.copy(self)
        changed._clients = clients
        return changed


def rows_of_recipe(clients: Clients, on_all_rows: bool, pooled: bool) -> Clients:
    """Return the clients as one recipe has them: training on validation rows, or all training rows in one place.

    Inputs stay as they are for the other recipes: the constants of a preparation are those of the training rows.

    Raises:
        SettingError: rows are not in memory, or those of one client are not prepared as another's.
    """
    if not on_all_rows and not pooled:
        return clients
    if isinstance(clients, ChangedClients):
        if pooled and clients.by_client:
            raise SettingError(
                "pooled = true needs inputs that are the same numbers at all clients, and harmonise in [prepare] takes "
                "each client's own constants: leave one of them out"
            )
        return clients.of(rows_of_recipe(clients.unchanged, on_all_rows, pooled))
    if not isinstance(clients, PooledClients):
        raise SettingError(
            "clients train on their validation rows (validation = false) or all rows are in one place (pooled = true) "
            "only where rows are in memory"
        )
    clients = clients.on_all_rows() if on_all_rows else clients
    return clients.in_one_place() if pooled else clients


def gathered_bytes(clients: Clients) -> int | None:
    """Return the bytes of the training rows that were sent to one place, as `pooled = true` has them, else None."""
    while isinstance(clients, ChangedClients):
        clients = clients.unchanged
    return clients.gathered_bytes if isinstance(clients, PooledClients) else None


class PreparedClients(ChangedClients):
    """Clients whose tables are prepared alike.

    Args:
        clients: the clients, whose inputs are columns as `columns` describes them.
        columns: how the columns are written as numbers.
        preparation: what the clients have agreed on.
        computed: see `ChangedClients`.
    """

    def __init__(self, clients: Clients, columns: CodedTable, preparation: Preparation, computed: bool) -> None:
        super().__init__(clients, computed)
        self.coded, self.preparation = columns, preparation

    def __repr__(self) -> str:
        """The clients, in one line."""
        return f"<prepared {self._clients!r}>"

    @property
    def by_client(self) -> bool:
        """True if numbers are harmonised, by each client's own constants."""
        return bool(self.preparation.harmonised)

    def in_unit_of_target(self) -> Self:
        """Return the same clients, with targets in their own unit unless [prepare] says how they are scaled."""
        preparation = self.preparation.in_unit_of_target()
        if preparation == self.preparation:
            return self
        changed = copy.copy(self)
        changed.preparation = preparation
        if self._pool is not None:
            changed._pool = replace(self._pool, y=scaled(self.unchanged.pool().y, preparation))  # type: ignore[attr-defined]
        log.info("the target is in its own unit for this loss: %s", preparation.said)
        return changed

    def raw(self, client: int, split: Split) -> pd.DataFrame:
        """Return the rows of one split as the table that they are before they are prepared."""
        return frame_of(self.coded, self._clients.rows(client, split))

    def change(self, rows: Rows, client: int | None = None) -> Rows:
        """Return inputs as the preparation makes them, and targets on one scale where they are numbers."""
        name, codes = None if client is None else str(self.names[client]), pytree.single(rows.x, "prepare").numpy()
        x = large_array((len(codes), len(self.preparation.feature_names_out)), self.preparation.dtype)
        numbered = dict[str, dict[str, int]]()  # a label has one number in all blocks
        for block in blocks(len(codes)):
            table = self.coded.frame(codes[block], np.arange(block.start, block.stop))
            x[block] = self.preparation.transform(table, name, numbered)
        return Rows(torch.from_numpy(x), scaled(rows.y, self.preparation), rows.weight)


class SitesPrepared(PreparedClients):
    """Sites that prepare their rows by themselves; blank rows have the agreed form already."""

    def __init__(self, clients: Clients, preparation: Preparation) -> None:
        super().__init__(clients, CodedTable((), {}), preparation, computed=False)

    def change(self, rows: Rows, client: int | None = None) -> Rows:
        """Return the rows as they are."""
        return rows


def prepared_as(clients: Clients, preparation: Preparation) -> Clients:
    """Return clients with the rows as a preparation makes them.

    Args:
        clients: with tables, or with inputs that are the preparation's columns in order, as numbers.
        preparation: of a run that these clients took no part in.

    Raises:
        SettingError: they are prepared by another one, or inputs are not its columns.
    """
    if isinstance(clients, PreparedClients) and preparation == clients.preparation.in_unit_of_target():
        return clients.in_unit_of_target()
    if (other := preparation_of(clients)) is not None:
        if other != preparation:
            raise SettingError("the rows are prepared in another way than those of the run: give them as they are")
        return clients
    columns = columns_of(clients)
    if columns is None:
        names, form = preparation.names_in, pytree.form(clients.rows(0, "train").x)
        if form != (len(names),):
            raise SettingError(
                f"the run reads the columns {shown(', '.join(names))}, and these inputs are {pytree.plain(form)}: give "
                "a table with these columns"
            )
        columns = CodedTable(tuple(names), {})
    return PreparedClients(clients, columns, preparation, computed=False)


def in_unit_of_loss(clients: Clients, loss: Any) -> Clients:
    """Return clients whose targets are in their own unit where a loss speaks in that, see `speaks_in_unit`.

    Args:
        clients: any.
        loss: as given to a run.
    """
    inner = getattr(clients, "_clients", None)
    if not speaks_in_unit(loss) or inner is None:
        return clients
    if isinstance(clients, PreparedClients):
        return clients.in_unit_of_target()
    changed = copy.copy(clients)
    changed._clients = in_unit_of_loss(inner, loss)  # type: ignore[attr-defined]
    return changed


def frame_of(table: CodedTable, rows: Rows) -> pd.DataFrame:
    """Return inputs as the table that they are the numbers of."""
    return table.frame(pytree.single(rows.x, "prepare").numpy())


def coded_rows(
    clients: Clients, table: CodedTable, client: int, split: Split
) -> tuple[CodedRows, np.ndarray[Any, Any] | None]:
    """Return the rows of a client as columns that are read one by one, and its targets [n] where they are numbers."""
    if isinstance(clients, InMemory) and clients.in_memory():
        rows, index = clients.pool(), clients.indices(client, split)
    else:
        rows = clients.rows(client, split)
        index = np.arange(len(rows))
    y = pytree.single(rows.y, "prepare").numpy()[index] if clients.classes is None else None
    return CodedRows(table, pytree.single(rows.x, "prepare").numpy(), index), y


def scaled(y: Any, preparation: Preparation) -> Any:
    """Return targets that are numbers as standard scores, float32, computed in float64; others as they are."""
    target = preparation.target
    if not isinstance(target, NumberTarget) or preparation.form == "values":
        return y
    mean, deviation = (torch.tensor(numbers, dtype=torch.float64) for numbers in target.constants)
    return ((y.double() - mean) / deviation).float()


def columns_of(clients: Any) -> CodedTable | None:
    """Return how the inputs of clients are columns of a table, None for other inputs."""
    return getattr(clients, "columns", None)


def preparation_of(clients: Any) -> Preparation | None:
    """Return the preparation of clients whose tables are prepared, or of some of them, None for others."""
    tables = _within(clients)
    return None if tables is None else tables.preparation


def _within(clients: Any) -> PreparedClients | None:
    """Return the clients with prepared tables that these are, or are some of."""
    while clients is not None and not isinstance(clients, PreparedClients):
        clients = getattr(clients, "_clients", None)
    return clients


def prepared(
    clients: Clients, settings: PrepareSettings, target: str | Sequence[str], held_out: Collection[int] = (), *,
    origin: str,
    say: Callable[[str], None] = log.info,
) -> PreparedClients:  # fmt: skip
    """Return clients with prepared rows; what is not agreed on yet follows from their training rows.

    Args:
        clients: clients whose inputs are columns of a table.
        settings: the settings of [prepare].
        target: the column to predict, or several.
        held_out: numbers of clients who have no say, since they take no part in the training.
        origin: the file of the rows, for messages.
        say: called with one line about what was chosen.

    Raises:
        SettingError: inputs are no columns of a table, or a value cannot be read.
    """
    table, agreed = columns_of(clients), settings.agreed
    if table is None:
        raise SettingError("prepare is for the columns of tables, and these inputs are arrays: leave it out")
    warn_of_values(clients, table, settings, origin)
    with about(origin):
        if agreed is None:
            agreed = _agreed(clients, table, settings, target, held_out)
            say(agreed.said)
        made = PreparedClients(clients, table, agreed, computed=settings.agreed is None)
        if made.in_memory():
            made.pool()  # now, so that a word among numbers is told with its file
    return made


_OF_WORDS = {
    "category": "; else all of them are categories",
    "identifier": "; else the column is left out",
    "number": "",
}


def warn_of_values(clients: Clients, table: CodedTable, settings: PrepareSettings, origin: str) -> None:
    """Log a warning of each column of numbers in memory that has words or codes for gaps which no setting explains."""
    if not isinstance(clients, InMemory) or not clients.in_memory():
        return
    numbers = pytree.single(clients.pool().x, "prepare").numpy()
    rows = CodedRows(table, numbers, np.arange(len(numbers)))
    for name in table.names:
        if (
            name in table.values
            and name not in settings.columns
            and (reason := mixed_reason(rows[name], settings.gaps))
        ):
            kind = guess_columns(rows[name].to_frame(), settings.gaps)[name]
            if kind in _OF_WORDS:
                _values_log.warning("%s: %s%s", origin, reason, _OF_WORDS[kind])
        if settings.columns.get(name, "number") == "number":
            for reason in gap_code_reasons(rows[name], settings.gaps):
                _values_log.warning("%s: %s", origin, reason)


def _agreed(
    clients: Clients, table: CodedTable, settings: PrepareSettings, target: str | Sequence[str],
    held_out: Collection[int],
) -> Preparation:  # fmt: skip
    from piebald.data.preparation.agreement import agree, are_labels_alone
    from piebald.data.preparation.answers import answer

    tables, names = list[tuple[CodedRows, Any]](), list[str]()
    for client in range(len(clients)):
        rows, y = coded_rows(clients, table, client, "train")
        if len(rows) and client not in held_out:
            tables.append((rows, y))
            names.append(str(clients.names[client]))
    if not tables:
        raise SettingError("prepare needs training rows, and no client has any")

    def ask(question: Question) -> list[Answer]:
        return [answer(question, frame, y) for frame, y in tables]

    if not isinstance(target, str):
        targets = [y for _, y in tables if y is not None]
        if are_labels_alone(target, targets, names, isinstance(target, CountAndExposure)):
            settings = settings.model_copy(update={"scale": {**settings.scale, **dict.fromkeys(target, "none")}})
    return agree(ask, settings, target, clients.classes, lambda: names)


def in_own_unit(objective: Objective, preparation: Preparation | None) -> Objective:
    """Return the objective with metrics in the target's own unit, where a model learns its standard scores."""
    target = None if preparation is None else preparation.target
    # times, events and counts are never scores, and the logarithm of a hazard or a rate has no unit of theirs
    if not isinstance(target, NumberTarget) or objective.name in OF_PAIRS:
        return objective
    return objective.in_unit(*target.constants)


def gaps_by_client(clients: Any) -> dict[str, dict[str, float]]:
    """Return the share of training rows without a value by client and column, of prepared tables on this machine."""
    tables = _within(clients)
    if tables is None or tables.elsewhere:
        return {}
    agreed, shares = tables.preparation, dict[str, dict[str, float]]()
    for client in range(min(len(tables), _SHOWN)):
        table, _ = coded_rows(tables.unchanged, tables.coded, client, "train")
        shares[str(tables.names[client])] = {
            name: float((factorized(table[name], agreed.gaps)[0] < 0).mean())
            for name in agreed.names_in if name in table.columns and len(table)
        }  # fmt: skip
    return shares


class Standardisation(WordedModel):
    """Constants of standard scores, (x - mean) / deviation.

    Attributes:
        mean: of each number of an input, flattened.
        deviation: of each of them, above 0; 1 for a constant one, which then becomes 0.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    mean: list[float] = Field(min_length=1)
    deviation: list[Positive] = Field(min_length=1)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if len(self.mean) != len(self.deviation):
            raise ValueError(f"mean and deviation must be as long, got {len(self.mean)} and {len(self.deviation)}")
        return self

    def applied(self, x: Any) -> Tensor:
        """Inputs [n, ...] as standard scores, float32, computed in float64.

        Raises:
            SettingError: inputs have another length, or are no numbers.
        """
        rows = _numbers(x)
        width = rows[:1].numel() if len(rows) else int(np.prod(rows.shape[1:]))
        if width != len(self.mean):
            raise SettingError(f"standardise has constants for {len(self.mean)} numbers, but inputs have {width}")
        shape = (1, *rows.shape[1:])
        mean, deviation = (
            torch.tensor(numbers, dtype=torch.float64).reshape(shape) for numbers in (self.mean, self.deviation)
        )
        # in float32 the difference cancels where numbers are large beside their deviation
        return ((rows.double() - mean) / deviation).float()


@checked_class
class StandardisedClients(ChangedClients):
    """Clients whose inputs are standard scores (`contracts.Clients`).

    Args:
        clients: the clients with the rows as they are.
        standardisation: the constants.
        computed: whether they were computed from these clients' rows, and so disclose something about them.
    """

    def __init__(self, clients: Clients, standardisation: Standardisation, computed: bool = False) -> None:
        super().__init__(clients, computed)
        self.standardisation = standardisation

    def __repr__(self) -> str:
        """The clients, in one line."""
        return f"<standardised {self._clients!r}>"

    def change(self, rows: Rows, client: int | None = None) -> Rows:
        """Return inputs as standard scores."""
        return replace(rows, x=self.standardisation.applied(rows.x))


def of_moments(moments: Moments) -> Standardisation:
    """The constants from the moments of all clients' training rows; the deviation divides by the number of rows.

    Raises:
        SettingError: a column has no numbers, or infinite ones.
    """
    for defect, counts in (("missing", moments.missing), ("infinite", moments.infinite)):
        if counts.any():
            index = int(np.argmax(counts > 0))
            raise SettingError(
                f"standardise needs finite numbers, but number {index} of the input is {defect} in "
                f"{int(counts[index])} training rows: fill them in, or leave these rows out"
            )
    if not moments.rows:
        raise SettingError("standardise needs training rows, and no client has any")
    deviation = np.sqrt(moments.scatter / moments.rows)
    return Standardisation(mean=moments.mean.tolist(), deviation=np.where(deviation > 0, deviation, 1.0).tolist())


@checked
def standardisation_of(clients: Clients) -> Standardisation:
    """The constants of these clients, from their training rows alone.

    Raises:
        SettingError: rows are at the sites of a federation, or inputs are no finite numbers.
    """
    if isinstance(clients, RowsAtSites) and clients.elsewhere:
        raise SettingError(
            "standardise = 'federated' needs rows on this machine, and they are at the sites: ask the sites with "
            "piebald statistics FILE --credentials FOLDER --standardise, and write what it prints into [data]"
        )
    return of_moments(
        merged(Moments.of(flat) for flat in (_flat(clients.rows(client, "train").x) for client in range(len(clients))))
    )


@checked
def standardised(clients: Clients, constants: Standardisation | None = None) -> StandardisedClients:
    """Clients with the inputs of all their rows as standard scores.

    Args:
        clients: the clients.
        constants: the constants; None computes them from all clients' training rows: the mean, and the deviation
            around it, of the pooled rows (merged as in Chan, Golub, LeVeque 1983, so that no row leaves its client).

    Raises:
        SettingError: inputs are no finite numbers, of one tensor, or are standardised already.
    """
    if isinstance(clients, StandardisedClients):
        raise SettingError("these clients are standardised already: standardise them once")
    scores = StandardisedClients(clients, constants or standardisation_of(clients), computed=constants is None)
    if len(clients):
        scores.standardisation.applied(clients.rows(0, "train").x)  # refuses inputs of another form now
    return scores


def constants_of(clients: Clients) -> Standardisation | None:
    """The constants of clients whose inputs are standard scores, None for others."""
    return clients.standardisation if isinstance(clients, StandardisedClients) else None


def unhidden_reason(clients: Clients, noise: str | None) -> str | None:
    """Return the reason why constants of these clients' rows cannot stand beside noise that hides them, or None."""
    if noise is None or not isinstance(clients, ChangedClients) or not clients.computed:
        return None
    if isinstance(clients, StandardisedClients):
        remedy = (
            "give constants that are known otherwise, standardise = { mean = [...], deviation = [...] }, or ask for "
            "them with piebald statistics --epsilon"
        )
    else:
        remedy = "set prepare = 'none' where columns are numbers, or agreed = {...} in [prepare] of rows of others"
    return (
        f"constants of {'standard scores' if isinstance(clients, StandardisedClients) else 'a preparation'} that are "
        f"computed from the rows tell of each of them what {noise} hides, and no privacy budget counts them: {remedy}"
    )


def constants_of_run(meta: Mapping[str, Any]) -> Standardisation | None:
    """The constants that the run which `meta` describes was trained with, None where it has none."""
    recorded = meta.get("standardise") or ((meta.get("settings") or {}).get("data") or {}).get("standardise")
    return Standardisation.model_validate(recorded) if isinstance(recorded, Mapping) else None


def as_in_run(clients: Clients, meta: Mapping[str, Any]) -> Clients:
    """Clients with inputs as the run has them which `meta` describes: its constants count, also for newcomers.

    Raises:
        SettingError: they are standardised already, by other constants, or the run is not; or inputs are not the
            columns of the run's tables.
    """
    if meta.get("preparation") is not None:
        return prepared_as(clients, Preparation(**meta["preparation"]))
    constants, of_run = constants_of(clients), constants_of_run(meta)
    if constants is not None and constants != of_run:
        raise SettingError("the rows are standardised by other constants than the run: give them as they are")
    return clients if of_run is None or constants is not None else StandardisedClients(clients, of_run)


def _numbers(x: Any) -> Tensor:
    rows = pytree.single(x, "standardise")
    if not rows.dtype.is_floating_point:
        raise SettingError(f"standardise is for inputs that are numbers, got {rows.dtype}: token ids have no mean")
    return rows


def _flat(x: Any) -> Any:
    rows = _numbers(x)
    return rows.reshape(len(rows), int(np.prod(rows.shape[1:]))).double().numpy()
