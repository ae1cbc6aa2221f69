"""Inputs as the model of an experiment reads them: behind an extractor, as standard scores."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from piebald.contracts import Clients
from piebald.core.errors import SettingError
from piebald.data.clients.standardise import Standardisation, standardised
from piebald.data.embeddings.embedded import embedded_by


def read_by_model(
    clients: Clients,
    extractor: str | None,
    standardise: Literal["federated"] | Standardisation | None,
    unseen: float,
    at: Callable[..., str],
) -> Clients:
    """The clients with their inputs as the model reads them.

    Args:
        clients: the clients with the rows of their source.
        extractor: a frozen network, or None.
        standardise: "federated" computes constants from all clients' training rows.
        unseen: clients to hold out, whose rows must not count.
        at: the place of a key in the experiment's file.

    Raises:
        SettingError: the rows cannot be read so.
    """
    if extractor is not None:
        try:
            clients = embedded_by(clients, extractor)
        except SettingError as error:
            raise SettingError(f"{at('extractor')}: {error}") from None
    if standardise is None:
        return clients
    if standardise == "federated" and unseen:
        raise SettingError(
            f"{at('unseen')}: unseen holds clients out, whose rows would count in data.standardise = 'federated': give "
            "constants, standardise = { mean = [...], deviation = [...] }, or leave one of them out"
        )
    try:
        return standardised(clients, standardise if isinstance(standardise, Standardisation) else None)
    except SettingError as error:
        raise SettingError(f"{at('data', 'standardise')}: {error}") from None
