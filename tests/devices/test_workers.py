"""Several worker processes compute on one GPU, which the process that started them never begins to use."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

import piebald
from piebald.core.errors import RuntimeFault, SettingError
from piebald.core.machine import moved
from piebald.engines.engine_choice import stack_limit
from piebald.runtimes.workers.forked import in_fork
from tests import processes
from tests.contract.conftest import method
from tests.devices import pretended
from tests.devices.there import carry_out


@pytest.mark.full
@pytest.mark.parametrize(("name", "engine"), [("scaffold", "batched"), ("fedavg", "auto")])
def test_workers_share_a_gpu(name: str, engine: str) -> None:
    """Also where the engine is measured; with the bits of as many workers on the CPU.

    In a process that has not used the device: on a GPU that of the tests has, and could not fork.
    """
    how = {"workers": 2, "stack": 2, "engine": engine}
    words = [sys.executable, "-m", "tests.devices.fresh", name, json.dumps(how)]
    done = processes.run(words, capture_output=True, text=True, timeout=300, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stderr


def test_a_forked_process_computes_with_one_thread_before_anything_else() -> None:
    """Pinning memory in one with several threads waits for ever; the pretended device refuses it."""
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        with pretended.pretended():
            in_fork(lambda: {"pinned": moved(torch.ones(3), pretended.DEVICE).sum().item()})
            with pytest.raises(RuntimeFault, match=r"pin_memory.. in a forked process with several threads"):
                in_fork(lambda: torch.set_num_threads(4) or {"pinned": len(moved(torch.ones(3), pretended.DEVICE))})
    finally:
        torch.set_num_threads(before)


def test_a_process_that_has_used_a_gpu_is_told_that_it_cannot_fork_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with pretended.pretended(), pytest.raises(SettingError, match="start the run in a new process, set workers = 0"):
        carry_out(method("fedavg"), pretended.DEVICE, workers=2)


def test_errors_of_a_worker_and_of_the_trial_reach_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)  # by other tests, where there is a GPU
    broken = {"engine": "auto", "workers": 2, "stack": None}
    with pytest.raises(piebald.core.errors.PiebaldError, match="Invalid device string"):
        carry_out(method("fedavg"), "no-such-device", **broken)
    with pytest.raises(piebald.core.errors.PiebaldError, match="Invalid device string"):
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
