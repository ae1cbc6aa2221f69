"""Sites of a real federation: clients whose rows stay at the sites, which agree on the form of their data."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Self

import torch
from pydantic import Field, field_validator, model_validator

from piebald.contracts import Component, Rows, Split
from piebald.contracts.data import without_inputs
from piebald.core.client_models import fitting_patterns, idle_pattern_reason
from piebald.core.errors import SettingError
from piebald.core.pytree import Tree
from piebald.data.partition.split import SplitSettings
from piebald.data.preparation.preparation import Preparation


class RowsNotKept(SettingError):
    """What is asked for needs rows of a client that a run folder does not hold."""


class SiteClients:
    """Sites as `contracts.Clients`.  Instead of a client's rows there is one blank row of the agreed form, which gives
    the shape of inputs and the kind of targets.
    """

    elsewhere = True

    def __init__(
        self,
        names: Sequence[str],
        blank: Rows,
        classes: Sequence[str] | None,
        lacks: Mapping[str, Collection[str]] | None = None,
    ) -> None:
        self.names, self.classes, self._blank, self._lacks = names, classes, blank, lacks or {}
        self.division: SplitSettings | None = None
        self.target: str | list[str] | None = None
        self.common: Rows | None = None
        self.server_rows: Rows | None = None
        self.public_rows: Rows | None = None

    def __len__(self) -> int:
        return len(self.names)

    def with_public_rows(self, rows: Rows) -> Self:
        """The same sites with these public rows, which each of them must have, too."""
        sites = copy.copy(self)
        sites.public_rows = rows
        return sites

    def divided_by(self, division: SplitSettings | None) -> Self:
        """The same sites, which divide their rows by these settings."""
        if division is not None:
            division.refuse_several()
            division.untrained(self.names)  # refuses unknown names
        sites = copy.copy(self)
        sites.division = division
        return sites

    def rows(self, client: int, split: Split) -> Rows:
        """One blank row."""
        return Rows(without_inputs(self._blank.x, self.lacks(client)), self._blank.y)

    def lacks(self, client: int) -> frozenset[str]:
        """Return the names of the inputs that a site lacks: those of its name, or else of the longest pattern."""
        fitting = fitting_patterns(self._lacks, self.names[client])
        return frozenset(self._lacks[fitting[0]] if fitting else ())

    def size(self, client: int, split: Split) -> int | None:
        """None: not known here."""
        return None

    def counts(self, client: int, split: Split) -> None:
        """None: not known here."""
        return None


class RecordedClients(SiteClients):
    """Clients of a finished run whose rows cannot be read any more, as its folder describes them.

    Args:
        table: a description of each client: its name, and how many rows of each split it has, None if not known.
        blank, classes: see `SiteClients`.
        reason: why the rows cannot be read, for messages.
    """

    elsewhere = False

    def __init__(
        self, table: Sequence[Mapping[str, Any]], blank: Rows, classes: Sequence[str] | None, reason: str
    ) -> None:
        super().__init__([str(row["name"]) for row in table], blank, classes)
        self._table, self._reason, self._shows_form = table, reason, False

    def size(self, client: int, split: Split) -> int | None:
        """Return the number of rows, None where it is not known."""
        size = self._table[client].get(split)
        return None if size is None else int(size)

    def rows(self, client: int, split: Split) -> Rows:
        """One blank row within `forms`.

        Raises:
            RowsNotKept: the rows themselves are wanted.
        """
        if not self._shows_form:
            raise RowsNotKept(
                f"this needs the {split} rows of client {self.names[client]!r}, which the run does not keep: "
                f"{self._reason}"
            )
        return self._blank

    @contextmanager
    def forms(self) -> Iterator[None]:
        """Give blank rows to those who want no more than their form."""
        self._shows_form = True
        try:
            yield
        finally:
            self._shows_form = False


class RemotePartition(Component):
    """Base class of partitions whose rows stay at the sites."""

    axis = "partition"

    def clients_elsewhere(self) -> SiteClients:
        """The clients, without their rows."""
        raise NotImplementedError


class Sites(RemotePartition):
    """Each client has the rows of its own site; no data set is loaded and no rows are dealt.

    Attributes:
        clients: names of the sites, as in the description of the federation; "any" for all that the server's
            credentials list.
        inputs: shape of one input; where inputs are several, a table of their names and shapes.  None for tables that
            the sites prepare alike, which agree on it.
        lacks: by name or pattern of sites, the names of the inputs that these lack and that the model can do without.
        tokens: whether inputs are whole numbers; where they are several, the names of those that are.
        classes: names of the classes in the order of their numbers; None if targets are numbers to predict.
        targets: how many numbers to predict, if there are no classes.
        places: how many classes each row has, such as the length of a text; None for one class.
    """

    clients: list[str] = Field(min_length=1)
    inputs: list[int] | dict[str, list[int]] | None = None
    lacks: dict[str, tuple[str, ...]] = Field(default_factory=dict)
    tokens: bool | list[str] = False
    classes: list[str] | None = None
    targets: int = Field(default=1, ge=1)
    places: int | None = Field(default=None, ge=1)

    @model_validator(mode="after")
    def _check_tokens(self) -> Self:
        if isinstance(self.inputs, dict) != isinstance(self.tokens, list) and self.tokens:
            raise ValueError("tokens must be a list of names where inputs have names, else true or false")
        named = self.tokens if isinstance(self.tokens, list) else []
        if self.inputs is not None and not self.inputs:
            raise ValueError("inputs needs at least one entry")
        inputs = self.inputs or []
        for name in named:
            if name not in inputs:
                raise ValueError(f"tokens must be among the inputs {', '.join(map(str, inputs))}, got {name!r}")
        for name in itertools.chain(*self.lacks.values()):
            if not isinstance(inputs, dict) or name not in inputs:
                raise ValueError(f"lacks must name inputs, which are {', '.join(map(str, inputs))}, got {name!r}")
        if idle := idle_pattern_reason(self.lacks, self.clients, "lacks"):
            raise ValueError(idle)
        if self.places is not None and self.classes is None:
            raise ValueError("places counts the classes of a row: give classes, or leave places out")
        return self

    @field_validator("clients", mode="before")
    @classmethod
    def _named(cls, clients: Any) -> Any:
        if clients == "any":
            raise ValueError(
                "clients = 'any' are the sites that the server's credentials list: start it with piebald server "
                "CREDENTIALS FILE"
            )
        return clients

    def prepared(self, agreed: Preparation) -> Self:
        """Return the same sites with the form of rows that they have agreed on."""
        form = {"inputs": [len(agreed.feature_names_out)], "tokens": agreed.text is not None}
        return self.model_copy(update={**form, "classes": agreed.classes})

    def predicting(self, target: str | list[str] | None) -> Self:
        """Return the same sites with rows that have all these columns as their targets."""
        return self.model_copy(update={"targets": len(target)}) if isinstance(target, list) else self

    def of_text(self, length: int) -> Self:
        """Return the same sites with rows of so many token ids, of which only the classes are still to be known."""
        return self.model_copy(update={"inputs": [length], "tokens": True})

    def clients_elsewhere(self) -> SiteClients:
        """The sites as clients, with a blank row of the agreed form; of one number where it is not agreed on yet."""
        if self.classes is not None:
            y = torch.zeros(1, *([] if self.places is None else [self.places]), dtype=torch.int64)
        else:
            y = torch.zeros(1) if self.targets == 1 else torch.zeros(1, self.targets)
        return SiteClients(self.clients, Rows(self._blank_inputs(), y), self.classes, self.lacks)

    def _blank_inputs(self) -> Tree:
        whole = self.tokens if isinstance(self.tokens, list) else []
        if isinstance(self.inputs, dict):
            kinds = {name: torch.int64 if name in whole else torch.float32 for name in self.inputs}
            return {name: torch.zeros(1, *shape, dtype=kinds[name]) for name, shape in self.inputs.items()}
        return torch.zeros(1, *(self.inputs or [1]), dtype=torch.int64 if self.tokens else torch.float32)
