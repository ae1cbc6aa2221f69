"""HDAFL's claims on real data, in one command: python benchmarks/hdafl/run.py --scale small --out runs/hdafl

Runs what is not there yet (a finished run folder is kept, one that was cut off goes on), then writes
RESULTS.md and plots.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

import results
from jobs import Job, all_jobs, carry_out
from settings import PARTS, SCALES


def main() -> int:
    """Run the jobs side by side and write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--scale", choices=SCALES, default="small", help="how much to run (settings.py)")
    parser.add_argument("--out", type=Path, default=Path("runs/hdafl"), help="folder of the run folders")
    parser.add_argument("--results", type=Path, help="the file to write, by default RESULTS.md in the output folder")
    parser.add_argument("--seeds", type=int, nargs="+", help="only these seeds of the scale")
    parser.add_argument("--only", choices=PARTS, nargs="+", default=PARTS, help="only these parts")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="runs at the same time, one thread each")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="start no run after this many minutes")
    parser.add_argument("--tables", action="store_true", help="run nothing, write the results from what is there")
    options = parser.parse_args()
    jobs = [] if options.tables else all_jobs(SCALES[options.scale], tuple(options.only), options.seeds)
    began, failed = time.monotonic(), 0
    with ProcessPoolExecutor(max(1, options.jobs), multiprocessing.get_context("spawn")) as pool:
        waiting = {pool.submit(_in_time, job, options.out, began + 60 * options.minutes): job for job in jobs}
        for number, done in enumerate(as_completed(waiting), 1):
            try:
                said = done.result()
            except Exception as error:
                failed += 1
                said = f"{waiting[done].group} {waiting[done].label} failed: {error}"
            print(f"[{number}/{len(jobs)}, {time.monotonic() - began:.0f} s] {said}", flush=True)
    print(results.write(options.out, options.results or options.out / "RESULTS.md"))
    return 1 if failed else 0


def _in_time(job: Job, out: Path, until: float) -> str:
    return carry_out(job, out) if time.monotonic() < until else f"{job.group} {job.label} seed {job.seed}: left out"


if __name__ == "__main__":
    sys.exit(main())
