"""What the GPU's benchmark makes of time that is up and memory that runs out, also in the middle of training."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from piebald.core.errors import RuntimeFault
from piebald.engines import engine_choice
from piebald.engines.batched import BatchedEngine
from piebald.engines.vmapped import VmappedEngine
from tests.contract.conftest import carry_out, method, plain_network
from tests.devices.there import equal_clients

FOLDER = Path(__file__).parents[2] / "benchmarks" / "gpu"


@pytest.fixture(scope="module")
def program() -> Iterator[Any]:
    """The program with the modules beside it, which are forgotten afterwards."""
    names = ("run", "measures", "works", "ledger", "figures", "workloads")
    before, path = {name: sys.modules.pop(name, None) for name in names}, [*sys.path]
    sys.path.insert(0, str(FOLDER))
    yield importlib.import_module("run")
    sys.path[:] = path
    for name, module in before.items():
        sys.modules.pop(name, None)
        if module is not None:
            sys.modules[name] = module


@pytest.fixture
def small_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device on which no more than eight clients train at once."""
    for engine in (VmappedEngine, BatchedEngine):

        def run_sgd(self: Any, run: Any, own: Any = engine.run_sgd) -> Any:
            if len(run.clients) > 8:
                raise torch.OutOfMemoryError("CUDA out of memory.")
            return own(self, run)

        monkeypatch.setattr(engine, "run_sgd", run_sgd)


@pytest.mark.usefixtures("small_memory")
def test_stacks_grow_until_memory_runs_out(program: Any, tmp_path: Path) -> None:
    ledger, work = program.Ledger(tmp_path, {}), program.SCALES["tiny"]["W1"]
    for table, name, run in program.stacks(work, "vmapped", "cpu", (4, 8, 16, 32), ledger):
        ledger.put(table, name, program.measured(run, 60.0, "cpu"))
    rows = {int(name.split(", ")[-1]): row for name, row in ledger.tables["Stacks"].items()}
    assert {size: row.get("not measured") for size, row in rows.items()} == {
        4: None,
        8: None,
        16: "it needs more memory than the device has",
        32: "not tried, 16 clients need more memory than the device has",
    }
    (largest,) = ledger.tables["Largest stacks"].values()
    assert largest["largest that fitted"] == 8
    assert largest["seconds a client"] == min(rows[size]["seconds a round"] / size for size in (4, 8))
    assert "more memory than the device has" in ledger.page.read_text()


@pytest.mark.usefixtures("small_memory")
def test_the_runtime_takes_no_stack_for_which_memory_runs_out(monkeypatch: pytest.MonkeyPatch) -> None:
    clients = equal_clients(32)
    run = carry_out(method("fedavg"), clients=clients, model=plain_network, rounds=1)
    tried: list[int] = []
    monkeypatch.setattr(engine_choice, "_measure", lambda engine, asked, stack: measured(engine, asked, stack, tried))
    chosen = engine_choice.fastest(run.work, clients, torch.device("cpu"), False, range(32), (8, 16, 32))
    assert chosen[:2] == ("batched", 8)
    assert tried == [1, 8, 16]
    with pytest.raises(RuntimeFault, match="the memory of device 'cpu' ran out: set stack to less than 16"):
        carry_out(method("fedavg", cohort=32), clients=clients, simulator={"engine": "vmapped", "stack": 16})


def measured(engine: Any, clients: Any, stack: int, tried: list[int]) -> tuple[torch.Tensor, float]:
    """The losses of real steps, and a time that is shorter for each client of a larger stack."""
    tried.append(stack)
    losses = engine_choice._losses(engine, list(clients)[:2])
    engine_choice._losses(engine, list(clients)[:stack])
    return losses, 1.0 / stack


def test_time_that_is_up_stops_training_at_once(program: Any) -> None:
    """And is no failure of a client, which would be trained again to find out whose it is."""
    work = program.SCALES["tiny"]["W1"]
    endless = program.replace(work, epochs=10**6)
    row = program.measured(program.partial(program.measures.seconds_a_round, endless, "cpu"), 0.5, "cpu")
    assert row == {"not measured": "it did not end within the time of this command"}
    failed = program.measured(lambda: 1 / 0, 1.0, "cpu")
    assert failed == {"not measured": "ZeroDivisionError: division by zero"}


