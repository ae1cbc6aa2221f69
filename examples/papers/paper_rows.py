"""Rows of the papers' files that no name of Piebald has: embeddings of frozen extractors, and parts of data sets.

A file names a function of it, like `name = "paper_rows.py:embedded_images"`; the benchmarks take the same rows.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray

from piebald import data
from piebald.data import DataSet
from piebald.data.sets.download import is_prepared
from piebald.models import LogMel, embed, squeezenet

Floats = NDArray[np.float32]
SIDE = 128  # pixels of the extractor's input
IMAGES = 20_000  # of CIFAR-10's training images, besides the 1,000 exact test images
POSITIVE, KEPT = "sitting", 0.35  # the rare activity, and the share of its windows that is kept
WORD, KEPT_WORDS = "dog", 0.65  # the same of Speech Commands: 2.5 % of the recordings, as coughs are of FSD
PEOPLE = 20  # of HAR's 30, as in DistFL's table 4


def cifar10_jpeg() -> DataSet:
    """Return CIFAR-10's 50,000 training and 10,000 test images; the latter as JPEG where no others are prepared."""
    return data.cifar10(test="jpeg") if is_prepared("cifar10", "cifar10_train.npz") else data.cifar10()


@lru_cache(maxsize=1)
def embedded_images() -> DataSet:
    """Return 21,000 of CIFAR-10's images embedded by the frozen SqueezeNet: rows of 512 numbers, standardised."""
    source = data.cifar10()
    rows = np.r_[0:IMAGES, len(source.x) - 1000 : len(source.x)]
    made = embed(squeezenet(SIDE), source.x[rows], key=f"cifar10-squeezenet-{SIDE}")
    return DataSet("cifar10 embedded", torch.from_numpy(standard(made)), source.y[rows], source.classes)


@lru_cache(maxsize=1)
def all_embedded_images() -> DataSet:
    """Return all of CIFAR-10 embedded, with its published test part; about 40 minutes of one core, once."""
    source = cifar10_jpeg()
    made = embed(squeezenet(SIDE), source.x, key=f"cifar10-all-squeezenet-{SIDE}")
    x = torch.from_numpy(standard(made))
    return DataSet("cifar10 embedded", x, source.y, source.classes, train=source.train, test=source.test)


@lru_cache(maxsize=1)
def rare_activity() -> DataSet:
    """Return HAR as 90 features of each window, with two classes: sitting, which is made rare, and other."""
    source = data.har()
    positive = source.y == source.classes.index(POSITIVE)
    rng = np.random.default_rng(0)
    chosen = np.flatnonzero(~positive.numpy() | (rng.random(len(source)) < KEPT))
    x = standard(features(source.x[chosen]).numpy())
    owners = {"subject": data.Owners.of(source.owners["subject"].codes[chosen])}
    return DataSet(
        "har, rare", torch.from_numpy(x), positive[chosen].long(), ["other", POSITIVE], owners,
        groups=source.groups[chosen],
    )  # fmt: skip


@lru_cache(maxsize=1)
def rare_sound() -> DataSet:
    """Return Speech Commands with one rare word where the data are here, or else HAR with one rare activity."""
    if not is_prepared("speech_commands", "testing_list.txt"):
        return rare_activity()
    source = data.speech_commands()
    positive = source.y == source.classes.index(WORD)
    chosen = np.flatnonzero(~positive.numpy() | (np.random.default_rng(0).random(len(source.y)) < KEPT_WORDS))
    x = torch.from_numpy(standard(embed(LogMel(), source.x, key="speech-commands-log-mel")[chosen]))
    speaker = source.owners["speaker"].codes[chosen]
    return DataSet("speech, rare", x, positive[chosen].long(), ["other", WORD], groups=speaker)


def first_people() -> DataSet:
    """Return HAR of the first 20 people of the published training part, who hold out test rows of their own."""
    source = data.har()
    subject = source.owners["subject"].codes
    first = np.unique(subject[source.train])[:PEOPLE]
    return replace(source, train=source.train[np.isin(subject[source.train], first)])


def features(windows: torch.Tensor) -> torch.Tensor:
    """Return mean, deviation, minimum, maximum and six log band energies of each axis: [n, 9, 128] to [n, 90]."""
    power = torch.fft.rfft(windows - windows.mean(2, keepdim=True)).abs().square()[:, :, 1:]
    edges = [0, 2, 4, 8, 16, 32, 64]
    bands = [(power[:, :, lo:hi].mean(2) + 1e-6).log() for lo, hi in pairwise(edges)]
    plain = [windows.mean(2), windows.std(2), windows.amin(2), windows.amax(2)]
    return torch.stack([*plain, *bands], 2).flatten(1)


def standard(x: Floats) -> Floats:
    """Return standard scores over all rows, which clients can compute from their sums."""
    return ((x - x.mean(0)) / (x.std(0) + 1e-6)).astype(np.float32)
