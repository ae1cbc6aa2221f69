"""The runs of the papers' benchmarks, as their own programs list and begin them.

A benchmark's modules have names that others have as well, so that a process can list the runs of one benchmark only,
whose folder is on the path.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

NOWHERE = Path("nowhere")


@dataclass(frozen=True)
class Listed:
    """One run.

    Attributes:
        part: of the benchmark.
        case: who the clients are.
        label: the method.
        seed: of all that is drawn.
        job: what the benchmark's program has of it.
        begin: carries it out, as that program does.
    """

    part: str
    case: str
    label: str
    seed: int
    job: Any
    begin: Callable[[], Any]


def listed(paper: str, scale: str, seed: int = 0) -> Iterator[Listed]:
    """Yield the runs of a benchmark at one of its scales, with one seed."""
    found: Iterator[Listed] = globals()[f"_{paper}"](scale, seed)
    return (one for one in found if one.seed == seed)


def _distfl(scale: str, seed: int) -> Iterator[Listed]:
    import run

    full = scale == "full"
    for part in run.PARTS:
        for job in (run.full_jobs if full else run.jobs)(part, seed):
            yield Listed(part, *job[:2], seed, job, lambda p=part, j=job: run.run_job(p, *j, seed, full))


def _hdafl(scale: str, seed: int) -> Iterator[Listed]:
    import jobs
    import settings

    size = settings.SCALES[scale]
    for job in (*jobs.paper_jobs(size), *jobs.traffic_jobs(size)):
        yield Listed(job.part, job.setting, job.label, job.seed, job, lambda j=job: jobs.run_job(j, NOWHERE))


def _metis(scale: str, seed: int) -> Iterator[Listed]:
    import run

    size = run.SCALES[scale]
    for job in run.all_jobs(size, [seed]):
        begin = lambda j=job: run.run_job(j, size, NOWHERE, "cpu")  # noqa: E731
        yield Listed(job.part, f"{job.sizes} {job.classes}", job.label, seed, job, begin)


def _cgau(scale: str, seed: int) -> Iterator[Listed]:
    import jobs
    import settings

    for part in settings.PAPER_PARTS if scale == "full" else settings.PARTS:
        for job in jobs.JOBS.get(part, lambda: ())():
            yield Listed(part, job.setting, job.method, job.seed, job, lambda j=job: jobs.run_job(j, NOWHERE))


def without_the_extractor() -> None:
    """Let the first pixels stand for the numbers of CGAU's extractor, which take hours and change no condition."""
    import federations  # noqa: F401 - puts the folder of `paper_rows` on the path
    import numpy as np
    import paper_rows

    paper_rows.embed = lambda network, x, **_: x.flatten(1)[:, :512].numpy().astype(np.float32)
