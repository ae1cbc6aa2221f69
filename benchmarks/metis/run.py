"""Metis' comparisons on CIFAR-10: python benchmarks/metis/run.py --scale small --out runs/metis

Finished run folders are kept and interrupted ones are resumed.  Then RESULTS.md and figures are written to --results.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))  # for `shared`

import results
import settings
import torch
from settings import SCALES, Scale
from shared.jobs import carry_out
from shared.options import reader

import piebald
from piebald.models import build_model

PARTS = ("synchronous", "corrupted", "uneven")


@dataclass(frozen=True)
class Job:
    """One run of a recipe on one partition and fleet with one seed."""

    part: str
    sizes: str
    classes: str
    label: str
    seed: int

    @property
    def folder(self) -> Path:
        """Folder, below the output folder, of all runs that this one is compared with."""
        return Path(self.part) / f"{self.sizes} {self.classes}".replace(" ", "_")


def all_jobs(scale: Scale, seeds: Iterable[int]) -> Iterator[Job]:
    """Yield the jobs of a scale, those of the first seed first."""
    for seed in seeds:
        for sizes, classes in scale.uneven:
            yield from (Job("uneven", sizes, classes, label, seed) for label in settings.labels("uneven"))
        for sizes, classes in scale.settings:
            yield from (Job("synchronous", sizes, classes, label, seed) for label in settings.labels("synchronous"))
        if scale.corrupted:
            sizes, classes = scale.settings[0]
            yield from (Job("corrupted", sizes, classes, label, seed) for label in settings.labels("corrupted"))


def run_job(job: Job, scale: Scale, out: Path, device: str) -> str:
    """Run or resume one job in its folder; do nothing if it has finished."""
    torch.set_num_threads(1)
    uneven = job.part == "uneven"
    methods = settings.asynchronous if uneven else settings.synchronous
    recipe = methods(**scale.training)[job.label]
    partition = settings.partition(job.sizes, job.classes, job.seed, recipe, job.part == "corrupted")
    data = settings.images(scale.rows, scale.side, job.seed)
    clients = partition.split(data)
    if job.label in settings.OWN_MODELS:
        clients = settings.tested_together(clients, data)
    label, began = job.label, time.perf_counter()
    every = scale.rounds if label in settings.OWN_MODELS else scale.every  # where ten models are to be scored
    if uneven:  # a round takes long, and the model that there is when the time ends must be scored
        every = 1 if label.startswith("Sync") else scale.every * settings.CLIENTS
    comparison = piebald.compare(
        {label: recipe},
        clients,
        lambda seed: build_model("metis_cnn", (3, scale.side, scale.side), 10, seed=seed, **scale.model),
        seeds=(job.seed,),
        out=out / job.folder,
        evaluate_every=every,
        checkpoint_every=10,
        runtime=piebald.Simulator(
            workers=0, deterministic=True, fleet=settings.fleet(uneven, scale.seconds_per_step), device=device
        ),
        **({"stop": {"seconds": scale.seconds}} if uneven else {"rounds": scale.rounds}),
    )
    comparison.runs[0].close()
    return f"{job.folder} {label} seed {job.seed} ({time.perf_counter() - began:.0f} s)"


def main() -> int:
    """Run the jobs in parallel and write the results."""
    options = reader(
        __doc__, scale=tuple(SCALES), out=Path("runs/metis"), results=Path(__file__).parent, jobs=2,
        device="cpu", parts=PARTS, seeds=None, recipes=None, cases=None, tables=False, dry_run=False,
    ).parse_args()  # fmt: skip
    scale, failed = SCALES[options.scale], 0
    options.recipes = options.recipes or scale.recipes
    seeds = scale.seeds if options.seeds is None else options.seeds
    jobs = [job for job in all_jobs(scale, seeds) if job.part in options.parts and not options.tables]
    jobs = [job for job in jobs if options.recipes is None or job.label in options.recipes]
    jobs = [job for job in jobs if options.cases is None or f"{job.sizes} {job.classes}" in options.cases]
    if options.dry_run:
        print(results.conditions(scale), *(f"{job.folder} {job.label} seed {job.seed}" for job in jobs), sep="\n")
        return 0
    failed = carry_out(jobs, run_job, scale, options.out, options.device, processes=options.jobs)
    print(results.write(options.out, options.results, options.scale))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
