"""Start the runs of a benchmark without carrying them out: `python starting.py BENCHMARK` prints a line for each cell.

Each is built to data, partition, model and recipe by the benchmark's own program, checked as a run checks it before
training, and takes one step of one client, once for each network.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.functional import cross_entropy
from torch.nn.utils import parameters_to_vector

import piebald
from piebald.core import pytree
from piebald.core.parameters import copied
from piebald.runs.options import RunOptions
from piebald.runs.prepare import prepare

ROOT = Path(__file__).parents[2]
ROWS = 16  # of the one step


def started(case: Any) -> str:
    """Check a run as it is checked before training, take one step, and return what there is."""
    names = {"rounds", "stop", "metrics", "evaluate_every", "longest_step", "checkpoint_every"} & case.options.keys()
    seed = case.options.get("seed", (case.options.get("seeds") or (0,))[0])
    plainly = piebald.Simulator(engine="sequential", workers=0)  # measures no engine
    given = RunOptions(seed=seed, runtime=plainly, **{name: case.options[name] for name in names})
    plan = prepare(case.recipe, case.clients, case.model, given)
    module, rows = copied(plan.work.model).train(), plan.clients.rows(0, "train")[:ROWS]
    before = parameters_to_vector(module.parameters()).clone()
    cross_entropy(pytree.run(module, rows.x), torch.as_tensor(rows.y).long()).backward()
    torch.optim.SGD(module.parameters(), lr=0.01).step()
    after = parameters_to_vector(module.parameters())
    moved = bool(torch.isfinite(after).all()) and not torch.equal(before, after)
    return f"{len(plan.clients)} clients, {len(before)} parameters, {'moved' if moved else 'not moved'}"


def made_once(make: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that makes the same clients once for all methods of a cell."""
    known: dict[str, Any] = {}

    def call(*values: Any, **options: Any) -> Any:
        key = repr((values, options))
        if key not in known:
            known[key] = make(*values, **options)
        return known[key]

    return call


def distfl() -> Iterator[tuple[str, Callable[[], Any]]]:
    """Tables 2, 4, 5 and 6, and Fig. 4."""
    import federations
    import run

    for name in ("planted", "attacked", "people"):
        setattr(federations, name, made_once(getattr(federations, name)))
    for part in run.PARTS:
        for job in run.full_jobs(part, 0):
            yield " ".join((part, *job[:2])), lambda part=part, job=job: run.run_job(part, *job, 0, True)


def metis() -> Iterator[tuple[str, Callable[[], Any]]]:
    """Table I."""
    import run

    scale = run.SCALES["full"]
    for job in run.all_jobs(scale, scale.seeds):
        if job.label in scale.recipes:
            name = f"{job.part} {job.sizes} {job.classes} {job.label}"
            yield name, lambda job=job: run.run_job(job, scale, Path("nowhere"), "cpu")


def hdafl() -> Iterator[tuple[str, Callable[[], Any]]]:
    """Tables 3 to 5 and Fig. 3."""
    import jobs
    import settings

    for job in jobs.all_jobs(settings.SCALES["full"], settings.PAPER_PARTS, [0]):
        yield f"{job.folder} {job.label}", lambda job=job: jobs.run_job(job, Path("nowhere"))


def cgau() -> Iterator[tuple[str, Callable[[], Any]]]:
    """Fig. 2; the first pixels stand for the extractor's numbers, which take hours."""
    import federations
    import jobs

    federations.embed = lambda network, x, **_: x.flatten(1)[:, :512].numpy().astype(np.float32)

    for job in (*jobs.paper_images(), *jobs.paper_rare()):
        if job.seed == 0:
            yield f"{job.part} {job.setting} {job.method}", lambda job=job: jobs.run_job(job, Path("nowhere"))


def main(benchmark: str) -> None:
    """Print what there is of each cell, or what is missing."""
    sys.path[:0] = [str(ROOT / "benchmarks" / benchmark), str(ROOT / "benchmarks"), str(ROOT)]
    from shared.capture import capture

    for name, begin in globals()[benchmark]():
        try:
            found = started(capture(begin))
        except Exception as error:  # the other cells are tried
            found = f"{type(error).__name__}: {error}"
        print(f"{name}: {found}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
