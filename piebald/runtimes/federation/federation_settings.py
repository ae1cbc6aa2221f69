"""The settings of a real federation."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import Field

from piebald.client_work import ClientWork
from piebald.contracts import Clients
from piebald.errors import SettingError
from piebald.runtimes.base import RuntimeSettings

if TYPE_CHECKING:
    from piebald.runtimes.federation.server_runtime import FederationServer


class Federation(RuntimeSettings):
    """Where to find the sites, and how long to wait for them.

    Attributes:
        credentials: the server's credentials; None makes a federation of processes on this machine, to try it.
        folder: where the federation on this machine keeps its credentials; None takes a temporary folder.
        wait_for: sites that must be there before anything is asked; None waits for all, or after `patience` for one.
        patience: seconds; a site that is silent for so long is not waited for any more.
        silence: seconds; a site that is silent for so long is not asked, and its answers to questions are not
            waited for.
        longest: seconds that a task may take at a site that is there; None for no limit.
        experiment: the experiment's settings, from which sites rebuild the model; filled in by the command line.
    """

    simulates = False
    repeats = False

    credentials: str | None = None
    folder: str | None = None
    wait_for: int | None = Field(default=None, ge=1)
    patience: float = Field(default=600.0, gt=0)
    silence: float = Field(default=5.0, ge=2.0)
    longest: float | None = Field(default=None, gt=0)
    experiment: dict[str, Any] | None = None

    def with_folder(self, folder: Path) -> Federation:
        """See `vectors.RuntimeSettings`."""
        return (
            self if self.credentials or self.folder else self.model_copy(update={"folder": str(folder / "federation")})
        )

    def open(self, work: ClientWork, clients: Clients) -> FederationServer:
        """Listen for sites; without a credentials, start them as well."""
        from piebald.runtimes.federation.flare_link import check_installed

        check_installed()
        if self.experiment is None:
            raise SettingError(
                "a federation's sites rebuild model and data from an experiment file: write one, and start it with "
                "piebald run FILE --runtime federation"
            )
        if self.credentials is None and getattr(clients, "elsewhere", False):
            raise SettingError(
                "partition 'sites' says that rows are at their sites, so they cannot be tried on this machine alone: "
                "start piebald server KIT FILE here and piebald client KIT there"
            )
        from piebald.runtimes.federation.local_federation import LocalFederation
        from piebald.runtimes.federation.server_runtime import FederationServer

        local = LocalFederation.start(len(clients), self.folder) if self.credentials is None else None
        return FederationServer(self, work, clients, local)
