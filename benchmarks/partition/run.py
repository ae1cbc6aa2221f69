"""Piebald's partitions beside flwr-datasets' on the same labels: python benchmarks/partition/run.py

Prints seconds for each, medians of alternating runs, and the ratios of the pairs (median, least and most); then one
large deal with its peak memory, what it takes to open a million clients, and to load CIFAR-10 (with PIEBALD_DATA).
Needs `pip install flwr-datasets` besides Piebald; without it only Piebald is timed.
"""

from __future__ import annotations

import resource
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

sys.path.append(str(Path(__file__).parents[1]))  # for `shared`

from shared.measured import ratios
from shared.measured import seconds as timed
from shared.options import reader

from piebald.data import DataSet, cifar10
from piebald.data.partition import Dirichlet, LazyClients, NonIid, Partition
from piebald.data.sets.download import is_prepared


def labels(rows: int, classes: int = 10) -> np.ndarray:
    return np.random.default_rng(0).integers(0, classes, rows)


def ours(kind: Partition, y: np.ndarray) -> Callable[[], int]:
    dataset = DataSet("labels", torch.zeros(len(y), 1), torch.from_numpy(y), [str(n) for n in range(10)])

    def deal() -> int:
        clients = kind.split(dataset)
        return sum(len(clients.indices(client, "train")) for client in range(len(clients)))

    return deal


def theirs(make: Callable[[], object], y: np.ndarray, clients: int) -> Callable[[], int]:
    from datasets import Dataset

    table = Dataset.from_dict({"label": y})

    def deal() -> int:
        partitioner = make()
        partitioner.dataset = table
        return sum(len(partitioner.load_partition(client)) for client in range(clients))

    return deal


def main() -> None:
    asked = reader(__doc__, rows=50_000, clients=100, repeats=5, skip_large=False).parse_args()
    y, clients = labels(asked.rows), asked.clients
    kinds = {
        "Dirichlet(0.5)": Dirichlet(clients=clients, alpha=0.5, test=0.0),
        "the same by class": Dirichlet(clients=clients, alpha=0.5, by="class", min_size=1, balance=False, test=0.0),
        "two classes each": NonIid(clients=clients, classes_each=2, test=0.0),
    }
    try:
        from flwr_datasets.partitioner import DirichletPartitioner, PathologicalPartitioner
    except ImportError:
        print("flwr-datasets is not installed, so only Piebald is timed")
        others = {}
    else:
        others = {
            "Dirichlet(0.5)": lambda: DirichletPartitioner(clients, "label", alpha=0.5, min_partition_size=1, seed=1),
            "the same by class": lambda: DirichletPartitioner(
                clients, "label", alpha=0.5, min_partition_size=1, seed=1
            ),
            "two classes each": lambda: PathologicalPartitioner(clients, "label", num_classes_per_partition=2, seed=1),
        }
    print(f"{asked.rows:,} rows, {clients:,} clients, medians of {asked.repeats} alternating runs")
    for name, kind in kinds.items():
        mine, other = ours(kind, y), theirs(others[name], y, clients) if name in others else None
        pairs = [(timed(mine), timed(other) if other else float("nan")) for _ in range(asked.repeats)]
        times, others_times = zip(*pairs, strict=True)
        a, b = statistics.median(times), statistics.median(others_times)
        spread = "ratio {:6.1f} ({:.1f} to {:.1f})".format(*ratios(others_times, times))
        print(f"{name:18} Piebald {a:8.3f} s   flwr-datasets {b:8.3f} s   {spread}")
    if not asked.skip_large:
        seconds = timed(ours(Dirichlet(clients=100_000, alpha=0.3), labels(1_000_000)))
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        print(f"1,000,000 rows over 100,000 clients: {seconds:.2f} s, peak memory of this process {peak:.2f} GB")
    opened = timed(lambda: len(LazyClients(1_000_000, lambda client: 1 / 0)))  # whoever loads a client fails
    print(f"opening 1,000,000 clients: {opened * 1e6:.0f} microseconds, none of them loaded")
    if is_prepared("cifar10", "cifar10_train.npz"):
        before = time.process_time()
        seconds = [timed(lambda: len(cifar10())) for _ in range(asked.repeats)]
        busy = (time.process_time() - before) / asked.repeats  # what it takes where nobody else is at work
        print(f"loading prepared CIFAR-10: {statistics.median(seconds):.2f} s, of which {busy:.2f} s on the processor")


if __name__ == "__main__":
    main()
