"""The figures: accuracy over time, and totals of requests and models exchanged."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np

matplotlib.use("Agg")
import matplotlib.pyplot as plt

NAMES = {"synchronous": "synchronous", "uneven": "fast_and_slow", "corrupted": "corrupted"}


def curves(found: dict[tuple[str, str, str], list[dict[str, Any]]], part: str, path: Path) -> None:
    """Plot accuracy over virtual seconds, one panel per case: means over seeds, with their range."""
    cases = sorted({case for here, case, _ in found if here == part})
    if not cases:
        path.unlink(missing_ok=True)
        return
    figure, panels = plt.subplots(
        1, len(cases), figsize=(max(6.5, 4.2 * len(cases)), 4), squeeze=False, sharey=True, layout="constrained"
    )
    for axes, case in zip(panels[0], cases, strict=True):
        labels = sorted(label for here, there, label in found if (here, there) == (part, case))
        for number, label in enumerate(labels):
            runs = [np.array(run["curve"]).T for run in found[part, case, label]]
            times = np.unique(np.concatenate([run[0] for run in runs]))
            times = times[times <= min(run[0, -1] for run in runs)]
            values = np.stack([np.interp(times, *run) for run in runs])
            axes.plot(times, values.mean(0), color=f"C{number}", label=label, lw=1.4)
            axes.fill_between(times, values.min(0), values.max(0), color=f"C{number}", alpha=0.1, lw=0)
        axes.set(title=case, xlabel="virtual seconds")
        axes.grid(alpha=0.3)
    panels[0][0].set_ylabel("accuracy in percent")
    panels[0][-1].legend(fontsize=7)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def exchanged(found: dict[tuple[str, str, str], list[dict[str, Any]]], path: Path) -> None:
    """Plot totals by policy as figure 9 of the paper does: requests on the left axis, models on the right one.

    One panel for each comparison; models that were sent for evaluation are a part of all models, shown beside them.
    """
    cases = sorted({(part, case) for part, case, _ in found if part != "corrupted"})
    if not cases:
        path.unlink(missing_ok=True)
        return
    figure, panels = plt.subplots(len(cases), 1, figsize=(9.5, 3.2 * len(cases)), squeeze=False, layout="constrained")
    for axes, (part, case) in zip(panels[:, 0], cases, strict=True):
        labels = sorted(label for here, there, label in found if (here, there) == (part, case))
        places, right = np.arange(3), axes.twinx()
        width = 0.8 / len(labels)
        for number, label in enumerate(labels):
            runs = found[part, case, label]
            totals = [statistics.mean(run[key] for run in runs) for key in ("updates", "models", "evaluation")]
            shift = (number - (len(labels) - 1) / 2) * width
            axes.bar(places[:1] + shift, totals[:1], width, color=f"C{number}", label=label)
            right.bar(places[1:] + shift, totals[1:], width, color=f"C{number}")
        axes.set_xticks(places, ["update requests", "models exchanged", "models for evaluation"])
        axes.set(title=f"{part}: {case}", ylabel="requests")
        right.set_ylabel("models")
        axes.legend(fontsize=7, loc="upper left", bbox_to_anchor=(1.1, 1.0))  # beside the bars, not over them
    figure.savefig(path, dpi=150)
    plt.close(figure)
