"""The model cache and the server's loop: python benchmarks/model_cache/run.py

Measures seconds per server step by number of clients and size of the model, with the cache and without, as in figure 2
of Metis; the same relative to the speed of memory; the drift after a million steps; and server steps per second of the
whole loop.  Writes RESULTS.md and step_time.png next to this file, or into --out.
"""

from __future__ import annotations

import heapq
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))  # for `shared`

import matplotlib
import matplotlib.pyplot as plt
import numpy as np
import torch
from shared import measured
from shared.options import reader
from shared.stored import with_notes
from torch import nn

from piebald import recipes
from piebald.contracts import Checkpoint, Result, SumRequest, Task, Update
from piebald.core.objective import OBJECTIVES
from piebald.core.parameters import Layout
from piebald.core.tensor_store import TensorStore
from piebald.methods.client_work import ClientWork
from piebald.methods.queries import Evaluate
from piebald.server import EvaluationPlan, ServerLoop
from piebald.server.cluster_state import ModelCache
from piebald.storage.store import RunStore


class Trivial:
    """A runtime whose clients all return the same change, each after its own virtual delay."""

    def __init__(self, count: int, change: torch.Tensor) -> None:
        self.numbers = range(count)
        self.update = Update({"model": change}, 10, 1, {"loss": 1.0}, float(change.norm()), nbytes=4 * len(change))
        self.due: list[tuple[float, int, Task]] = []
        self.clock = 0.0

    def submit(self, tasks: Sequence[Task], sum_request: SumRequest | None = None) -> None:
        for task in tasks:
            heapq.heappush(self.due, (self.clock + 1.0 + task.client % 97 / 97, task.id, task))

    def next(self, until: float = float("inf")) -> Result | None:
        self.clock, _, task = heapq.heappop(self.due)
        return Result(task, self.update, self.clock - 1.0, self.clock, 4000, 4000)

    def clients(self) -> Sequence[int]:
        return self.numbers

    def now(self) -> float:
        return self.clock

    def state(self) -> Checkpoint:
        return Checkpoint()

    def restore(self, checkpoint: Checkpoint, tasks: Mapping[int, Task]) -> None:
        raise NotImplementedError("this runtime is only timed")

    def close(self) -> None:
        return


class Silent:
    """A recorder that records nothing."""

    lasts = False

    def confusion(self, rows: Any) -> None:
        return

    def commit(self, step: Any, results: Any, checkpoint: Any = None, notes: Any = ()) -> None:
        return

    def scores(self, rows: Any) -> None:
        return


def steps_per_second(recorder: Any, size: int, clients: int, steps: int) -> float:
    """Run asynchronous FedAvg with the cache, without evaluation and with one checkpoint at the end."""
    module = nn.Linear(size - 1, 1)  # and one bias
    layout = Layout.of(module, ())
    recipe = recipes.async_fedavg()
    work = ClientWork(
        model=module,
        layout=layout,
        initial=layout.flatten(module),
        objective=OBJECTIVES["regression"],
        seed=0,
        shape=(size - 1,),
        outputs=(1,),
        trainer=recipe.training,
        transforms=recipe.transforms,
    )
    server = ServerLoop(
        recipe,
        Trivial(clients, torch.full((size,), 1e-3)),
        work,
        recorder,
        known=clients,
        rounds=steps,
        evaluation=EvaluationPlan(Evaluate(), every=0),
        checkpoint_every=steps,
    )
    began = time.perf_counter()
    server.run()
    return steps / (time.perf_counter() - began)


def vectors(size: int, clients: int, steps: int) -> float:
    """Return the seconds per server step of the operations on vectors, which every loop needs."""
    cache, out = ModelCache(size, TensorStore()), torch.empty(size)
    sent, change = torch.ones(size), torch.full((size,), 1e-3)
    for client in range(clients):
        cache.swap(client, 1.0, sent, out)
    began = time.perf_counter()
    for turn in range(steps):
        torch.linalg.vector_norm(change).item()  # the check of the result
        cache.swap(turn % clients, 1.0, sent + change, out)
        torch.linalg.vector_norm(out).item()  # the limit for the next change
    return (time.perf_counter() - began) / steps


