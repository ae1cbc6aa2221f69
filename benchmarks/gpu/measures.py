"""Single measurements: each returns one row of a table."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))  # for `shared`

import torch
from shared import measured
from works import TARGETS, Workload, bare_loop, registered_clients

import piebald
import piebald.core.machine
from piebald import data, partition, recipes
from piebald.core.errors import DeviceLost
from piebald.models import build_model
from piebald.report.callbacks import Callback

Row = dict[str, Any]
RECIPES: dict[str, dict[str, Any]] = {
    "fedavg": {}, "fedprox": {"mu": 0.5}, "scaffold": {}, "fedadam": {"server_lr": 0.01}, "fedbn": {}, "ditto": {},
    "hdafl": {}, "dp_sgd": {"clip": 0.5, "noise": 0.5}, "async_dvw": {"above_chance": True},
    "fedbuff": {"buffer_size": 3}, "ifca": {"k": 2}, "distfl": {"probes": 20}, "cfl": {"eps1": 2.0, "eps2": 0.1},
}  # fmt: skip
ENGINES = ("sequential", "vmapped", "batched")
# Sums are added in another order on a GPU; a few hundred steps on digits carry a rounding to the fourth digit.
TOLERANCE = 2e-3


def runtime(device: str, **how: Any) -> piebald.Simulator:
    """The simulator on a device; matrix products are in float32 unless `tf32` is asked for."""
    return piebald.Simulator(device=device, **{"workers": 0} | how)


def equal_to_the_cpu(recipe: str, engine: str, device: str, rounds: int, compiled: bool = False) -> Row:
    """Train on scikit-learn's digits here and on the CPU, and compare the models and the losses."""

    def end(where: str, by: str, stack: int, compiled: bool = False) -> tuple[torch.Tensor, float | None]:
        clients = partition.Dirichlet(alpha=0.5, clients=8, seed=0, validation=0.1).split(data.digits())
        made = recipes.make(recipe, **{"cohort": 4, "lr": 0.05, "batch": 20} | RECIPES[recipe])
        name = "mlp" if recipe == "dp_sgd" else "cnn_bn"
        model = build_model(name, (1, 8, 8), 10, 0, **({} if name == "mlp" else {"channels": (8, 8)}))
        how = runtime(where, engine=by, stack=stack, compiled=compiled)
        run = piebald.run(made, clients, model, rounds=rounds, seed=0, runtime=how, measure="none")
        return run.work.layout.flatten(run.model()), run.rounds[-1]["loss"]  # None where single rows are hidden

    (ours, loss), (theirs, expected) = end(device, engine, 4, compiled), end("cpu", "reference", 1)
    apart = float(torch.linalg.vector_norm(ours - theirs) / torch.linalg.vector_norm(theirs))
    near = apart <= TOLERANCE and (loss is None) == (expected is None)
    if loss is not None and expected is not None:
        near = near and abs(loss - expected) <= TOLERANCE * max(1.0, abs(expected))
    return {
        "relative distance": apart, "loss": loss, "on the CPU": expected, "tolerance": TOLERANCE,
        "equal": "yes" if near else "NO",
    }  # fmt: skip


def seconds_a_round(work: Workload, device: str, clients: Any = None, **how: Any) -> Row:
    """Seconds a round of `piebald.run`, from the first server step to the last."""
    _forget_peak(device)
    return timed(work, clients or work.data(), runtime(device, **how)) | _peak(device)


class FirstRound(Callback):
    """When the first round ended; memory is counted anew from there, without that of the engines that were tried."""

    ended = 0.0
    peak: Row = {}  # noqa: RUF012 - of what came before

    def __init__(self, device: str) -> None:
        self.device = device

    def on_server_step(self, step: Any) -> None:
        """See `Callback`."""
        if not self.ended:
            self.ended, before = time.perf_counter(), _peak(self.device)
            self.peak = {f"{name}, engines tried": value for name, value in before.items()}
            _forget_peak(self.device)


def timed(work: Workload, clients: Any, where: Any) -> Row:
    """Seconds a round on a runtime, what it chose, and how long the first round took with all that comes before."""
    network, began, first = work.network(), time.perf_counter(), FirstRound(str(where.device))
    run = piebald.run(
        recipes.fedavg(cohort=work.cohort, lr=0.05, batch=20, epochs=work.epochs),
        clients,
        network,
        rounds=work.rounds + 1,
        runtime=where,
        evaluate_every=0,
        measure="none",
        callbacks=[first],
    )
    walls, chosen = [row["wall"] for row in run.rounds], run.meta["runtime"]
    return {
        "seconds a round": (walls[-1] - walls[0]) / work.rounds,
        "engine": chosen["engine"],
        "stack": chosen["stack"],
        "loss": float(run.rounds[-1]["loss"]),
        "seconds to the first round": first.ended - began,
        **first.peak,
    }


