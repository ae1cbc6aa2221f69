"""The federations: characters by writer, and two captures of mobile-app traffic with the bytes of their rows.

Characters are FEMNIST's 62 classes where its files are here, or else MNIST's digits.
"""

from __future__ import annotations

import io
import lzma
import os
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import numpy as np
import settings
import torch
from numpy.typing import NDArray

from piebald import data
from piebald.contracts import Clients
from piebald.core.randomness import generator
from piebald.data import DataSet
from piebald.data.partition import ByOwner, PooledClients
from piebald.data.sets.dataset import Owners
from piebald.data.sets.traffic import FULL_PACKET


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


CENTRAL = "centralised"
LENGTH = settings.PACKETS


@lru_cache(maxsize=1)
def everything() -> DataSet:
    """Return all flows of both captures."""
    return data.traffic()


@lru_cache(maxsize=2)
def federation(case: str, rows: int | None, seed: int) -> PooledClients:
    """Return two clients, one per capture; no trace is in both training and test rows.

    Args:
        case: key of `settings.TRAFFIC_CASES`, which says how many apps are removed from each capture.
        rows: number of flows; None means all.
        seed: seed of the split and of the choice of removed apps.
    """
    whole = everything()
    alone = settings.TRAFFIC_CASES[case]
    order = generator("hdafl benchmark", "apps", seed).permutation(len(whole.classes))
    removed = {0: order[:alone], 1: order[alone : 2 * alone]}
    app, capture = whole.y.numpy(), whole.owners["capture"].codes
    keep = ~np.any([(capture == side) & np.isin(app, apps) for side, apps in removed.items()], axis=0)
    made = ByOwner(owner="capture", test=settings.TEST, limit=rows, seed=seed).split(only(whole, np.flatnonzero(keep)))
    check_traces(made, whole.groups[keep])
    return made


def only(whole: DataSet, rows: NDArray[np.int64]) -> DataSet:
    """Return a data set that holds only some rows."""
    places = torch.from_numpy(rows)
    return replace(
        whole,
        x=whole.x[places],
        y=whole.y[places],
        owners={name: Owners(owners.codes[rows], owners.names) for name, owners in whole.owners.items()},
        groups=whole.groups[rows],
    )


def check_traces(made: PooledClients, trace: NDArray[np.int64]) -> None:
    """Raise an error if a trace has flows in both training and test rows."""
    train, test = (np.unique(trace[made.lists(split).values]) for split in ("train", "test"))
    if len(np.intersect1d(train, test)):
        raise RuntimeError("a trace has flows in both training and test rows")


def sizes_in_bytes(x: NDArray[np.float32]) -> NDArray[np.int16]:
    """Return the captured packet sizes from the scaled ones."""
    return np.rint(np.sign(x) * np.expm1(np.abs(x.astype(np.float64)) * np.log1p(FULL_PACKET))).astype(np.int16)


@lru_cache(maxsize=4)
def compressed(case: str, rows: int | None, seed: int) -> dict[str, int]:
    """Return the bytes of both captures' training rows (sizes and app), raw and compressed."""
    made = federation(case, rows, seed)
    train = np.sort(made.lists("train").values)
    size, app = sizes_in_bytes(made.x[torch.from_numpy(train)].numpy()[:, 0]), made.y.numpy()[train].astype(np.uint8)
    packed = io.BytesIO()
    np.savez_compressed(packed, size=size, app=app)
    raw = size.tobytes() + app.tobytes()
    return {"rows": len(train), "raw": len(raw), "npz": len(packed.getvalue()), "xz": len(lzma.compress(raw, preset=9))}
