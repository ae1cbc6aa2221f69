"""Measure the simulator on a GPU: python benchmarks/gpu/run.py --device cuda --only W2 equality --out build/gpu

In parts, each of at most two minutes, which can be asked for one by one; without `--only` all of them, until the time
of the command is up.  Each measurement is written to OUT/results.json and OUT/RESULTS.md when it is made, the most
telling first, and the same command goes on where an earlier one stopped.  What did not fit into the time, or failed, is
a row that says so.  A device that is lost ends the command at once, with exit code 1.

`--device cpu --scale tiny` tries the program itself, in about a minute.
"""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))  # for `shared`

import measures
import torch
from ledger import SPEED, Ledger
from measures import ENGINES, RECIPES, Measurement
from shared.options import reader
from switches import SWITCHES, switched
from works import COHORTS, NAMES, REGISTERED, SCALES, SHARING, STACKS, Workload

from piebald.core.errors import DeviceLost
from piebald.core.machine import device_named, free_cached

Plan = tuple[str, str, Measurement]
PARTS = (
    "machine", "equality", *NAMES, "switches", "recipes", "profile", "cohorts", "registered", "stacks", "precision",
    "compile", "workers",
)  # fmt: skip
PART_SECONDS = 120.0
EQUALITY = "Equality with the CPU"
STACKED, SHARED, SWITCHED = "Stacks", "Several processes on one device", "One part switched"
PEERS = {"fedjax": "with_fedjax.py", "pfl": "with_pfl.py"}
TOO_MUCH = "more memory than the device has"


class TimeUp(BaseException):
    """The time of this command is up; no error, which whatever trains would answer."""


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


def speed(device: str, scale: str, name: str, ledger: Ledger) -> Iterator[Plan]:
    """Yield a workload's bare loop, Piebald beside it, and other packages where they have the workload."""
    beside = partial(_beside_bare, name, ledger)
    yield SPEED, f"{name}, bare loop", partial(measures.bare, SCALES[scale][name], device)
    yield SPEED, name, partial(beside, partial(measures.seconds_a_round, SCALES[scale][name], device))
    if scale == "full" and name in ("W1", "W2"):
        for package, script in PEERS.items():
            yield SPEED, f"{name}, {package}", partial(beside, partial(measures.peer, script, package, name))


def _beside_bare(name: str, ledger: Ledger, measure: Measurement) -> measures.Row:
    """Return a row with its ratio to the bare loop of its workload, where both were measured."""
    row, loop = measure(), ledger.get(SPEED, f"{name}, bare loop")
    both = "seconds a round" in loop and "seconds a round" in row
    return measures.beside(row, loop, name) if both else row


def _switched(work: Workload, device: str, switch: str, ledger: Ledger) -> measures.Row:
    return switched(work, device, switch, ledger.get(SPEED, work.name))


def stacks(work: Workload, engine: str, device: str, sizes: Sequence[int], ledger: Ledger) -> Iterator[Plan]:
    """Yield stacks that grow until memory runs out, and then the largest that fitted."""

    def beyond(size: int) -> measures.Row:
        return next(({"not measured": f"not tried, {smaller} clients need {TOO_MUCH}"} for smaller in sizes
                     if smaller < size and TOO_MUCH in str(ledger.get(STACKED, named(smaller)))), {})  # fmt: skip

    def named(size: int) -> str:
        return f"{work.name}, {engine}, {size}"

    def one(size: int) -> measures.Row:
        asked = replace(work, clients=max(size, work.clients), cohort=size, rounds=1)
        how = {"engine": engine, "stack": size}
        return beyond(size) or measures.seconds_a_round(asked, device, **how)

    def largest() -> measures.Row:
        rows = {size: ledger.get(STACKED, named(size)) for size in sizes}
        fitted = {size: row["seconds a round"] / size for size, row in rows.items() if "seconds a round" in row}
        if not fitted:
            return {"not measured": "no stack was measured"}
        most, best = max(fitted), min(fitted, key=lambda size: fitted[size])
        return {"largest that fitted": most, "fastest for one client": best, "seconds a client": fitted[best]}

    for size in sizes:
        yield STACKED, named(size), partial(one, size)
    yield "Largest stacks", f"{work.name}, {engine}", largest


def compiled(work: Workload, device: str, ledger: Ledger) -> measures.Row:
    """Compiled passes, beside the bare loop as well."""
    plain = ledger.get(SPEED, work.name)
    return _beside_bare(work.name, ledger, partial(measures.compiled, work, device, plain))


def profile(work: Workload, device: str, ledger: Ledger) -> measures.Row:
    """Where the time goes with the engine that was chosen for a workload."""
    row = ledger.get(SPEED, work.name)
    how = {name: row[name] for name in ("engine", "stack") if name in row}
    return measures.largest_costs(work, device, **how)


