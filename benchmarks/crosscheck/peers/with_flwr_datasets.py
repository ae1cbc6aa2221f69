"""flwr-datasets: statistics of partitions by its DirichletPartitioner."""

import sys

import numpy as np
from datasets import Dataset
from flwr_datasets.partitioner import DirichletPartitioner
from inputs import DIRICHLET, folder_of, label_statistics

_, out = folder_of(sys.argv)
rows, classes, clients = (DIRICHLET[name] for name in ("rows", "classes", "clients"))
y = np.random.default_rng(0).permutation(np.arange(rows) % classes)
found = {}
for alpha in DIRICHLET["alphas"]:
    for balance in (True, False):
        made = []
        for seed in range(DIRICHLET["repeats"]):
            partitioner = DirichletPartitioner(
                num_partitions=clients, partition_by="label", alpha=alpha, min_partition_size=DIRICHLET["least"],
                self_balancing=balance, shuffle=False, seed=seed,
            )  # fmt: skip
            partitioner.dataset = Dataset.from_dict({"label": y})
            counts = [
                np.bincount(np.asarray(partitioner.load_partition(client)["label"]), minlength=classes)
                for client in range(clients)
            ]
            made.append(label_statistics(np.array(counts)))
        found[f"Dirichlet {alpha:g}, {'balanced' if balance else 'plain'}"] = np.array(made)
np.savez(out, **found)
