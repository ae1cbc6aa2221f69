"""Ablation of noise, z and E (Figs. 6 to 8): python benchmarks/distfl/ablation.py --out runs/distfl

One FedAvg run on digits with attackers; in its sixth round the same uploads are compared with every setting.
"""

from __future__ import annotations

import copy
import json
import sys
import time
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))  # for `shared`

import federations as fed
import numpy as np
import torch
from settings import TRAINING, small_network
from shared.options import reader
from sklearn.metrics import adjusted_rand_score

import piebald
from piebald import recipes
from piebald.methods.clustering import Distfl
from piebald.methods.clustering.distribution_knowledge import batch_norm_targets, synthesise
from piebald.methods.clustering.partitioning import by_silhouette, renumbered, silhouette
from piebald.methods.clustering.response_divergence import divergences, responses, unlikeness

PROBES = (2, 10, 50, 100, 200, 500)
CHANNELS = (0.2, 0.5, 0.8, 1.0)
ROUND = 6


class Compare(Distfl):
    """One cluster for all; in one round it tries every setting on the uploads."""

    def assign(self, cohort: Any, known: Any, context: Any) -> list[int]:
        if cohort.version + 1 == ROUND:
            FOUND.extend(self.try_settings(cohort, context))
        return [0] * len(cohort.clients)

    def try_settings(self, cohort: Any, context: Any) -> list[dict[str, Any]]:
        """Return a line for each z and E, and for plain noise."""
        spec, rows, lines = context.spec, range(len(cohort.clients)), []
        truth = renumbered(TRUTH)
        for probes in PROBES:
            noise = torch.randn((probes, *spec.shape), generator=torch.Generator().manual_seed(probes))
            for channels in (0.0, *CHANNELS):
                module = copy.deepcopy(spec.model).eval()
                spec.layout.load(module, sum(self._uploads(cohort, rows, spec)) / len(rows))
                began, x, mismatch = time.perf_counter(), noise, None
                if channels:
                    made = synthesise(module, batch_norm_targets(module, channels), noise, 100, 0.1, 0.2)
                    x, mismatch = made.x, made.mismatch
                answers = responses(module, spec.layout, self._uploads(cohort, rows, spec), x, afresh=True)
                distances = unlikeness(divergences(answers)).numpy()
                found = by_silhouette(distances, accept=-1.0)
                lines.append({
                    "probes": probes, "channels": channels, "mismatch": mismatch,
                    "true_silhouette": silhouette(distances, truth),
                    "ari": adjusted_rand_score(truth, found.labels), "seconds": time.perf_counter() - began,
                })  # fmt: skip
        return lines


FOUND: list[dict[str, Any]] = []
TRUTH = np.zeros(0)


def main() -> None:
    """Run all seeds and write one file."""
    global TRUTH
    options = reader(__doc__, seeds=[0, 1, 2], out=Path("runs/distfl")).parse_args()
    fed.torch_threads()
    options.out.mkdir(parents=True, exist_ok=True)
    lines = []
    for seed in options.seeds:
        clients, TRUTH = fed.attacked("digits", 30, 12, each=30, seed=seed)
        FOUND.clear()
        recipe = recipes.fedavg(**TRAINING).with_(clustering=Compare())
        model = small_network(tuple(clients.rows(0, "train").x.shape[1:]))
        runtime = piebald.Simulator(workers=0)
        piebald.run(recipe, clients, model, rounds=ROUND, seed=seed, evaluate_every=0, runtime=runtime)
        lines += [{"seed": seed, **line} for line in FOUND]
        print(seed, len(FOUND), flush=True)
    (options.out / "ablation.json").write_text(json.dumps(lines))


if __name__ == "__main__":
    main()
