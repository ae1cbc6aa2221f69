"""Measure seconds and peak memory from the file of a large table to prepared clients, and to a trained model.

    python benchmarks/tables/run.py --rows 1000000 10000000

Each measurement is a process of its own; the table has numbers, words, dates, gaps and eight clients.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pandas as pd

_CHUNK = 1_000_000  # rows that are made and written at once
_EXPERIMENT = """
rounds = 1
[data]
source = "{path}"
client = "site"
target = "ill"
[model]
name = "logistic"
[recipe]
name = "fedavg"
epochs = 1
batch = 1024
"""


def tables(rows: int) -> Iterator[pd.DataFrame]:
    """Yield the parts of a made-up table of patients."""
    for first in range(0, rows, _CHUNK):
        rng, count = np.random.default_rng(first), min(_CHUNK, rows - first)
        seen = pd.to_datetime("2020-01-01") + pd.to_timedelta(rng.integers(0, 1500, count), unit="D")
        frame = pd.DataFrame({
            "site": rng.choice(list("abcdefgh"), count), "age": rng.normal(60, 9, count).round(1),
            "dose": rng.normal(size=count).round(4), "income": rng.lognormal(3, 1, count).round(2),
            "visits": rng.integers(0, 30, count), "ward": rng.choice([f"ward {number}" for number in range(12)], count),
            "smoker": rng.choice(["yes", "no"], count), "seen": seen.strftime("%Y-%m-%d"),
        })  # fmt: skip
        frame["ill"] = np.where(frame.age + 9 * frame.dose > 60, "yes", "no")
        frame.loc[rng.random(count) < 0.05, "age"] = np.nan
        yield frame


def written(rows: int, path: Path) -> Path:
    """Write the table as CSV or Parquet, by the suffix of the path."""
    import pyarrow
    from pyarrow import parquet

    writer = None
    for number, frame in enumerate(tables(rows)):
        if path.suffix == ".csv":
            frame.to_csv(path, index=False, header=not number, mode="a")
            continue
        part = pyarrow.Table.from_pandas(frame, preserve_index=False)
        writer = writer or parquet.ParquetWriter(path, part.schema)
        writer.write_table(part)
    if writer is not None:
        writer.close()
    return path


def measured(path: str, step: str) -> dict[str, float]:
    """Return the seconds and the memory, GB, that a step takes beside those of importing.

    Args:
        path: the table.
        step: "clients" for prepared clients, "run" for a run of one round, with a pass over all training rows.
    """
    import piebald

    small = next(tables(1000))
    piebald.clients_from(small, client="site", target="ill", prepare="federated")  # imports what is needed
    before, peak, start, done = _memory(), _memory(), time.perf_counter(), threading.Event()

    def watch() -> None:
        while not done.wait(0.1):
            peak.update({name: max(value, peak[name]) for name, value in _memory().items()})

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        if step == "clients":
            piebald.clients_from(path, client="site", target="ill")
        else:
            _run(path)
    finally:
        done.set()
        watcher.join()
    return {"seconds": time.perf_counter() - start, **{name: peak[name] - before[name] for name in peak}}


def _run(path: str) -> None:
    """Run `piebald run`, for one round of one epoch."""
    from piebald.cli import main as piebald

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "run.toml"
        file.write_text(_EXPERIMENT.format(path=path))
        if code := piebald(["run", str(file), "--out", str(Path(folder) / "run"), "--quiet"]):
            raise SystemExit(code)


def _memory() -> dict[str, float]:
    """Return the memory of this process and of those that it has started now, GB: all of it, and what is in no file.

    The first counts pages of files that the system keeps as long as nobody else needs the memory; a page that several
    processes have counts once.
    """
    kilobytes, processes = {"Pss": 0, "Pss_Anon": 0}, [Path("/proc/self")]
    for process in processes:
        try:
            for line in (process / "smaps_rollup").read_text().splitlines():
                if (name := line.partition(":")[0]) in kilobytes:
                    kilobytes[name] += int(line.split()[1])
            for task in (process / "task").iterdir():
                processes += [Path("/proc") / child for child in (task / "children").read_text().split()]
        except (FileNotFoundError, ProcessLookupError):  # it has ended
            continue
    return {"peak": kilobytes["Pss"] / 2**20, "anonymous": kilobytes["Pss_Anon"] / 2**20}


def main() -> None:
    """Print a line for each table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1_000_000])
    parser.add_argument("--suffixes", nargs="+", default=[".csv", ".parquet"])
    parser.add_argument("--steps", nargs="+", default=["clients", "run"])
    parser.add_argument("--measure", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.measure:
        print(json.dumps(measured(*given.measure)))
        return
    print("| rows | file | GB | step | seconds | peak GB | anonymous GB |\n|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        for rows in given.rows:
            for suffix in given.suffixes:
                path = written(rows, Path(folder) / f"rows-{rows}{suffix}")
                for step in given.steps:
                    command = [sys.executable, __file__, "--measure", str(path), step]
                    taken = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
                    size = path.stat().st_size / 2**30
                    print(
                        f"| {rows:,} | {suffix} | {size:.2f} | {step} | {taken['seconds']:.0f} | {taken['peak']:.2f} | "
                        f"{taken['anonymous']:.2f} |", flush=True
                    )  # fmt: skip


if __name__ == "__main__":
    main()
