"""Measure a million clients that keep state between rounds, in a file beyond 64 MB of memory.

    python benchmarks/simulator/states.py

SCAFFOLD keeps a control variate for each client and Ditto a model.  Clients have 40 rows and train an epoch in batches
of 20; a row of the table is a tenth of the run.  Linux only.
"""

from __future__ import annotations

import itertools
import json
import os
import stat
import sys
import time
from pathlib import Path
from typing import Any

import torch

sys.path.append(str(Path(__file__).parents[1]))  # for `shared`

from shared.measured import apart, megabytes
from shared.options import reader
from workloads import CLASSES, WIDTH, registered_clients

REGISTERED, COHORT, ROUNDS, HIDDEN = 1_000_000, 1_000, 50, 134  # 10,060 parameters
BUDGET = 64 << 20


def one(method: str, registered: int, cohort: int, rounds: int) -> list[dict[str, float]]:
    """A run in this process: what there is after each tenth."""
    import piebald
    from piebald.report.callbacks import Callback

    clients = registered_clients(registered)
    found: list[dict[str, float]] = []

    class Watch(Callback):
        def on_server_step(self, step: Any) -> None:
            taken = len(found) * rounds // 10
            if step["version"] >= taken:
                own = megabytes("RssAnon")
                clocks = {"wall": time.perf_counter(), "cpu": time.process_time()}
                found.append({"round": step["version"], "own": own, "disk": deleted_files() / 2**20} | clocks)

    piebald.run(
        piebald.recipes.make(method, cohort=cohort, lr=0.05, batch=20, epochs=1),
        clients,
        torch.nn.Sequential(torch.nn.Linear(WIDTH, HIDDEN), torch.nn.ReLU(), torch.nn.Linear(HIDDEN, CLASSES)),
        rounds=rounds,
        evaluate_every=0,
        measure="none",
        runtime=piebald.Simulator(workers=0, memory=BUDGET),
        callbacks=[Watch()],
    )
    return found


def deleted_files() -> int:
    """Bytes on disk of files that this process has open and nobody else can see, as temporary ones are."""
    about = []
    for name in os.listdir("/proc/self/fd"):
        try:
            about.append(os.stat(f"/proc/self/fd/{name}"))
        except OSError:  # the listing's own
            continue
    return sum(512 * one.st_blocks for one in about if stat.S_ISREG(one.st_mode) and not one.st_nlink)


def main() -> None:
    """Measure both and print a table."""
    given = reader(__doc__, ["one"], registered=REGISTERED, cohort=COHORT, rounds=ROUNDS).parse_args()
    sizes = (given.registered, given.cohort, given.rounds)
    if given.one:
        print(json.dumps(one(given.one, *sizes)))
        return
    print("| recipe | rounds | clients a second | of processor time | own memory, MB | on disk, MB |")
    print("| --- " * 6 + "|")
    for method in ("scaffold", "ditto"):
        words = [f"--{name}={value}" for name, value in zip(("registered", "cohort", "rounds"), sizes, strict=True)]
        for before, after in itertools.pairwise(apart(__file__, "--one", method, *words)):
            served = (after["round"] - before["round"]) * given.cohort
            rates = [served / (after[clock] - before[clock]) for clock in ("wall", "cpu")]
            cells = f"{rates[0]:,.0f} | {rates[1]:,.0f} | {after['own']:,.0f} | {after['disk']:,.0f}"
            print(f"| `{method}` | {before['round']:.0f} to {after['round']:.0f} | {cells} |", flush=True)


if __name__ == "__main__":
    main()
