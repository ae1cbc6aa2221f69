"""The base class of a runtime's settings."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from piebald.client_work import Work
from piebald.component import Part
from piebald.contracts import Clients, Runtime

if TYPE_CHECKING:
    pass


class Where(Part):
    """Settings of a runtime: where a recipe runs."""

    axis = "runtime"
    simulates: ClassVar[bool] = True  # False: clients' rows are not here
    repeats: ClassVar[bool] = True  # False: what is lost since the last checkpoint cannot be computed again

    def settled(self, work: Work, clients: Clients, expected: int) -> Where:
        """The same with every choice made, so that a resumed run makes the same ones; `expected` clients work at a
        time.
        """
        return self

    def beside(self, folder: Path) -> Where:
        """The same with what it keeps on disk in a run's folder."""
        return self

    def open(self, work: Work, clients: Clients) -> Runtime:
        """Start it."""
        raise NotImplementedError
