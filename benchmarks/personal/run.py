"""Personal models side by side: python benchmarks/personal/run.py --out runs/personal

Two small federations, whose clients differ by handwriting (MNIST by writer) or by classes (digits, Dirichlet 0.1 by
class).  Each method has the same two learning rates and its other settings as in `METHODS`; the rate with the best mean
on validation rows counts, and test rows are scored with it.  Finished runs are kept, so the command can be stopped and
repeated.  RESULTS.md is written at the end.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.append(str(Path(__file__).parents[1]))  # for `shared`

from shared.options import reader

import piebald
from piebald import data, models, partition, recipes

WRITERS, FEWEST = 20, 100  # clients, and rows that each has at least
ROUNDS, SEEDS, RATES = 10, (0, 1), (0.05, 0.3)
METHODS: dict[str, dict[str, Any]] = {
    "local": {}, "fedavg": {}, "fine_tuned": {}, "hdafl": {}, "fedrep": {}, "fedbabu": {}, "fedrod": {},
    "ditto": {"lam": 0.5}, "apfl": {}, "pfedme": {"lam": 2.0, "eta": 0.3}, "per_fedavg": {"alpha": 0.1},
    "per_fedavg, Hessian-free": {"alpha": 0.1, "hessian": "differences"},
}  # fmt: skip


def writers(seed: int) -> Any:
    """Persons who wrote digits, with about 130 each."""
    source = data.mnist_writers()
    owned = partition.ByOwner(owner="writer", test=0.0).split(source)
    large = [client for client in range(len(owned)) if (owned.size(client, "train") or 0) >= FEWEST][:WRITERS]
    pairs = [(rows.x, rows.y) for rows in (owned.rows(client, "train") for client in large)]
    return partition.clients_from(pairs, test=0.3, validation=0.2, classes=source.classes, seed=seed)


def classes(seed: int) -> Any:
    """Clients with few classes each."""
    made = partition.Dirichlet(clients=WRITERS, alpha=0.1, by="class", test=0.3, validation=0.2, seed=seed)
    return made.split(data.digits())


FEDERATIONS: dict[str, tuple[Callable[[int], Any], tuple[int, int, int]]] = {
    "MNIST by writer": (writers, (1, 28, 28)),
    "digits, few classes each": (classes, (1, 8, 8)),
}


def scores(run: Any, clients: Any, split: Any) -> list[float]:
    """The accuracy of the model that each client uses, on its own rows."""
    found = []
    for client in range(len(clients)):
        rows = clients.rows(client, split)
        with torch.no_grad():
            right = (run.model(client)(rows.x).argmax(1) == rows.y).float().mean()
        found.append(float(right) if len(rows) else float("nan"))
    return found


def line(federation: str, label: str, out: Path) -> tuple[float, float, float]:
    """The mean accuracy on test rows, that of the worst tenth of clients, and the rate."""
    make, shape = FEDERATIONS[federation]
    tried: dict[float, tuple[float, list[float]]] = {}
    for rate in RATES:
        validation, test = [], []
        for seed in SEEDS:
            clients = make(seed)
            recipe = recipes.make(label.partition(",")[0], lr=rate, batch=20, epochs=2, **METHODS[label])
            run = piebald.run(
                recipe, clients, lambda seed: models.build_model("mlp", shape, 10, seed, hidden=(32,)),
                rounds=ROUNDS, seed=seed, evaluate_every=0, out=out / f"{federation}-{label}-{rate}-{seed}",
                runtime=piebald.Simulator(engine="batched", workers=0),
            )  # fmt: skip
            validation += scores(run, clients, "validation")
            test += scores(run, clients, "test")
        tried[rate] = float(np.nanmean(validation)), test
    best = max(tried, key=lambda rate: tried[rate][0])
    ordered = np.sort([one for one in tried[best][1] if one == one])
    return float(ordered.mean()), float(ordered[: max(1, len(ordered) // 10)].mean()), best


def main() -> None:
    """Run what is missing, and write the table."""
    out = reader(__doc__, out=Path("runs/personal")).parse_args().out
    rows = []
    for label in METHODS:
        made = [line(federation, label, out) for federation in FEDERATIONS]
        cells = " | ".join(f"{100 * mean:.1f} | {100 * worst:.1f} | {rate:g}" for mean, worst, rate in made)
        rows.append(f"| {label} | {cells} |")
        print(rows[-1], flush=True)
    titles = " | ".join(f"{name}: mean | worst tenth | rate" for name in FEDERATIONS)
    text = "\n".join(rows)
    (Path(__file__).parent / "RESULTS.md").write_text(f"""# Personal models side by side

`python benchmarks/personal/run.py --out runs/personal`: accuracy in per cent on clients' own test rows, of {WRITERS}
clients and {len(SEEDS)} seeds, after {ROUNDS} rounds of all clients.  Each method was tried with {len(RATES)} learning
rates, of which validation rows chose one; its other settings are in run.py.  With few clients and seeds, differences of
two points mean little.

| method | {titles} |
|---|{"---|" * (3 * len(FEDERATIONS))}
{text}
""")


if __name__ == "__main__":
    main()
