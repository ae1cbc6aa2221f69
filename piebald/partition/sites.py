"""Sites of a real federation: clients whose rows stay at the sites, which agree on the form of their data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from pydantic import Field, field_validator

from piebald.component import Component
from piebald.contracts import Clients, Rows, Split


class SiteClients:
    """Sites as `contracts.Clients`.  Instead of a client's rows there is one blank row of the agreed form, which gives
    the shape of inputs and the kind of targets.
    """

    elsewhere = True

    def __init__(self, names: Sequence[str], blank: Rows, classes: Sequence[str] | None) -> None:
        self.names, self.classes, self._blank = names, classes, blank
        self.common: Rows | None = None
        self.server_rows: Rows | None = None

    def __len__(self) -> int:
        return len(self.names)

    def rows(self, client: int, split: Split) -> Rows:
        """One blank row."""
        return self._blank

    def size(self, client: int, split: Split) -> None:
        """None: not known here."""
        return None

    def counts(self, client: int, split: Split) -> None:
        """None: not known here."""
        return None


class RemotePartition(Component):
    """Base class of partitions whose rows stay at the sites."""

    axis = "partition"

    def clients_elsewhere(self) -> Clients:
        """The clients, without their rows."""
        raise NotImplementedError


class Sites(RemotePartition):
    """Each client has the rows of its own site; no data set is loaded and no rows are dealt.

    Attributes:
        clients: names of the sites, as in the description of the federation; "any" for all that the server's
            credentials list.
        inputs: shape of one input.
        classes: names of the classes in the order of their numbers; None if targets are numbers to predict.
        targets: how many numbers to predict, if there are no classes.
    """

    clients: list[str] = Field(min_length=1)
    inputs: list[int] = Field(min_length=1)
    classes: list[str] | None = None
    targets: int = Field(default=1, ge=1)

    @field_validator("clients", mode="before")
    @classmethod
    def _named(cls, given: Any) -> Any:
        if given == "any":
            raise ValueError(
                "clients = 'any' are the sites that the server's credentials list: start it with piebald server "
                "CREDENTIALS FILE"
            )
        return given

    def clients_elsewhere(self) -> SiteClients:
        """The sites as clients, with a blank row of the agreed form."""
        if self.classes is not None:
            y = torch.zeros(1, dtype=torch.int64)
        else:
            y = torch.zeros(1) if self.targets == 1 else torch.zeros(1, self.targets)
        return SiteClients(self.clients, Rows(torch.zeros(1, *self.inputs), y), self.classes)
