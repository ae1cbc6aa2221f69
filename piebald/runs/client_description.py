"""What a run folder says of the clients: a row for each, and how they differ."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from piebald.contracts import Clients, Fleet
from piebald.core.machine import existing_objects_frozen
from piebald.runs.prepare import PreparedRun
from piebald.storage.store import RunStore
from piebald.runtimes.base import SimulatesDevices
from piebald.data.measures.weight_divergence import measure_heterogeneity

_DESCRIBED_CLIENTS = 10_000  # above this, the run folder keeps no rows about clients


@existing_objects_frozen()
def describe(plan: PreparedRun, store: RunStore) -> None:
    """Record the clients, and how they differ."""
    if len(plan.clients) > _DESCRIBED_CLIENTS or store.rows("measure"):
        return
    store.clients(list(_client_rows(plan.clients, plan.runtime)))
    how = store.meta.get("measure", "none")
    if measured := measure_heterogeneity(plan.clients, _fleet(plan.runtime), plan.work, how):
        store.set_meta(units=measured.units)
        store.measures(measured.records())


def _fleet(runtime: Any) -> Fleet | None:
    return runtime.fleet if isinstance(runtime, SimulatesDevices) else None


def _client_rows(clients: Clients, runtime: Any) -> Iterator[dict[str, Any]]:
    fleet = _fleet(runtime)
    for client in range(len(clients)):
        counts = clients.counts(client, "train")
        device = fleet.device(client) if fleet is not None else None
        yield {
            "client": client,
            "name": str(clients.names[client]),
            "train": clients.size(client, "train"),
            "validation": clients.size(client, "validation"),
            "test": clients.size(client, "test"),
            "counts": None if counts is None else list(counts),
            "device": device,
        }
