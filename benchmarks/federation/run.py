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

import argparse
import json
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import faults
import parties
import secure_aggregation
import speed

HERE = Path(__file__).parent
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
        "faults": [(faults.disturb, (name, times)) for name in chosen],
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
    lines = [
        "# A real federation on one machine", "",
        f"`python benchmarks/federation/run.py` on {platform.machine()}, {os.cpu_count()} cores, Linux, Python "
        f"{platform.python_version()}; loopback, TLS 1.3 with certificates on both sides.  The machine was "
        "shared with other work.", "",
    ]  # fmt: skip
    if "speed" in found:
        lines += [
            "## Seconds of a task", "",
            "From submitting the task to receiving the update: the model is sent down, the site takes one optimiser "
            "step on ten rows, writes the update to its disk, and sends it up.  *Step* is the same without the "
            "network.  Memory is the peak of each process.", "",
            "| model | MB each way | median s | longest s | step s | server MB | site MB |",
            "|---|---|---|---|---|---|---|",
            *(f"| {r['size']} | {r['megabytes']:.3g} | {r['median']:.3f} | {r['longest']:.3f} | {r['step']:.3f} | "
              f"{r['server']:.0f} | {r['site']:.0f} |" for r in found["speed"]), "",
        ]  # fmt: skip
    if "crowd" in found:
        lines += [
            "## Updates a second", "",
            "A tiny model; each site gets the next task as soon as its update is there; all processes share the "
            "cores.", "",
            "| sites | updates a second |", "|---|---|",
            *(f"| {r['sites']} | {r['updates']:.0f} |" for r in found["crowd"]), "",
        ]  # fmt: skip
    if "flower" in found:
        lines += flower(found["flower"], found.get("speed", []), found.get("crowd", []))
    if "secure_aggregation" in found:
        lines += [
            "## Secure aggregation", "",
            "Milliseconds of CPU time, one thread, for an update of 1,000,000 numbers; the protocol without the "
            "network.  One in ten clients drops out after training.  *Keys*, *shares*, *mask* and *unmask*: the steps "
            "of one client, medians; *server*: all of its work for one round.  Up and down: the key rounds of one "
            "client, without its update.  Clients are simulated; between sites there is also a signature of 1,024 "
            "bytes per client.", "",
            "| | keys | shares | mask | unmask | server | update MB | up KB | down KB |",
            "|---|---|---|---|---|---|---|---|---|",
            *(f"| {r['case']} | {r['advertise_keys']:.1f} | {r['share_keys']:.1f} | {r['masking']:.0f} | "
              f"{r['unmasking']:.1f} | {r['server']:.0f} | {r['update'] / 1e6:.1f} | {r['up'] / 1e3:.1f} | "
              f"{r['down'] / 1e3:.1f} |" for r in found["secure_aggregation"]), "",
        ]  # fmt: skip
    if "faults" in found:
        lines += [
            "## Faults", "",
            "Three sites, synchronous HDAFL with momentum that sites keep.  Each fault is caused at random moments of "
            "one run; then the run's model is compared with that of an undisturbed simulated run of as many rounds "
            "(largest difference of any parameter).  *Lost* and *twice*: updates that should have counted in a round "
            "and did not, or counted twice.  Seconds are from the end of the fault to the end of the next round, which "
            "needs all three sites: a process that restarts imports torch first.", "",
            "| fault | times | rounds | lost | twice | difference | median s | longest s |",
            "|---|---|---|---|---|---|---|---|",
            *(f"| {said(r['fault'])} | {r['times']} | {r['rounds']} | {r['lost']} | {r['twice']} | {r['apart']:.1e} | "
              f"{r['median']:.1f} | {r['longest']:.1f} |" for r in found["faults"]), "",
        ]  # fmt: skip
    if missing := unmeasured(found):
        lines += ["## Not measured yet", "", f"{'; '.join(missing)}.", ""]
    return "\n".join(lines)


def flower(theirs: dict[str, Any], speed: list[Any], crowd: list[Any]) -> list[str]:
    """Flower's SuperLink and SuperNodes on the same task."""
    ours = {row["size"]: row["median"] for row in speed} | {row["sites"]: row["updates"] for row in crowd}
    rows = [("seconds of a task, {}", row["size"], row["median"], ".3f") for row in theirs["speed"]]
    rows += [("updates a second, {} sites", row["sites"], row["updates"], ".3g") for row in theirs["crowd"]]
    return [
        "## Compared with Flower", "",
        "`python benchmarks/federation/run.py --parts --flower PYTHON`, where PYTHON is the interpreter of an "
        "environment with flwr 1.41.0 and torch: one SuperLink and one SuperNode per site, on loopback, without TLS, "
        "with Flower's defaults.  A SuperNode starts a process for each message, which first imports torch, and polls "
        "for messages; Piebald's sites are long-running processes.  So this compares both frameworks with their "
        "defaults, not their network protocols.", "",
        "| | Piebald | Flower |", "|---|---|---|",
        *(f"| {what.format(case)} | {ours.get(case, float('nan')):{form}} | {value:{form}} |"
          for what, case, value, form in rows), "",
    ]  # fmt: skip


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
    reader = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    reader.add_argument("--out", type=Path, default=HERE)
    reader.add_argument("--parts", nargs="*", default=["speed", "crowd", "secure_aggregation", "faults"])
    reader.add_argument("--times", type=int, default=20)
    reader.add_argument("--faults", nargs="+", choices=list(parties.FAULTS))
    reader.add_argument("--flower", metavar="PYTHON", help="measure Flower beside, with this interpreter")
    reader.add_argument("--brief", action="store_true")
    given = reader.parse_args()
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
