"""The base class of a runtime's settings."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar, Protocol, runtime_checkable

import torch
from pydantic import Field

from piebald.contracts import Clients, Component, Fleet, Runtime
from piebald.methods.client_work import ClientWork


class RuntimeSettings(Component):
    """Settings that say where a recipe runs.

    Attributes:
        simulates: False where clients' rows are not on this machine.
        repeats: False where results that were lost since the last checkpoint cannot be computed again.
        map_above: bytes; global models, and vectors that the server keeps beside them, which are longer lie in a file
            and are mapped from it.  The file is in the run folder, or else in the system's folder for temporary files.
    """

    axis = "runtime"
    simulates: ClassVar[bool] = True
    repeats: ClassVar[bool] = True

    map_above: int = Field(default=4 << 30, ge=0)

    def resolved(self, work: ClientWork, clients: Clients, expected: int) -> RuntimeSettings:
        """These settings with every choice made, so that a resumed run makes the same choices.

        Args:
            work: the model and the components that work at clients.
            clients: who holds what.
            expected: how many clients work at a time.
        """
        return self

    def with_folder(self, folder: Path) -> RuntimeSettings:
        """These settings with the runtime's own files in a run's folder."""
        return self

    def going_on_from(self, federation: str | None) -> RuntimeSettings:
        """These settings for a run that goes on from one whose sites keep their part under this number, if any."""
        return self

    def server_device(self) -> torch.device:
        """Return the device on which the server computes if it needs only sums: the one on which they are formed."""
        return torch.device("cpu")

    def open(self, work: ClientWork, clients: Clients) -> Runtime:
        """Start the runtime."""
        raise NotImplementedError


@runtime_checkable
class SimulatesDevices(Protocol):
    """Settings of a runtime in which clients have simulated devices."""

    @property
    def fleet(self) -> Fleet | None:
        """The devices, or None where all are instant."""
