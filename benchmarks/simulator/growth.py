"""Measure how time and memory grow with clients, cohorts and models.

    python benchmarks/simulator/growth.py

Each point is a process of its own: three rounds of FedAvg, one local epoch of 40 rows, batch 20; the first is not
counted.  Peak memory is of the whole process tree, shared pages of forked workers counted once.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from footprint import watched
from shared.options import reader
from torch import nn
from workloads import CLASSES, WIDTH, registered_clients

HERE = Path(__file__).parent
POINTS = {
    "registered clients": [(count, 10, 10_000) for count in (10, 100, 1_000, 10_000, 100_000, 1_000_000)],
    "clients a round": [(100_000, cohort, 10_000) for cohort in (10, 100, 1_000, 10_000)],
    "parameters": [(10, 4, size) for size in (10_000, 100_000, 1_000_000, 10_000_000, 100_000_000)],
}


def one(registered: int, cohort: int, parameters: int) -> float:
    """Seconds for one client update."""
    import piebald

    clients = registered_clients(registered)
    width = round(parameters / (WIDTH + CLASSES + 1)) if parameters <= 1_000_000 else round(parameters**0.5)
    layers = [nn.Linear(WIDTH, width), nn.ReLU()]
    if parameters > 1_000_000:
        layers += [nn.Linear(width, width), nn.ReLU()]
    run = piebald.run(
        piebald.recipes.fedavg(cohort=cohort, lr=0.05),
        clients,
        nn.Sequential(*layers, nn.Linear(width, CLASSES)),
        rounds=3,
        evaluate_every=0,
        measure="none",
    )
    walls = [row["wall"] for row in run.rounds]
    return (walls[-1] - walls[0]) / 2 / cohort


def main() -> None:
    """Measure all points and draw them."""
    parser = reader(__doc__, most=10**9)  # of parameters: points with more are left out
    parser.add_argument("--one", nargs=3, type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(one(*options.one))
        return
    print("| what grows | | milliseconds a client update | peak memory, GB |\n| --- | --- | --- | --- |")
    found: dict[str, list[tuple[int, float, float]]] = {}
    for what, points in POINTS.items():
        for place, point in enumerate(points):
            if point[2] > options.most:
                continue
            command = [sys.executable, __file__, "--one", *map(str, point)]
            printed, peak = watched(command, HERE)
            seconds = float(printed.split()[-1])
            size = point[tuple(POINTS).index(what)]
            found.setdefault(what, []).append((size, seconds, peak))
            print(f"| {what if not place else ''} | {size:,} | {1000 * seconds:.2f} | {peak:.2f} |", flush=True)
    draw(found)


def draw(found: dict[str, list[tuple[int, float, float]]]) -> None:
    """Draw time and memory over each of the three sizes, on logarithmic axes."""
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 3, figsize=(11, 3.4), sharey=True, layout="constrained")
    for ax, (what, points) in zip(axes, found.items(), strict=False):
        sizes, seconds, peaks = zip(*points, strict=True)
        ax.loglog(sizes, [1000 * value for value in seconds], "o-", label="milliseconds a client update")
        ax.loglog(sizes, peaks, "s--", color="0.5", label="peak memory, GB")
        ax.set_xlabel(what)
        ax.grid(alpha=0.3)
    axes[0].legend(fontsize=8)
    figure.savefig(HERE / "growth.png", dpi=130)


if __name__ == "__main__":
    main()
