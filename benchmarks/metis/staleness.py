"""Figure 4: the effective staleness of each client's first 20 validation cycles, from the updates of the runs."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import pictures
import table_1
from table_1 import Found

FIRST = 20  # cycles that set a client's own measure (section V)
POLICY = "AsyncDVW, adaptive"  # whose requests end validation cycles
KINDS = ("fast", "slow")  # clients are fast, slow, fast, slow, ...


def first_cycles(trained: Sequence[dict[str, Any]]) -> dict[int, list[int]]:
    """Return the effective staleness of each client's first cycles, in optimizer steps.

    It is the number of steps in updates that were committed after the client got its model, its own among them
    (section V); every update of an asynchronous policy makes a version.
    """
    steps = defaultdict(int)
    for row in trained:
        steps[row["version"]] += row["steps"]
    committed = list(accumulate((steps[version] for version in range(max(steps, default=0) + 1)), initial=0))
    cycles = defaultdict(list)
    for row in sorted(trained, key=lambda row: row["version"]):
        cycles[row["client"]].append(committed[row["version"] + 1] - committed[row["version"] - row["staleness"]])
    return {client: values[:FIRST] for client, values in cycles.items()}


def medians(runs: Sequence[dict[str, Any]]) -> list[list[float]]:
    """Return each client's median, mean over the runs: those of fast clients, then those of slow ones."""
    clients = sorted(runs[0]["staleness"])
    each = {client: statistics.mean(statistics.median(run["staleness"][client]) for run in runs) for client in clients}
    return [[each[client] for client in clients if client % 2 == kind] for kind in range(len(KINDS))]


def cases(found: Found) -> list[tuple[str, Sequence[dict[str, Any]]]]:
    """Return the cases of fast and slow clients in which clients decide when to ask, with their runs."""
    known = [case for case in table_1.cases(found, "uneven") if ("uneven", case, POLICY) in found]
    return [(case, found["uneven", case, POLICY]) for case in known]


def judged(found: Found) -> tuple[str, str]:
    """Return our figures for the page, and the verdict: whether one class's clients are nearer than the two classes.

    Only uniform sizes, as in the paper, allow a verdict: a client with more rows trains longer, and is staler.
    """
    shown, alike = [], []
    every = cases(found)
    for case, runs in [one for one in every if one[0].startswith("uniform")] or every:  # the paper's, where there are
        fast, slow = medians(runs)
        within = max(max(group) / max(min(group), 1) for group in (fast, slow))
        middle = sorted(statistics.median(group) for group in (fast, slow))
        if case.startswith("uniform"):
            alike.append(within < middle[1] / max(middle[0], 1))
        ranges = [
            f"{min(group):,.0f} to {max(group):,.0f} ({kind})" for group, kind in zip((fast, slow), KINDS, strict=True)
        ]
        shown.append(f"{case}, medians of clients, in steps: {', '.join(ranges)}")
    if not shown:
        return "-", "not run at this scale"
    if not alike:
        return "; ".join(shown), "cannot be compared: sizes are not uniform here, and staleness follows them"
    return "; ".join(shown), "agrees" if all(alike) else "opposite: clients of one class differ more than the classes"


def section(found: Found) -> list[str]:
    """Return the section of RESULTS.md."""
    lines = ["## Staleness of the first 20 validation cycles (figure 4)", ""]
    known = cases(found)
    if not known:
        return [*lines, "Not run.", ""]
    lines += [
        "Steps in updates that were committed after a client got its model, its own among them; median of each client,",
        "largest first, mean over seeds.  The paper's figure has uniform sizes.", "",
        "| sizes, classes | fast clients | slow clients | median of all cycles, fast and slow |", "|---|---|---|---|",
    ]  # fmt: skip
    for case, runs in known:
        groups = [", ".join(f"{one:,.0f}" for one in group) for group in medians(runs)]
        both = [statistics.median(_values(runs, kind)) for kind in range(len(KINDS))]
        lines.append(f"| {case} | {' | '.join(groups)} | {both[0]:,.0f} and {both[1]:,.0f} |")
    return [*lines, "", "![Staleness of the first cycles](staleness.png)", ""]


def _values(runs: Sequence[dict[str, Any]], kind: int) -> list[int]:
    return [
        one
        for run in runs
        for client, values in run["staleness"].items()
        if client % 2 == kind
        for one in values
    ]  # fmt: skip


def picture(found: Found, path: Path) -> None:
    """Plot the distributions of fast and slow clients, one panel a case, with their medians."""
    known = cases(found)
    if not known:
        path.unlink(missing_ok=True)
        return
    figure, panels = pictures.grid(len(known))
    for axes, (case, runs) in zip(panels, known, strict=True):
        clients = sorted(runs[0]["staleness"])
        values = [[one for run in runs for one in run["staleness"][client]] for client in clients]
        boxes = axes.boxplot(values, positions=clients, widths=0.6, patch_artist=True, medianprops={"color": "black"})
        for client, box in zip(clients, boxes["boxes"], strict=True):
            box.set_facecolor(f"C{client % 2}")
            box.set_alpha(0.5)
        named = [boxes["boxes"][kind] for kind in range(len(KINDS))]
        axes.legend(named, [f"{kind} clients" for kind in KINDS], fontsize=8)
        axes.set(title=case, xlabel="client, the largest first", ylabel="effective staleness, steps", yscale="log")
        axes.grid(alpha=0.3, axis="y")
    figure.savefig(path, dpi=150)
    pictures.plt.close(figure)
