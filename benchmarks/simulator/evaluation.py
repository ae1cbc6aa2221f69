"""Time a row of evaluation beside a row of the forward passes of training, in processor time of one process.

python benchmarks/simulator/evaluation.py

Every client is evaluated on rows of its own after each round.  Training passes batches of 20 rows through one model,
without a gradient.
"""

from __future__ import annotations

import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch

sys.path.append(str(Path(__file__).parents[1]))  # for `shared`

from shared.measured import ratios, seconds
from shared.options import reader
from workloads import WORKLOADS, Workload

import piebald
from piebald.data.partition import PooledClients
from piebald.report.callbacks import Callback

ROUNDS, BATCH = 4, 20


class Clock(Callback):
    """Notes the processor time at each server step."""

    def __init__(self, marks: list[float]) -> None:
        self.marks = marks

    def on_server_step(self, step: Any) -> None:
        self.marks.append(time.process_time())


def evaluating(work: Workload) -> float:
    """Microseconds of a row that is scored: a round with evaluation less one without."""
    pool = work.data()
    lists = pool.lists("train")
    clients = PooledClients(pool.x, pool.y, {"train": lists, "test": lists}, classes=pool.classes)
    spent = []
    for every in (1, 0):
        marks = list[float]()
        piebald.run(
            piebald.recipes.fedavg(cohort=work.cohort, lr=0.05, batch=BATCH),
            clients,
            work.network(),
            rounds=ROUNDS,
            runtime=piebald.Simulator(workers=0),
            evaluate_every=every,
            callbacks=[Clock(marks)],
        )
        spent.append((marks[-1] - marks[0]) / (ROUNDS - 1))  # of a version's evaluation and the next round
    return 1e6 * (spent[0] - spent[1]) / len(pool.y)


def passing(work: Workload) -> float:
    """Microseconds of a row in a forward pass over a batch."""
    torch.set_num_threads(1)
    model, x = work.network(), work.data().x[:2000]
    with torch.no_grad():
        times = [seconds(lambda: [model(batch) for batch in x.split(BATCH)], time.process_time) for _ in range(6)]
    return 1e6 * statistics.median(times[1:]) / len(x)


def main() -> None:
    """Measure and print."""
    options = reader(__doc__, workloads=["W1", "W2"], times=3).parse_args()
    print(
        "| workload | a row scored, µs | a row in a forward pass of training, µs | ratio |\n| --- | --- | --- | --- |"
    )
    for name in options.workloads:
        pairs = [(evaluating(WORKLOADS[name]), passing(WORKLOADS[name])) for _ in range(options.times)]
        scored, passed = zip(*pairs, strict=True)
        cells = f"{statistics.median(scored):.1f} | {statistics.median(passed):.1f}"
        print(f"| {name} | {cells} | {ratios(scored, passed)[0]:.2f} |", flush=True)


if __name__ == "__main__":
    main()