@pytest.mark.long
def test_models_that_differ_are_not_called_equal(program: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a method that tells no loss."""
    assert program.measures.equal_to_the_cpu("dp_sgd", "vmapped", "cpu", 1)["equal"] == "yes"
    monkeypatch.setattr(program.measures, "TOLERANCE", 0.0)
    assert program.measures.equal_to_the_cpu("dp_sgd", "vmapped", "cpu", 1)["equal"] == "NO"


def test_every_promised_measurement_is_planned(program: Any, tmp_path: Path) -> None:
    plans = list(planned(program, tmp_path))
    named = {part: [name for own, (_, name, _) in plans if own == part] for part in program.PARTS}
    assert {f"fedavg, {engine}" for engine in ("sequential", "vmapped", "batched")} <= {*named["equality"]}
    assert len({name.split(",")[0] for name in named["recipes"]}) >= 12
    works = {"W1", "W2", "ResNet-18, group norm", "VGG-11", "LSTM", "transformer", "LoRA on a frozen transformer"}
    assert {*program.NAMES.values()} == works
    for part, name in program.NAMES.items():  # each by itself, with what it is compared with
        peers = ["fedjax", "pfl"] if name in ("W1", "W2") else []
        assert named[part] == [f"{name}, bare loop", name, *(f"{name}, {peer}" for peer in peers)]
    assert (named["cohorts"][0], named["cohorts"][-1]) == ("10", "1,000")
    assert (named["registered"][0], named["registered"][-1]) == ("100", "1,000,000")
    assert {name.split(", ")[-1] for name in named["precision"]} == {"bfloat16", "tf32"}
    assert program.measures.TARGETS.keys() == works
    assert all(named.values()), "a part without measurements"
    assert len({(table, name) for _, (table, name, _) in plans}) == len(plans)


def planned(program: Any, folder: Path) -> Iterator[Any]:
    """The plans for a GPU, wherever this runs."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(program.measures, "device_name", lambda device: "a GPU")
        yield from program.plans("cuda", "full", program.Ledger(folder, {}))


def test_a_lost_device_ends_the_measuring_at_once(
    program: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With one sentence, exit code 1 and what was measured before; nothing else is tried on it."""

    def lose() -> Any:
        raise RuntimeError("CUDA error: misaligned address")

    done: list[str] = []
    rows = [("a", lambda: {"seconds": 1.0}), ("b", lose), ("c", lambda: done.append("c") or {"seconds": 1.0})]
    monkeypatch.setattr(program, "plans", lambda *_: (("machine", ("Table", name, run)) for name, run in rows))
    monkeypatch.setattr(sys, "argv", ["run.py", "--device", "cpu", "--scale", "tiny", "--out", str(tmp_path)])
    assert program.main() == 1
    said = capsys.readouterr().err
    assert said.count("misaligned address") == 1
    assert "computes nothing more" in said
    assert not done
    page = (tmp_path / "RESULTS.md").read_text()
    assert "| a | 1 |" in page
    assert "the device was lost" in page
    assert "Last seen on" in page


def test_what_was_last_seen_has_a_commit_a_card_and_a_date(program: Any, tmp_path: Path) -> None:
    ledger = program.Ledger(tmp_path, {"device": "some card"})
    ledger.saw("W2", "some card")
    (row,) = ledger.tables["Last seen on"].values()
    assert row["card"] == "some card"
    assert len(row["date"].split("-")) == 3
    assert row["commit"]


def test_figures_replace_the_rows_that_were_measured(program: Any, tmp_path: Path) -> None:
    figures, ledger = importlib.import_module("figures"), program.Ledger(tmp_path, {"device": "some card"})
    before = figures.PAGE.read_text()
    assert figures.written(before, ledger.tables) == before
    ledger.put(program.SPEED, "W2, bare loop", {"seconds a round": 0.5})
    ledger.put(program.SPEED, "W2", {"seconds a round": 0.125, "engine": "vmapped", "stack": 10})
    ledger.put(program.SPEED, "W2, fedjax", {"not measured": "it is not installed"})
    ledger.saw("W2", "some card")
    after = figures.written(before, ledger.tables).splitlines()
    changed = [(old, new) for old, new in zip(before.splitlines(), after, strict=True) if old != new]
    ((old, new),) = changed
    assert old.startswith("| W2 |")
    assert new.startswith("| W2 | 0.5 | 0.125, vmapped, 10 | 0.25 |  | ")
    assert "some card" in new
