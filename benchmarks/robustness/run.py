"""All fuzzers: python benchmarks/robustness/run.py

Bad calls, bad experiment files, damaged files of every format, kills, and hostile results of clients.  What each part
found is kept in rows.json as soon as it has ended, so that a run that was stopped goes on where it was; RESULTS.md is
made of that file.  The exit code is 1 if anything ended with a raw exception or a crash.

    python benchmarks/robustness/run.py --only results     # these parts anew, the others as they are in rows.json
    python benchmarks/robustness/run.py --table            # RESULTS.md from rows.json, nothing is run
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))  # for `shared`

import api_fuzzer
import file_fuzzer
import kills
import results_fuzzer
import toml_fuzzer
from rows import Row
from shared.options import reader

HERE = Path(__file__).parent
Part = Callable[[], list[Row]]


@dataclass(frozen=True)
class Found:
    """What a part found, and at which commit."""

    commit: str
    rows: list[Row]


TOLD = """\
Refused: one sentence of the project's own errors.  Accepted: allowed, and rightly.  Raw: any other exception, or a
wrong value that was allowed.  Crashed: the process ended, or did not end.
"""


def parts(seed: int, calls: int, files: int, formats: int, killed: int, results: int) -> dict[str, Part]:
    """Return what is run, by name."""
    made: dict[str, Part] = {
        "calls": lambda: api_fuzzer.run(calls, seed),
        "files": lambda: toml_fuzzer.run(files, seed),
        "formats": lambda: file_fuzzer.run(formats, seed),
        "kills": lambda: kills.run(killed, seed),
    }
    for name in results_fuzzer.RECIPES:
        made[f"results of {name}"] = lambda name=name: [results_fuzzer.row_of(name, results, seed)]
    return made


def commit() -> str:
    """The commit that is tried, "" where there is no git."""
    done = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=HERE, capture_output=True, text=True, check=False
    )
    return done.stdout.strip()


def written(found: Mapping[str, Found], seed: int) -> str:
    """The rows as RESULTS.md, and the attacks of attacks.md below them."""
    rows = [row for part in found.values() for row in part.rows]
    lines = ["# Robustness", "", f"Written by `python benchmarks/robustness/run.py --seed {seed}`.", "", TOLD]
    lines += ["| subject | tried | refused | accepted | raw | crashed | commit |", "|---|--:|--:|--:|--:|--:|---|"]
    for part in found.values():
        for r in part.rows:
            numbers = (r.tried, r.refused, r.accepted, r.raw, r.crashed)
            lines.append(f"| {r.subject} | {' | '.join(map(str, numbers))} | {part.commit} |")
    sums = [sum(getattr(row, name) for row in rows) for name in ("tried", "refused", "accepted", "raw", "crashed")]
    lines += [f"| all | {' | '.join(map(str, sums))} | |"]
    bad = [example for row in rows if not row.good for example in row.examples]
    if bad:
        lines += ["", "Raw and crashed:", "", *(f"- `{' '.join(example.split())[:200]}`" for example in bad)]
    return "\n".join([*lines, "", (HERE / "attacks.md").read_text("utf-8")])


def main() -> int:
    """Run what is not there yet, and write the table."""
    parser = reader(__doc__, out=HERE, seed=0, calls=1000, files=1000, formats=200, kills=30, results=1000, table=False)
    parser.add_argument("--only", default="", help="run the parts whose names begin so anew")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    kept, key = options.out / "rows.json", f"seed {options.seed}"
    known = json.loads(kept.read_text()).get(key, {}) if kept.exists() else {}
    found = {name: Found(part["commit"], [Row(**row) for row in part["rows"]]) for name, part in known.items()}
    wanted = parts(options.seed, options.calls, options.files, options.formats, options.kills, options.results)
    for name, part in {} if options.table else wanted.items():
        if name not in found or (options.only and name.startswith(options.only)):
            print(name, flush=True)
            found[name] = Found(commit(), part())
            found = {one: found[one] for one in wanted if one in found}
            kept.write_text(json.dumps({key: {one: asdict(what) for one, what in found.items()}}, indent=1) + "\n")
    text = written(found, options.seed)
    (options.out / "RESULTS.md").write_text(text)
    print(text)
    return int(any(not row.good for part in found.values() for row in part.rows))


if __name__ == "__main__":
    sys.exit(main())
