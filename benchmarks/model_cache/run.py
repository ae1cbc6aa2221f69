"""The community cache and the loop around it: python benchmarks/global/run.py

Metis, figure 2: seconds a commit over learners and sizes of the model, with the cache and without; the same beside
what memory allows; the drift after a million commits; and commits a second of the whole loop.  Writes RESULTS.md and
commit_time.png beside this file, or into --out.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import loop
import matplotlib
import numpy as np
import torch

from piebald.server.model_cache import ModelCache
from piebald.tensor_store import TensorStore

matplotlib.use("Agg")
import matplotlib.pyplot as plt

LEARNERS = (10, 30, 100, 300, 1000)
BYTES = 28  # a number of the model: W read and written (8 each), old and new model read, community written (4 each)
ROOM = 3 << 30  # bytes of learners' models that are really different; more learners share them


def seconds(work: Callable[[int], None], repeats: int) -> float:
    """Median over calls, the first left out."""
    work(0)
    spent = []
    for turn in range(1, repeats + 1):
        began = time.perf_counter()
        work(turn)
        spent.append(time.perf_counter() - began)
    return statistics.median(spent)


def bandwidth() -> float:
    """Bytes a second of copying an array far larger than any cache, one thread."""
    here, there = np.ones(1 << 27, dtype=np.float32), np.zeros(1 << 27, dtype=np.float32)
    return 2 * here.nbytes / seconds(lambda _: np.copyto(there, here), 7)


def models(size: int, learners: int) -> list[torch.Tensor]:
    """A model for each learner."""
    apart = max(3, min(learners, ROOM // (4 * size)))
    made = [torch.randn(size, generator=torch.Generator().manual_seed(number)) for number in range(apart)]
    return [made[learner % apart] for learner in range(learners)]


def with_cache(size: int, learners: int, repeats: int) -> float:
    """Seconds of a commit that swaps one learner's model."""
    known = models(size, learners)
    cache, out = ModelCache(size, TensorStore(1 << 60)), torch.empty(size)
    for learner in range(learners):
        cache.weights[learner] = 1.0
        cache.store.set(learner, {"model": known[learner]})
    cache.whole = float(learners)
    return seconds(lambda turn: cache.swap(turn % learners, 2.0, known[(turn + 1) % learners], out), repeats)


def without_cache(size: int, learners: int, repeats: int) -> float:
    """Seconds of a commit that adds up all learners' models again."""
    known = models(size, learners)
    out = torch.empty(size)

    def commit(turn: int) -> None:
        out.zero_()
        for model in known:
            out.add_(model, alpha=1.0 / learners)

    return seconds(commit, repeats)


def drift(commits: int, size: int = 100, learners: int = 100) -> float:
    """Relative distance from one exact sum after many commits, weights over six orders of magnitude."""
    draw = np.random.default_rng(0)
    cache, out = ModelCache(size, TensorStore()), torch.empty(size)
    pool = torch.from_numpy(draw.normal(size=(1000, size)).astype(np.float32))
    weights, last = {}, {}
    for learner, row, weight in zip(
        draw.integers(learners, size=commits).tolist(),
        draw.integers(1000, size=commits).tolist(),
        (10 ** draw.uniform(-3, 3, size=commits)).tolist(),
        strict=True,
    ):
        cache.swap(learner, weight, pool[row], out)
        weights[learner], last[learner] = weight, row
    exact = sum(weights[k] * pool[last[k]].double() for k in last) / sum(weights.values())
    mean = cache.sums / cache.whole
    return float((mean - exact).norm() / exact.norm())


