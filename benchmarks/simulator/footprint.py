"""Measure peak memory, also that of pfl-research, and seconds from the start of Python to the first round's end.

    python benchmarks/simulator/footprint.py --peers build/peers

Memory is that of the whole process tree, shared pages counted once (PSS, sampled fifty times a second; Linux only).
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from run import HERE, PEERS, VENVS


def watched(command: list[str], folder: Path) -> tuple[str, float]:
    """A command's output, and the peak memory of it and all its children, GB."""
    with tempfile.TemporaryFile("w+") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.DEVNULL, cwd=folder)
        peak = 0
        while process.poll() is None:
            peak = max(peak, _pages(process.pid))
            time.sleep(0.02)
        if process.returncode:
            raise subprocess.CalledProcessError(process.returncode, command)
        out.seek(0)
        return out.read(), peak / 2**20


def _pages(pid: int) -> int:
    """Memory of a process and its children, kB, each shared page in equal parts to those that share it."""
    try:
        rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:  # it has just ended
        return 0
    mine = sum(int(line.split()[1]) for line in rollup.splitlines() if line.startswith("Pss:"))
    return mine + sum(_pages(int(child)) for child in children)


def first_round(name: str) -> float:
    """Seconds since this process began until the first round ends, without making the random data."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    began = time.perf_counter()
    from workloads import WORKLOADS

    import piebald

    work = WORKLOADS[name]
    imported = time.perf_counter()
    clients, model = work.data(), work.network()
    made = time.perf_counter()
    recipe = piebald.recipes.fedavg(cohort=work.cohort, lr=0.05, batch=20)
    piebald.run(recipe, clients, model, rounds=1, evaluate_every=0)
    return age + imported - began + time.perf_counter() - made


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--times", type=int, default=3)
    parser.add_argument("--workloads", nargs="+", default=["W1", "W2"])
    parser.add_argument("--peers", type=Path, help="a folder of virtual environments, see README")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(first_round(options.one))
        return
    print("| workload | | peak memory, GB | seconds to the first round's end |\n| --- | --- | --- | --- |")
    for name in options.workloads:
        run = [sys.executable, "run.py", "--one"]
        rows = {what: ([*run, what, name], HERE) for what in ("bare", "piebald", "piebald with a run folder")}
        for what in ("pfl, 1 process", "pfl, 2 processes") if options.peers else ():
            script, (start, *rest) = PEERS[what]
            program = options.peers.absolute() / VENVS.get(what, "pfl") / "bin" / start
            rows[what] = ([str(program), *rest, script, name], HERE / "peers")
        for what, (command, folder) in rows.items():
            peak = statistics.median(watched(command, folder)[1] for _ in range(options.times))
            seconds = "" if what != "piebald" else f"{_median_start(name, options.times):.2f}"
            print(f"| {name} | {what} | {peak:.2f} | {seconds} |", flush=True)


def _median_start(name: str, times: int) -> float:
    command = [sys.executable, __file__, "--one", name]
    found = [subprocess.run(command, capture_output=True, text=True, check=True, cwd=HERE) for _ in range(times)]
    return statistics.median(float(done.stdout.split()[-1]) for done in found)


if __name__ == "__main__":
    main()
