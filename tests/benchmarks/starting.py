"""Start the runs of a benchmark without carrying them out: `python starting.py BENCHMARK` prints a line for each cell.

Each is built to data, partition, model and recipe by the benchmark's own program, checked as a run checks it before
training, and takes one step of one client, once for each network.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.functional import cross_entropy

import piebald
from piebald.core import pytree
from piebald.core.parameters import copied
from piebald.experiments.run_settings import RunSettings
from piebald.runs.prepare import prepare

ROOT = Path(__file__).parents[2]
ROWS = 16  # of the one step
STEPPED: set[str] = set()  # networks that have taken their step, which cells have in common
Cells = Iterator[tuple[str, Callable[[], Any]]]


def started(case: Any) -> str:
    """Check a run as it is checked before training, take one step, and return what there is."""
    names = {"rounds", "stop", "metrics", "evaluate_every", "longest_step", "checkpoint_every"} & case.options.keys()
    seed = case.options.get("seed", (case.options.get("seeds") or (0,))[0])
    plainly = piebald.Simulator(engine="sequential", workers=0)  # measures no engine
    given = RunSettings.of_keywords({"seed": seed, "runtime": plainly} | {name: case.options[name] for name in names})
    plan = prepare(case.recipe, case.clients, case.model, given)
    module = plan.work.model
    if str(module) not in STEPPED:
        take_a_step(module, plan.clients)
        STEPPED.add(str(module))
    return f"{len(plan.clients)} clients, {sum(part.numel() for part in module.parameters())} parameters"


def take_a_step(model: torch.nn.Module, clients: Any) -> None:
    """Take a step of gradient descent on the first client's rows; `torch.optim` would be imported for seconds."""
    module, rows = copied(model).train(), clients.rows(0, "train")[:ROWS]
    cross_entropy(pytree.run(module, rows.x), torch.as_tensor(rows.y).long()).backward()
    steps = torch.cat(
        [torch.zeros_like(p).view(-1) if p.grad is None else p.grad.view(-1) for p in module.parameters()]
    )
    assert torch.isfinite(steps).all(), "the step is not finite"
    assert steps.any(), "the step moves nothing"


def made_once(make: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that makes the same clients once for all methods of a cell; the last ones are kept."""
    known: dict[str, Any] = {}

    def call(*values: Any, **options: Any) -> Any:
        key = repr((values, options))
        if key not in known:
            known.clear()
            known[key] = make(*values, **options)
        return known[key]

    return call


def distfl() -> Cells:
    """Tables 2, 4, 5 and 6, and Fig. 4."""
    import federations
    import run

    for name in ("planted", "attacked", "people"):
        setattr(federations, name, made_once(getattr(federations, name)))
    for part in run.PARTS:
        for job in run.full_jobs(part, 0):
            yield " ".join((part, *job[:2])), lambda part=part, job=job: run.run_job(part, *job, 0, True)


def metis() -> Cells:
    """Table I."""
    import run

    scale = run.SCALES["full"]
    for job in run.all_jobs(scale, scale.seeds):
        if job.label in scale.recipes:
            name = f"{job.part} {job.sizes} {job.classes} {job.label}"
            yield name, lambda job=job: run.run_job(job, scale, Path("nowhere"), "cpu")


def hdafl() -> Cells:
    """Tables 3 to 5 and Fig. 3."""
    import jobs
    import settings

    for job in jobs.all_jobs(settings.SCALES["full"], settings.PAPER_PARTS, [0]):
        yield f"{job.folder} {job.label}", lambda job=job: jobs.run_job(job, Path("nowhere"))


def cgau() -> Cells:
    """Fig. 2; the first pixels stand for the extractor's numbers, which take hours."""
    import federations
    import jobs
    import paper_rows

    paper_rows.embed = lambda network, x, **_: x.flatten(1)[:, :512].numpy().astype(np.float32)
    for name in ("all_embedded_images", "published_by_clusters", "rare_by_clusters"):
        setattr(federations, name, made_once(getattr(federations, name)))
    for job in (*jobs.paper_images(), *jobs.paper_rare()):
        if job.seed == 0:
            yield f"{job.part} {job.setting} {job.method}", lambda job=job: jobs.run_job(job, Path("nowhere"))


def smmd() -> Cells:
    """Tables 1 to 3, each arm with a single step, which a transfer has no way to leave out."""
    import conditions
    import tables

    settings = tables.settings
    tables.settings = lambda name, seed, **changes: settings(name, seed, **{"steps": 1} | changes)
    for name in tables.SETS:
        for arm, variant, make in tables.arms(name, 0, conditions.BACKENDS["full"]):
            yield f"{name} {arm} {variant}", make


def main(benchmark: str) -> None:
    """Print what there is of each cell, or what is missing."""
    sys.path[:0] = [str(ROOT / "benchmarks" / benchmark), str(ROOT / "benchmarks"), str(ROOT)]
    from shared.capture import capture

    for name, begin in globals()[benchmark]():
        try:
            with redirect_stdout(sys.stderr):  # a transfer says what it reveals
                found = f"begins, {begin() if benchmark == 'smmd' else started(capture(begin))}"
        except Exception as error:  # the other cells are tried
            found = f"{type(error).__name__}: {error}"
        print(f"{name}: {found}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
