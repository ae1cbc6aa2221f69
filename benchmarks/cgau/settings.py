"""Settings of the benchmark: data, models, recipes, learning rates and rounds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import nn

from piebald import recipes
from piebald.models import build_model
from piebald.recipe import Recipe

PARTS = ("xor", "tuning", "images", "longer", "controls", "office", "signals", "newcomers", "cost", "pictures")

IMAGES = 20_000  # of CIFAR-10's training images that are embedded, besides the 1,000 exact test images
TO_CLIENTS = 8_000  # of these that clients get, drawn anew for each seed
SIDE = 128  # pixels of the extractor's input
CLIENTS = 10
SHUFFLES = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
SEEDS = (0, 1, 2, 3, 4)
REPETITIONS = range(12)  # seeds of the signals
TUNING_SEED = 100  # used for nothing else
LONGER = 72  # rounds of the longer runs
TUNED_RATES = (0.02, 0.05, 0.1, 0.2)
FRECHET_COMPONENTS = 32
VALIDATION, TEST = 0.1, 0.2  # shares of each client's rows


@dataclass(frozen=True)
class TaskSettings:
    """Settings that a set of runs has in common.

    Attributes:
        units: units of both layers (the paper: 128 for images, 64 for audio).
        rounds: largest number of rounds; the version with the least validation loss is kept.
        batch: rows per step.
        rates: learning rate by family of models; those for images were chosen with the part "tuning".
    """

    units: int
    rounds: int
    batch: int
    rates: dict[str, float]


@dataclass(frozen=True)
class Method:
    """A recipe and a model, one row of a table.

    Attributes:
        recipe: function that makes the recipe from training settings.
        model: name of the network.
        family: "gated" or "plain", which decides the learning rate.
        settings: settings of the network.
    """

    recipe: Callable[..., Recipe]
    model: str
    family: str
    settings: dict[str, object]

    def network(self, shape: Sequence[int], outputs: int, units: int, clients: int) -> Callable[[int], nn.Module]:
        """Return a function that makes the network from a seed."""
        own = {name: clients if value == "clients" else value for name, value in self.settings.items()}
        return lambda seed: build_model(self.model, shape, outputs, seed, units=(units, units), **own)


PLAIN, GATED = "plain_classifier", "gated_classifier"
CGAU, MATRIX, BLIND = "CGAU", "CGAU, averaged matrix", "gated, no conditioning"
RELU, MATCHED, HEAD, LOCAL = "plain", "plain, matched capacity", "plain, private head", "Local"


def _matrix(**training: object) -> Recipe:
    return recipes.cgau(shared_matrix=True, **training)


METHODS: dict[str, Method] = {
    CGAU: Method(recipes.cgau, GATED, "gated", {}),
    MATRIX: Method(_matrix, GATED, "gated", {"clients": "clients"}),
    BLIND: Method(recipes.fedavg, GATED, "gated", {"filter": False, "gate": False}),
    RELU: Method(recipes.fedavg, PLAIN, "plain", {}),
    MATCHED: Method(recipes.fedavg, PLAIN, "plain", {"matched": True}),
    HEAD: Method(recipes.hdafl, PLAIN, "plain", {}),
    LOCAL: Method(recipes.local, PLAIN, "plain", {}),
}
SWITCHES: dict[str, Method] = {
    "CGAU, filter only": Method(recipes.cgau, GATED, "gated", {"gate": False}),
    "CGAU, gate only": Method(recipes.cgau, GATED, "gated", {"filter": False}),
    "CGAU, shared bias, too": Method(recipes.cgau, GATED, "gated", {"bias": True}),
}

MOMENTUM = 0.9
IMAGE_TASK = TaskSettings(units=128, rounds=24, batch=50, rates={"gated": 0.1, "plain": 0.05})
OFFICE_TASK = TaskSettings(units=128, rounds=24, batch=20, rates={"gated": 0.05, "plain": 0.02})
SIGNAL_TASK = TaskSettings(units=64, rounds=36, batch=20, rates={"gated": 0.05, "plain": 0.02})
EVERY = 4  # rounds between evaluations, of which the best is kept
