"""The methods of the leaderboard: each with the values of its own settings, from which the same number is drawn."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from piebald import recipes
from piebald.methods.recipe import Recipe

ALONE, TOGETHER, POOLED, NAIVE = "local", "fedavg", "centralised", "naive"
KNN_PER, PUBLIC = "knn_per", "fedmd"
SETTINGS = 4  # settings that every method tries
DRAW = 54  # of the settings
RATES = (0.02, 0.5)  # of local steps, drawn on the logarithmic scale
ROUNDS, PASSES = 16, 32
TRAINING = {"batch": 20, "epochs": 2}
TWICE = {"epochs": 1}  # of methods that pass over their rows once for each of two models
GATED = ("gated_classifier", {"units": [32], "dropout": 0.0})

Values = tuple[Any, ...]


@dataclass(frozen=True)
class Between:
    """Numbers between two ends, drawn on the logarithmic scale."""

    low: float
    high: float

    def at(self, place: float) -> float:
        """The number at a place from 0 to 1, with three digits."""
        return float(f"{self.low * (self.high / self.low) ** place:.3g}")


@dataclass(frozen=True)
class Method:
    """A method of the leaderboard.

    Attributes:
        recipe: the name of its recipe, "centralised", or "knn_per" for FedAvg with that choice at the end.
        title: what readers call it.
        family: what kind of answer to unlikeness it is.
        space: the values of its own settings: `Between`, or choices.
        fixed: settings that are not drawn.
        rounds: of a run, fewer where its clients pass over their rows after the last one.
        network: a network of its own in the small tier, with its settings.
        clock: whether it is meant for unequal devices, and compared only there, by the virtual clock.
        reason: why it is not run.
    """

    recipe: str
    title: str
    family: str
    space: Mapping[str, Between | Values] = field(default_factory=dict)
    fixed: Mapping[str, Any] = field(default_factory=dict)
    rounds: int = ROUNDS
    network: tuple[str, Mapping[str, Any]] | None = None
    clock: bool = False
    reason: str = ""

    @property
    def name(self) -> str:
        """What it is called in files and on the command line."""
        return self.recipe

    def settings(self) -> list[dict[str, Any]]:
        """The settings that are tried: one in each of as many strata of each range (a Latin hypercube).

        All methods have the same learning rates, so that none is lucky with them.  A setting's places depend on its
        name only, so that a method that is added changes nothing for the others.
        """
        drawn = {name: [_value(values, place) for place in _places(name)] for name, values in self._spaces().items()}
        return [{name: values[number] for name, values in drawn.items()} for number in range(SETTINGS)]

    def make(self, settings: Mapping[str, Any]) -> Recipe:
        """The recipe with one of the settings."""
        recipe = TOGETHER if self.recipe in (POOLED, KNN_PER) else self.recipe
        return recipes.make(recipe, **{**TRAINING, **self.fixed, **settings})

    def _spaces(self) -> dict[str, Between | Values]:
        return {"lr": Between(*RATES), **self.space}


def _places(name: str) -> list[float]:
    """Places from 0 to 1, one in each stratum, in an order of their own."""
    random = np.random.default_rng([DRAW, *name.encode()])
    return [float(place) for place in (random.permutation(SETTINGS) + random.random(SETTINGS)) / SETTINGS]


def _value(values: Between | Values, place: float) -> Any:
    return values.at(place) if isinstance(values, Between) else values[int(place * len(values))]


METHODS = (
    Method(POOLED, "Pooled", "all rows in one place"),
    Method(ALONE, "Local", "alone"),
    Method(TOGETHER, "FedAvg", "one model"),
    Method("fedavgm", "FedAvgM", "one model", {"beta": (0.3, 0.5, 0.7, 0.9)}),
    Method("fedadam", "FedAdam", "one model", {"server_lr": Between(0.003, 0.1)}),
    Method("fedyogi", "FedYogi", "one model", {"server_lr": Between(0.003, 0.1)}),
    Method("fedprox", "FedProx", "one model", {"mu": Between(0.01, 1.0)}),
    Method("scaffold", "SCAFFOLD", "one model", {"option": ("I", "II")}),
    Method("feddyn", "FedDyn", "one model", {"alpha": Between(0.003, 0.3)}),
    Method("fednova", "FedNova", "one model"),
    Method("sync_dvw", "DVW", "one model", {"power": (0.5, 1.0, 2.0, 4.0)}),
    Method("moon", "MOON", "one model", {"mu": Between(0.1, 5.0)}),
    Method("fedlc", "FedLC", "one model", {"tau": Between(0.1, 1.0)}),
    Method("feddecorr", "FedDecorr", "one model", {"beta": Between(0.01, 0.3)}),
    Method("fedsam", "FedSAM", "one model", {"rho": Between(0.01, 0.2)}),
    Method("hierfavg", "HierFAVG", "one model", {"regions": (2, 2, 3, 3)}),
    Method("heterofl", "HeteroFL", "one model", {"widths": ((1.0, 0.5), (1.0, 0.75))}),
    Method("qfedavg", "q-FedAvg", "one model, fair", {"q": Between(0.1, 2.0)}),
    Method("term", "TERM", "one model, fair", {"t": Between(0.1, 2.0)}),
    Method("afl", "AFL", "one model, fair", {"lambda_lr": Between(0.01, 0.3)}),
    Method("fine_tuned", "FedAvg, fine-tuned", "personal model", fixed={"tune_epochs": 2}, rounds=15),
    Method("ditto", "Ditto", "personal model", {"lam": Between(0.03, 2.0)}, {**TWICE, "personal_epochs": 1}),
    Method("apfl", "APFL", "personal model", {"alpha": (0.25, 0.5, 0.75, 0.9)}),
    Method("pfedme", "pFedMe", "personal model", {"lam": Between(1.0, 20.0)}),
    Method("per_fedavg", "Per-FedAvg", "personal model", {
        "alpha": Between(0.01, 0.2), "hessian": ("ignored", "differences")}),
    Method("fedala", "FedALA", "personal model", {"weight_lr": Between(0.1, 2.0)}),
    Method("fedamp", "FedAMP", "personal model", {"sigma": Between(1.0, 100.0)}),
    Method("fedphp", "FedPHP", "personal model", {"lam": Between(0.03, 0.5)}, {"horizon": ROUNDS}),
    Method(KNN_PER, "kNN-Per on FedAvg", "personal model"),
    Method("hdafl", "HDAFL", "private layers"),
    Method("fedrep", "FedRep", "private layers", fixed={**TWICE, "head_epochs": 1}),
    Method("fedbabu", "FedBABU", "private layers", fixed={"tune_epochs": 2}, rounds=15),
    Method("fedrod", "FedRoD", "private layers"),
    Method("silobn", "SiloBN", "private layers"),
    Method("lg_fedavg", "LG-FedAvg", "private layers"),
    Method("fedbn", "FedBN", "private layers"),
    Method("cgau", "CGAU", "private layers", network=GATED),
    Method("fedproto", "FedProto", "models of their own", {"lam": Between(0.1, 2.0)}),
    Method(PUBLIC, "FedMD", "models of their own", {"digest_steps": (5, 10, 20, 40)}),
    Method("ifca", "IFCA", "clusters", {"k": (2, 2, 3, 3)}),
    Method("cfl", "CFL", "clusters", {"eps1": Between(0.1, 1.0), "eps2": Between(0.1, 1.0)}),
    Method("distfl", "DistFL", "clusters", {"channels": (0.25, 0.5, 0.75, 1.0)}),
    Method("async_fedavg", "FedAvg without rounds", "without rounds", clock=True),
    Method("fedasync", "FedAsync", "without rounds", {"alpha": Between(0.1, 0.9)}, clock=True),
    Method("fedbuff", "FedBuff", "without rounds", {"buffer_size": (2, 3, 5, 8)}, clock=True),
    Method("async_dvw", "DVW without rounds", "without rounds", {"power": (0.5, 1.0, 2.0, 4.0)}, clock=True),
    Method("adaptive_dvw", "Adaptive DVW", "without rounds", {"power": (0.5, 1.0, 2.0, 4.0)}, clock=True),
    Method("dp_sgd", "DP-SGD", "private", reason="gives up accuracy for privacy, which is not scored here"),
    Method("flexlora", "FlexLoRA", "adapters", reason="trains adapters of a pretrained network, which no tier has"),
)  # fmt: skip
BY_NAME = {method.name: method for method in METHODS}
RUN = tuple(method for method in METHODS if not method.reason)
# what the tiers of real networks and of survival are tried with: the plain method of each family
FEW = (POOLED, ALONE, TOGETHER, "qfedavg", "fine_tuned", "apfl", "fedrep", "fedbn", "fedproto", "cfl")
