"""Everything that is chosen: data, models, recipes, learning rates and rounds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import nn

from piebald import recipes
from piebald.models import build_model
from piebald.recipe import Recipe

PARTS = ("xor", "tuning", "images", "longer", "controls", "office", "signals", "newcomers", "cost", "pictures")

IMAGES = 20_000  # of CIFAR-10's training part are embedded, with the 1,000 exact test images beside them
DEALT = 8_000  # of these are dealt to clients, other ones for each seed
SIDE = 128  # pixels that the extractor sees
CLIENTS = 10
SHUFFLES = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
SEEDS = (0, 1, 2, 3, 4)
REPETITIONS = range(12)  # of the signals
TUNING_SEED = 100  # used for nothing else
LONGER = 72  # rounds, to see what more training changes
TUNED_RATES = (0.02, 0.05, 0.1, 0.2)
FRECHET_COMPONENTS = 32
VALIDATION, TEST = 0.1, 0.2  # shares of each client's rows


@dataclass(frozen=True)
class Objective:
    """What one set of runs has in common.

    Attributes:
        units: of both layers (the paper: 128 for images, 64 for audio).
        rounds: at most; the best by validation loss is kept.
        batch: rows a step.
        rates: learning rate by family of models; for images chosen with the part "tuning".
    """

    units: int
    rounds: int
    batch: int
    rates: dict[str, float]


@dataclass(frozen=True)
class Method:
    """A line of a table: a recipe and a model.

    Attributes:
        recipe: makes the recipe from the settings of training.
        model: name in the registry.
        family: whose learning rate it has, "gated" or "plain".
        settings: of the model.
    """

    recipe: Callable[..., Recipe]
    model: str
    family: str
    settings: dict[str, object]

    def network(self, shape: Sequence[int], outputs: int, units: int, clients: int) -> Callable[[int], nn.Module]:
        """A model for a seed."""
        own = {name: clients if value == "clients" else value for name, value in self.settings.items()}
        return lambda seed: build_model(self.model, shape, outputs, seed, units=(units, units), **own)


PLAIN, GATED = "plain_classifier", "gated_classifier"
CGAU, MATRIX, BLIND = "CGAU", "CGAU, averaged matrix", "gated, no conditioning"
RELU, MATCHED, HEAD, LOCAL = "plain", "plain, matched capacity", "plain, private head", "ClientContext"


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
IMAGE_TASK = Objective(units=128, rounds=24, batch=50, rates={"gated": 0.1, "plain": 0.05})
OFFICE_TASK = Objective(units=128, rounds=24, batch=20, rates={"gated": 0.05, "plain": 0.02})
SIGNAL_TASK = Objective(units=64, rounds=36, batch=20, rates={"gated": 0.05, "plain": 0.02})
EVERY = 4  # rounds between measurements, among which the best is kept
