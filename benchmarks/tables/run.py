"""Measure seconds and peak memory from the file of a large table to prepared clients.

    python benchmarks/tables/run.py --rows 1000000 4000000

Each measurement is a process of its own; the table has numbers, words, dates, gaps and eight clients.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pandas as pd


def table(rows: int) -> pd.DataFrame:
    """Return a made-up table of patients."""
    rng = np.random.default_rng(0)
    seen = pd.to_datetime("2020-01-01") + pd.to_timedelta(rng.integers(0, 1500, rows), unit="D")
    frame = pd.DataFrame({
        "site": rng.choice(list("abcdefgh"), rows), "age": rng.normal(60, 9, rows).round(1),
        "dose": rng.normal(size=rows).round(4), "income": rng.lognormal(3, 1, rows).round(2),
        "visits": rng.integers(0, 30, rows), "ward": rng.choice([f"ward {number}" for number in range(12)], rows),
        "smoker": rng.choice(["yes", "no"], rows), "seen": seen.strftime("%Y-%m-%d"),
    })  # fmt: skip
    frame["ill"] = np.where(frame.age + 9 * frame.dose > 60, "yes", "no")
    frame.loc[rng.random(rows) < 0.05, "age"] = np.nan
    return frame


def measured(path: str) -> dict[str, float]:
    """Return the seconds and the memory, GB, that it takes to make clients of a table, beside those of importing."""
    import sklearn.compose  # noqa: F401 - imported when a table is prepared

    from piebald import clients_from

    before, start = _highest(), time.perf_counter()
    clients_from(path, client="site", target="ill")
    return {"seconds": time.perf_counter() - start, "GB": _highest() - before}


def _highest() -> float:
    """Return the largest memory of this process so far, GB; `getrusage` would count that of its parent."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines["VmHWM"].split()[0]) / 2**20


def main() -> None:
    """Print a line for each table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1_000_000])
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.measure:
        print(json.dumps(measured(given.measure)))
        return
    print("| rows | file | GB | seconds | peak GB |\n|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        for rows in given.rows:
            frame = table(rows)
            for suffix, write in ((".csv", frame.to_csv), (".parquet", frame.to_parquet)):
                path = Path(folder) / f"rows{suffix}"
                write(path, index=False)
                command = [sys.executable, __file__, "--measure", str(path)]
                found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
                size = path.stat().st_size / 2**30
                print(f"| {rows:,} | {suffix} | {size:.2f} | {found['seconds']:.0f} | {found['GB']:.2f} |", flush=True)


if __name__ == "__main__":
    main()
