"""Piebald's simulator beside a bare one-thread PyTorch loop, in alternating runs: python benchmarks/simulator/run.py

Prints seconds a round (training, averaging and the run folder; no evaluation), the medians, and their ratio.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent


def bare(name: str) -> float:
    """Seconds a round of the bare loop."""
    from workloads import W1, W2, bare_loop

    work = {"W1": W1, "W2": W2}[name]
    return bare_loop(work, work.data())


def piebald_run(name: str, folder: bool) -> float:
    """Seconds a round through `piebald.run`: from the first commit to the last, so that start-up is not counted."""
    from workloads import W1, W2

    import piebald

    work = {"W1": W1, "W2": W2}[name]
    with tempfile.TemporaryDirectory() as place:
        history = piebald.run(
            piebald.recipes.fedavg(cohort=work.cohort, lr=0.05, batch=20, epochs=1),
            work.data(),
            work.network(),
            rounds=work.rounds + 1,
            out=Path(place) / "run" if folder else None,
            evaluate_every=0,
        )
        walls = [row["wall"] for row in history.rounds]
        print(json.dumps(history.meta["runtime"]), file=sys.stderr)
    return (walls[-1] - walls[0]) / work.rounds


def measure(what: str, name: str) -> float:
    """One measurement in a process of its own, so that none profits from another's warmth."""
    command = [sys.executable, __file__, "--one", what, name]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=HERE)
    return float(done.stdout.split()[-1])


def main() -> None:
    """Alternate and report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=5, help="alternations of each workload")
    parser.add_argument("--one", nargs=2, metavar=("WHAT", "WORKLOAD"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        what, name = options.one
        print(bare(name) if what == "bare" else piebald_run(name, folder=what == "folder"))
        return
    print(f"{platform.processor() or platform.machine()}, Python {platform.python_version()}")
    for name in ("W1", "W2"):
        times: dict[str, list[float]] = {"bare": [], "piebald": [], "folder": []}
        for _ in range(options.pairs):
            for what in times:
                times[what].append(measure(what, name))
        base = statistics.median(times["bare"])
        for what, seconds in times.items():
            ratios = sorted(mine / theirs for mine, theirs in zip(seconds, times["bare"], strict=True))
            middle = statistics.median(seconds)
            print(
                f"{name} {what:8} median {middle:.4f} s a round, ratio {middle / base:.3f} "
                f"(pairs {ratios[0]:.3f} to {ratios[-1]:.3f})"
            )


if __name__ == "__main__":
    main()
