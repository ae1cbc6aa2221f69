"""Boosted trees together, alone and from pooled rows, on tables of real hospitals and districts.

    PIEBALD_DATA=FOLDER python benchmarks/trees/run.py --out build/trees.json

The number of rounds of each is chosen by validation rows (patience 5).  A table that is done is not run again.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import sys
from pathlib import Path
from typing import Any

import pandas

sys.path.append(str(Path(__file__).parents[1]))  # for `shared`

from shared.options import reader

import piebald

SETTINGS: dict[str, Any] = {"rounds": 60, "max_depth": 3, "patience": 5, "validation": 0.2, "test": 0.3}


def tables(data: Path) -> dict[str, tuple[pandas.DataFrame, str, str]]:
    """Rows, the column of the client and that of the target."""
    heart = pandas.read_csv(data / "heart" / "heart.csv.gz")
    heart["sick"] = (heart.pop("num") > 0).astype(int)
    women = pandas.read_csv(data / "sites" / "Contraception.csv.gz").drop(columns="woman")
    visits = pandas.read_csv(data / "sites" / "respiratory.csv.gz")
    patients = visits[visits.visit == 4].drop(columns=["id", "visit"])  # one row a person
    return {
        "heart, 4 hospitals": (heart, "site", "sick"),
        "contraception, 60 districts": (women, "district", "use"),
        "respiratory at visit 4, 2 centres": (patients, "center", "outcome"),
    }


def main() -> None:
    options = reader(__doc__, out=Path("build/trees.json"), seeds=5).parse_args()
    options.out.parent.mkdir(parents=True, exist_ok=True)
    done = json.loads(options.out.read_text()) if options.out.exists() else {}
    for name, (table, client, target) in tables(Path(os.environ["PIEBALD_DATA"])).items():
        for form in ("bagging", "cyclic", "histogram"):
            for seed in range(options.seeds):
                key = f"{name}/{form}/{seed}"
                if key not in done:
                    found = piebald.trees(
                        table, client=client, target=target, form=form, seed=seed, compare=form == "bagging", **SETTINGS
                    )
                    done[key] = found.plain()
                    options.out.write_text(json.dumps(done))
        print(name)
        for form, kinds in (
            ("bagging", ("together", "alone", "pooled")),
            ("cyclic", ("together",)),
            ("histogram", ("together",)),
        ):
            runs = [done[f"{name}/{form}/{seed}"] for seed in range(options.seeds)]
            for kind in kinds:
                every = [run["mean"][kind] for run in runs]
                weighted = [by_rows(run, kind) for run in runs]
                print(f"  {form:8} {kind:9} mean AUC of clients {statistics.mean(every):.3f}, sd over seeds "
                      f"{statistics.stdev(every):.3f}; weighted by rows {statistics.mean(weighted):.3f}")  # fmt: skip


def by_rows(run: dict[str, Any], kind: str) -> float:
    """The mean AUC in which clients count by their rows."""
    held = [(one["rows"], one[kind]["auc"]) for one in run["clients"].values() if one[kind]["auc"] is not None]
    return math.fsum(rows * auc for rows, auc in held) / sum(rows for rows, _ in held)


if __name__ == "__main__":
    main()
