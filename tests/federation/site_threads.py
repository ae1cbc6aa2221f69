"""Sites in threads of this process: their credentials, their files, their connections over mutual TLS are real."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from piebald.federation.credentials import provisioning
from piebald.federation.hub.server_runtime import FederationServer
from piebald.federation.hub.server_state import Timeouts
from piebald.federation.site.client_runtime import FederationClient
from piebald.federation.site.policy import Policy
from piebald.federation.site.site_rows import SiteClient
from piebald.runs.prepare import PreparedRun

from .conftest import provisioned

PATIENT = Timeouts(wait_for="all", patience=600.0, silence=300.0, task_timeout=600.0)  # however busy the machine is


@contextmanager
def connected(plan: PreparedRun, policies: Sequence[Policy], folder: Path) -> Iterator[FederationServer]:
    """A server that all sites have said hello to; a site for each client, with its policy."""
    names = [str(name) for name in plan.clients.names]
    provisioned(folder, names)
    sites = [
        FederationClient(
            provisioning.read(folder / name),
            lambda terms, client=client: SiteClient(plan.work, plan.clients, client),  # type: ignore[misc]
            policy=policy,
        )
        for client, (name, policy) in enumerate(zip(names, policies, strict=True))
    ]
    server = FederationServer(folder / "server", PATIENT, {}, plan.work, plan.clients, None)
    threads = [threading.Thread(target=site.run, daemon=True) for site in sites]
    try:
        for thread in threads:
            thread.start()
        yield server
    finally:
        for site in sites:
            site.stop()
        for thread in threads:
            thread.join(60)
        server.close()
