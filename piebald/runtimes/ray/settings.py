"""The Ray runtime's settings: the simulator with its engines in Ray actors, on this machine or on a cluster.

The virtual clock, the server and client state stay in this process; `ray.actors` describes what travels.
"""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from piebald.contracts import Clients
from piebald.core.machine import count_cores
from piebald.methods.client_work import ClientWork
from piebald.runtimes.ray.actors import RayWorkerPool, measured
from piebald.runtimes.ray.connection import RayConnection, connected, imported
from piebald.runtimes.simulation.simulator import Simulated
from piebald.runtimes.workers.pool import WorkerPool


class Ray(Simulated):
    """The settings of a simulation with Ray (`pip install '.[ray]'`).

    Attributes:
        workers: actors, each on one core or GPU; None starts one for each that Ray offers, at most one for each client
            that works at a time.
        device: "cpu", or "cuda" where each actor has a GPU, or a share of one.
        address: address of a running cluster, "auto" for one on this machine; None takes the existing connection
            (`ray.init`), or starts a Ray on this machine.
        gpus: how much of a GPU each actor takes, with device "cuda": 1, or a share like 0.25, with which four actors
            share each GPU.
        memory: bytes of client state that are kept in RAM by this process; more goes to a temporary file.
        store: bytes of the object store of a Ray that is started here; None is Ray's default, 30% of the memory.
    """

    workers: int | None = Field(default=None, ge=1)
    address: str | None = None
    gpus: float = Field(default=1.0, gt=0, le=1)
    store: int | None = Field(default=None, ge=100_000_000)

    @model_validator(mode="after")
    def _check_reach(self) -> Self:
        if self.device not in ("cpu", "cuda"):
            raise ValueError(f"device must be 'cpu' or 'cuda', Ray says which GPU an actor has, got {self.device!r}")
        if self.device == "cpu" and "gpus" in self.model_fields_set and self.gpus != 1.0:
            raise ValueError(f"gpus says how much of a GPU an actor takes, got {self.gpus:g}: set device = 'cuda' too")
        if self.address is not None and self.address.startswith("ray://"):
            raise ValueError(
                f"address must be that of the cluster itself, like '10.0.0.7:6379', got {self.address!r}: start the "
                "run on one of its nodes"
            )
        return self

    def share_of_gpu(self) -> float:
        return self.gpus

    def resolved(self, work: ClientWork, clients: Clients, expected: int) -> Self:
        """Make the choices of `RuntimeSettings.resolved` where the actors will be."""
        imported()
        here = self.address is None and self.device == "cpu" and not connected()
        workers = self.workers or min(expected, count_cores() if here else self._connection().offers()) or 1
        settings = self.model_copy(update={"workers": workers})
        if here or self.engine != "auto":
            return settings.measured(work, clients, expected)
        resolved = measured(settings, self._connection(), work, clients, expected)
        assert isinstance(resolved, type(self))
        return resolved

    def worker_pool(self, work: ClientWork, clients: Clients, room: tuple[int, int]) -> WorkerPool:
        """A pool of Ray actors."""
        return RayWorkerPool(self, self._connection(), work, clients)

    def _connection(self) -> RayConnection:
        gpus = self.gpus if self.device == "cuda" else 0.0
        return RayConnection(self.address, max(self.workers or 1, count_cores()), self.store, gpus)
