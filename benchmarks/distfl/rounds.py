"""Clusters that each way of comparing finds in the same uploads: python benchmarks/distfl/rounds.py --out runs/distfl

Fifty clients, or 25, with forty images of CIFAR-10 each train as one cluster (FedAvg).  In every round their uploads
are compared on synthesised inputs and on plain noise, with batch norms that use the statistics of the probes or running
statistics, and clustered from all rounds so far.  The clusters are not used in training, so all ways of comparing see
the same models.
"""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))  # for `shared`

import federations as fed
import numpy as np
import torch
from settings import TRAINING, small_network
from shared.options import reader
from shared.stored import Lines
from sklearn.metrics import adjusted_rand_score

import piebald
from piebald import recipes
from piebald.methods.clustering import Distfl
from piebald.methods.clustering.distribution_knowledge import batch_norm_targets, synthesise
from piebald.methods.clustering.partitioning import ClusterSearch, by_gap, by_silhouette
from piebald.methods.clustering.response_divergence import divergences, responses, unlikeness

CASES = {
    "40 % attack": lambda seed: fed.attacked("cifar10", 50, 20, seed=seed),
    "80 % attack": lambda seed: fed.attacked("cifar10", 50, 40, seed=seed),
    "one cluster": lambda seed: fed.attacked("cifar10", 50, 0, seed=seed),
    "20 % attack": lambda seed: fed.attacked("cifar10", 50, 10, seed=seed),
    "25 clients, 5 types": lambda seed: fed.planted([5] * 5, seed=seed),  # as in Fig. 6
    "5 equal clusters": lambda seed: fed.planted([10] * 5, seed=seed),
    "5 unequal clusters": lambda seed: fed.planted([20, 12, 9, 6, 3], seed=seed),
}
WAYS = {
    "synthesis": (True, True),
    "synthesis, running statistics": (True, False),
    "plain noise": (False, True),
}


class Watch(Distfl):
    """One cluster for all; keeps the divergences of every round."""

    def assign(self, cohort: Any, known: Any, context: Any) -> list[int]:
        spec, rows = context.spec, range(len(cohort.clients))
        module = copy.deepcopy(spec.model).eval()
        noise = torch.randn((100, *spec.shape), generator=torch.Generator().manual_seed(1))
        spec.layout.load(module, sum(self._uploads(cohort, rows, spec)) / len(rows))
        start = context.state.get("probes", noise)
        made = synthesise(module, batch_norm_targets(module, 0.5), start, 50, 0.1, 0.2)
        context.state["probes"] = made.x
        for way, (knowledge, afresh) in WAYS.items():
            x = made.x if knowledge else noise
            answers = responses(copy.deepcopy(module), spec.layout, self._uploads(cohort, rows, spec), x, afresh)
            matrix, state = divergences(answers), STATES.setdefault(way, {})
            own: Any = SimpleNamespace(spec=spec, state=state)
            found = self._search(matrix.numpy(), cohort.clients, cohort.version, own)
            SEEN.setdefault(way, []).append((matrix, found))
            APART.setdefault(way, []).append(apart(cohort, found.labels))
        return [0] * len(rows)


SEEN: dict[str, list[tuple[torch.Tensor, ClusterSearch]]] = {}
STATES: dict[str, dict[str, Any]] = {}  # what each way of comparing remembers


APART: dict[str, list[tuple[float, float]]] = {}  # weight divergences inside of clusters, and of all clients


def apart(cohort: Any, labels: Any) -> tuple[float, float]:
    """Return the mean distance of clients' models to the mean of their cluster, and to that of all clients.

    Section 4.5 argues with them (eq. 8): models that are averaged should be near one another.
    """
    models = torch.stack([cohort.model_parameters(row) for row in range(len(cohort.clients))])
    means = torch.stack([models[labels == label].mean(0) for label in labels])
    return float((models - means).norm(dim=1).mean()), float((models - models.mean(0)).norm(dim=1).mean())


def scores(seen: list[tuple[torch.Tensor, ClusterSearch]], truth: Any) -> list[dict[str, Any]]:
    """Score, by round, the clusters that DistFL finds, the best cut of the mean so far, and the single-round gap."""
    unlike, lines = [unlikeness(one).numpy() for one, _ in seen], []
    for count, (matrix, found) in enumerate(seen, 1):
        best, gap = by_silhouette(np.mean(unlike[:count], axis=0), -1.0), by_gap(matrix.numpy())
        lines.append({
            "best": adjusted_rand_score(truth, best.labels), "score": best.score,
            "ari": adjusted_rand_score(truth, found.labels), "clusters": int(found.labels.max()) + 1,
            "gap": adjusted_rand_score(truth, gap.labels), "gap_clusters": int(gap.labels.max()) + 1,
        })  # fmt: skip
    return lines


def main() -> None:
    """Add a line for each case, seed and way of comparing."""
    options = reader(__doc__, seeds=[0], rounds=8, cases=tuple(CASES), out=Path("runs/distfl")).parse_args()
    fed.torch_threads()
    kept = Lines(options.out / "rounds.jsonl")
    for seed in options.seeds:
        for case in options.cases:
            clients, truth = CASES[case](seed)
            SEEN.clear()
            STATES.clear()
            APART.clear()
            recipe = recipes.fedavg(**TRAINING).with_(clustering=Watch())
            model = small_network(tuple(clients.rows(0, "train").x.shape[1:]))
            runtime = piebald.Simulator(workers=0)
            piebald.run(recipe, clients, model, rounds=options.rounds, seed=seed, evaluate_every=0, runtime=runtime)
            for way, seen in SEEN.items():
                line = {"case": case, "seed": seed, "way": way, "rounds": scores(seen, truth), "apart": APART[way]}
                kept.add(line)
                print(case, seed, way, *(f"{one['ari']:.2f}/{one['clusters']}" for one in line["rounds"]), flush=True)


if __name__ == "__main__":
    main()
