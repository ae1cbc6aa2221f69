"""Compare Piebald's simulator with bare PyTorch loops and other packages, in alternating runs.

    python benchmarks/simulator/run.py

Prints seconds a round (training, averaging and the run folder; no evaluation), the medians, and their ratio to the bare
loop of one thread.  Each measurement is a process of its own, so that none profits from another's caches.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import tempfile
from functools import partial
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))  # for `shared`

from shared.measured import in_turns, printed, ratios
from shared.options import reader

HERE = Path(__file__).parent
OWN = (
    "bare",
    "bare in two processes",
    "arithmetic alone",
    "piebald",
    "piebald in one process",
    "piebald with a run folder",
)
PEERS = {  # by name: the script, and what to start it with
    "FedJAX": ("with_fedjax.py", ("python",)),
    "pfl, 1 process": ("with_pfl.py", ("python",)),
    "pfl, 2 processes": ("with_pfl.py", ("torchrun", "--standalone", "--nproc-per-node", "2")),
    "FedLab": ("with_fedlab.py", ("python",)),
    "Flower on Ray, 2 actors": ("with_flower.py", ("python",)),
}
VENVS = {"FedJAX": "fedjax", "FedLab": "fedlab", "Flower on Ray, 2 actors": "flwr"}


def bare(name: str, processes: int) -> float:
    """Seconds a round of a bare loop."""
    from workloads import WORKLOADS, bare_loop

    return bare_loop(WORKLOADS[name], WORKLOADS[name].data(), processes)


def piebald_run(name: str, folder: bool, in_process: bool) -> float:
    """Seconds a round through `piebald.run`, from the first server step to the last, so without the start."""
    from workloads import WORKLOADS

    import piebald

    work = WORKLOADS[name]
    with tempfile.TemporaryDirectory() as place:
        history = piebald.run(
            piebald.recipes.fedavg(cohort=work.cohort, lr=0.05, batch=20, batches="exact", epochs=work.epochs),
            work.data(),
            work.network(),
            rounds=work.rounds + 1,
            out=Path(place) / "run" if folder else None,
            runtime=piebald.Simulator(workers=0 if in_process else None),
            evaluate_every=0,
        )
        walls = [row["wall"] for row in history.rounds]
        print(json.dumps(history.meta["runtime"]), file=sys.stderr)
    return (walls[-1] - walls[0]) / work.rounds


def one(what: str, name: str) -> float:
    """One measurement in this process."""
    if what == "arithmetic alone":
        from workloads import WORKLOADS, arithmetic

        return arithmetic(WORKLOADS[name], WORKLOADS[name].data())
    if what.startswith("bare"):
        return bare(name, 2 if "two" in what else 1)
    return piebald_run(name, folder="folder" in what, in_process="one process" in what)


def measure(what: str, name: str, venvs: Path | None) -> float:
    """One measurement in a process of its own."""
    if what in PEERS:
        script, (start, *options) = PEERS[what]
        assert venvs is not None
        program = venvs / VENVS.get(what, "pfl") / "bin" / start
        return float(printed(*options, script, name, python=program, cwd=HERE / "peers"))
    return float(printed(__file__, "--one", what, name))


def main() -> None:
    """Alternate and report."""
    parser = reader(__doc__, pairs=5, workloads=["W1", "W2"])
    parser.add_argument(
        "--peers", type=Path, help="a folder of virtual environments, see README: W1 and W2 on peers too"
    )
    parser.add_argument("--without", nargs="+", default=[], choices=PEERS, help="peers to leave out")
    parser.add_argument("--one", nargs=2, metavar=("WHAT", "WORKLOAD"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(one(*options.one))
        return
    peers = [peer for peer in PEERS if peer not in options.without]
    print(f"{platform.processor() or platform.machine()}, Python {platform.python_version()}\n")
    print("| workload | | seconds a round | ratio | pairs |\n| --- | --- | --- | --- | --- |")
    for name in options.workloads:
        whats = (*OWN, *(peers if options.peers else ()))
        times = in_turns({what: partial(measure, what, name, options.peers) for what in whats}, options.pairs)
        base = statistics.median(times["bare"])
        for what, found in times.items():
            middle, (_, least, most) = statistics.median(found), ratios(found, times["bare"])
            print(f"| {name} | {what} | {middle:.4f} | {middle / base:.2f} | {least:.2f} to {most:.2f} |", flush=True)


if __name__ == "__main__":
    main()
