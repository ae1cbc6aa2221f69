"""On how many test rows is one of two methods right and the other wrong?  What `detectable_difference` assumes.

python benchmarks/advise/disagreement.py trains five methods on some federations, and prints the share for each pair.
"""

from __future__ import annotations

import itertools
import tempfile
from pathlib import Path

import numpy as np
import torch
from federations import BY_NAME
from grid import TRAINING

import piebald
from piebald import recipes
from piebald.runtimes import Simulator

NAMES = ("digits-dirichlet", "mnist-writers", "cifar10-dirichlet", "har-subjects", "heart", "contraception", "office")
METHODS = {"local": {}, "fedavg": {}, "fine_tuned": {}, "hdafl": {}, "ditto": {"lam": 1.0}}


def main() -> None:
    """Print a row for each federation."""
    torch.set_num_threads(1)
    everywhere: list[float] = []
    print("| federation | median | smallest | largest |\n|---|---|---|---|")
    for name in NAMES:
        federation = BY_NAME[name]
        clients = federation.clients()
        right = {}
        for method, settings in METHODS.items():
            with tempfile.TemporaryDirectory() as folder:
                run = piebald.run(
                    recipes.make(method, lr=0.1, **TRAINING, **settings), clients, federation.model(0), rounds=16,
                    evaluate_every=16, measure="none", out=Path(folder) / "run",
                    runtime=Simulator(engine="batched", stack=len(clients), workers=0),
                )  # fmt: skip
                right[method] = [
                    _right(run.model(client), clients.rows(client, "test")) for client in range(len(clients))
                ]
                run.close()
        shares = [
            float(np.mean([np.mean(one != two) for one, two in zip(right[a], right[b], strict=True)]))
            for a, b in itertools.combinations(METHODS, 2)
        ]
        everywhere += shares
        print(f"| {federation.words} | {np.median(shares):.2f} | {min(shares):.2f} | {max(shares):.2f} |", flush=True)
    print(f"| all | {np.median(everywhere):.2f} | {min(everywhere):.2f} | {max(everywhere):.2f} |")


def _right(model: torch.nn.Module, rows: object) -> np.ndarray:
    with torch.no_grad():
        return (model(rows.x).argmax(1) == rows.y).numpy()


if __name__ == "__main__":
    main()
