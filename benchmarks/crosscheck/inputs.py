"""What Piebald and the other programs are given: the same arrays and the same settings.

Only NumPy is needed here, so that every program can import it in an environment of its own.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

Arrays = dict[str, np.ndarray[Any, Any]]

EXPECTED = 3  # attackers that robust aggregators reckon with
BULYAN = 2
ADAPTIVE = {"lr": 0.1, "beta1": 0.9, "beta2": 0.99, "tau": 1e-3}
MOMENTUM = {"lr": 1.0, "beta": 0.9}
CLIENTS, ROWS, FEATURES, CLASSES = 6, 40, 12, 3
TRAINING = {"lr": 0.2, "epochs": 3, "rounds": 5}  # batches are all rows of a client, so their order does not matter
USUAL: dict[str, Any] = {"lr": TRAINING["lr"], "epochs": int(TRAINING["epochs"]), "batch": ROWS}  # of our recipes
DECAY = 0.05
HIDDEN = 8  # neurons of the network of two layers
MOON = {"mu": 1.5, "temperature": 0.5}
FEDLC = {"tau": 0.8}
FEDALA = {"weight_lr": 1.0, "first_passes": 11}  # PFLlib looks at its losses after eleven passes
FEDAMP = {"alpha": 0.3, "sigma": 250.0}
PRIVATE = {"lr": 0.5, "steps": 4, "clip": 0.3}
BUDGETS = ((1.1, 0.05, 40), (0.8, 0.01, 2000), (2.0, 0.2, 300))  # noise, share of the rows, steps
DELTA = 1e-5
FEDASYNC = {"alpha": 0.6, "a": 0.5, "mu": 0.1, "lr": 0.1, "rounds": 40}
FEDBUFF = {"buffer_size": 3, "a": 0.5, "server_lr": 0.7, "lr": 0.1, "rounds": 15}
DIRICHLET = {"clients": 20, "alphas": (0.1, 0.5), "rows": 4000, "classes": 10, "least": 5, "repeats": 60}
KERNEL_SIGMA = 1.5


def make() -> Arrays:
    """Return all inputs, drawn from one seed."""
    draw = np.random.default_rng(0)
    updates = draw.normal(size=(13, 400))
    updates[:EXPECTED] = 8 * updates[:EXPECTED] + 3  # the attackers
    y = draw.integers(0, CLASSES, (CLIENTS, ROWS))
    centres = draw.normal(size=(CLASSES, FEATURES))
    x = draw.normal(size=(CLIENTS, ROWS, FEATURES)) + centres[y] + 0.5 * draw.normal(size=(CLIENTS, 1, FEATURES))
    scores = draw.normal(size=(300, 4))
    mixing = draw.normal(size=(8, 8))
    found: Arrays = {
        "updates": updates, "examples": draw.integers(10, 500, len(updates)), "averages": draw.normal(size=(6, 50)),
        "x": x, "y": y, "weight": 0.1 * draw.normal(size=(CLASSES, FEATURES)), "bias": 0.1 * draw.normal(size=CLASSES),
        "one": draw.normal(size=(90, 8)) @ mixing, "other": 0.5 + draw.normal(size=(70, 8)),
        "scores": scores, "labels": (scores + draw.normal(size=scores.shape)).argmax(1),
        "cloud": np.round(draw.normal(size=(5, 11)), 6), "samples": draw.normal(size=7),
    }  # fmt: skip
    found |= {
        "body weight": 0.5 * draw.normal(size=(HIDDEN, FEATURES)), "body bias": 0.1 * draw.normal(size=HIDDEN),
        "head weight": 0.5 * draw.normal(size=(CLASSES, HIDDEN)), "head bias": 0.1 * draw.normal(size=CLASSES),
    }  # fmt: skip
    return {name: value.astype(np.float32) if value.dtype == np.float64 else value for name, value in found.items()}


def label_statistics(table: np.ndarray[Any, Any]) -> tuple[float, float, float]:
    """Mean entropy of clients' labels in nats, spread of their sizes over the mean, and classes that a client has.

    Args:
        table: rows of each client and class [clients, classes].
    """
    sizes = table.sum(1)
    share = table / sizes[:, None]
    entropy = -(share * np.log(np.where(share > 0, share, 1.0))).sum(1)
    return float(entropy.mean()), float(sizes.std() / sizes.mean()), float((table > 0).sum(1).mean())


def folder_of(arguments: list[str]) -> tuple[Arrays, Path]:
    """Return what a peer's script is given on its command line: the inputs' arrays, and the file for its own."""
    with np.load(arguments[1]) as given:
        return dict(given), Path(arguments[2])


def linear(given: Arrays, bias: bool = True) -> Any:
    """Return the linear model that others than the methods of personal models start from, in PyTorch."""
    return _layer(given, "", bias)


def two_layers(given: Arrays) -> tuple[Any, Any]:
    """Return both layers of the network of two layers to start from, in PyTorch."""
    return _layer(given, "body "), _layer(given, "head ")


def _layer(given: Arrays, name: str, bias: bool = True) -> Any:
    import torch

    layer = torch.nn.Linear(*given[f"{name}weight"].shape[::-1], bias=bias)
    with torch.no_grad():
        layer.weight.copy_(torch.from_numpy(given[f"{name}weight"]))
        if bias:
            layer.bias.copy_(torch.from_numpy(given[f"{name}bias"]))
    return layer


def flat(model: Any) -> np.ndarray[Any, Any]:
    """All parameters of a module in its order."""
    made: np.ndarray[Any, Any] = np.concatenate([one.detach().numpy().ravel() for one in model.parameters()])
    return made


def glm_targets(given: Arrays) -> Arrays:
    """Targets [clients, rows] of generalised linear models, by family."""
    odd = np.arange(given["y"].shape[1]) % 4 == 0  # without them, a combination of columns separates the classes
    return {
        "gaussian": given["y"] + given["x"].astype(np.float64).sum(2) / 7,
        "binomial": ((given["y"] == 0) ^ odd).astype(float),
        "poisson": given["y"].astype(float),
    }
