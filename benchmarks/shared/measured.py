"""Measurements of time and memory: in turns, so that other work on the machine affects all alike, or in processes."""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any


def seconds(work: Callable[[], Any], clock: Callable[[], float] = time.perf_counter) -> float:
    """Return the seconds that one call takes, by the wall or by another clock."""
    began = clock()
    work()
    return clock() - began


def in_turns(works: Mapping[str, Callable[[], float]], repeats: int) -> dict[str, list[float]]:
    """Return what each measurement gives, so many times in turns."""
    found: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(repeats):
        for name, work in works.items():
            found[name].append(work())
    return found


def ratios(ours: Sequence[float], base: Sequence[float]) -> tuple[float, float, float]:
    """Return the median, the least and the largest ratio of pairs that were measured one after the other."""
    each = [one / other for one, other in zip(ours, base, strict=True)]
    return statistics.median(each), min(each), max(each)


def spread(values: Sequence[float], form: str = ".2f") -> str:
    """Format the median of values, with the least and the largest."""
    return f"{statistics.median(values):{form}} ({min(values):{form}} to {max(values):{form}})"


def printed(*words: object, python: str | Path = sys.executable, **more: Any) -> str:
    """Return the last line that a program prints in a process of its own.

    Args:
        words: the script and its arguments.
        python: what starts it.
        more: further arguments of `subprocess.run`.

    Raises:
        RuntimeError: with the last line of its errors.
    """
    command = [str(python), *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, **more)
    if done.returncode:
        raise RuntimeError((done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1])
    return done.stdout.splitlines()[-1]


def apart(*words: object, **more: Any) -> Any:
    """Return the JSON value that a program prints last in a process of its own, see `printed`."""
    return json.loads(printed(*words, **more))


def megabytes(what: str, pid: int | str = "self") -> float:
    """Return memory of a process as Linux counts it in /proc/PID/status, NaN elsewhere; `VmHWM` is the peak so far."""
    status = Path(f"/proc/{pid}/status")
    lines = status.read_text().splitlines() if status.exists() else []
    return next((int(line.split()[1]) / 1000 for line in lines if line.startswith(f"{what}:")), float("nan"))


def of_tree(pid: int | str = "self") -> dict[str, int]:
    """Return the memory of a process and of all that it has started, kB; shared pages count once (Linux).

    `Pss` has all pages, also those of files that the system keeps while nobody else needs the memory, `Pss_Anon` what
    is in no file.
    """
    found, processes = {"Pss": 0, "Pss_Anon": 0}, [Path(f"/proc/{pid}")]
    for process in processes:
        try:
            for line in (process / "smaps_rollup").read_text().splitlines():
                if (name := line.partition(":")[0]) in found:
                    found[name] += int(line.split()[1])
            for task in (process / "task").iterdir():
                processes += [Path("/proc") / child for child in (task / "children").read_text().split()]
        except (FileNotFoundError, ProcessLookupError):  # it has ended
            continue
    return found


def children(pid: int | str) -> list[str]:
    """Return all processes below one (Linux)."""
    try:
        mine = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:  # it has just ended
        return []
    return mine + [one for child in mine for one in children(child)]


def seconds_of(pid: str) -> float:
    """Return the processor seconds of a process (Linux)."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


class Watch:
    """Reads what a function returns every so often, in a thread, while it is open.

    Args:
        read: the function.
        every: seconds between two readings.

    Attributes:
        seen: what was read.
    """

    def __init__(self, read: Callable[[], Any], every: float) -> None:
        self.seen: list[Any] = []
        self._read, self._every, self._over = read, every, threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._over.wait(self._every):
            self.seen.append(self._read())


def processor() -> str:
    """Return the name of the processor."""
    about = Path("/proc/cpuinfo")
    lines = about.read_text().splitlines() if about.exists() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or "a CPU")


def machine() -> str:
    """Return the architecture, the number of cores, the system and the version of Python."""
    return f"{platform.machine()}, {os.cpu_count()} cores, {platform.system()}, Python {platform.python_version()}"