def plans(device: str, scale: str, ledger: Ledger) -> Iterator[tuple[str, Plan]]:
    """Yield every measurement with its part, the most telling first."""
    works = SCALES[scale]
    first = list(works)[:3]
    yield "machine", ("Machine", measures.device_name(device), partial(measures.machine, device))
    yield from (("equality", plan) for plan in equality(device, scale, all_recipes=False))
    for part, name in NAMES.items():
        yield from ((part, plan) for plan in speed(device, scale, name, ledger))
    for name in first:  # by the engine that was the fastest
        for switch in SWITCHES:
            beside = partial(_beside_bare, name, ledger, partial(_switched, works[name], device, switch, ledger))
            yield "switches", (SWITCHED, f"{name}, {switch}", beside)
    for name in first:
        yield "profile", ("The three largest costs", name, partial(profile, works[name], device, ledger))
    yield from (("recipes", plan) for plan in equality(device, scale, all_recipes=True))
    w1 = works["W1"]
    for count in COHORTS[scale]:
        asked = replace(w1, clients=max(w1.clients, count), cohort=count, rounds=min(w1.rounds, 5))
        yield "cohorts", ("Clients a round, W1", f"{count:,}", partial(measures.seconds_a_round, asked, device))
    for count in REGISTERED[scale]:
        yield "registered", ("Registered clients", f"{count:,}", partial(measures.registered, count, w1, device))
    for name in first:
        for engine in ("vmapped",) if "norm" in name else ("batched", "vmapped"):
            yield from (("stacks", plan) for plan in stacks(works[name], engine, device, STACKS[scale], ledger))
    for name in first:
        for how in ("bfloat16", *(("tf32",) if device.startswith("cuda") else ())):
            run = partial(measures.seconds_a_round, works[name], device, **{how: True})
            yield "precision", ("Precision", f"{name}, {how}", run)
    for engine in ("sequential", "vmapped") if scale == "full" else ():  # late: to compile takes minutes
        run = partial(measures.equal_to_the_cpu, "fedavg", engine, device, 3, compiled=True)
        yield "compile", (EQUALITY, f"fedavg, {engine}, compiled", run)
    for name in first if scale == "full" else first[:1]:
        run = partial(compiled, works[name], device, ledger)
        yield "compile", ("Compiled passes, on an NVIDIA GPU as CUDA graphs", name, run)
    for name in first[:2]:
        for count in SHARING[scale]:
            own = {"kind": "simulator", "device": device, "workers": count}
            yield "workers", (SHARED, f"{name}, {count} workers", partial(measures.apart, name, scale, own))
        if device == "cuda":
            fraction = {"kind": "ray", "device": device, "gpus": 0.5, "workers": 2}
            yield "workers", (SHARED, f"{name}, Ray, gpus = 0.5", partial(measures.apart, name, scale, fraction))


def measured(run: Measurement, seconds: float, device: str) -> measures.Row:
    """A measurement's row, or one that says why there is none; it is interrupted after so many seconds."""

    def stop(*_: object) -> None:
        raise TimeUp

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, max(seconds, 0.01), 1.0)  # again, where a callback has swallowed the first
    try:
        return run()
    except TimeUp:
        return {"not measured": "it did not end within the time of this command"}
    except Exception as error:  # the other measurements are still worth having, where the device is
        measures.stop_if_lost(error, device)
        if isinstance(error, torch.OutOfMemoryError) or isinstance(error.__cause__, torch.OutOfMemoryError):
            free_cached(torch.device(device))
            return {"not measured": f"it needs {TOO_MUCH}"}
        return {"not measured": f"{type(error).__name__}: {error}".splitlines()[0][:200]}
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def main() -> int:
    """Measure what has not been measured, until the time is up."""
    parser = reader(
        __doc__, device="cuda", scale=tuple(SCALES), only=PARTS, budget_seconds=520.0, part_seconds=PART_SECONDS,
        out=Path("build/gpu"),
    )  # fmt: skip
    options = parser.parse_args()
    began = time.monotonic()
    try:
        device = device_named(options.device)
    except ValueError as error:
        parser.error(str(error))
    ledger = Ledger(options.out, {"device": measures.device_name(device), "scale": options.scale})
    spent = dict.fromkeys(PARTS, 0.0)
    for part, (table, name, run) in plans(device, options.scale, ledger):
        if part not in options.only or ledger.has(table, name):
            continue
        now = time.monotonic()
        left = min(options.budget_seconds - (now - began), options.part_seconds - spent[part])
        try:
            row = measured(run, left, device) if left > 0 else {"not measured": "the time of this command was up"}
        except DeviceLost as error:
            ledger.put(table, name, {"not measured": "the device was lost"})
            print(f"{table}: {name}: {error}", file=sys.stderr)
            return 1
        spent[part] += time.monotonic() - now
        ledger.put(table, name, row)
        if "not measured" not in row:
            ledger.saw(part, ledger.about["device"])
        print(f"[{time.monotonic() - began:.0f} s] {table}: {name}: {row}", flush=True)
    print(ledger.page)
    return 0


if __name__ == "__main__":
    sys.exit(main())
