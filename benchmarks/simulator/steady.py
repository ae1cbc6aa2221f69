"""Measure whether the process of a long run grows.

    python benchmarks/simulator/steady.py

Ditto on the digits with thirty clients, each with a model as its state, in this process, with a run folder; MB of the
process's own memory and of mapped files.  Linux only.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))  # for `shared`

from shared.measured import Watch, megabytes
from shared.options import reader

import piebald
from piebald import data, models, partition, recipes


def main() -> None:
    """Run and report."""
    options = reader(__doc__, rounds=400).parse_args()
    read = lambda: (megabytes("RssAnon"), megabytes("RssFile"))  # noqa: E731
    with tempfile.TemporaryDirectory() as place, Watch(read, 1.0) as watch:
        piebald.run(
            recipes.ditto(lr=0.1, batch=20),
            partition.Iid(clients=30).split(data.digits()),
            models.build_model("mlp", (1, 8, 8), 10, hidden=(512,)),
            rounds=options.rounds,
            evaluate_every=0,
            runtime=piebald.Simulator(workers=0),
            out=Path(place) / "run",
        )
    print("| part of the run | own memory, MB | mapped files, MB |\n| --- | --- | --- |")
    for tenth in (1, 2, 4, 6, 8, 9):
        own, files = watch.seen[tenth * len(watch.seen) // 10]
        print(f"| {tenth / 10:.0%} | {own:.0f} | {files:.0f} |")


if __name__ == "__main__":
    main()
