"""Runs of a benchmark, carried out by processes beside one another."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from typing import TypeVar

Job = TypeVar("Job")


def carry_out(jobs: Sequence[Job], run: Callable[..., str], *arguments: object, processes: int) -> int:
    """Carry out all jobs, print a line for each that has ended, and return the number of those that failed.

    Args:
        jobs: picklable values; they begin in this order.
        run: called as ``run(job, *arguments)`` in a new process; returns the line to print.
        arguments: the same for every job.
        processes: number of jobs at a time.
    """
    began, failed = time.monotonic(), 0
    with ProcessPoolExecutor(max(1, processes), multiprocessing.get_context("spawn")) as pool:
        waiting = {pool.submit(run, job, *arguments): job for job in jobs}
        for number, done in enumerate(as_completed(waiting), 1):
            try:
                message = done.result()
            except Exception as error:  # the other jobs go on
                failed += 1
                message = f"{waiting[done]} failed: {error}"
            print(f"[{number}/{len(jobs)}, {time.monotonic() - began:.0f} s] {message}", flush=True)
    return failed
