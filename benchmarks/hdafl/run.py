"""Check HDAFL's claims on real data: python benchmarks/hdafl/run.py --scale small --out runs/hdafl

Finished run folders are kept and interrupted ones are resumed.  Then RESULTS.md and the plots are written.
`--scale full` runs tables 3 to 5 and Fig. 3 as the paper prints them, on FEMNIST where its files are here;
`--dry-run` prints its conditions beside the paper's and runs nothing.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))  # for `shared`

import paper
import results
from federations import CENTRAL, letters_here
from jobs import Job, all_jobs, run_job
from settings import LABELS, PAPER_PARTS, PARTS, SCALES
from shared.jobs import carry_out
from shared.options import reader

DEFAULT = {"small": PARTS, "full": PAPER_PARTS}


def main() -> int:
    """Run the jobs in parallel and write the results."""
    parser = reader(
        __doc__, scale=tuple(SCALES), out=Path("runs/hdafl"), seeds=None, cases=[""], methods=(*LABELS, CENTRAL),
        dry_run=False, jobs=os.cpu_count() or 1, minutes=float("inf"), tables=False,
    )  # fmt: skip
    parser.add_argument("--results", type=Path, help="the file to write, by default RESULTS.md in the output folder")
    parser.add_argument("--only", choices=("paper", *PARTS), nargs="+", help="only these parts, by default all")
    options = parser.parse_args()
    scale, parts = SCALES[options.scale], tuple(options.only or DEFAULT[options.scale])
    jobs = [] if options.tables else all_jobs(scale, parts, options.seeds)
    jobs = [job for job in jobs if job.label in options.methods]
    jobs = [job for job in jobs if any(text in job.folder.as_posix() for text in options.cases)]
    if options.dry_run:
        print(f"{paper.printed(scale, letters_here())}\n\n{len(jobs)} runs: {', '.join(parts)}")
        return 0
    began = time.monotonic()
    failed = carry_out(jobs, _in_time, options.out, began + 60 * options.minutes, processes=options.jobs)
    print(results.write(options.out, options.results or options.out / "RESULTS.md"))
    return 1 if failed else 0


def _in_time(job: Job, out: Path, until: float) -> str:
    return (
        run_job(job, out)
        if time.monotonic() < until
        else f"{job.folder} {job.label} seed {job.seed}: not started, out of time"
    )


if __name__ == "__main__":
    sys.exit(main())
