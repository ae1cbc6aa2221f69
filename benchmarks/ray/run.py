"""Compare the Ray runtime with the simulator, with one actor and two, and its memory over 200 rounds.

    python benchmarks/ray/run.py
    python benchmarks/ray/run.py --only W2      one of the workloads
    python benchmarks/ray/run.py --only feed    what the driver does for each result, and how many actors it can feed

Needs `pip install 'piebald[ray]'` and two idle cores.  Every measurement is a process of its own.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

sys.path.extend([str(Path(__file__).parents[1] / "simulator"), str(Path(__file__).parents[1])])

from shared.measured import apart, children, in_turns, megabytes, seconds_of
from shared.options import reader

STORE = 1 << 30  # bytes of Ray's object store
CASES = {"simulator 1": ("simulator", 1), "ray 1": ("ray", 1), "simulator 2": ("simulator", 2), "ray 2": ("ray", 2)}

FEED = (
    ("W1", "fedavg", "batched"),
    ("W1", "fedavg", "sequential"),
    ("W2", "fedavg", "sequential"),
)
FEED_ROUNDS = 12


def runtime(kind: str, workers: int) -> Any:
    """The same engine on either runtime."""
    import piebald

    same = {"engine": "sequential", "workers": workers}
    return piebald.Ray(store=STORE, **same) if kind == "ray" else piebald.Simulator(**same)


def speed(case: str, name: str, method: str) -> float:
    """Seconds a round after the first, which starts the workers."""
    from workloads import IMAGE, W1, W2, Workload

    import piebald
    from piebald import recipes
    from piebald.models import build_model

    cnn = Workload("CNN", 100, 20, 200, 4, IMAGE, 62, lambda: build_model("small_cnn", IMAGE, 62, 0))
    work = {"W1": W1, "W2": W2, "CNN": cnn}[name]
    run = piebald.run(
        recipes.make(method, cohort=work.cohort, lr=0.05, batch=20, epochs=1),
        work.data(),
        work.network(),
        rounds=work.rounds + 1,
        evaluate_every=0,
        runtime=runtime(*CASES[case]),
    )
    walls = [row["wall"] for row in run.rounds]
    return (walls[-1] - walls[0]) / work.rounds


def feed(name: str, method: str, engine: str, actors: int) -> dict[str, float]:
    """Processor milliseconds for each result of a client, after the first sixth of a run, by kind of process."""
    from workloads import WORKLOADS

    import piebald
    from piebald.report.callbacks import Callback

    work, marks = WORKLOADS[name], list[dict[str, float]]()

    class Clock(Callback):
        def on_server_step(self, step: Any) -> None:
            marks.append(processor_seconds() | {"wall": time.perf_counter()})

    run = piebald.run(
        piebald.recipes.make(method, cohort=work.cohort, lr=0.05, batch=20, epochs=1),
        work.data(),
        work.network(),
        rounds=FEED_ROUNDS,
        evaluate_every=0,
        runtime=piebald.Ray(store=STORE, engine=engine, workers=actors),
        callbacks=[Clock()],
    )
    first = len(marks) // 6
    results = sum(row["arrived"] for row in run.rounds[first:])
    return {kind: 1000 * (marks[-1][kind] - marks[first - 1][kind]) / results for kind in marks[-1]}


def processor_seconds() -> dict[str, float]:
    """What this process, the other processes of Ray, and all actors have used of processors so far."""
    actors, ray = processes("RayWorker"), processes("")
    rest = [pid for pid in children(os.getpid()) if pid not in ray]
    used = {kind: sum(map(seconds_of, pids)) for kind, pids in (("actors", actors), ("Ray", rest))}
    return {"driver": time.process_time(), **used}


def feeding(pairs: int) -> None:
    """Print what the driver does for each result, and the number of actors that follows."""
    print(
        "| results | actors | driver, ms | Ray's own processes, ms | an actor, ms | results a second | actors to feed |"
    )
    print("| --- " * 7 + "|")
    for name, method, engine in FEED:
        for actors in (1, 2):
            runs = [measure("feed", name, method, engine, str(actors)) for _ in range(pairs)]
            driver, ray, train = (statistics.median(run[kind] for run in runs) for kind in ("driver", "Ray", "actors"))
            cells = f"{driver:.2f} | {ray:.2f} | {train:.1f} | {1000 / driver:,.0f} | {train / driver:.0f}"
            print(f"| {name}, `{method}`, {engine} | {actors} | {cells} |", flush=True)


def memory(rounds: int) -> list[dict[str, float]]:
    """Megabytes of this process, of the actors and of Ray's object store, every tenth of a run of Ditto.

    The state of each client is a model, of which 64 MB in all are kept in RAM.  Bytes that pass through this process
    are counted too: down and up with tasks and updates.
    """
    import ray
    from workloads import W1

    import piebald
    from piebald.runtimes.ray.actors import RayWorkerPool
    from piebald.storage.store import RunStore

    samples: list[dict[str, float]] = []
    sent = {"down": 0, "up": 0}
    real_commit, real_packed, real_serve = RunStore.commit, RayWorkerPool._packed, RayWorkerPool._serve_chunks

    def packed(self: RayWorkerPool, shares: Any) -> Any:
        chunks = real_packed(self, shares)
        arrays = [array for chunk in chunks for array in chunk.own.values()]
        sent["down"] += sum(array.nbytes for array in arrays)
        return chunks

    def carry_out(self: RayWorkerPool, *arguments: Any) -> Any:
        answers = real_serve(self, *arguments)
        sent["up"] += sum(array.nbytes for answer in answers for array in answer["arrays"].values())
        return answers

    def commit(self: RunStore, step: Any, *rest: Any, **more: Any) -> None:
        real_commit(self, step, *rest, **more)
        if step["version"] % (rounds // 10) == 0 or step["version"] == 5:
            store = ray.cluster_resources()["object_store_memory"] - ray.available_resources()["object_store_memory"]
            row = {"round": step["version"], "driver": megabytes("RssAnon"), "store": store / 2**20}
            actors = {f"actor {place}": megabytes("RssAnon", pid) for place, pid in enumerate(processes("RayWorker"))}
            samples.append(row | actors | {name: count / 2**20 for name, count in sent.items()})

    RunStore.commit, RayWorkerPool._packed, RayWorkerPool._serve_chunks = commit, packed, carry_out  # type: ignore[method-assign]
    with tempfile.TemporaryDirectory() as place:
        piebald.run(
            piebald.methods.recipes.ditto(cohort=W1.cohort, lr=0.05, batch=20, epochs=1),
            W1.data(),
            W1.network(),
            rounds=rounds,
            evaluate_every=0,
            checkpoint_every=10,
            out=Path(place) / "run",
            runtime=runtime("ray", 2).model_copy(update={"memory": 64 << 20}),
        )
    return samples


def processes(kind: str) -> list[str]:
    """The actors of this machine, by the name that Ray gives their processes."""
    return [
        place.parent.name
        for place in sorted(Path("/proc").glob("[0-9]*/cmdline"))
        if place.read_bytes().startswith(f"ray::{kind}".encode())
    ]


def measure(*what: str) -> Any:
    """One measurement in a process of its own."""
    return apart(__file__, "one", *what)


def main() -> None:
    """Alternate and report."""
    if sys.argv[1:2] == ["one"]:  # in a process of its own
        _, _, what, *rest = sys.argv
        if what == "feed":
            print(json.dumps(feed(*rest[:3], int(rest[3]))))
        else:
            print(json.dumps(memory(int(rest[0])) if what == "memory" else speed(what, *rest)))
        return
    options = reader(__doc__, pairs=3, only=("feed", "CNN", "W2", "W1")).parse_args()
    if options.only == ["feed"]:
        feeding(options.pairs)
        return
    print(f"{platform.processor() or platform.machine()}, Python {platform.python_version()}")
    for name, method in (("CNN", "fedavg"), ("W2", "fedavg"), ("W1", "ditto")):
        if name not in options.only:
            continue
        times = in_turns({case: partial(measure, case, name, method) for case in CASES}, options.pairs)
        for case, seconds in times.items():
            shown = ", ".join(f"{second:.3f}" for second in sorted(seconds))
            print(f"{name} {method:7} {case:12} median {statistics.median(seconds):.3f} s a round ({shown})")
    for row in measure("memory", "200") if len(options.only) == 4 else ():
        print("  ".join(f"{name} {value:.0f}" for name, value in row.items()))


if __name__ == "__main__":
    main()
