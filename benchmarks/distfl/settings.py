"""Settings of the benchmark: its parts, training, networks, and the defences that DistFL is compared with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from piebald.models import build_model

Training = dict[str, Any]
PARTS = (
    "study", "category", "vgg", "resnet", "wide", "domains", "people", "attacks", "cifar", "replacement", "privacy",
    "mixed", "rows",
)  # fmt: skip
TRAINING: Training = {"lr": 0.1, "epochs": 3, "batch": 10}
DEEP: Training = {"lr": 0.05, "epochs": 3, "batch": 10}  # a hundred clients with the networks of Table 2
WIDE: Training = {"lr": 0.05, "epochs": 1, "batch": 20}

DEFENCES: dict[str, Any] = {
    "median": "median",
    "trimmed mean": {"kind": "trimmed_mean", "attackers": 0.4},
    "Krum": {"kind": "krum", "attackers": 0.4},
    "multi-Krum": {"kind": "multi_krum", "attackers": 0.4},
    "Bulyan": {"kind": "bulyan", "attackers": 0.2},
    "geometric median": "geometric_median",
    "norm clipping": "norm_clipping",
    "IRLS": "irls",
    "GRA": "gra",
    "Credit": "credit",
    "FLTrust": "fltrust",
    "FoolsGold": "foolsgold",
}


def network(part: str, shape: tuple[int, ...]) -> Callable[[int], Any]:
    """Return a function that makes the network of one part from a seed."""
    if part in ("vgg", "resnet"):  # a quarter of the width, a sixteenth of the work
        return lambda seed: build_model({"vgg": "vgg11", "resnet": "resnet18"}[part], shape, 10, seed=seed, width=16)
    if part == "wide":
        return lambda seed: build_model("vgg11", shape, 10, seed=seed)
    if part == "rows":  # no batch norm: it mixes rows
        return lambda seed: build_model("mlp", shape, 10, seed=seed, hidden=(64,))
    return small_network(shape)


def small_network(shape: tuple[int, ...]) -> Callable[[int], Any]:
    """Return a function that makes the small network with batch norm for inputs of this shape."""
    name = {3: "cnn_bn", 2: "cnn_1d_bn", 1: "mlp_bn"}[len(shape)]
    outputs = {3: 10, 2: 6, 1: 10}[len(shape)]
    settings = {"channels": (8, 8)} if shape[-1] == 8 else {}  # the digits are 8 pixels wide
    return lambda seed: build_model(name, shape, outputs, seed=seed, **settings)