def measure(size: int, clients: int, steps: int, repeats: int) -> dict[str, float]:
    """Return medians of alternating runs: steps per second without and with a run folder, and seconds of vectors."""
    torch.set_num_threads(1)
    found: dict[str, list[float]] = {"no run folder": [], "run folder": [], "vectors": []}
    for _ in range(repeats):
        found["vectors"].append(vectors(size, clients, steps))
        found["no run folder"].append(steps_per_second(Silent(), size, clients, steps))
        with TemporaryDirectory() as folder, RunStore.create(Path(folder) / "run", {}) as store:
            found["run folder"].append(steps_per_second(store, size, clients, steps))
    return {name: statistics.median(rates) for name, rates in found.items()}


matplotlib.use("Agg")

CLIENTS = (10, 30, 100, 300, 1000)
BYTES = 28  # per parameter: the sum read and written (8 each), old and new model read, global model written (4 each)
ROOM = 3 << 30  # bytes of clients' models that differ; further clients share these models


def seconds(work: Callable[[int], None], repeats: int) -> float:
    """Return the median over calls, without the first one."""
    return statistics.median([measured.seconds(lambda turn=turn: work(turn)) for turn in range(repeats + 1)][1:])


def bandwidth() -> float:
    """Return the bytes per second of copying an array far larger than any cache, with one thread."""
    here, there = np.ones(1 << 27, dtype=np.float32), np.zeros(1 << 27, dtype=np.float32)
    return 2 * here.nbytes / seconds(lambda _: np.copyto(there, here), 7)


