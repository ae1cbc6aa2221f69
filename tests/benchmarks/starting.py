"""Start the runs of a benchmark without carrying them out: `python starting.py BENCHMARK` prints a line for each cell.

Each is built to data, partition, model and recipe by the benchmark's own program, checked as a run checks it before
training, and takes one step of one client, once for each network.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

import piebald
from piebald.core import pytree
from piebald.core.parameters import copied
from piebald.methods.recipe import Recipe
from piebald.runs.options import RunOptions
from piebald.runs.prepare import prepare

ROOT = Path(__file__).parents[2]
ROWS = 16  # of the one step


class Started(Exception):
    """A run that would begin to train now; its text is what there is."""


def start(recipes: Recipe | Mapping[str, Recipe], clients: Any, model: Callable[[int], Any], **options: Any) -> Any:
    """Stand in for `piebald.run` and `piebald.compare`, and end with `Started` in place of training."""
    names = {"rounds", "stop", "metrics", "evaluate_every", "longest_step", "checkpoint_every"}
    seed = options.get("seed", (options.get("seeds") or (0,))[0])
    plainly = piebald.Simulator(engine="sequential", workers=0)  # measures no engine
    given = RunOptions(seed=seed, runtime=plainly, **{name: options[name] for name in names & options.keys()})
    (recipe,) = recipes.values() if isinstance(recipes, Mapping) else (recipes,)
    plan = prepare(recipe, clients, model, given)
    module, rows = copied(plan.work.model).train(), plan.clients.rows(0, "train")[:ROWS]
    before = torch.nn.utils.parameters_to_vector(module.parameters()).clone()
    loss = torch.nn.functional.cross_entropy(pytree.run(module, rows.x), torch.as_tensor(rows.y).long())
    loss.backward()
    torch.optim.SGD(module.parameters(), lr=0.01).step()
    after = torch.nn.utils.parameters_to_vector(module.parameters())
    moved = bool(torch.isfinite(after).all()) and not torch.equal(before, after)
    raise Started(f"{len(plan.clients)} clients, {len(before)} parameters, {'moved' if moved else 'not moved'}")


def distfl() -> Iterator[tuple[str, Callable[[], Any]]]:
    """Tables 2, 4, 5 and 6, and Fig. 4."""
    import run

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
    """Fig. 2."""
    import jobs

    for job in (*jobs.paper_images(), *jobs.paper_rare()):
        if job.seed == 0:
            yield f"{job.part} {job.setting} {job.method}", lambda job=job: jobs.run_job(job, Path("nowhere"))


def main(benchmark: str) -> None:
    """Print what there is of each cell, or what is missing."""
    sys.path[:0] = [str(ROOT / "benchmarks" / benchmark), str(ROOT / "benchmarks"), str(ROOT)]
    piebald.run = piebald.compare = start
    for name, begin in globals()[benchmark]():
        try:
            begin()
            found = "finished without a run"
        except Started as started:
            found = str(started)
        except Exception as error:  # the other cells are tried
            found = f"{type(error).__name__}: {error}"
        print(f"{name}: {found}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
