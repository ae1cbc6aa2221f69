"""Standard scores of inputs: each client's rows less one mean and divided by one deviation, the same at all clients."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

import numpy as np
import torch
from pydantic import ConfigDict, Field, model_validator
from torch import Tensor

from piebald.contracts import Clients, Rows, RowsAtSites
from piebald.contracts.component import WordedModel
from piebald.core import pytree
from piebald.core.arguments import checked, checked_class
from piebald.core.errors import SettingError
from piebald.core.moments import Moments, merged
from piebald.data.clients.prepared import ChangedClients, prepared_as
from piebald.data.preparation.preparation import Preparation


class Standardisation(WordedModel):
    """Constants of standard scores, (x - mean) / deviation.

    Attributes:
        mean: of each number of an input, flattened.
        deviation: of each of them, above 0; 1 for a constant one, which then becomes 0.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    mean: list[float] = Field(min_length=1)
    deviation: list[float] = Field(min_length=1)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if len(self.mean) != len(self.deviation):
            raise ValueError(f"mean and deviation must be as long, got {len(self.mean)} and {len(self.deviation)}")
        if not all(number > 0 for number in self.deviation):
            raise ValueError(f"deviation must be above 0, got {min(self.deviation)}")
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
        return Rows(self.standardisation.applied(rows.x), rows.y)


def of_moments(moments: Moments) -> Standardisation:
    """The constants from the moments of all clients' training rows; the deviation divides by the number of rows.

    Raises:
        SettingError: a column has no numbers, or infinite ones.
    """
    for defect, counts in (("missing", moments.missing), ("infinite", moments.infinite)):
        if counts.any():
            place = int(np.argmax(counts > 0))
            raise SettingError(
                f"standardise needs finite numbers, but number {place} of the input is {defect} in "
                f"{int(counts[place])} training rows: fill them in, or leave these rows out"
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
