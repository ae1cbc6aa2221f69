"""All fuzzers: python benchmarks/robustness/run.py --out benchmarks/robustness

Bad calls, bad experiment files, kills, and hostile results of clients.  RESULTS.md is written to the folder, and the
exit code is 1 if anything ended with a raw exception or a crash.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from pathlib import Path

import api_fuzzer
import kills
import toml_fuzzer
from rows import Row

HERE = Path(__file__).parent


def everything(seed: int, calls: int, files: int, killed: int, results: int) -> list[Row]:
    """The rows of all fuzzers; hostile results need the messages of a federation."""
    rows = [*api_fuzzer.run(calls, seed), *toml_fuzzer.run(files, seed), *kills.run(killed, seed)]
    print(written(rows, seed), flush=True)
    if importlib.util.find_spec("results_fuzzer") is not None:
        import results_fuzzer

        rows += results_fuzzer.run(results, seed)
    return rows


def written(rows: list[Row], seed: int) -> str:
    """The rows as RESULTS.md."""
    lines = ["# Robustness", "", f"Written by `python benchmarks/robustness/run.py --seed {seed}`.", ""]
    lines += ["Refused: one sentence of the project's own errors.  Accepted: allowed, and rightly.  Raw: any other", ""]
    lines[-2:] = [
        lines[-2] + " exception, or a wrong",
        "value that was allowed.  Crashed: the process ended, or did not end.",
        "",
    ]
    lines += ["| subject | tried | refused | accepted | raw | crashed |", "|---|--:|--:|--:|--:|--:|"]
    lines += [f"| {r.subject} | {r.tried} | {r.refused} | {r.accepted} | {r.raw} | {r.crashed} |" for r in rows]
    sums = [sum(getattr(row, name) for row in rows) for name in ("tried", "refused", "accepted", "raw", "crashed")]
    lines += [f"| all | {' | '.join(map(str, sums))} |"]
    bad = [example for row in rows for example in getattr(row, "examples", ())]
    if bad:
        lines += ["", "Raw and crashed:", "", *(f"- `{' '.join(example.split())[:200]}`" for example in bad)]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=HERE)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--calls", type=int, default=1000)
    parser.add_argument("--files", type=int, default=1000)
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--results", type=int, default=1000)
    options = parser.parse_args()
    found = everything(options.seed, options.calls, options.files, options.kills, options.results)
    text = written(found, options.seed)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "RESULTS.md").write_text(text)
    print(text)
    sys.exit(any(row.raw or row.crashed for row in found))
