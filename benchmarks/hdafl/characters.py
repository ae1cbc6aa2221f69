"""Characters by writer: FEMNIST's 62 classes where its files are here, or else MNIST's digits."""

from __future__ import annotations

import os
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import numpy as np
import settings
import torch

from piebald import data
from piebald.contracts import Clients
from piebald.core.randomness import generator
from piebald.data import DataSet
from piebald.data.sets.dataset import Owners


def letters_here() -> bool:
    """Return whether FEMNIST's files are in PIEBALD_DATA."""
    return (Path(os.environ.get("PIEBALD_DATA", "")) / "femnist" / "train").is_dir()


@lru_cache(maxsize=2)
def clients(setting: str, rows: int | None, seed: int, letters: bool = False) -> Clients:
    """Return the clients of a setting; `letters` asks for FEMNIST where it is here."""
    if not (letters and letters_here()):
        return settings.partition(setting, rows, seed).split(_digits())
    made = _some_writers(_femnist(), seed)
    return settings.partition(setting, rows, seed, len(made.classes or ())).split(made)


def _some_writers(whole: DataSet, seed: int) -> DataSet:
    """Return the rows of `settings.WRITERS` writers, drawn by the seed."""
    owners = whole.owners["writer"]
    drawn = generator("hdafl benchmark", "writers", seed).permutation(len(owners.names))[: settings.WRITERS]
    rows = np.flatnonzero(np.isin(owners.codes, drawn))
    places = torch.from_numpy(rows)
    mine = {"writer": Owners(owners.codes[rows], owners.names)}
    return replace(whole, x=whole.x[places], y=whole.y[places], owners=mine, train=None, test=None)


@lru_cache(maxsize=1)
def _digits() -> DataSet:
    return data.mnist_writers()


@lru_cache(maxsize=1)
def _femnist() -> DataSet:
    return data.femnist()
