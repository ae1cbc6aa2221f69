"""Federations: embedded images by clusters or by domain, and sensor signals by person."""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise

import numpy as np
import settings
import torch
from numpy.typing import NDArray

from piebald import data
from piebald.data import DataSet
from piebald.data.clients.pooled_clients import PooledClients
from piebald.data.partition import ByEmbedding, ByOwner, collect, measure
from piebald.data.sets.download import is_prepared
from piebald.models import LogMel, embed, squeezenet

Floats = NDArray[np.float32]
POSITIVE, KEPT = "sitting", 0.35  # the rare activity, and the share of its windows that is kept
WORD, KEPT_WORDS = "dog", 0.65  # the same of Speech Commands: 2.5 % of the recordings, as coughs are of FSD


@lru_cache(maxsize=1)
def images() -> DataSet:
    """Return CIFAR-10 embedded by the frozen SqueezeNet: 21,000 rows of 512 numbers, standardised."""
    source = data.cifar10()
    rows = np.r_[0 : settings.IMAGES, len(source.x) - 1000 : len(source.x)]
    made = embed(squeezenet(settings.SIDE), source.x[rows], key=f"cifar10-squeezenet-{settings.SIDE}")
    return DataSet("cifar10 embedded", torch.from_numpy(_standard(made)), source.y[rows], source.classes)


@lru_cache(maxsize=1)
def images_in_one_class() -> DataSet:
    """Return the same rows with a single class, so that clusters do not depend on labels."""
    known = images()
    return DataSet("cifar10 embedded", known.x, torch.zeros_like(known.y), ["any"])


@lru_cache(maxsize=1)
def published_images() -> DataSet:
    """Return all of CIFAR-10 embedded, with its published test part (10,000 images, JPEG where no others are here)."""
    source = data.cifar10(test="jpeg")
    made = embed(squeezenet(settings.SIDE), source.x, key=f"cifar10-all-squeezenet-{settings.SIDE}")
    x = torch.from_numpy(_standard(made))
    return DataSet("cifar10 embedded", x, source.y, source.classes, train=source.train, test=source.test)


def by_clusters(shuffle: float, seed: int, rows: int = settings.TO_CLIENTS) -> PooledClients:
    """Return ten clients, each with one region of the embedding inside each class (CGAU, section 3.3)."""
    return _clusters(images(), shuffle, seed, rows)


def published_by_clusters(shuffle: float, seed: int) -> PooledClients:
    """Return the same of all images, tested on the published test part; 20 % of the others are for validation."""
    return ByEmbedding(clients=settings.CLIENTS, shuffle=shuffle, seed=seed, validation=0.2).split(published_images())


def rare_by_clusters(shuffle: float, seed: int) -> PooledClients:
    """Return ten clients by clusters inside two classes, one of them rare, as in the paper's experiment I."""
    return ByEmbedding(
        clients=settings.CLIENTS, shuffle=shuffle, seed=seed, validation=0.05, test=0.3, test_first=True
    ).split(rare_rows())


def by_blind_clusters(shuffle: float, seed: int) -> PooledClients:
    """Return the control: k-means over all rows, so that a client tells nothing about the label beyond its region."""
    split = _clusters(images_in_one_class(), shuffle, seed)
    known = images()
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
        "office embedded", torch.from_numpy(_standard(source.x.numpy())), source.y, source.classes, source.owners
    )


def by_domain(seed: int) -> PooledClients:
    """Return four clients: amazon, caltech10, dslr and webcam."""
    return ByOwner(owner="domain", seed=seed, validation=0.15, test=0.3).split(office_rows())


@lru_cache(maxsize=1)
def signal_rows() -> DataSet:
    """Return HAR as fixed features of each window, with two classes: sitting, which is made rare, and other."""
    source = data.har()
    positive = source.y == source.classes.index(POSITIVE)
    rng = np.random.default_rng(0)
    chosen = np.flatnonzero(~positive.numpy() | (rng.random(len(source)) < KEPT))
    x = _standard(features(source.x[chosen]).numpy())
    y = positive[chosen].long()
    owners = {"subject": data.Owners.of(source.owners["subject"].codes[chosen])}
    return DataSet("har, rare", torch.from_numpy(x), y, ["other", POSITIVE], owners, groups=source.groups[chosen])


@lru_cache(maxsize=1)
def rare_rows() -> DataSet:
    """Return Speech Commands with one rare word where the data are here, or else HAR with one rare activity."""
    if not is_prepared("speech_commands", "testing_list.txt"):
        return signal_rows()
    source = data.speech_commands()
    positive = source.y == source.classes.index(WORD)
    chosen = np.flatnonzero(~positive.numpy() | (np.random.default_rng(0).random(len(source.y)) < KEPT_WORDS))
    x = torch.from_numpy(_standard(embed(LogMel(), source.x, key="speech-commands-log-mel")[chosen]))
    speaker = source.owners["speaker"].codes[chosen]
    return DataSet("speech, rare", x, positive[chosen].long(), ["other", WORD], groups=speaker)


def by_subject(seed: int) -> PooledClients:
    """Return thirty clients, one per person."""
    return ByOwner(owner="subject", seed=seed, validation=0.2, test=0.3).split(signal_rows())


def features(windows: torch.Tensor) -> torch.Tensor:
    """Return mean, deviation, minimum, maximum and six log band energies of each axis: [n, 9, 128] to [n, 90]."""
    power = torch.fft.rfft(windows - windows.mean(2, keepdim=True)).abs().square()[:, :, 1:]
    edges = [0, 2, 4, 8, 16, 32, 64]
    bands = [(power[:, :, lo:hi].mean(2) + 1e-6).log() for lo, hi in pairwise(edges)]
    plain = [windows.mean(2), windows.std(2), windows.amin(2), windows.amax(2)]
    return torch.stack([*plain, *bands], 2).flatten(1)


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


def _standard(x: Floats) -> Floats:
    """Return standard scores over all rows, which clients can compute from their sums."""
    return ((x - x.mean(0)) / (x.std(0) + 1e-6)).astype(np.float32)
