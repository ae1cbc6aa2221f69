"""Measure seconds and peak memory from the file of a large table to prepared clients, and to a trained model.

    python benchmarks/tables/run.py --rows 1000000 10000000

Each measurement is a process of its own; the table has numbers, words, dates, gaps and eight clients.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pandas as pd

sys.path.append(str(Path(__file__).parents[1]))  # for `shared`

from shared.measured import Watch, apart, of_tree
from shared.options import reader

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
    before, start = of_tree(), time.perf_counter()
    with Watch(of_tree, 0.1) as watch:
        if step == "clients":
            piebald.clients_from(path, client="site", target="ill")
        else:
            _run(path)
    peak = {name: max([base, *(one[name] for one in watch.seen)]) for name, base in before.items()}
    more = {name: (peak[name] - before[name]) / 2**20 for name in peak}
    return {"seconds": time.perf_counter() - start, "peak": more["Pss"], "anonymous": more["Pss_Anon"]}


def _run(path: str) -> None:
    """Run `piebald run`, for one round of one epoch."""
    from piebald.cli import main as piebald

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "run.toml"
        file.write_text(_EXPERIMENT.format(path=path))
        if code := piebald(["run", str(file), "--out", str(Path(folder) / "run"), "--quiet"]):
            raise SystemExit(code)


def main() -> None:
    """Print a line for each table."""
    if sys.argv[1:2] == ["measure"]:  # in a process of its own
        print(json.dumps(measured(*sys.argv[2:])))
        return
    given = reader(__doc__, rows=[1_000_000], suffixes=[".csv", ".parquet"], steps=["clients", "run"]).parse_args()
    print("| rows | file | GB | step | seconds | peak GB | anonymous GB |\n|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        for rows in given.rows:
            for suffix in given.suffixes:
                path = written(rows, Path(folder) / f"rows-{rows}{suffix}")
                for step in given.steps:
                    taken = apart(__file__, "measure", path, step)
                    size = path.stat().st_size / 2**30
                    print(
                        f"| {rows:,} | {suffix} | {size:.2f} | {step} | {taken['seconds']:.0f} | {taken['peak']:.2f} | "
                        f"{taken['anonymous']:.2f} |", flush=True
                    )  # fmt: skip


if __name__ == "__main__":
    main()
