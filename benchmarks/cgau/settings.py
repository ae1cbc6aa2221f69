"""Settings of the benchmark: data, models, recipes, learning rates and rounds."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "examples" / "papers"))  # whose files of settings take the same rows

from paper_rows import SIDE as SIDE
from torch import nn

from piebald import recipes
from piebald.methods.recipe import Recipe
from piebald.models import build_model

PARTS = (
    "xor",
    "tuning",
    "images",
    "more_rows",
    "longer",
    "controls",
    "office",
    "signals",
    "rare",
    "newcomers",
    "cost",
    "pictures",
)
PAPER_PARTS = ("paper_images", "paper_rare")  # the paper's own settings, for --scale full

TO_CLIENTS = 8_000  # of the embedded images that clients get, drawn anew for each seed
CLIENTS = 10
SHUFFLES = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
SEEDS = (0, 1, 2, 3, 4)
MORE_ROWS, MORE_SEEDS, MORE_SHUFFLES = 20_000, (0, 1, 2), (0.0, 1.0, 0.4)  # of the part "more_rows"
REPETITIONS = range(12)  # seeds of the signals
RARE_SEEDS = (0, 1, 2)
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
        local: length of a client's training in a round, by the name of the setting; one epoch by default.
        every: rounds between evaluations, of which the best is kept.
    """

    units: int
    rounds: int
    batch: int
    rates: dict[str, float]
    local: dict[str, int] = field(default_factory=dict)
    every: int = 4


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
TUNED, EQUAL = "plain, then one unsent epoch", "plain, equal weights"


def _matrix(**training: object) -> Recipe:
    return recipes.cgau(shared_matrix=True, **training)


def _equal(**training: object) -> Recipe:
    return recipes.fedavg(**training).with_(aggregation="equal_weighted")


METHODS: dict[str, Method] = {
    CGAU: Method(recipes.cgau, GATED, "gated", {}),
    MATRIX: Method(_matrix, GATED, "gated", {"clients": "clients"}),
    BLIND: Method(recipes.fedavg, GATED, "gated", {"filter": False, "gate": False}),
    RELU: Method(recipes.fedavg, PLAIN, "plain", {}),
    MATCHED: Method(recipes.fedavg, PLAIN, "plain", {"matched": True}),
    HEAD: Method(recipes.hdafl, PLAIN, "plain", {}),
    TUNED: Method(recipes.fine_tuned, PLAIN, "plain", {}),
    EQUAL: Method(_equal, PLAIN, "plain", {}),
    LOCAL: Method(recipes.local, PLAIN, "plain", {}),
}
SHORT = (CGAU, BLIND, RELU, HEAD, TUNED, EQUAL, LOCAL)  # of the parts "more_rows", "rare" and the paper's
SWITCHES: dict[str, Method] = {
    "CGAU, filter only": Method(recipes.cgau, GATED, "gated", {"gate": False}),
    "CGAU, gate only": Method(recipes.cgau, GATED, "gated", {"filter": False}),
    "CGAU, shared bias, too": Method(recipes.cgau, GATED, "gated", {"bias": True}),
}

MOMENTUM = 0.9
IMAGE_TASK = TaskSettings(units=128, rounds=24, batch=50, rates={"gated": 0.1, "plain": 0.05})
OFFICE_TASK = TaskSettings(units=128, rounds=24, batch=20, rates={"gated": 0.05, "plain": 0.02})
SIGNAL_TASK = TaskSettings(units=64, rounds=36, batch=20, rates={"gated": 0.05, "plain": 0.02})
RARE_TASK = TaskSettings(
    units=64, rounds=120, batch=32, rates={"gated": 0.05, "plain": 0.02}, local={"steps": 10}, every=10
)
# As printed in sections 4.1 and 4.2.  The momentum is not printed; the learning rate of 4.1 is not, either.
PRINTED_LENGTH = {"step_limit": 10}  # or one epoch, whichever ends first
PAPER_IMAGE_TASK = TaskSettings(
    units=128, rounds=500, batch=32, rates={"gated": 0.01, "plain": 0.01}, local=PRINTED_LENGTH, every=10
)
PAPER_RARE_TASK = TaskSettings(
    units=64, rounds=1000, batch=32, rates={"gated": 0.005, "plain": 0.005}, local=PRINTED_LENGTH, every=10
)
PAPER_IMAGE_SEEDS, PAPER_RARE_SEEDS = range(5), range(12)
