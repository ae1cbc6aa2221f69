"""Measure the simulator on a GPU: python benchmarks/gpu/run.py --device cuda --out build/gpu

One command, at most nine minutes.  Each measurement is written to OUT/results.json and OUT/RESULTS.md when it is made,
the most telling first, and the same command goes on where an earlier one stopped.  What did not fit into the time, or
failed, is a row that says so.

`--device cpu --scale tiny` tries the program itself, in about a minute.
"""

from __future__ import annotations

import argparse
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import measures
import torch
from ledger import Ledger
from measures import ENGINES, RECIPES, Measurement
from works import COHORTS, REGISTERED, SCALES, STACKS, Workload

from piebald.machine import device_named

Plan = tuple[str, str, Measurement]
PARTS = ("machine", "equality", "speed", "profile", "cohorts", "registered", "stacks", "precision", "compile", "peers")
EQUALITY, SPEED = "Equality with the CPU", "Seconds a round, beside a bare loop on the same device"


def equality(device: str, scale: str, all_recipes: bool) -> Iterator[Plan]:
    """Yield FedAvg on every engine, or every recipe on each engine in turn."""
    rounds = 3 if scale == "full" else 1
    if not all_recipes:
        for engine in ENGINES:
            yield EQUALITY, f"fedavg, {engine}", partial(measures.equal_to_the_cpu, "fedavg", engine, device, rounds)
        return
    for place, recipe in enumerate(list(RECIPES)[1:] if scale == "full" else ["scaffold"]):
        engine = ENGINES[place % len(ENGINES)]
        yield EQUALITY, f"{recipe}, {engine}", partial(measures.equal_to_the_cpu, recipe, engine, device, rounds)


def speed(device: str, scale: str, names: list[str], ledger: Ledger) -> Iterator[Plan]:
    """Yield each workload's bare loop, and Piebald beside it."""

    def ours(name: str, base: str) -> measures.Row:
        row, loop = measures.seconds_a_round(SCALES[scale][name], device), ledger.get(SPEED, base)
        return measures.beside(row, loop, name) if "seconds a round" in loop else row

    for name in names:
        base = f"{name}, bare loop"
        yield SPEED, base, partial(measures.bare, SCALES[scale][name], device)
        yield SPEED, name, partial(ours, name, base)


def profile(work: Workload, device: str, ledger: Ledger) -> measures.Row:
    """Where the time goes with the engine that was chosen for a workload."""
    row = ledger.get(SPEED, work.name)
    how = {name: row[name] for name in ("engine", "stack") if name in row}
    return measures.largest_costs(work, device, onednn=False, **how)


def plans(device: str, scale: str, ledger: Ledger) -> Iterator[tuple[str, Plan]]:
    """Yield every measurement with its part, the most telling first."""
    works = SCALES[scale]
    first, later = list(works)[:3], list(works)[3:]
    yield "machine", ("Machine", measures.device_name(device), partial(measures.machine, device))
    yield from (("equality", plan) for plan in equality(device, scale, all_recipes=False))
    yield from (("speed", plan) for plan in speed(device, scale, first, ledger))
    for name in first:  # by the engine that was the fastest
        yield "profile", ("The three largest costs", name, partial(profile, works[name], device, ledger))
    yield from (("equality", plan) for plan in equality(device, scale, all_recipes=True))
    yield from (("speed", plan) for plan in speed(device, scale, later, ledger))
    w1 = works["W1"]
    for count in COHORTS[scale]:
        asked = replace(w1, clients=max(w1.clients, count), cohort=count, rounds=min(w1.rounds, 5))
        yield "cohorts", ("Clients a round, W1", f"{count:,}", partial(measures.seconds_a_round, asked, device))
    for count in REGISTERED[scale]:
        yield "registered", ("Registered clients", f"{count:,}", partial(measures.registered, count, w1, device))
    for name in first:
        for stack in STACKS[scale]:
            work = replace(works[name], clients=max(stack, works[name].clients), cohort=stack, rounds=1)
            for engine in ("vmapped",) if "norm" in name else ("batched", "vmapped"):
                run = partial(measures.seconds_a_round, work, device, engine=engine, stack=stack, onednn=False)
                yield "stacks", ("Stacks", f"{name}, {engine}, {stack}", run)
    for name in first:
        for how in ("bfloat16", *(("tf32",) if device.startswith("cuda") else ())):
            run = partial(measures.seconds_a_round, works[name], device, **{how: True})
            yield "precision", ("Precision", f"{name}, {how}", run)
    if scale == "full":
        for name in first:
            yield "compile", ("torch.compile", name, partial(measures.compiled, works[name], device))
        for package, script in {"fedjax": "with_fedjax.py", "pfl": "with_pfl.py"}.items():
            for name in ("W1", "W2"):
                yield (
                    "peers",
                    ("Other packages", f"{package}, {name}", partial(measures.peer, script, package, name, device)),
                )


def measured(run: Measurement, seconds: float) -> measures.Row:
    """A measurement's row, or one that says why there is none; it is interrupted after so many seconds."""

    def stop(*_: object) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, max(seconds, 0.01))
    try:
        return run()
    except TimeoutError:
        return {"not measured": "it did not end within the time of this command"}
    except torch.OutOfMemoryError:
        return {"not measured": "it needs more memory than the device has"}
    except Exception as error:  # the other measurements are still worth having
        return {"not measured": f"{type(error).__name__}: {error}".splitlines()[0][:200]}
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def main() -> int:
    """Measure what has not been measured, until the time is up."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", help="cuda, cuda:1, mps, cpu, or auto")
    parser.add_argument("--scale", choices=SCALES, default="full")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, help="parts, by default all")
    parser.add_argument("--budget-seconds", type=float, default=520.0, help="begin and go on with nothing after these")
    parser.add_argument("--out", type=Path, default=Path("build/gpu"), help="folder of results.json and RESULTS.md")
    options = parser.parse_args()
    began = time.monotonic()
    try:
        device = device_named(options.device)
    except ValueError as error:
        parser.error(str(error))
    ledger = Ledger(options.out, {"device": measures.device_name(device), "scale": options.scale})
    for part, (table, name, run) in plans(device, options.scale, ledger):
        if part not in options.only or ledger.has(table, name):
            continue
        left = options.budget_seconds - (time.monotonic() - began)
        row = measured(run, left) if left > 0 else {"not measured": "the time of this command was up"}
        ledger.put(table, name, row)
        print(f"[{time.monotonic() - began:.0f} s] {table}: {name}: {row}", flush=True)
    print(ledger.page)
    return 0


if __name__ == "__main__":
    sys.exit(main())
