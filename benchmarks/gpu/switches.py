"""What each part of the simulator is worth on a GPU: the same workload with one part switched to what it was before."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any
from unittest import mock

import measures
from works import Workload

from piebald.core import cohort_matrix, pytree
from piebald.core.machine import HOST
from piebald.engines import scoring
from piebald.engines.device_copies import LaterNumbers
from piebald.runtimes.simulation.simulator import Simulator


def _numbers_at_once() -> Any:
    add = LaterNumbers.add

    def read(self: Any, numbers: Any, take: Any) -> None:
        add(self, numbers, take)
        self.read()

    return mock.patch.object(LaterNumbers, "add", read)


def _channels_last() -> Any:
    turned = lambda self, x: pytree.mapped(scoring._channels_last, x) if self._conv2d else x  # noqa: E731
    return mock.patch.object(scoring.ScoringEngine, "shaped", turned)


SWITCHES: dict[str, tuple[dict[str, Any], Callable[[], Any]]] = {
    "recorded": ({"recorded": True}, contextlib.nullcontext),
    "not recorded": ({"recorded": False}, contextlib.nullcontext),
    "server on the host": ({}, lambda: mock.patch.object(Simulator, "server_device", return_value=HOST)),
    "sums in a CPU's blocks": ({}, lambda: mock.patch.object(cohort_matrix, "_AT_ONCE", cohort_matrix._CACHED)),
    "numbers for each stack": ({}, _numbers_at_once),
    "channels-last": ({}, _channels_last),
}


def switched(work: Workload, device: str, switch: str, base: measures.Row) -> measures.Row:
    """Return the row of a workload with one part switched.

    Args:
        work: the workload.
        device: where it is trained; steps are recorded on NVIDIA's GPUs alone.
        switch: one of `SWITCHES`.
        base: the row without, whose engine and stack this one has.
    """
    settings, patched = SWITCHES[switch]
    if settings.get("recorded") and not device.startswith("cuda"):
        return {"not measured": f"steps are recorded on NVIDIA's GPUs, not on {device}"}
    settings = settings | {name: base[name] for name in ("engine", "stack") if name in base}
    with patched():
        return measures.seconds_a_round(work, device, **settings)
