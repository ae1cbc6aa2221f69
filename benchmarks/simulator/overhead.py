"""The cost of other recipes than FedAvg, for the same number of client updates.

python benchmarks/simulator/overhead.py
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))  # for `shared`

from shared.measured import in_turns, printed, ratios
from shared.options import reader

TARGETS = {  # Ditto's and IFCA's: 1.1 times (2 trainings) and (a training of 3 passes and 5 more, in trainings)
    "fedavg": 1.0,
    "hdafl": 1.05,
    "fedprox": 1.05,
    "scaffold": 1.3,
    "asynchronous": 1.3,
    "adamw": 1.6,
    "ditto": 2.2,
    "ifca": 2.9,
    "run folder": 1.02,
}
FEDAVG = ("asynchronous", "adamw", "run folder")  # FedAvg with something else


def recipe_of(what: str, cohort: int) -> Any:
    """The recipe of a row."""
    from piebald import recipes

    steps = {"optimizer": "adamw", "lr": 0.001} if what == "adamw" else {"lr": 0.05}
    recipe = recipes.make("fedavg" if what in FEDAVG else what, cohort=cohort, batch=20, **steps)
    return recipe if what != "asynchronous" else recipe.with_(scheduling={"kind": "asynchronous", "cohort": cohort})


def one(what: str, name: str, engine: str) -> float:
    """Seconds for as many client updates as the workload's rounds have, after the first round's worth."""
    from workloads import WORKLOADS

    import piebald

    work = WORKLOADS[name]
    recipe = recipe_of(what, work.cohort)
    # server steps that take a round's worth of updates
    each = work.cohort if recipe.scheduling.kind == "asynchronous" else 1
    devices = piebald.Simulator(fleet={"kind": "homogeneous", "seconds_per_step": 1.0}, engine=engine)
    with tempfile.TemporaryDirectory() as place:
        run = piebald.run(
            recipe,
            work.data(),
            work.network(),
            rounds=(work.rounds + 1) * each,
            runtime=devices,
            evaluate_every=0,
            measure="none",
            out=Path(place) / "run" if what == "run folder" else None,
        )
        walls = [row["wall"] for row in run.rounds]
    return (walls[-1] - walls[each - 1]) / work.rounds


def main() -> None:
    """Alternate and report."""
    parser = reader(__doc__, pairs=5, workloads=["W1", "W2"])
    parser.add_argument("--recipes", nargs="+", choices=TARGETS, default=list(TARGETS), help="beside FedAvg")
    parser.add_argument("--engine", default="auto", help="the same engine for all; auto takes the fastest for FedAvg")
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(one(*options.one, options.engine))
        return
    print("| workload | | seconds a round's updates | times FedAvg | pairs | target |")
    print("| --- | --- | --- | --- | --- | --- |")
    for name in options.workloads:
        here = partial(printed, __file__, "--engine", options.engine, "--one")
        works = {what: lambda what=what: float(here(what, name)) for what in ("fedavg", *options.recipes)}  # noqa: B023
        times = in_turns(works, options.pairs)
        for what, found in times.items():
            middle, (ratio, least, most) = statistics.median(found), ratios(found, times["fedavg"])
            pairs = f"{least:.2f} to {most:.2f}"
            print(f"| {name} | {what} | {middle:.4f} | {ratio:.2f} | {pairs} | {TARGETS[what]} |", flush=True)


if __name__ == "__main__":
    main()
