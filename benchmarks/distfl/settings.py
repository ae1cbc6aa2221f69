"""Settings of the benchmark: its parts, training, networks, and the defences that DistFL is compared with."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from piebald.models import build_model

Training = dict[str, Any]
PARTS = (
    "study", "control", "category", "vgg", "resnet", "wide", "domains", "people", "attacks", "cifar", "replacement",
    "scales", "privacy", "mixed", "environment_privacy", "rows",
)  # fmt: skip
ATTACKED = ("attacks", "cifar", "replacement", "scales")  # parts with attackers
NOISY = ("privacy", "mixed", "environment_privacy")  # parts with noise on the uploads
NOISY_STEP = 1e9  # the noise of the paper's epsilons alone is longer than an update may be otherwise
TUNED, LOCAL = "FedAvg + one unsent epoch", "Local"  # the two methods without a model for all
BY_ROWS = "DistFL, clients weighted by rows"
RULES: dict[str, dict[str, Any]] = {  # what else may say who is near (section 4.3 prints no threshold)
    "the authors' rule": {"find": "linked", "first": 5, "every": 0, "statistics": "running", "loss": "published"},
    "single-round gap": {"find": "gap"},
    "linked in each round": {"find": "linked"},
}
LG_NET = "LG-Net (fine-tuning)"  # what the paper runs under this name (section 5.1.4); LG-FedAvg is another method
TRAINING: Training = {"lr": 0.1, "epochs": 3, "batch": 10}
DEEP: Training = {"lr": 0.05, "epochs": 3, "batch": 10}  # a hundred clients with the networks of Table 2
WIDE: Training = {"lr": 0.05, "epochs": 1, "batch": 20}

SCALES = (2.0, 4.0, 8.0, 16.0, 30.0, 50.0)  # of a lone attacker's update
CLIP, DELTA = 5.0, 1e-5
EPSILONS = (0.1, 0.2, 0.3)  # of Figs. 3 and 4
NOISES = (0.0, 0.01, 0.03, 0.1)  # in clips: none, and what the small network still learns under


def noise_of(epsilon: float) -> float:
    """Standard deviation in clips by the classic calibration (Dwork and Roth 2014, theorem A.1), for epsilon < 1."""
    return math.sqrt(2 * math.log(1.25 / DELTA)) / epsilon


# the paper's own setting (section 5.1.5), for one GPU: 50 rounds, 5 local epochs, momentum 0.9, batch not stated
PAPER: dict[str, Training] = {
    "vgg": {"lr": 1e-4, "epochs": 5, "batch": 32, "momentum": 0.9},
    "resnet": {"lr": 1e-2, "epochs": 5, "batch": 32, "momentum": 0.9},
    "people": {"lr": 1e-2, "epochs": 5, "batch": 32, "momentum": 0.9},
}
# of Tables 2, 5 and 6 and of Fig. 4
FULL_NETWORKS = {
    "vgg": "vgg11", "resnet": "resnet18", "mixed": "vgg11", "cifar": "vgg11", "replacement": "resnet18",
}  # fmt: skip
PAPER_ROUNDS, PAPER_PROBES, PAPER_SEEDS = 50, 200, (0, 1, 2)

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


def network(part: str, shape: tuple[int, ...], full: bool = False) -> Callable[[int], Any]:
    """Return a function that makes the network of one part from a seed; `full` is the paper's network and width."""
    if full and part in FULL_NETWORKS:
        return lambda seed: build_model(FULL_NETWORKS[part], shape, 10, seed=seed)
    if part in ("vgg", "resnet"):  # a quarter of the width, a sixteenth of the work
        return lambda seed: build_model(FULL_NETWORKS[part], shape, 10, seed=seed, width=16)
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
