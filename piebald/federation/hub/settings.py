"""Settings of a real federation."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from piebald.contracts import Clients, RowsAtSites, Runtime
from piebald.core.errors import SettingError
from piebald.federation.link.wire_format import Needs
from piebald.methods.client_work import ClientWork
from piebald.runtimes.base import RuntimeSettings


class Federation(RuntimeSettings):
    """Runs clients at sites of a federation.

    Attributes:
        credentials: folder with the server's credentials; None starts a federation of processes on this machine.
        folder: folder for the credentials of a federation on this machine; None takes a temporary folder.
        wait_for: number of sites without which no round begins or ends; "all" if every site must take part, so that the
            refusal of one ends the run; None waits at first for all sites that do not refuse, or for one after
            `patience`, and later for nobody who is absent.
        patience: seconds of silence after which a site is absent: no round waits for it until it is back.
        silence: seconds of silence after which a site is sent nothing until it is heard again.
        task_timeout: seconds that a task may take at a site that is present; then the server goes on without its
            result, and sends it no more tasks until it delivers.  At the third time it gets no more tasks.
        experiment: the experiment's settings, from which sites rebuild the model; filled in by the command line.
        needs: what each site must have free for it: "gpus", and "gigabytes" of memory.
        lineage: number of the run that this one goes on from, by which sites find the state that they kept; filled in
            by `start_from`.

    Examples:
        Begin with two sites, and train on without one that is silent for a minute.

        >>> runtime = Federation(wait_for=2, patience=60)
        >>> runtime.patience, runtime.task_timeout, runtime.simulates
        (60.0, 3600.0, False)
    """

    simulates = False
    repeats = False

    credentials: str | None = None
    folder: str | None = None
    wait_for: Annotated[int, Field(ge=1)] | Literal["all"] | None = None
    patience: float = Field(default=600.0, gt=0)
    silence: float = Field(default=5.0, ge=2.0)
    task_timeout: float = Field(default=3600.0, gt=0)
    experiment: dict[str, Any] | None = None
    needs: Needs = Needs()
    lineage: str | None = None
    # below that of other runtimes: a server's disk needs room for results of this size anyhow
    map_above: int = Field(default=64 << 20, ge=0)

    def going_on_from(self, federation: str | None) -> Federation:
        """See `runtimes.base.RuntimeSettings`."""
        return self.model_copy(update={"lineage": federation})

    def with_folder(self, folder: Path) -> Federation:
        """See `runtimes.base.RuntimeSettings`."""
        if self.credentials or self.folder:
            return self
        return self.model_copy(update={"folder": str(folder / "federation")})

    def open(self, work: ClientWork, clients: Clients) -> Runtime:
        """Listen for sites; without `credentials`, start them as well."""
        if self.experiment is None:
            raise SettingError(
                "a federation's sites rebuild model and data from an experiment file: write one, and start it with "
                "piebald run FILE --runtime federation"
            )
        if self.credentials is None and isinstance(clients, RowsAtSites) and clients.elsewhere:
            raise SettingError(
                "partition 'sites' says that rows are at their sites, so they cannot be tried on this machine alone: "
                "start piebald server CREDENTIALS FILE here and piebald client CREDENTIALS there"
            )
        from piebald.federation.hub.local_federation import LocalFederation
        from piebald.federation.hub.server_runtime import FederationServer
        from piebald.federation.hub.server_state import Timeouts

        local = LocalFederation.start(len(clients), self.folder) if self.credentials is None else None
        folder = Path(str(self.credentials)) if local is None else local.server
        timeouts = Timeouts(self.wait_for, self.patience, self.silence, self.task_timeout)
        return FederationServer(
            folder, timeouts, self.experiment, work, clients, local, lineage=self.lineage, needs=self.needs
        )
