"""Several worker processes compute on one GPU, which the process that started them never begins to use."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import piebald
from piebald.errors import SettingError
from piebald.runtimes.engines.engine_choice import stack_limit
from tests.contract.conftest import method
from tests.devices import pretended
from tests.devices.there import assert_as_on_the_cpu, carry_out


class Untouched(TorchDispatchMode):
    """Raises an error where this process computes on the device; forked ones have been told not to mind."""

    def __init__(self) -> None:
        super().__init__()
        self.touched = 0

    def __torch_dispatch__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        self.touched += isinstance(made, pretended.OnDevice)
        return made


@pytest.mark.full
@pytest.mark.parametrize(("name", "engine"), [("scaffold", "batched"), ("fedavg", "auto")])
def test_workers_share_a_gpu(name: str, engine: str) -> None:
    """Also where the engine is measured; with the bits of as many workers on the CPU."""
    how = {"workers": 2, "stack": 2} | ({} if engine == "auto" else {"engine": engine})
    with pretended.pretended(), Untouched() as seen:
        found = carry_out(method(name), pretended.DEVICE, **how | {"engine": engine})
    assert seen.touched == 0
    assert found.meta["runtime"]["workers"] == 2
    chosen = {"engine": found.meta["runtime"]["engine"], "stack": found.meta["runtime"]["stack"]}
    assert_as_on_the_cpu(found, carry_out(method(name), **how | chosen))


def test_a_process_that_has_used_a_gpu_is_told_that_it_cannot_fork_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with pretended.pretended(), pytest.raises(SettingError, match="start the run in a new process, set workers = 0"):
        carry_out(method("fedavg"), pretended.DEVICE, workers=2)


def test_errors_of_a_worker_and_of_the_trial_reach_the_user() -> None:
    broken = {"engine": "auto", "workers": 2, "stack": None}
    with pytest.raises(piebald.errors.PiebaldError, match="Invalid device string"):
        carry_out(method("fedavg"), "no-such-device", **broken)
    with pytest.raises(piebald.errors.PiebaldError, match="Invalid device string"):
        carry_out(method("fedavg"), "no-such-device", **broken | {"engine": "sequential", "stack": 1})


def test_each_worker_takes_its_share_of_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    work = carry_out(method("fedavg")).work
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (48 * work.layout.size * 8, 0))
    gpu = torch.device("cuda")
    for where, clients in (
        (piebald.Simulator(device="cuda"), 8),
        (piebald.Simulator(device="cuda", workers=4), 2),
        (piebald.Ray(device="cuda", gpus=0.25), 2),
        (piebald.Ray(device="cuda", gpus=0.5), 4),
    ):
        assert stack_limit(work, gpu, where.share_of_gpu()) == clients
