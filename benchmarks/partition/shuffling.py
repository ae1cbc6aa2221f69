"""CGAU's table 1 on other data: how unlike clients are as rows are shuffled between them.

python benchmarks/partition/shuffling.py    (PIEBALD_DATA for all but the digits)

Clients are regions of an embedding (partition.ByEmbedding); the measure is the average Fréchet distance, as a share of
that without shuffling.  Prints mean and 95 % interval over seeds, and draws shuffling.png beside this file.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np

sys.path.append(str(Path(__file__).parents[1]))  # for `shared`

from shared.intervals import interval
from shared.options import reader

from piebald import data
from piebald.data.measures import pictures
from piebald.data.partition import ByEmbedding, collect, measure
from piebald.data.sets.download import is_prepared

SHARES = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
SOURCES: dict[str, tuple[str, str, Callable[[], data.DataSet]]] = {
    "digits": ("", "", data.digits),
    "handwriting": ("mnist_writers", "mnist_writers.npz", data.mnist_writers),
    "photographs": (
        "office_caltech10",
        "office_caltech10_features.npz",
        lambda: data.office_caltech10("squeezenet"),
    ),
}


def distances(source: data.DataSet, clients: int, limit: int, seed: int) -> list[float]:
    """The average Fréchet distance at each share."""
    found = []
    for share in SHARES:
        kind = ByEmbedding(clients=clients, shuffle=share, seed=seed, limit=limit)
        seen = measure(collect(kind.split(source), embed=lambda x: pictures.flat(x)[:, :128]))
        found.append(seen.federation["frechet"])
    return found


def main() -> None:
    asked = reader(__doc__, clients=5, limit=1500, seeds=5).parse_args()
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 4), layout="constrained")
    ax = figure.subplots()
    print(f"{asked.clients} clients, at most {asked.limit} rows, {asked.seeds} seeds; shares shuffled: {SHARES}")
    for name, (folder, file, load) in SOURCES.items():
        if folder and not is_prepared(folder, file):
            print(f"{name}: not here")
            continue
        source = load()
        table = np.array([distances(source, asked.clients, asked.limit, seed) for seed in range(asked.seeds)])
        table /= table[:, :1]
        mean, half = zip(*map(interval, table.T.tolist()), strict=True)
        falls = int((np.diff(table, axis=1) < 0).all(1).sum())
        cells = "  ".join(f"{m:.3f} ± {h:.3f}" for m, h in zip(mean, half, strict=True))
        print(f"{name:12} {cells}   falls throughout: {falls} of {asked.seeds}")
        ax.errorbar(SHARES, mean, half, marker="o", capsize=3, label=name)
    ax.set_xlabel("share of rows that swap clients")
    ax.set_ylabel("average Fréchet distance\n(share of that without shuffling)")
    ax.set_ylim(0)
    ax.legend(frameon=False)
    figure.savefig(Path(__file__).with_name("shuffling.png"), dpi=100)


if __name__ == "__main__":
    main()
