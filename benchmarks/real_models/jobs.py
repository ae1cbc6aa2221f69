"""The runs of the benchmark."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

METHODS = ("Local", "FedAvg", "fine-tuned")
SEEDS = (0, 1, 2)
NETWORKS = {
    "heart": ("logistic",),
    "tcga": ("linear",),
    "tcga-scaled": ("linear",),
    "shakespeare": ("lstm", "transformer"),
    "cifar10": ("resnet18",),
}


class Job(NamedTuple):
    """One run."""

    study: str
    network: str
    method: str
    seed: int


def jobs(only: Sequence[str] = tuple(NETWORKS), seeds: Sequence[int] = SEEDS) -> Iterator[Job]:
    """All runs: one seed of everything before a second one."""
    for seed in seeds:
        for name in only:
            for network in NETWORKS[name]:
                yield from (Job(name, network, method, seed) for method in METHODS)
