"""Measure whether the process of a long run grows.

    python benchmarks/simulator/steady.py

Ditto on the digits with thirty clients, each with a model as its state, in this process, with a run folder; MB of the
process's own memory and of mapped files.  Linux only.
"""

from __future__ import annotations

import argparse
import tempfile
import threading
from pathlib import Path

import piebald
from piebald import data, models, partition, recipes


def megabytes() -> tuple[int, int]:
    """Own memory and mapped files of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    found = dict(line.split(":", 1) for line in lines if ":" in line)
    return int(found["RssAnon"].split()[0]) // 1024, int(found["RssFile"].split()[0]) // 1024


def main() -> None:
    """Run and report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=400)
    options = parser.parse_args()
    done, seen = threading.Event(), list[tuple[int, int]]()

    def watch() -> None:
        while not done.wait(1.0):
            seen.append(megabytes())

    watcher = threading.Thread(target=watch)
    watcher.start()
    with tempfile.TemporaryDirectory() as place:
        piebald.run(
            recipes.ditto(lr=0.1, batch=20),
            partition.Iid(clients=30).split(data.digits()),
            models.build_model("mlp", (1, 8, 8), 10, hidden=(512,)),
            rounds=options.rounds,
            evaluate_every=0,
            runtime=piebald.Simulator(workers=0),
            out=Path(place) / "run",
        )
    done.set()
    watcher.join()
    print("| part of the run | own memory, MB | mapped files, MB |\n| --- | --- | --- |")
    for tenth in (1, 2, 4, 6, 8, 9):
        own, files = seen[tenth * len(seen) // 10]
        print(f"| {tenth / 10:.0%} | {own} | {files} |")


if __name__ == "__main__":
    main()
