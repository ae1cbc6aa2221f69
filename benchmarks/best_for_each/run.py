"""Who loses by joining?  python benchmarks/best_for_each/run.py --out runs/best_for_each

Every federation is run with FedAvg and HDAFL and `keep = "best_for_each"`; then, on test rows, each client's models are
compared with what it would have trained alone.  Finished runs are kept, so the command can be stopped and repeated.
RESULTS.md is written at the end.
"""

from __future__ import annotations

import functools
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))  # for `shared`

import numpy as np
import pandas as pd
import results
import torch
from shared.options import reader

import piebald
from piebald import data, models, partition, recipes
from piebald.core.metrics import accuracy, cross_entropy
from piebald.data.sets.download import prepared
from piebald.methods.choice import best_for_each
from piebald.methods.choice.candidates import ClientCandidates
from piebald.runs import adaptation

WRITERS = 100  # of 539, by the seed
ROUNDS = {"digits": 20, "mnist_writers": 15, "har": 10, "heart": 30}
RATES = {"digits": 0.1, "mnist_writers": 0.1, "har": 0.05, "heart": 0.05}


writers, persons = functools.cache(data.mnist_writers), functools.cache(data.har)


def clients_of(name: str, seed: int) -> Any:
    """The clients of a federation, each with a fifth of its rows for validation and a fifth or more for testing."""
    if name == "digits":
        return partition.Dirichlet(clients=20, alpha=0.3, validation=0.2, pool=True, seed=seed).split(data.digits())
    if name == "mnist_writers":
        everybody = partition.ByOwner(owner="writer", validation=0.2, test=0.25, seed=seed).split(writers())
        return adaptation.hold_out(everybody, len(everybody) - WRITERS, seed)[0]
    if name == "har":
        return partition.ByOwner(owner="subject", validation=0.2, test=0.25, pool=True, seed=seed).split(persons())
    return heart(seed)


def heart(seed: int) -> Any:
    """Four hospitals; what is missing is 0 after scaling, with a column that says so."""
    frame = pd.read_csv(prepared("heart", "heart.csv.gz"))
    inputs = frame.drop(columns=["site", "num"])
    inputs.loc[inputs.chol == 0, "chol"] = np.nan
    scaled = ((inputs - inputs.mean()) / inputs.std()).fillna(0.0).to_numpy(np.float32)
    x = torch.from_numpy(np.concatenate([scaled, inputs.isna().to_numpy(np.float32)], axis=1))
    y = torch.from_numpy((frame.num > 0).to_numpy(np.int64))
    sites = {str(site): torch.from_numpy(np.flatnonzero(frame.site == site)) for site in frame.site.unique()}
    pairs = {site: (x[rows], y[rows]) for site, rows in sites.items()}
    return partition.clients_from(pairs, test=0.3, validation=0.2, seed=seed)


def recordings_of(name: str) -> Any:
    """The recording of each row of the data set, None where rows do not come in recordings."""
    return persons().groups if name == "har" else None


def model_of(name: str) -> Callable[[int], torch.nn.Module]:
    """The model: one hidden layer."""
    shape, classes, hidden = {
        "digits": ((1, 8, 8), 10, 32),
        "mnist_writers": ((1, 28, 28), 10, 32),
        "har": ((9, 128), 6, 32),
        "heart": ((26,), 2, 16),
    }[name]
    return lambda seed: models.build_model("mlp", shape, classes, seed, hidden=(hidden,))


def folder_of(out: Path, name: str, recipe: str, seed: int) -> Path:
    """The file with what was measured in one run."""
    return out / f"{name}-{recipe}-{seed}.json"


RECIPES = ("fedavg", "hdafl")


