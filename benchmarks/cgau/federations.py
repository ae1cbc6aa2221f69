"""Federations: embedded images by clusters or by domain, and sensor signals by person."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import settings  # puts the folder of `paper_rows` on the path
import torch
from numpy.typing import NDArray
from paper_rows import all_embedded_images, embedded_images, rare_activity, rare_sound, standard

from piebald import data
from piebald.data import DataSet
from piebald.data.clients.pooled_clients import PooledClients
from piebald.data.partition import ByEmbedding, ByOwner, collect, measure


@lru_cache(maxsize=1)
def images_in_one_class() -> DataSet:
    """Return the same rows with a single class, so that clusters do not depend on labels."""
    known = embedded_images()
    return DataSet("cifar10 embedded", known.x, torch.zeros_like(known.y), ["any"])


def by_clusters(shuffle: float, seed: int, rows: int = settings.TO_CLIENTS) -> PooledClients:
    """Return ten clients, each with one region of the embedding inside each class (CGAU, section 3.3)."""
    return _clusters(embedded_images(), shuffle, seed, rows)


def published_by_clusters(shuffle: float, seed: int) -> PooledClients:
    """Return the same of all images, tested on the published test part; 20 % of the others are for validation."""
    dealt = ByEmbedding(clients=settings.CLIENTS, shuffle=shuffle, seed=seed, validation=0.2)
    return dealt.split(all_embedded_images())


def rare_by_clusters(shuffle: float, seed: int) -> PooledClients:
    """Return ten clients by clusters inside two classes, one of them rare, as in the paper's experiment I."""
    return ByEmbedding(
        clients=settings.CLIENTS, shuffle=shuffle, seed=seed, validation=0.05, test=0.3, test_first=True
    ).split(rare_sound())


def by_blind_clusters(shuffle: float, seed: int) -> PooledClients:
    """Return the control: k-means over all rows, so that a client tells nothing about the label beyond its region."""
    split = _clusters(images_in_one_class(), shuffle, seed)
    known = embedded_images()
    parts = {name: split.lists(name) for name in ("train", "validation", "test")}
    return PooledClients(known.x, known.y, parts, classes=known.classes)


def _clusters(rows: DataSet, shuffle: float, seed: int, count: int = settings.TO_CLIENTS) -> PooledClients:
    return ByEmbedding(
        clients=settings.CLIENTS,
        shuffle=shuffle,
        seed=seed,
        validation=settings.VALIDATION,
        test=settings.TEST,
        limit=count,
        test_first=True,
    ).split(rows)


@lru_cache(maxsize=1)
def office_rows() -> DataSet:
    """Return Office-Caltech10 as SqueezeNet's features of the original photographs, standardised."""
    source = data.office_caltech10("squeezenet")
    return DataSet(
        "office embedded", torch.from_numpy(standard(source.x.numpy())), source.y, source.classes, source.owners
    )


def by_domain(seed: int) -> PooledClients:
    """Return four clients: amazon, caltech10, dslr and webcam."""
    return ByOwner(owner="domain", seed=seed, validation=0.15, test=0.3).split(office_rows())


def by_subject(seed: int) -> PooledClients:
    """Return thirty clients, one per person."""
    return ByOwner(owner="subject", seed=seed, validation=0.2, test=0.3).split(rare_activity())


def frechet(clients: PooledClients, components: int, held: int | None = None) -> NDArray[np.float64]:
    """Return each client's squared Fréchet distance to all others, on principal components.

    At most `held` rows per client are used."""
    from sklearn.decomposition import PCA

    rows = np.concatenate([clients.indices(client, "train") for client in range(len(clients))])
    axes = PCA(components, random_state=0).fit(clients.x.numpy()[rows])

    def project(x: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(axes.transform(x.numpy()[:held]))

    found = measure([one for one in collect(_Unlabelled(clients), embed=project)])
    return found.frechet


class _Unlabelled:
    """A view of clients that hides their classes."""

    def __init__(self, clients: PooledClients) -> None:
        self._clients = clients
        self.names, self.classes, self.common = clients.names, None, None

    def __len__(self) -> int:
        return len(self._clients)

    def counts(self, client: int, split: str) -> None:
        return None

    def rows(self, client: int, split: str):
        return self._clients.rows(client, split)
