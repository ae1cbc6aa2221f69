"""Cost of extraction and clustering, relative to training: python benchmarks/distfl/cost.py --out runs/distfl

Each step is timed by itself, in alternation, and the shares are computed from the medians.  Then the time that the rule
takes in a run is compared with that of the passes over the probes and of the matrices that it consists of.
"""

from __future__ import annotations

import copy
import json
import statistics
import sys
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch.nn import functional

sys.path.append(str(Path(__file__).parents[1]))  # for `shared`

from shared.measured import in_turns
from shared.measured import seconds as timed
from shared.options import reader

import piebald
from piebald.data.partition import Lists, PooledClients
from piebald.methods.clustering.distribution_knowledge import batch_norm_targets, distance
from piebald.methods.clustering.partitioning import by_silhouette
from piebald.methods.clustering.response_divergence import divergences, unlikeness
from piebald.models import build_model

PROBES, BATCH = 200, 20
CLIENTS, ROUNDS = 30, 6  # of the run whose rule is timed


def steps(name: str, repeats: int) -> dict[str, float]:
    """Return the median seconds of a training step, a synthesis step, and one model's responses to the probes."""
    model = build_model(name, (3, 32, 32), 10)
    x, y, probes = torch.randn(BATCH, 3, 32, 32), torch.randint(0, 10, (BATCH,)), torch.randn(PROBES, 3, 32, 32)
    frozen = copy.deepcopy(model).eval()
    targets = batch_norm_targets(frozen, 0.5)

    def train() -> None:
        functional.cross_entropy(model(x), y).backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.01 * parameter.grad
                parameter.grad = None

    def synthesise() -> None:
        moved = probes.clone().requires_grad_()
        torch.autograd.grad(distance(moved, frozen, targets)[0], [moved])

    def answer() -> None:
        with torch.no_grad():
            frozen(probes)

    parts = {"train": train, "synthesise": synthesise, "answer": answer}
    found = in_turns({part: partial(timed, work) for part, work in parts.items()}, repeats)
    return {part: statistics.median(times) for part, times in found.items()}


def matrices(clients: int) -> float:
    """Return the seconds that divergences, unlikeness and clusters of so many clients take."""
    answers = torch.randn(clients, PROBES, 10).softmax(2)
    return timed(lambda: by_silhouette(unlikeness(divergences(answers)).numpy()))


def rule(name: str, step: dict[str, float]) -> dict[str, float]:
    """Return the rule's seconds in a run's last round, those of its own steps, and the median of their ratios.

    Args:
        name: the network.
        step: the median seconds of each step, as timed by itself.
    """
    rows = np.arange(CLIENTS * BATCH)
    rng = torch.Generator().manual_seed(0)
    x, y = torch.randn(len(rows), 3, 32, 32, generator=rng), torch.randint(0, 10, (len(rows),), generator=rng)
    train = Lists(rows, np.arange(CLIENTS + 1) * BATCH)
    run = piebald.run(
        piebald.methods.recipes.distfl(probes=PROBES, lr=0.01, batch=BATCH, batches="exact"),
        PooledClients(x, y, {"train": train}, classes=[str(label) for label in range(10)]),
        build_model(name, (3, 32, 32), 10),
        rounds=ROUNDS,
        runtime=piebald.Simulator(workers=0),
        evaluate_every=0,
    )
    found = [row["value"] for row in run.notes if row["name"] == "clustering"][1:]  # the first one warms up
    always = (CLIENTS + 1) * step["answer"] + matrices(CLIENTS)  # the synthesis ends with a forward pass of its own
    counted = [one["steps"] * step["synthesise"] + always for one in found]
    times = statistics.median(one["seconds"] / steps for one, steps in zip(found, counted, strict=True))
    last = found[-1]
    return {"steps": last["steps"], "seconds": last["seconds"], "counted": counted[-1], "times": times}


def main() -> None:
    """Measure, and write one file."""
    options = reader(__doc__, out=Path("runs/distfl"), repeats=5).parse_args()
    torch.set_num_threads(1)
    options.out.mkdir(parents=True, exist_ok=True)
    found = {"steps": {name: steps(name, options.repeats) for name in ("cnn_bn", "resnet18")}}
    found |= {"matrices": {str(clients): matrices(clients) for clients in (100, 1000)}}
    found |= {"rule": {name: rule(name, step) for name, step in found["steps"].items()}}
    (options.out / "cost.json").write_text(json.dumps(found))
    print(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
