"""Measure peak memory, also that of pfl-research, and seconds from the start of Python to the first round's end.

    python benchmarks/simulator/footprint.py --peers build/peers

Memory is that of the whole process tree, shared pages counted once (PSS, sampled fifty times a second; Linux only).
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))  # for `shared`

from run import HERE, PEERS, VENVS
from shared.measured import of_tree, printed
from shared.options import reader


def watched(command: list[str], folder: Path) -> tuple[str, float]:
    """A command's output, and the peak memory of it and all its children, GB."""
    with tempfile.TemporaryFile("w+") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.DEVNULL, cwd=folder)
        peak = 0
        while process.poll() is None:
            peak = max(peak, of_tree(process.pid)["Pss"])
            time.sleep(0.02)
        if process.returncode:
            raise subprocess.CalledProcessError(process.returncode, command)
        out.seek(0)
        return out.read(), peak / 2**20


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
    parser = reader(__doc__, ["one"], times=3, workloads=["W1", "W2"])
    parser.add_argument("--peers", type=Path, help="a folder of virtual environments, see README")
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
    return statistics.median(float(printed(__file__, "--one", name)) for _ in range(times))


if __name__ == "__main__":
    main()
