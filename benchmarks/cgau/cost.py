"""Time and bytes of a round: gated against plain units, and one fused product against two."""

from __future__ import annotations

import json
import statistics
import time
from pathlib import Path

import federations
import settings
import torch
from torch import Tensor, nn
from torch.nn import functional

import piebald
from piebald import recipes
from piebald.models import build_model
from piebald.runtimes import Simulator

REPEATS, ROUNDS = 3, 2


class TwoProducts(nn.Module):
    """The gated unit with separate products for filter and gate, and conditioning added to every row."""

    def __init__(self, inputs: int, units: int) -> None:
        super().__init__()
        self.filter, self.gate = nn.Linear(inputs, units), nn.Linear(inputs, units)
        self.conditioning = nn.Module()
        self.conditioning.filter = nn.Parameter(torch.zeros(units))
        self.conditioning.gate = nn.Parameter(torch.zeros(units))

    def forward(self, x: Tensor) -> Tensor:
        """Map [batch, inputs] to [batch, units]."""
        f = functional.linear(x, self.filter.weight) + self.filter.bias + self.conditioning.filter
        g = functional.linear(x, self.gate.weight) + self.gate.bias + self.conditioning.gate
        return f.tanh() * g.sigmoid()


def with_two_products(seed: int) -> nn.Module:
    """Return the gated classifier made of `TwoProducts`."""
    torch.manual_seed(seed)
    wide = settings.IMAGE_TASK.units
    layers = [TwoProducts(512, wide), nn.Dropout(0.5), TwoProducts(wide, wide), nn.Dropout(0.5), nn.Linear(wide, 10)]
    return nn.Sequential(*layers)


def measure(out: Path) -> None:
    """Measure alternating runs, so that other work on the machine affects all alike."""
    torch.set_num_threads(1)
    clients = federations.by_clusters(0.0, 0)
    wide = {"units": (settings.IMAGE_TASK.units,) * 2}

    def network(name: str, **more: object):
        return lambda seed: build_model(name, (512,), 10, seed, **wide, **more)

    tried = {
        "plain": (recipes.fedavg, network("plain_classifier")),
        "plain, matched capacity": (recipes.fedavg, network("plain_classifier", matched=True)),
        "gated, no conditioning": (recipes.fedavg, network("gated_classifier", filter=False, gate=False)),
        "CGAU": (recipes.cgau, network("gated_classifier")),
        "CGAU, two products": (recipes.cgau, with_two_products),
    }
    seconds: dict[str, list[float]] = {name: [] for name in tried}
    table: dict[str, dict[str, float]] = {}
    for engine, stack in (("sequential", 1), ("vmapped", 10)):
        seconds = {name: [] for name in tried}
        for _ in range(REPEATS + 1):
            for name, (recipe, model) in tried.items():
                began = time.process_time()
                run = piebald.run(
                    recipe(lr=0.05, batch=50, batches="exact"), clients, model, rounds=ROUNDS, evaluate_every=0,
                    runtime=Simulator(engine=engine, stack=stack, workers=0),
                )  # fmt: skip
                seconds[name].append((time.process_time() - began) / ROUNDS)
                table.setdefault(name, {})["numbers"] = run.meta["parameters"]
                table[name]["private"] = run.meta["parameters"] - run.meta["shared"]
                table[name]["bytes_up"] = run.final["bytes_up"] / ROUNDS / len(clients)
        for name, values in seconds.items():
            ratios = [value / plain for value, plain in zip(values[1:], seconds["plain"][1:], strict=True)]
            table[name][engine] = statistics.median(values[1:])
            table[name][f"{engine}_ratio"] = statistics.median(ratios)
            table[name][f"{engine}_range"] = [min(ratios), max(ratios)]
    out.mkdir(parents=True, exist_ok=True)
    (out / "cost.json").write_text(json.dumps(table))