def bare(work: Workload, device: str) -> Row:
    """Seconds a round of the loop that one would write by hand, on the same device and in float32 as well."""
    _forget_peak(device)
    if device.startswith("cuda"):
        piebald.core.machine.set_up_gpu(tf32=False, repeats=False)
    return {"seconds a round": bare_loop(work, work.data(), device=device), "engine": "bare loop", **_peak(device)}


def beside(row: Row, base: Row, name: str) -> Row:
    """A row with its ratio to the bare loop's, and the target."""
    ratio = row["seconds a round"] / base["seconds a round"]
    target = TARGETS.get(name)
    met = "" if target is None else "yes" if ratio <= target else "no"
    return row | {"times the bare loop": ratio, "at most": target, "met": met}


def registered(count: int, work: Workload, device: str) -> Row:
    """Seconds a round where so many clients are registered and as many as ever are asked."""
    clients = registered_clients(count)
    asked = replace(work, cohort=min(100, count), shape=(64,), make=lambda: build_model("mlp", (64,), 10, 0))
    return seconds_a_round(asked, device, clients, engine="batched", stack=50)


def largest_costs(work: Workload, device: str, **how: Any) -> Row:
    """The three operations that take most of a round's time, and their shares."""
    from torch.profiler import ProfilerActivity, profile

    there = device.startswith("cuda")
    kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if there else [])]
    # a first round, which starts everything, and one of few steps: a profiler takes longer than what it looks at
    short = replace(work, rounds=1, cohort=min(work.cohort, 2), rows=40)
    with profile(activities=kinds) as seen:
        seconds_a_round(short, device, **how)
    rows = seen.key_averages()

    def cost(row: Any) -> float:
        return float(row.self_device_time_total if there else row.self_cpu_time_total)

    whole, largest = sum(map(cost, rows)) or 1.0, sorted(rows, key=cost, reverse=True)[:3]
    return {f"{place}.": f"{row.key}: {cost(row) / whole:.0%}" for place, row in enumerate(largest, 1)}


def compiled(work: Workload, device: str, plain: Row) -> Row:
    """Seconds a round with compiled passes, on an NVIDIA GPU as CUDA graphs, beside the row without."""
    chosen = plain.get("engine")
    how = {"engine": chosen, "stack": plain["stack"]} if chosen in ("sequential", "vmapped") else {"engine": "vmapped"}
    row = seconds_a_round(work, device, compiled=True, **how)
    if "seconds a round" not in plain:
        return row
    faster = row["seconds a round"] < plain["seconds a round"]
    return row | {"without": plain["seconds a round"], "used": "yes" if faster else "no"}


def apart(work: str, scale: str, runtime: dict[str, Any]) -> Row:
    """Seconds a round in a process of its own, with a runtime whose workers share the device."""
    if runtime["kind"] == "ray" and importlib.util.find_spec("ray") is None:
        return {"engine": "Ray is not installed"}
    row: Row = measured.apart(Path(__file__).parent / "apart.py", work, scale, json.dumps(runtime))
    return row


def peer(script: str, package: str, work: str) -> Row:
    """Seconds a round of another package on the device that it chooses, where it is installed."""
    if importlib.util.find_spec(package) is None:
        return {"engine": f"{package} is not installed"}
    folder = Path(__file__).parents[1] / "simulator" / "peers"
    environment = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    return {"seconds a round": float(measured.printed(script, work, cwd=folder, env=environment)), "engine": package}


def stop_if_lost(error: Exception, device: str) -> None:
    """Raise `DeviceLost` where an error has lost the device, so that nothing else is measured on it."""
    if isinstance(error, DeviceLost):
        raise error
    piebald.core.machine.raise_if_lost(error, torch.device(device))


def machine(device: str) -> Row:
    """What the machine is."""
    row: Row = {"torch": torch.__version__, "CPU threads": torch.get_num_threads()}
    if device.startswith("cuda"):
        about = torch.cuda.get_device_properties(device)
        row |= {
            "memory, GiB": about.total_memory / 2**30,
            "CUDA": torch.version.cuda,
            "capability": f"{about.major}.{about.minor}",
        }
    return row


def device_name(device: str) -> str:
    """The name of a device, for tables."""
    if device.startswith("cuda"):
        return torch.cuda.get_device_name(device)
    return str(piebald.core.machine.machine()["processor"])


def _forget_peak(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def _peak(device: str) -> Row:
    return {"peak GB": torch.cuda.max_memory_allocated(device) / 1e9} if device.startswith("cuda") else {}


Measurement = Callable[[], Row]
