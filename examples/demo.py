"""Compare five methods on clients that are not alike, on real data: scikit-learn's digits.  `make demo` runs this."""

from __future__ import annotations

import argparse
from pathlib import Path

from torch import nn

import piebald
from piebald import data, models, partition, recipes
from piebald.report.comparison import Comparison

ROUNDS = 20
SEEDS = (0, 1, 2)  # each seed has its own initial model and its own order of rows
TRAINING = {"lr": 0.1, "batch": 10, "epochs": 1}

# Which client holds which rows, and how many clients take part in a round.
FEDERATIONS = {
    "disjoint": (
        "5 clients, each with two digits that no other client has; all take part",
        partition.Disjoint(clients=5, classes_each=2),
        5,
    ),
    "dirichlet": (
        "20 clients with different mixtures of digits, Dirichlet(0.3); 10 a round",
        partition.Dirichlet(clients=20, alpha=0.3),
        10,
    ),
}


def methods(cohort: int) -> dict[str, piebald.Recipe]:
    return {
        "Local": recipes.local(cohort=cohort, **TRAINING),
        "FedAvg": recipes.fedavg(cohort=cohort, **TRAINING),
        "FedAvg, fine-tuned": recipes.fine_tuned(cohort=cohort, **TRAINING),
        "SCAFFOLD": recipes.scaffold(cohort=cohort, **TRAINING),
        "HDAFL": recipes.hdafl(cohort=cohort, **TRAINING),
    }


def first_model(seed: int) -> nn.Module:
    return models.build_model("mlp", input_shape=(1, 8, 8), outputs=10, seed=seed)


def show(title: str, comparison: Comparison) -> None:
    table = comparison.summary().only("label", "mean", "low", "high", "worst_decile", "mb_up", "mb_down")
    print(f"\n{title}\n\n{table.text(width=80)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("demo"), help="folder for the runs and the reports")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="number of rounds; fewer are faster")
    chosen = parser.parse_args()
    digits = data.digits()
    pages = []
    for name, (title, split, cohort) in FEDERATIONS.items():
        runs = chosen.out / name / "runs"
        if runs.exists():
            print(f"Finished runs in {runs} are shown again; delete {chosen.out} to train again.")
        comparison = piebald.compare(
            methods(cohort),
            split.split(digits),
            first_model,
            rounds=chosen.rounds,
            seeds=SEEDS,
            out=runs,
            progress=True,
        )
        show(title, comparison)
        pages.append(piebald.write_report([runs], chosen.out / name)[0])
    print("Each client is tested on its own held-out digits.  Open in a browser:")
    for page in pages:
        print(f"  {page}")


if __name__ == "__main__":
    main()