def models(size: int, clients: int) -> list[torch.Tensor]:
    """Return a model for each client."""
    different = max(3, min(clients, ROOM // (4 * size)))
    made = [torch.randn(size, generator=torch.Generator().manual_seed(number)) for number in range(different)]
    return [made[client % different] for client in range(clients)]


def with_cache(size: int, clients: int, repeats: int) -> float:
    """Return the seconds of a server step that exchanges one client's model."""
    known = models(size, clients)
    cache, out = ModelCache(size, TensorStore(1 << 60)), torch.empty(size)
    for client in range(clients):
        cache.weights[client] = 1.0
        cache.store.set(client, {"model": known[client]})
    cache.whole = float(clients)
    return seconds(lambda turn: cache.swap(turn % clients, 2.0, known[(turn + 1) % clients], out), repeats)


def without_cache(size: int, clients: int, repeats: int) -> float:
    """Return the seconds of a server step that sums all clients' models again."""
    known = models(size, clients)
    out = torch.empty(size)

    def step(turn: int) -> None:
        out.zero_()
        for model in known:
            out.add_(model, alpha=1.0 / clients)

    return seconds(step, repeats)


def drift(steps: int, size: int = 100, clients: int = 100) -> float:
    """Return the relative distance from an exact sum after many steps with weights over six orders of magnitude."""
    draw = np.random.default_rng(0)
    cache, out = ModelCache(size, TensorStore()), torch.empty(size)
    pool = torch.from_numpy(draw.normal(size=(1000, size)).astype(np.float32))
    weights, last = {}, {}
    for client, row, weight in zip(
        draw.integers(clients, size=steps).tolist(),
        draw.integers(1000, size=steps).tolist(),
        (10 ** draw.uniform(-3, 3, size=steps)).tolist(),
        strict=True,
    ):
        cache.swap(client, weight, pool[row], out)
        weights[client], last[client] = weight, row
    exact = sum(weights[k] * pool[last[k]].double() for k in last) / sum(weights.values())
    mean = cache.sums / cache.whole
    return float((mean - exact).norm() / exact.norm())


def plot(times: dict[tuple[int, int, str], float], path: Path) -> None:
    """Plot seconds over clients, one line for each size, with the cache and without."""
    figure, axes = plt.subplots(figsize=(8.5, 4.2), layout="constrained")
    sizes = sorted({size for size, _, _ in times})
    for size, colour in zip(sizes, ("#4c72b0", "#dd8452", "#55a868"), strict=False):
        for way, style in (("cache", "-"), ("full sum", "--")):
            points = sorted((n, t) for (s, n, w), t in times.items() if s == size and w == way)
            label = f"{size / 1e6:g} M parameters, {'cached' if way == 'cache' else 'full sum'}"
            axes.plot(*zip(*points, strict=True), style, color=colour, marker="o", markersize=3, label=label)
    axes.set(
        xscale="log", yscale="log", xlabel="clients", ylabel="seconds per server step", title="Time of one server step"
    )
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    figure.savefig(path, dpi=150)


def main() -> None:
    """Measure, and write the results."""
    here, sizes = Path(__file__).parent, [10**6, 10**7, 10**8]
    options = reader(__doc__, sizes=sizes, repeats=5, steps=10**6, out=here).parse_args()  # steps are of the drift
    torch.set_num_threads(1)
    options.out.mkdir(parents=True, exist_ok=True)
    copied = bandwidth()
    times: dict[tuple[int, int, str], float] = {}
    for size in options.sizes:
        for clients in CLIENTS:
            times[size, clients, "cache"] = with_cache(size, clients, options.repeats)
            if size * clients <= 3 * 10**10:  # the largest would take a minute per step
                times[size, clients, "full sum"] = without_cache(size, clients, max(2, options.repeats // 2))
            print(size, clients, times[size, clients, "cache"], times.get((size, clients, "full sum")), flush=True)
    drifted = drift(options.steps)
    rates = measure(1000, 1000, 20_000, options.repeats)
    plot(times, options.out / "step_time.png")
    with_notes(options.out / "RESULTS.md", text(times, copied, drifted, options.steps, rates))


def text(
    times: dict[tuple[int, int, str], float], copied: float, drifted: float, steps: int, rates: dict[str, float]
) -> str:
    """Return the text of RESULTS.md."""
    lines = [
        "# The model cache", "",
        f"`python benchmarks/model_cache/run.py`, one thread of {measured.processor()}, {os.cpu_count()} cores, "
        "medians.",
        f"Copying large arrays moves {copied / 1e9:.1f} GB/s here, counting reads and writes.", "",
        "Seconds per server step, as in figure 2 of Metis (Stripelis, Ambite 2020): with the cache a step exchanges",
        "one client's model for its new one, without it all clients' models are summed again.  \"Limit\" is the time",
        f"in which the bytes that must move ({BYTES} per parameter) are copied at the measured speed.", "",
        "| parameters | clients | cached | full sum | cached / limit |", "|---|---|---|---|---|",
    ]  # fmt: skip
    for (size, clients, way), spent in times.items():
        if way == "cache":
            full = times.get((size, clients, "full sum"))
            limit = BYTES * size / copied
            cell = "not run" if full is None else f"{full:.4f}"
            lines.append(f"| {size:,} | {clients} | {spent:.4f} | {cell} | {spent / limit:.2f} |")
    lines += [
        "", "![Time of one server step](step_time.png)", "",
        f"After {steps:,} steps with weights over six orders of magnitude the relative distance of the cached mean",
        f"from an exact sum of the last models is {drifted:.1e}.  Sums are float64, so the cache is never rebuilt.", "",
        "The loop, with asynchronous FedAvg, 1,000 clients, 1,000 parameters, and training that costs nothing:",
        f"{rates['no run folder']:,.0f} server steps per second without a run folder,",
        f"{rates['run folder']:,.0f} with a run folder (one SQLite transaction per step).  Of the"
        f" {1e6 / rates['no run folder']:.0f} microseconds of a step,",
        f"{1e6 * rates['vectors']:.0f} are spent on vectors; the rest is Python.", "",
    ]  # fmt: skip
    return "\n".join(lines)


if __name__ == "__main__":
    main()
