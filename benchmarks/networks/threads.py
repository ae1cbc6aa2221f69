"""A federation whose sites are threads, so that many of them fit on one machine; connections and messages are real.

A site is a `FederationClient` as in a process of its own: with its credentials, its files, its connection over TLS 1.3,
and its own rows.  What it shares with the others is the process: Python, PyTorch, and the processors' time.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from piebald.contracts import Checkpoint, Result, Task
from piebald.experiments.file import ExperimentSettings
from piebald.experiments.run_settings import RunSettings
from piebald.federation import Federation
from piebald.federation.credentials import provisioning
from piebald.federation.hub.local_federation import free_port
from piebald.federation.site.client_runtime import FederationClient
from piebald.federation.site.policy import Policy
from piebald.federation.site.site_process import SiteSettings, SiteWork
from piebald.federation.site.site_rows import SiteSource
from piebald.federation.site.task_runner import SiteClient
from piebald.runs.prepare import PreparedRun, prepare

_PREPARING = threading.Lock()  # PyTorch makes one model of a process at a time where parameters are counted


class Site:
    """A site in a thread.

    Args:
        folder: its credentials.
        port: where it connects to, if not to the server's own port: that of a proxy.
        rows: the file of its rows; None takes those that the experiment's partition gives it.
    """

    def __init__(self, folder: Path, port: int | None = None, rows: Path | None = None) -> None:
        credentials = provisioning.read(folder)
        if port is not None:
            credentials = dataclasses.replace(credentials, port=port)
        source = None if rows is None else SiteSource(source=str(rows))
        work = SiteWork(credentials, SiteSettings(data=source), folder, local=True)

        def prepare(terms: Mapping[str, Any]) -> SiteClient:
            with _PREPARING:
                return work(terms)

        self.client = FederationClient(credentials, prepare, policy=Policy(), stays=True)
        self._thread = threading.Thread(target=self.client.run, name=credentials.party, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End it, as SIGTERM does."""
        self.client.stop()
        self._thread.join()


def provisioned(folder: Path, sites: int) -> list[str]:
    """Credentials of a server and so many sites, made once; returns the sites' names."""
    names = [f"site-{number + 1}" for number in range(sites)]
    if not (folder / "server").exists():
        described = provisioning.Description(name="bench", host="127.0.0.1", port=free_port(), days=30, sites=names)
        provisioning.provision(described, folder)
    return names


class Tasks:
    """A server that gives tasks by hand, and sites in threads.

    Args:
        made: the experiment.
        folder: folder of the credentials.
        ports: the port that each site connects to.
    """

    def __init__(self, made: ExperimentSettings, folder: Path, ports: Sequence[int]) -> None:
        plan = made.plan()
        where = plan.runtime
        assert isinstance(where, Federation)
        options = RunSettings(runtime=where.model_copy(update={"credentials": str(folder / "server")}))
        self.ready: PreparedRun = prepare(next(iter(plan.recipes.values())), plan.clients, plan.model, options)
        self.runtime: Any = self.ready.runtime.open(self.ready.work, self.ready.clients)
        self.sites = [Site(folder / f"site-{number + 1}", port) for number, port in enumerate(ports)]
        self._id = 0

    def step(self) -> list[Result]:
        """Have every site train once; returns what came of it."""
        model = self.ready.work.initial[: self.ready.work.layout.shared]
        count = len(self.sites)
        tasks = [Task(self._id + number + 1, number, self._id, {"model": model}) for number in range(count)]
        self._id += count
        self.runtime.submit(tasks)
        found = [self.runtime.next() for _ in range(count)]
        checkpoint = self.runtime.state()
        assert isinstance(checkpoint, Checkpoint)
        return [one for one in found if one is not None]

    def close(self) -> None:
        """End the sites and the server."""
        for site in self.sites:
            site.client.stop()
        for site in self.sites:
            site.stop()
        self.runtime.close()
