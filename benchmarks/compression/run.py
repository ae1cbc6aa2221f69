"""Bytes and accuracy of packed updates: python benchmarks/compression/run.py

Every transform that packs updates, in FedAvg on the digits of ten clients with unlike labels, over a few seeds; then,
with --federation, FedAvg and top-k in a real federation of three sites on this machine.  Writes RESULTS.md.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

sys.path.append(str(Path(__file__).parents[1]))  # for `shared`

from shared.options import reader

import piebald
from piebald import data, models, partition, recipes
from piebald.contracts import Update
from piebald.experiments.file import ExperimentSettings
from piebald.federation.link.wire_format import pack_update

RESULTS = Path(__file__).with_name("RESULTS.md")
HERE = piebald.Simulator(engine="batched", stack=10, workers=0)
ROWS: dict[str, Mapping[str, Any] | None] = {
    "nothing (FedAvg)": None,
    "`zstandard`": {"kind": "zstandard"},
    "`qsgd`, 8 bits": {"kind": "qsgd", "bits": 8},
    "`qsgd`, 4 bits": {"kind": "qsgd", "bits": 4},
    "`qsgd`, 2 bits": {"kind": "qsgd", "bits": 2},
    "`sign`": {"kind": "sign"},
    "`sign`, no memory": {"kind": "sign", "error_feedback": False},
    "`low_rank`, rank 4": {"kind": "low_rank", "rank": 4},
    "`low_rank`, rank 1": {"kind": "low_rank", "rank": 1},
    "`top_k`, 10%": {"kind": "top_k", "share": 0.1},
    "`top_k`, 1%": {"kind": "top_k", "share": 0.01},
    "`top_k`, 1%, no memory": {"kind": "top_k", "share": 0.01, "error_feedback": False},
    "`random_k`, 10%": {"kind": "random_k", "share": 0.1},
    "`random_k`, 1%": {"kind": "random_k", "share": 0.01},
    "`random_k`, 1%, no memory": {"kind": "random_k", "share": 0.01, "error_feedback": False},
}


def simulated(transform: Mapping[str, Any] | None, seed: int, rounds: int) -> dict[str, Any]:
    """The final figures of one run."""
    clients = partition.Dirichlet(clients=10, alpha=0.5, seed=seed).split(data.digits())
    model = models.build_model("mlp", (1, 8, 8), 10, seed=seed)
    recipe = recipes.fedavg(lr=0.1, batch=10).with_(transforms=[] if transform is None else [transform])
    run = piebald.run(recipe, clients, model, rounds=rounds, seed=seed, evaluate_every=rounds, runtime=HERE)
    final = run.final
    return {
        "bytes": final["bytes_up"] / len(run.results),
        "mean": final["mean"],
        "worst": final["worst_decile"],
        "size": run.work.layout.shared,
    }


def federated(transform: Mapping[str, Any] | None, rounds: int) -> dict[str, Any]:
    """The final figures of one run in a real federation on this machine, with its bytes as the server received them."""
    table: dict[str, Any] = {
        "rounds": rounds,
        "seed": 1,
        "data": {"name": "digits"},
        "model": {"name": "mlp"},
        "partition": {"kind": "dirichlet", "clients": 3, "alpha": 0.5},
        "recipe": {"name": "fedavg", "lr": 0.1, "batch": 10, "transforms": [] if transform is None else [transform]},
        "evaluate": {"every": rounds},
        "runtime": {"kind": "federation"},
    }
    made = ExperimentSettings.of_table(table, "the benchmark's settings")
    plan = made.plan()
    run = piebald.run(
        next(iter(plan.recipes.values())), plan.clients, plan.model, rounds=rounds, seed=1, runtime=plan.runtime,
        evaluate_every=rounds, settings=made.table(),
    )  # fmt: skip
    final = run.final
    return {"bytes": final["bytes_up"] / len(run.results), "mean": final["mean"], "worst": final["worst_decile"]}


def frame() -> int:
    """Bytes of a result besides its numbers: its head, and the names and shapes of its tensors."""
    update = Update({"model": torch.zeros(1000, dtype=torch.uint8)}, 100, 10, {"loss": 0.5123456789}, nbytes=1000)
    return len(pack_update(update, None)) - 1000


def line(name: str, found: Sequence[Mapping[str, Any]], whole: float) -> str:
    """One row of the table: means over seeds, and the range of the mean accuracy."""
    size, mean, worst = (statistics.mean(one[key] for one in found) for key in ("bytes", "mean", "worst"))
    low, high = min(one["mean"] for one in found), max(one["mean"] for one in found)
    span = f" ({low:.3f} to {high:.3f})" if len(found) > 1 else ""
    return f"| {name} | {size:,.0f} | {size / whole:.1%} | {mean:.3f}{span} | {worst:.3f} |"


def main() -> None:
    options = reader(__doc__, rounds=60, seeds=3, federation=False).parse_args()
    head = ["| sent | bytes of an update | of FedAvg's | accuracy | worst tenth |", "|---|---|---|---|---|"]
    lines, whole = list(head), 0.0
    for name, transform in ROWS.items():
        found = [simulated(transform, seed, options.rounds) for seed in range(options.seeds)]
        whole = whole or found[0]["bytes"]
        lines.append(line(name, found, whole))
        print(lines[-1], flush=True)
    size = round(whole / 4)
    text = [
        "# Bytes and accuracy of packed updates",
        "",
        f"`python benchmarks/compression/run.py{' --federation' if options.federation else ''}` makes this page.",
        "",
        f"FedAvg on scikit-learn's digits, 10 clients, Dirichlet 0.5 over labels, a network of {size:,} numbers, "
        f"{options.rounds} rounds of one epoch, lr 0.1, {options.seeds} seeds (in brackets their range).  A result has "
        f"{frame()} bytes around its numbers, which are not counted.",
        "",
        *lines,
    ]
    if options.federation:
        rows = {name: federated(ROWS[name], options.rounds) for name in ("nothing (FedAvg)", "`top_k`, 1%")}
        whole = rows["nothing (FedAvg)"]["bytes"]
        text += ["", "A real federation of three sites over mTLS, one seed:", "", *head]
        text += [line(name, [found], whole) for name, found in rows.items()]
    RESULTS.write_text("\n".join(text) + "\n", encoding="utf-8")
    print("\n".join(text))


if __name__ == "__main__":
    main()
