"""What a last batch of a few rows does: python benchmarks/batches/run.py

Six recipes in three small federations, with `batches = "exact"` and `batches = "equal"`, which take as many steps: the
persons of HAR and the writers of MNIST of the adviser's benchmark, and ten clients with 42 digits each, whose last
batch has two.  Scores are means over clients of the accuracy on test rows.  What was measured is kept in results.json,
so the command can be stopped and repeated.  RESULTS.md is written at the end.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

sys.path.append(str(Path(__file__).parents[1]))  # for `shared`
sys.path.append(str(Path(__file__).parents[1] / "advise"))  # for its federations

from federations import BY_NAME
from shared import markdown
from shared.options import reader

import piebald
from piebald import data, models, partition, recipes

RECIPES: dict[str, dict[str, Any]] = {
    "local": {"lr": 0.1}, "fedavg": {"lr": 0.1}, "fine_tuned": {"lr": 0.1, "tune_epochs": 4}, "ditto": {"lr": 0.1},
    "fedrep": {"lr": 0.1}, "hdafl": {"lr": 0.5},
}  # fmt: skip
HERE = Path(__file__).parent
ROUNDS, BATCH, SEEDS = 16, 20, [0, 1]
DIGITS, TEST = 42, 300  # rows of each client
FEDERATIONS = {"har-subjects": "HAR subjects", "mnist-writers": "MNIST writers", "digits": "digits, 42 rows each"}


def digits() -> Any:
    """Ten clients with five classes each."""
    rows, clients = data.digits(), {}
    for client in range(10):
        own = np.flatnonzero(np.isin(rows.y.numpy(), [(client + offset) % 10 for offset in range(5)]))
        index = np.random.default_rng(client).permutation(own)
        train, test = index[:DIGITS], index[DIGITS : DIGITS + TEST]
        x = rows.x.float().flatten(1)
        clients[f"c{client}"] = {"train": (x[train], rows.y[train]), "test": (x[test], rows.y[test])}
    return partition.clients_from(clients)


def federation(name: str) -> tuple[Any, Any]:
    """The clients of a federation, and its network by seed."""
    if name != "digits":
        return BY_NAME[name].clients(), BY_NAME[name].model
    return digits(), lambda seed: models.build_model("mlp", (64,), 10, seed=seed, hidden=(32,))


def accuracy(name: str, recipe: str, batches: str, seed: int) -> float:
    """The mean over clients of the accuracy on test rows, in percent."""
    clients, network = federation(name)
    settings = {"batch": BATCH, "batches": batches, "epochs": 2, **RECIPES[recipe]}
    run = piebald.run(
        recipes.make(recipe, **settings), clients, network(seed), rounds=ROUNDS, seed=seed, evaluate_every=ROUNDS,
        evaluate_split="test", measure="none",
        runtime=piebald.Simulator(engine="batched", stack=len(clients), workers=0),
    )  # fmt: skip
    return 100 * statistics.fmean(value for value in dict(run.per_client).values() if value is not None)


def page(measured: Iterable[dict[str, Any]]) -> str:
    """The results as a page."""
    scores: dict[tuple[str, str, str], list[float]] = {}
    for row in measured:
        scores.setdefault((row["federation"], row["recipe"], row["batches"]), []).append(row["accuracy"])
    lines = []
    for recipe in RECIPES:
        line = [f"`{recipe}`, lr {RECIPES[recipe]['lr']:g}"]
        for name in FEDERATIONS:
            exact, equal = (statistics.fmean(scores[name, recipe, kind]) for kind in ("exact", "equal"))
            line += [f"{exact:.1f}", f"{equal:.1f}"]
        lines.append(line)
    heads = ["recipe", *(f"{words}: {kind}" for words in FEDERATIONS.values() for kind in ("exact", "equal"))]
    rests = {name: [(federation(name)[0].size(c, "train") - 1) % BATCH + 1 for c in range(len(federation(name)[0]))]
             for name in FEDERATIONS}  # fmt: skip
    text = ", ".join(f"{words} {min(rests[name])} to {max(rests[name])}" for name, words in FEDERATIONS.items())
    return (
        "# Batches of nearly equal size, and a last one of what is left\n\n"
        f"`python benchmarks/batches/run.py`: accuracy on test rows in percent, mean over clients and {len(SEEDS)} "
        f"seeds, after {ROUNDS} rounds of two epochs in batches of {BATCH}.\nExact batches leave these rows to the "
        f"last one: {text}.\n\n{markdown.table(heads, lines)}\n"
    )


def main() -> int:
    """Measure what has not been measured, and write the results."""
    options = reader(__doc__, seeds=SEEDS).parse_args()
    file = HERE / "results.json"
    measured = json.loads(file.read_text("utf-8")) if file.exists() else []
    known = {(row["federation"], row["recipe"], row["batches"], row["seed"]) for row in measured}
    for name in FEDERATIONS:
        for recipe in RECIPES:
            for kind in ("exact", "equal"):
                for seed in options.seeds:
                    if (name, recipe, kind, seed) in known:
                        continue
                    score = accuracy(name, recipe, kind, seed)
                    measured.append(
                        {"federation": name, "recipe": recipe, "batches": kind, "seed": seed, "accuracy": score}
                    )
                    file.write_text(json.dumps(measured, indent=1) + "\n", "utf-8")
                    print(measured[-1], flush=True)
    (HERE / "RESULTS.md").write_text(page(measured), "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
