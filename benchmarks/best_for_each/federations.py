"""The federations: digits by Dirichlet, MNIST by writer, HAR by person, heart patients by hospital."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch

from piebald import data, models, partition
from piebald.data.sets.download import prepared
from piebald.runs import adaptation

WRITERS = 100  # of 539, by the seed
ROUNDS = {"digits": 20, "mnist_writers": 15, "har": 10, "heart": 30}
RATES = {"digits": 0.1, "mnist_writers": 0.1, "har": 0.05, "heart": 0.05}


writers, persons = functools.cache(data.mnist_writers), functools.cache(data.har)


def clients_of(name: str, seed: int) -> Any:
    """The clients of a federation, each with a fifth of its rows for validation and a fifth or more for testing."""
    if name == "digits":
        return partition.Dirichlet(clients=20, alpha=0.3, validation=0.2, pool=True, seed=seed).split(data.digits())
    if name == "mnist_writers":
        everybody = partition.ByOwner(owner="writer", validation=0.2, test=0.25, seed=seed).split(writers())
        return adaptation.hold_out(everybody, len(everybody) - WRITERS, seed)[0]
    if name == "har":
        return partition.ByOwner(owner="subject", validation=0.2, test=0.25, pool=True, seed=seed).split(persons())
    return heart(seed)


def heart(seed: int) -> Any:
    """Four hospitals; what is missing is 0 after scaling, with a column that says so."""
    frame = pd.read_csv(prepared("heart", "heart.csv.gz"))
    inputs = frame.drop(columns=["site", "num"])
    inputs.loc[inputs.chol == 0, "chol"] = np.nan
    scaled = ((inputs - inputs.mean()) / inputs.std()).fillna(0.0).to_numpy(np.float32)
    x = torch.from_numpy(np.concatenate([scaled, inputs.isna().to_numpy(np.float32)], axis=1))
    y = torch.from_numpy((frame.num > 0).to_numpy(np.int64))
    sites = {str(site): torch.from_numpy(np.flatnonzero(frame.site == site)) for site in frame.site.unique()}
    pairs = {site: (x[rows], y[rows]) for site, rows in sites.items()}
    return partition.clients_from(pairs, test=0.3, validation=0.2, seed=seed)


def recordings_of(name: str) -> Any:
    """The recording of each row of the data set, None where rows do not come in recordings."""
    return persons().groups if name == "har" else None


def model_of(name: str) -> Callable[[int], torch.nn.Module]:
    """The model: one hidden layer."""
    shape, classes, hidden = {
        "digits": ((1, 8, 8), 10, 32),
        "mnist_writers": ((1, 28, 28), 10, 32),
        "har": ((9, 128), 6, 32),
        "heart": ((26,), 2, 16),
    }[name]
    return lambda seed: models.build_model("mlp", shape, classes, seed, hidden=(hidden,))


def folder_of(out: Path, name: str, recipe: str, seed: int) -> Path:
    """The file with what was measured in one run."""
    return out / f"{name}-{recipe}-{seed}.json"