class Study(ClientCandidates):
    """The candidates of one client, which are also scored row by row on its validation and test rows."""

    seen: dict[int, dict[str, Any]] = {}  # noqa: RUF012 - what one run has shown
    rows: Any = None  # the clients
    groups: Any = None  # the recording of each row, where rows come in recordings
    net: torch.nn.Module
    layout: Any
    choosing = scoring = 0.0  # seconds

    def __init__(self, inputs: Any, *more: Any) -> None:
        began = time.perf_counter()
        super().__init__(inputs, *more)
        made = time.perf_counter()
        self._score(*inputs.clients)
        Study.choosing += made - began
        Study.scoring += time.perf_counter() - made

    def _score(self, client: int) -> None:
        scored = {split: self._scored(client, split) for split in ("validation", "test")}
        plain = {
            split: {
                name: [[float(f"{one:.9g}") for one in row] for row in values.tolist()]
                for name, values in found.items()
            }
            for split, found in scored.items()
        }
        groups = {} if Study.groups is None else {
            split: Study.groups[Study.rows.indices(client, split)].tolist() for split in ("validation", "test")
        }  # fmt: skip
        Study.seen[client] = {"models": list(self.models), "shared": self.shared, "recordings": groups, **plain}

    def _scored(self, client: int, split: Any) -> dict[str, torch.Tensor]:
        """Losses and hits [models, rows]."""
        rows = Study.rows.rows(client, split)
        found: dict[str, list[torch.Tensor]] = {"loss": [], "accuracy": []}
        for model in self.models.values():
            Study.layout.load(Study.net, model[0])
            with torch.no_grad():
                outputs = Study.net.eval()(rows.x)
            found["loss"].append(cross_entropy(outputs, rows.y))
            found["accuracy"].append(accuracy(outputs, rows.y))
        return {name: torch.stack(values) for name, values in found.items()}


def measure(name: str, recipe: str, seed: int) -> dict[str, Any]:
    """Run a recipe in a federation; what its clients can choose from, and what it costs."""
    clients = clients_of(name, seed)
    made, net = recipes.make(recipe, lr=RATES[name], batch=20), model_of(name)
    Study.seen, Study.rows, Study.net, Study.choosing, Study.scoring = {}, clients, net(seed), 0.0, 0.0
    Study.groups = recordings_of(name)
    Study.layout = piebald.core.parameters.Layout.of(Study.net, made.sharing.private(Study.net))
    here = piebald.Simulator(engine="sequential", stack=1, workers=0)
    options: dict[str, Any] = {"rounds": ROUNDS[name], "seed": seed, "runtime": here, "measure": "none"}
    began = time.perf_counter()
    real, best_for_each.ClientCandidates = best_for_each.ClientCandidates, Study  # type: ignore[misc]
    try:
        run = piebald.run(made, clients, net, evaluate_every=0, keep="best_for_each", **options)
    finally:
        best_for_each.ClientCandidates = real  # type: ignore[misc]
    whole = time.perf_counter() - began - Study.scoring
    for one in run.choices:  # the product chose what is studied here
        assert results.chosen(Study.seen[one["client"]], 1.0) == one["chosen"], (name, recipe, seed, one)
    steps = sum(row["steps"] for row in run.results if row["kind"] == "train")
    return {
        "federation": name,
        "recipe": recipe,
        "seed": seed,
        "seconds": {"run": whole - Study.choosing, "choice": Study.choosing},
        "steps": steps,
        "clients": [{"name": one["name"], **Study.seen[one["client"]]} for one in run.choices],
    }


def main() -> int:
    """Run what has not been run, and write the results."""
    parser = reader(__doc__, out=Path("runs/best_for_each"), seeds=[0, 1, 2], only=tuple(ROUNDS))
    parser.add_argument("--results", type=Path, help="the file to write, by default RESULTS.md in the output folder")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    for seed in options.seeds:
        for name in options.only:
            for recipe in RECIPES:
                file = folder_of(options.out, name, recipe, seed)
                if not file.exists():
                    made = json.dumps(measure(name, recipe, seed))
                    file.with_suffix(".part").write_text(made)
                    file.with_suffix(".part").replace(file)
                    print(file, flush=True)
    print(results.write(options.out, options.results or options.out / "RESULTS.md"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
