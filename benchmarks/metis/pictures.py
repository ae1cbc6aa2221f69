"""The figures: accuracy over time, and totals of requests and models exchanged."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from table_1 import Found, cases, labels

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
