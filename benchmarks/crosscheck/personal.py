"""Methods that give each client a model of its own: what Piebald and the other programs are given, and ours.

Only NumPy is needed to import this.  The network has two layers, a body and a head; batches are all rows of a client.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from inputs import CLASSES, FEATURES, TRAINING, USUAL, Arrays, flat

HIDDEN = 8
FEDREP = {"head_epochs": 2}
FEDBABU = {"tune_epochs": 2}
PFEDME = {"lam": 4.0, "eta": 0.1, "inner_steps": 3}
PER_FEDAVG = {"alpha": 0.1}
FEDPHP = {"lam": 0.3, "mu": 0.9, "horizon": TRAINING["rounds"]}


def start() -> Arrays:
    """The parameters that all methods start from, by name in the order of the module."""
    draw = np.random.default_rng(1)
    sizes = {
        "body weight": (HIDDEN, FEATURES),
        "body bias": HIDDEN,
        "head weight": (CLASSES, HIDDEN),
        "head bias": CLASSES,
    }
    return {name: (0.4 * draw.normal(size=size)).astype(np.float32) for name, size in sizes.items()}


def network() -> Any:
    """The network to start from, in the two parts that PFLlib asks a model for."""
    import torch
    from torch import nn

    class Network(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base = nn.Sequential(nn.Linear(FEATURES, HIDDEN), nn.Tanh())
            self.head = nn.Linear(HIDDEN, CLASSES)
            with torch.no_grad():
                for parameter, value in zip(self.parameters(), start().values(), strict=True):
                    parameter.copy_(torch.from_numpy(value))

        def forward(self, x: Any) -> Any:
            return self.head(self.base(x))

    return Network()


def results(given: Arrays) -> Arrays:
    """What Piebald makes of them: the global models, and the model of the first client."""
    import ours

    from piebald import recipes

    made = {
        "FedRep": recipes.fedrep(**FEDREP, **USUAL),  # type: ignore[arg-type]
        "FedBABU": recipes.fedbabu(**FEDBABU, **USUAL),  # type: ignore[arg-type]
        "FedRoD": recipes.fedrod(**USUAL),
        "pFedMe": recipes.pfedme(**PFEDME, **USUAL),  # type: ignore[arg-type]
        "Per-FedAvg": recipes.per_fedavg(**PER_FEDAVG, **USUAL),
        "FedPHP": recipes.fedphp(**FEDPHP, **USUAL),  # type: ignore[arg-type]
    }
    found = {}
    for name, recipe in made.items():
        with ours.kept(recipe, ours.federation(given), network()) as run:
            if name not in ("FedRep", "FedBABU"):  # whose global models lack a head
                found[name] = flat(run.model())
            if name != "pFedMe":  # PFLlib overwrites its personal model with the local one
                found[f"{name}, client 0"] = flat(run.model(0))
    return found
