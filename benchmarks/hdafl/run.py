"""Check HDAFL's claims on real data: python benchmarks/hdafl/run.py --scale small --out runs/hdafl

Finished run folders are kept and interrupted ones are resumed.  Then RESULTS.md and the plots are written.
`--scale full` runs tables 3 to 5 and Fig. 3 as the paper prints them, on FEMNIST where its files are here;
`--dry-run` prints its conditions beside the paper's and runs nothing.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))  # for `shared`

import paper
import results
from characters import letters_here
from jobs import Job, all_jobs, run_job
from settings import LABELS, PAPER_PARTS, PARTS, SCALES
from shared.jobs import carry_out
from traffic import CENTRAL

DEFAULT = {"small": PARTS, "full": PAPER_PARTS}


def main() -> int:
    """Run the jobs in parallel and write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--scale", choices=SCALES, default="small", help="how much to run, see settings.py")
    parser.add_argument("--out", type=Path, default=Path("runs/hdafl"), help="folder that holds the run folders")
    parser.add_argument("--results", type=Path, help="the file to write, by default RESULTS.md in the output folder")
    parser.add_argument("--seeds", type=int, nargs="+", help="only these seeds of the scale")
    parser.add_argument("--only", choices=("paper", *PARTS), nargs="+", help="only these parts, by default all")
    parser.add_argument("--cases", nargs="+", help="only runs whose folder contains one of these texts, as writer/C10")
    parser.add_argument("--methods", choices=(*LABELS, CENTRAL), nargs="+", help="only these methods, by default all")
    parser.add_argument("--dry-run", action="store_true", help="print the conditions beside the paper's, run nothing")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="number of parallel runs, one thread each")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="start no run after so many minutes")
    parser.add_argument("--tables", action="store_true", help="only write the results of the runs that have finished")
    options = parser.parse_args()
    scale, parts = SCALES[options.scale], tuple(options.only or DEFAULT[options.scale])
    jobs = [] if options.tables else all_jobs(scale, parts, options.seeds)
    cases, methods = options.cases or [""], options.methods or (*LABELS, CENTRAL)
    jobs = [job for job in jobs if job.label in methods and any(text in job.folder.as_posix() for text in cases)]
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