def picture(times: dict[tuple[int, int, str], float], path: Path) -> None:
    """Seconds over learners, a line for each size and way."""
    figure, axes = plt.subplots(figsize=(8.5, 4.2), layout="constrained")
    sizes = sorted({size for size, _, _ in times})
    for size, colour in zip(sizes, ("#4c72b0", "#dd8452", "#55a868"), strict=False):
        for way, style in (("cache", "-"), ("anew", "--")):
            points = sorted((n, t) for (s, n, w), t in times.items() if s == size and w == way)
            label = f"{size / 1e6:g} M parameters, {'cached' if way == 'cache' else 'summed anew'}"
            axes.plot(*zip(*points, strict=True), style, color=colour, marker="o", markersize=3, label=label)
    axes.set(xscale="log", yscale="log", xlabel="learners", ylabel="seconds a commit", title="Time of one commit")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    figure.savefig(path, dpi=150)


def main() -> None:
    """Measure, and write what was found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", type=int, nargs="+", default=[10**6, 10**7, 10**8])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--commits", type=int, default=10**6, help="of the drift")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent)
    options = parser.parse_args()
    torch.set_num_threads(1)
    options.out.mkdir(parents=True, exist_ok=True)
    copied = bandwidth()
    times: dict[tuple[int, int, str], float] = {}
    for size in options.sizes:
        for learners in LEARNERS:
            times[size, learners, "cache"] = with_cache(size, learners, options.repeats)
            if size * learners <= 3 * 10**10:  # the largest would take a minute a commit
                times[size, learners, "anew"] = without_cache(size, learners, max(2, options.repeats // 2))
            print(size, learners, times[size, learners, "cache"], times.get((size, learners, "anew")), flush=True)
    wandered = drift(options.commits)
    rates = loop.measure(1000, 1000, 20_000, options.repeats)
    picture(times, options.out / "commit_time.png")
    results = options.out / "RESULTS.md"
    notes = results.read_text().partition("<!-- notes -->")[2] if results.exists() else "\n"
    results.write_text(text(times, copied, wandered, options.commits, rates) + "<!-- notes -->" + notes)


def text(
    times: dict[tuple[int, int, str], float], copied: float, wandered: float, commits: int, rates: dict[str, float]
) -> str:
    """RESULTS.md."""
    lines = [
        "# The community cache", "",
        f"`python benchmarks/global/run.py`, one thread of {processor()}, {os.cpu_count()} cores, medians.  Copying",
        f"large arrays moves {copied / 1e9:.1f} GB/s here, reads and writes counted.", "",
        "Seconds a commit, as in figure 2 of Metis (Stripelis, Ambite 2020): with the cache a commit swaps one",
        "learner's model for its new one, without it all learners' models are added up again.  \"Limit\" is what the",
        f"bytes that must move ({BYTES} for each number of the model) would take at the measured speed of copying.", "",
        "| parameters | learners | cached | summed anew | cached / limit |", "|---|---|---|---|---|",
    ]  # fmt: skip
    for (size, learners, way), spent in times.items():
        if way == "cache":
            anew = times.get((size, learners, "anew"))
            limit = BYTES * size / copied
            told = "not run" if anew is None else f"{anew:.4f}"
            lines.append(f"| {size:,} | {learners} | {spent:.4f} | {told} | {spent / limit:.2f} |")
    lines += [
        "", "![Time of one commit](commit_time.png)", "",
        f"After {commits:,} commits of weights over six orders of magnitude the cached mean is {wandered:.1e}",
        "(relative) away from one exact sum over the last models.  Sums are float64, so nothing is ever refreshed.", "",
        "The loop, asynchronous FedAvg with 1,000 learners and 1,000 parameters, training that costs nothing:",
        f"{rates['nothing written']:,.0f} commits a second when nothing is written down,",
        f"{rates['run folder']:,.0f} with a run folder (one SQLite transaction a commit).  Of the"
        f" {1e6 / rates['nothing written']:.0f} microseconds a commit takes,",
        f"{1e6 * rates['vectors']:.0f} go into its operations on vectors; the rest is Python.", "",
    ]  # fmt: skip
    return "\n".join(lines)


def processor() -> str:
    """What runs this, in words."""
    try:
        told = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor()
    return next(
        (line.partition(":")[2].strip() for line in told.splitlines() if line.startswith("model name")), "a CPU"
    )


if __name__ == "__main__":
    main()
