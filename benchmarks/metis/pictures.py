"""The figures: accuracy over time, totals of requests and models, and staleness of cycles."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import matplotlib
import matplotlib.pyplot as plt
import numpy as np
import table_1
from shared.markdown import table
from table_1 import Found, cases, labels

matplotlib.use("Agg")

NAMES = {"synchronous": "synchronous", "uneven": "fast_and_slow", "corrupted": "corrupted"}


def grid(panels: int, **shared: Any) -> tuple[Any, list[Any]]:
    """Return a figure with so many panels, three in a row at most, and the panels."""
    columns = min(panels, 3)
    rows = -(-panels // columns)
    figure, axes = plt.subplots(
        rows,
        columns,
        figsize=(max(6.5, 4.2 * columns), 3.4 * rows + 0.6),
        squeeze=False,
        layout="constrained",
        **shared,
    )
    for empty in axes.flat[panels:]:
        empty.remove()
    return figure, list(axes.flat[:panels])


def curves(found: Found, part: str, path: Path) -> None:
    """Plot accuracy over virtual seconds, one panel per case: means over seeds, with their range.

    Clients' own models, which are measured at the end only, are points there.
    """
    shown = cases(found, part)
    if not shown:
        path.unlink(missing_ok=True)
        return
    figure, panels = grid(len(shown), sharey="row")
    every = sorted({label for here, _, label in found if here == part})  # a policy has one colour in all panels
    for axes, case in zip(panels, shown, strict=True):
        for label in labels(found, part, case):
            number = every.index(label)
            runs = [np.array(run["curve"]).T for run in found[part, case, label]]
            times = np.unique(np.concatenate([run[0] for run in runs]))
            times = times[times <= min(run[0, -1] for run in runs)]
            values = np.stack([np.interp(times, *run) for run in runs])
            if len(times) <= 2:  # measured at the end alone: a line from the start would say what nobody has seen
                times, values = times[-1:], values[:, -1:]
                axes.vlines(times, values.min(0), values.max(0), color=f"C{number}", lw=1.4)
            style = "o" if len(times) == 1 else "-"
            axes.plot(times, values.mean(0), style, color=f"C{number}", label=label, lw=1.4, ms=4)
            axes.fill_between(times, values.min(0), values.max(0), color=f"C{number}", alpha=0.1, lw=0)
        axes.set(title=case, xlabel="virtual seconds")
        axes.grid(alpha=0.3)
        axes.set_ylabel("accuracy in percent")
    lines = {line.get_label(): line for axes in panels for line in axes.lines}
    figure.legend([lines[label] for label in every], every, fontsize=8, ncols=4, loc="outside lower center")
    figure.savefig(path, dpi=150)
    plt.close(figure)


def exchanged(found: Found, path: Path) -> None:
    """Plot totals by policy as figure 9 of the paper does: requests on the left axis, models on the right one.

    One panel for each cell, of fast and slow clients where there are such runs; models that were sent for evaluation
    are a part of all models, shown beside them.
    """
    part = "uneven" if cases(found, "uneven") else "synchronous"
    shown = cases(found, part)
    if not shown:
        path.unlink(missing_ok=True)
        return
    figure, panels = grid(len(shown))
    every = sorted({label for here, _, label in found if here == part})
    for axes, case in zip(panels, shown, strict=True):
        here = labels(found, part, case)
        places, right = np.arange(3), axes.twinx()
        width = 0.8 / len(here)
        for place, label in enumerate(here):
            runs, colour = found[part, case, label], f"C{every.index(label)}"
            totals = [statistics.mean(one[key] for one in runs) for key in ("updates", "models", "evaluation")]
            shift = (place - (len(here) - 1) / 2) * width
            axes.bar(places[:1] + shift, totals[:1], width, color=colour, label=label)
            right.bar(places[1:] + shift, totals[1:], width, color=colour)
        axes.set_xticks(places, ["update\nrequests", "models\nexchanged", "models for\nevaluation"])
        axes.set(title=case, ylabel="requests")
        right.set_ylabel("models")
    named = {label: bars for axes in panels for bars, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    figure.legend(named.values(), named.keys(), fontsize=8, ncols=4, loc="outside lower center")
    figure.savefig(path, dpi=150)
    plt.close(figure)


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


def adaptive_cases(found: Found) -> list[tuple[str, Sequence[dict[str, Any]]]]:
    """Return the cases of fast and slow clients in which clients decide when to ask, with their runs."""
    known = [case for case in table_1.cases(found, "uneven") if ("uneven", case, POLICY) in found]
    return [(case, found["uneven", case, POLICY]) for case in known]


def staleness_section(found: Found) -> list[str]:
    """Return the section of RESULTS.md."""
    lines = ["## Staleness of the first 20 validation cycles (figure 4)", ""]
    known = adaptive_cases(found)
    if not known:
        return [*lines, "Not run.", ""]
    lines += [
        "Steps in updates that were committed after a client got its model, its own among them; median of each client,",
        "largest first, mean over seeds.  The paper's figure has uniform sizes.", "",
    ]  # fmt: skip
    rows = []
    for case, runs in known:
        groups = [", ".join(f"{one:,.0f}" for one in group) for group in medians(runs)]
        both = [f"{statistics.median(_values(runs, kind)):,.0f}" for kind in range(len(KINDS))]
        rows.append([case, *groups, " and ".join(both)])
    heads = ["sizes, classes", "fast clients", "slow clients", "median of all cycles, fast and slow"]
    return [*lines, table(heads, rows, "---"), "", "![Staleness of the first cycles](staleness.png)", ""]


def _values(runs: Sequence[dict[str, Any]], kind: int) -> list[int]:
    return [
        one
        for run in runs
        for client, values in run["staleness"].items()
        if client % 2 == kind
        for one in values
    ]  # fmt: skip


def staleness_picture(found: Found, path: Path) -> None:
    """Plot the distributions of fast and slow clients, one panel a case, with their medians."""
    known = adaptive_cases(found)
    if not known:
        path.unlink(missing_ok=True)
        return
    figure, panels = grid(len(known))
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
    plt.close(figure)
