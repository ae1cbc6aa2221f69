"""A real federation on this machine: python benchmarks/federation/run.py

Seconds of a task for three sizes of the model, updates per second over 2 to 16 sites, peak memory, and the cost of
faults at random moments.  Writes RESULTS.md beside this file, or into --out.

--parts speed       only these parts (speed, crowd, secure_aggregation, faults), each in a process of its own; the
                    others' numbers are kept
--times 20          how often each fault is tried
--faults wire_cut   only these faults
--brief             a check of two minutes: two sizes, two sites, three faults three times each; fails where anything
                    was lost
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))  # for `shared`

import parties
import secure_aggregation
import speed
from shared.markdown import table
from shared.options import reader
from shared.stored import texts

HERE = Path(__file__).parent
TEXTS = texts(HERE / "page.md")
TOLERANCE = 1e-4


def measure(parts: list[str], times: int, brief: bool, keep: Path, chosen: list[str]) -> dict[str, Any]:
    """All numbers; they are written after each measurement, since all of them take a while."""
    found: dict[str, Any] = json.loads(keep.read_text()) if keep.exists() else {}
    jobs = {
        "speed": [(speed.latency, (size,)) for size in (["tiny", "4 MB"] if brief else speed.SIZES)],
        "crowd": [(speed.updates, (sites,)) for sites in ((2,) if brief else speed.CROWDS)],
        "secure_aggregation": [
            (secure_aggregation.measure, case)
            for case in (secure_aggregation.CASES[:1] if brief else secure_aggregation.CASES)
        ],
        "faults": [(parties.disturb, (name, times)) for name in chosen],
    }
    for part in parts:
        rows = {str(row[next(iter(row))]): row for row in found.get(part, [])}
        for job, arguments in jobs[part]:
            row = apart(job, arguments)
            print(row, flush=True)
            rows[str(row[next(iter(row))])] = row
            found[part] = list(rows.values())
            keep.write_text(json.dumps(found, indent=1) + "\n")
    return found


def apart(job: Any, arguments: tuple[Any, ...]) -> Any:
    """A measurement in a process of its own, so that its memory is its own."""
    import multiprocessing

    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(job, arguments)


def page(found: dict[str, Any]) -> str:
    """The results as a page."""
    facts = {"machine": platform.machine(), "cores": os.cpu_count(), "python": platform.python_version()}
    tables: dict[str, tuple[list[str], Callable[[dict[str, Any]], list[str]]]] = {
        "speed": (["model", "MB each way", "median s", "longest s", "step s", "server MB", "site MB"], lambda r: [
            r["size"], f"{r['megabytes']:.3g}", *(f"{r[name]:.3f}" for name in ("median", "longest", "step")),
            *(f"{r[name]:.0f}" for name in ("server", "site")),
        ]),
        "crowd": (["sites", "updates a second"], lambda r: [r["sites"], f"{r['updates']:.0f}"]),
        "secure_aggregation": (["", "keys", "shares", "mask", "unmask", "server", "update MB", "up KB", "down KB"],
                               lambda r: [
            r["case"], f"{r['advertise_keys']:.1f}", f"{r['share_keys']:.1f}", f"{r['masking']:.0f}",
            f"{r['unmasking']:.1f}", f"{r['server']:.0f}", f"{r['update'] / 1e6:.1f}", f"{r['up'] / 1e3:.1f}",
            f"{r['down'] / 1e3:.1f}",
        ]),
        "faults": (["fault", "times", "rounds", "lost", "twice", "difference", "median s", "longest s"], lambda r: [
            said(r["fault"]), *(str(r[name]) for name in ("times", "rounds", "lost", "twice")), f"{r['apart']:.1e}",
            *(f"{r[name]:.1f}" for name in ("median", "longest")),
        ]),
    }  # fmt: skip
    parts = [TEXTS["head"].format(**facts)]
    for name, (heads, cells) in tables.items():
        if name == "secure_aggregation" and "flower" in found:
            parts.append(flower(found["flower"], found.get("speed", []), found.get("crowd", [])))
        if name in found:
            parts.append(f"{TEXTS[name.replace('_', ' ')]}\n{table(heads, map(cells, found[name]), '---')}\n")
    if missing := unmeasured(found):
        parts.append(f"## Not measured yet\n\n{'; '.join(missing)}.\n")
    return "\n".join(parts)


def flower(theirs: dict[str, Any], speed: list[Any], crowd: list[Any]) -> str:
    """Flower's SuperLink and SuperNodes on the same task."""
    ours = {row["size"]: row["median"] for row in speed} | {row["sites"]: row["updates"] for row in crowd}
    rows = [("seconds of a task, {}", row["size"], row["median"], ".3f") for row in theirs["speed"]]
    rows += [("updates a second, {} sites", row["sites"], row["updates"], ".3g") for row in theirs["crowd"]]
    lines = [
        [what.format(case), f"{ours.get(case, float('nan')):{form}}", f"{value:{form}}"]
        for what, case, value, form in rows
    ]
    return f"{TEXTS['flower']}\n{table(['', 'Piebald', 'Flower'], lines, '---')}\n"


def beside(python: str) -> dict[str, Any]:
    """What the script for Flower measures, in its own environment."""
    command = [python, str(HERE / "peers" / "with_flower.py"), "--sizes", "tiny", "4 MB", "--crowds", "2", "4"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, cwd=HERE / "peers")
    measured: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return measured


def unmeasured(found: dict[str, Any]) -> list[str]:
    """What is not in the tables yet."""
    wanted = {
        "speed": ("tasks of the sizes", [str(size) for size in speed.SIZES]),
        "crowd": ("updates a second over so many sites", [str(sites) for sites in speed.CROWDS]),
        "faults": ("twenty tries of each of these faults", [said(name) for name in parties.FAULTS]),
    }
    there = {
        "speed": {row["size"] for row in found.get("speed", [])},
        "crowd": {str(row["sites"]) for row in found.get("crowd", [])},
        "faults": {said(row["fault"]) for row in found.get("faults", []) if row["times"] >= 20},
    }
    left = {part: [name for name in names if name not in there[part]] for part, (_, names) in wanted.items()}
    return [f"{wanted[part][0]}: {', '.join(names)}" for part, names in left.items() if names]


def said(fault: str) -> str:
    """A fault in words."""
    return (parties.FAULTS[fault].__doc__ or "").rstrip(".").lower()


def check(found: dict[str, Any]) -> None:
    """Fail where anything was lost."""
    for row in found.get("faults", []):
        if row["lost"] or row["twice"] or row["apart"] > TOLERANCE:
            raise SystemExit(f"something was lost: {row}")


def main() -> None:
    parser = reader(__doc__, out=HERE, times=20, brief=False)
    parser.add_argument("--parts", nargs="*", default=["speed", "crowd", "secure_aggregation", "faults"])
    parser.add_argument("--faults", nargs="+", choices=list(parties.FAULTS))
    parser.add_argument("--flower", metavar="PYTHON", help="measure Flower beside, with this interpreter")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    chosen = given.faults or (["site_killed", "server_killed", "wire_cut"] if given.brief else list(parties.FAULTS))
    times = 3 if given.brief else given.times
    found = measure(given.parts, times, given.brief, given.out / "results.json", chosen)
    if given.flower:
        found["flower"] = beside(given.flower)
        (given.out / "results.json").write_text(json.dumps(found, indent=1) + "\n")
    (given.out / "RESULTS.md").write_text(page(found))
    check(found)


if __name__ == "__main__":
    main()
