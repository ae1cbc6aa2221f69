"""Settings of the benchmark: data, partitions, fleets, recipes, and the runs of each scale."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import numpy as np
import torch

from piebald import recipes
from piebald.aggregation import EqualWeighted
from piebald.data import DataSet, cifar10
from piebald.partition import (
    FastSlow,
    FlipRandom,
    Homogeneous,
    NonIid,
    Partition,
    PowerLaw,
    Sizes,
    Skewed,
    Uniform,
)
from piebald.randomness import generator
from piebald.recipe import Recipe
from piebald.server_optimizer import CachedAverage

CLIENTS = 10
SIDE = 32  # pixels of a published image
TRAINING = {"lr": 0.05, "momentum": 0.75, "batch": 20, "epochs": 4}
SIZES: dict[str, Sizes] = {"uniform": Uniform(), "skewed": Skewed(), "power law": PowerLaw(exponent=1.5)}
CLASSES: dict[str, int] = {"IID": 10, "Non-IID(5)": 5, "Non-IID(3)": 3}
# The largest clients may need more rows than a few classes have, so they hold more classes, as in Metis.
HEADS = {
    ("skewed", "Non-IID(5)"): "7x1,6x1,5x8",
    ("power law", "Non-IID(5)"): "10x1,7x1,6x1,5x7",
    ("power law", "Non-IID(3)"): "8x1,4x1,3x8",
}
# Not in the paper: a model's weight is its score above chance, or the cube of that.
ABOVE = {"above_chance": True}
SHARP = {"above_chance": True, "power": 3.0}

# a fast client takes a virtual second per step, so virtual seconds are steps that a fast client could have made
FAST = 1.0
FLEETS = {
    "homogeneous": Homogeneous(seconds_per_step=FAST),
    "five fast, five slow": FastSlow(fast=FAST, slow_factor=4.0, first="fast"),
}


@cache
def _photographs(side: int) -> DataSet:
    data, few = cifar10(), SIDE // side
    assert isinstance(data.x, torch.Tensor)
    if few == 1:
        return data
    squares = data.x.to(torch.int16).unflatten(3, (side, few)).unflatten(2, (side, few))
    return replace(data, x=(squares.sum((3, 5)) // few**2).to(torch.uint8))


def images(rows: int | None, side: int, seed: int, balanced: bool = False) -> DataSet:
    """Return CIFAR-10 with so many training images, drawn anew for each seed, and all test images.

    If `side` is below 32, each pixel is the mean of a square of the published ones.  With `balanced` all classes have
    the same number of images.
    """
    data = _photographs(side)
    if rows is None:
        return data
    assert data.train is not None
    if not balanced:
        return replace(data, train=np.sort(generator(seed, "images").choice(data.train, rows, replace=False)))
    labels, count = data.y.numpy()[data.train], rows // len(data.classes or ())
    drawn = [
        generator(seed, "images", label).choice(data.train[labels == label], count, replace=False)
        for label in range(len(data.classes or ()))
    ]
    return replace(data, train=np.sort(np.concatenate(drawn)))


def partition(sizes: str, classes: str, seed: int, corrupted: bool = False) -> Partition:
    """Return the partition; if one client is corrupted, it is the second largest, and all its labels are random."""
    changes = (FlipRandom(clients=(1,)),) if corrupted else None
    return NonIid(
        clients=CLIENTS,
        classes_each=HEADS.get((sizes, classes), CLASSES[classes]),
        sizes=SIZES[sizes],
        validation=0.05,
        seed=seed,
        changes=changes,
    )


def synchronous(**training: Any) -> dict[str, Recipe]:
    """Return the recipes of the synchronous comparison."""
    return {
        "FedAvg": recipes.fedavg(**training),
        "Equal": recipes.fedavg(**training).with_(aggregation=EqualWeighted()),
        "DVW": recipes.sync_dvw(**training),
        "DVW, above chance": recipes.sync_dvw(**ABOVE, **training),
        "DVW, sharp": recipes.sync_dvw(**SHARP, **training),
    }


def asynchronous(**training: Any) -> dict[str, Recipe]:
    """Return the recipes that are compared with fast and slow clients."""
    frequency = {**training, "epochs": 1, "cycles": 8, "vc_loss": 1.0, "vc_tomb": 1}
    return {
        "SyncFedAvg": recipes.fedavg(**training),
        "SyncDVW": recipes.sync_dvw(**training),
        "FedAsync": recipes.fedasync(**training),
        "AsyncFedAvg": recipes.async_fedavg(**training),
        "AsyncEqual": recipes.async_fedavg(**training).with_(
            aggregation=EqualWeighted(), server_optimizer=CachedAverage()
        ),
        "AsyncDVW": recipes.async_dvw(**training),
        "AsyncDVW, adaptive": recipes.adaptive_dvw(**frequency),
        "AsyncDVW, sharp": recipes.async_dvw(**SHARP, **training),
    }


@dataclass(frozen=True)
class Scale:
    """Size of the benchmark.

    Attributes:
        rows: number of training images; None means all 50,000.
        side: width of an image in pixels, 32 as published.
        model: settings of `metis_cnn`.
        seeds: each redraws the partition and the first model.
        rounds: rounds of the synchronous comparison.
        every: rounds between evaluations; asynchronous runs are evaluated after as many updates as that is.
        settings: (sizes, classes) of the synchronous comparison.
        seconds: virtual seconds of the comparison on the heterogeneous fleet.
        uneven: (sizes, classes) of the comparison on the heterogeneous fleet.
        corrupted: whether to run the first of `settings` with one corrupted client as well.
        balanced: whether all classes have the same number of images, which some of the partitions need.
    """

    rows: int | None
    side: int
    model: Mapping[str, Any]
    seeds: Sequence[int]
    rounds: int
    every: int
    settings: Sequence[tuple[str, str]]
    seconds: float
    uneven: Sequence[tuple[str, str]]
    corrupted: bool = True
    balanced: bool = False
    training: Mapping[str, Any] = field(default_factory=lambda: dict(TRAINING))


SCALES = {
    "small": Scale(
        rows=5000,
        side=16,
        model={"channels": (16, 32), "hidden": (64, 32)},
        seeds=(0, 1, 2),
        rounds=24,
        every=4,
        settings=(("power law", "Non-IID(3)"), ("uniform", "Non-IID(3)")),
        seconds=5000.0,
        uneven=(("power law", "Non-IID(3)"),),
    ),
    "full": Scale(
        rows=None,
        side=SIDE,
        model={},
        seeds=(0, 1, 2, 3, 4),
        rounds=100,
        every=2,
        settings=tuple((sizes, classes) for sizes in SIZES for classes in CLASSES),
        seconds=200_000.0,
        uneven=(
            ("power law", "IID"),
            ("power law", "Non-IID(5)"),
            ("power law", "Non-IID(3)"),
            ("skewed", "Non-IID(3)"),
        ),
    ),
}
# every distribution of sizes with every number of classes, at the small scale
SCALES["cells"] = replace(
    SCALES["small"],
    settings=tuple((sizes, classes) for sizes in SIZES for classes in CLASSES),
    uneven=(),
    corrupted=False,
    balanced=True,
    seeds=(0,),
)
