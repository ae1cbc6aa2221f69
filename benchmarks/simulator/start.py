"""Processor seconds of the phases before the first round, and memory of the server's process after some rounds.

python benchmarks/simulator/start.py W1
"""

from __future__ import annotations

import argparse
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any


def processor() -> float:
    """Processor seconds of this process and its children that have ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


def anonymous() -> int:
    """MB of this process that no file holds."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Anonymous:")) >> 10


def told(what: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, which prints what it takes."""

    def call(*args: Any, **fields: Any) -> Any:
        began = processor()
        made = function(*args, **fields)
        print(f"{what:12} {processor() - began:6.2f} s, then {anonymous():4} MB", flush=True)
        return made

    return call


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("workload")
    parser.add_argument("--rounds", type=int, default=10)
    options = parser.parse_args()

    def imported() -> Any:
        import piebald

        return piebald.run

    print(f"{'':12} processor seconds, memory")
    told("torch", lambda: __import__("torch"))()
    run = told("piebald", imported)()

    from workloads import WORKLOADS

    import piebald.runs.run as run_module
    from piebald import recipes
    from piebald.runtimes.simulation import simulator
    from piebald.runtimes.workers import forked

    work = WORKLOADS[options.workload]
    clients, model = work.data(), work.network()
    simulator.fastest = told("measuring", simulator.fastest)
    simulator.make_engine = told("probing", simulator.make_engine)
    run_module.describe = told("describing", run_module.describe)
    forked.ForkedWorkers.collect = told("round", forked.ForkedWorkers.collect)  # type: ignore[method-assign]
    if remembers := vars(simulator).get("agrees"):
        simulator.agrees = told("checking", remembers)
    recipe = recipes.fedavg(cohort=work.cohort, lr=0.05, batch=20)
    run(recipe, clients, model, rounds=options.rounds, evaluate_every=0, runtime=simulator.Simulator(workers=2))


if __name__ == "__main__":
    main()
