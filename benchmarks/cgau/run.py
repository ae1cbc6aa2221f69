"""Check CGAU's claims on real data: python benchmarks/cgau/run.py --out runs/cgau

Runs only what has not been measured, then writes RESULTS.md and the figures.  It needs PIEBALD_DATA.
`--scale full` has the paper's own rows, rounds, batches and seeds; `--dry-run` prints them beside the paper's.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))  # for `shared`

import conditions
import cost
import jobs
import pictures
import results
import settings
import xor
from shared.jobs import carry_out
from shared.options import reader

SCALES = {"small": settings.PARTS, "full": ("xor", *settings.PAPER_PARTS)}


def main() -> int:
    """Run the jobs in parallel and write the results."""
    parser = reader(
        __doc__,
        out=Path("runs/cgau"),
        scale=tuple(SCALES),
        dry_run=False,
        seeds=None,
        jobs=os.cpu_count(),
        tables=False,
    )
    parser.add_argument("--results", type=Path, help="folder of RESULTS.md and the figures, by default that of --out")
    parser.add_argument("--only", choices=[*settings.PARTS, *settings.PAPER_PARTS], nargs="+", help="only these parts")
    options = parser.parse_args()
    only = options.only or SCALES[options.scale]
    if options.dry_run:
        wanted = [job for part in only if part in jobs.JOBS for job in jobs.JOBS[part]()]
        print(f"{conditions.printed(options.scale)}\n\n{len(wanted)} runs: {', '.join(only)}")
        return 0
    failed = 0 if options.tables else measure(options.out, only, options.seeds, options.jobs)
    folder = options.results or options.out
    folder.mkdir(parents=True, exist_ok=True)
    print(results.write(options.out, folder))
    return 1 if failed else 0


def measure(out: Path, only: Sequence[str], seeds: list[int] | None, workers: int) -> int:
    """Run everything that has not been measured, and return how many jobs failed."""
    wanted = [job for part, listed in jobs.JOBS.items() if part in only for job in listed()]
    wanted = [job for job in wanted if seeds is None or job.seed in seeds]
    failed = carry_out(wanted, jobs.run_job, out, processes=workers)
    if "images" in only:
        jobs.describe(out)
    if "xor" in only:
        xor.measure(out)
    if "cost" in only:
        cost.measure(out)
    if "pictures" in only:
        pictures.measure(out)
    return failed


if __name__ == "__main__":
    sys.exit(main())
