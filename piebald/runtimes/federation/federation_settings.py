"""The settings of a real federation."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import Field

from piebald.client_work import Work
from piebald.contracts import Clients
from piebald.errors import SettingError
from piebald.runtimes.base import Where

if TYPE_CHECKING:
    from piebald.runtimes.federation.server_runtime import Coordinator


class Federation(Where):
    """Where to find the sites, and how long to wait for them.

    Attributes:
        kit: the server's kit; None makes a federation of processes on this machine, to try it.
        folder: where the federation on this machine keeps its kits; None takes a temporary folder.
        wait_for: sites that must be there before anything is asked; None waits for all, or after `patience` for one.
        patience: seconds; a site that is silent for so long is not waited for any more.
        silence: seconds; a site that is silent for so long is not asked, and its answers to questions are not
            waited for.
        longest: seconds that an assignment may take at a site that is there; None for no limit.
        experiment: the experiment's settings, from which sites rebuild the model; filled in by the command line.
    """

    simulates = False
    repeats = False

    kit: str | None = None
    folder: str | None = None
    wait_for: int | None = Field(default=None, ge=1)
    patience: float = Field(default=600.0, gt=0)
    silence: float = Field(default=5.0, ge=2.0)
    longest: float | None = Field(default=None, gt=0)
    experiment: dict[str, Any] | None = None

    def beside(self, folder: Path) -> Federation:
        """See `parts.Where`."""
        return self if self.kit or self.folder else self.model_copy(update={"folder": str(folder / "federation")})

    def open(self, work: Work, clients: Clients) -> Coordinator:
        """Listen for sites; without a kit, start them as well."""
        from piebald.runtimes.federation.flare_link import check_installed

        check_installed()
        if self.experiment is None:
            raise SettingError(
                "a federation's sites rebuild model and data from an experiment file: write one, and start it with "
                "piebald run FILE --runtime federation"
            )
        if self.kit is None and getattr(clients, "elsewhere", False):
            raise SettingError(
                "partition 'sites' says that rows are at their sites, so they cannot be tried on this machine alone: "
                "start piebald server KIT FILE here and piebald client KIT there"
            )
        from piebald.runtimes.federation.local_federation import Local
        from piebald.runtimes.federation.server_runtime import Coordinator

        local = Local.start(len(clients), self.folder) if self.kit is None else None
        return Coordinator(self, work, clients, local)
