"""Write RESULTS.md and the figures from run folders."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import settings

from piebald.report.tables import History

matplotlib.use("Agg")
import matplotlib.pyplot as plt

Curve = list[tuple[float, float]]  # (virtual seconds, accuracy on the common test set)


def read(out: Path) -> dict[tuple[str, str, str], list[dict[str, Any]]]:
    """Return, by part, case and recipe, what the tables need of each seed's run."""
    found = defaultdict(list)
    for database in sorted(out.glob("*/*/*/seed-*/run.db")):
        with History(database.parent) as run:
            if run.meta.get("status") != "finished":
                continue
            times = {0: 0.0} | {row["version"]: row["time"] for row in run.rounds}
            common = [row for row in run.scores if row["split"] == "common" and row["metric"] == "accuracy"]
            curve = sorted((times[row["version"]], row["value"]) for row in common)
            trained = [row for row in run.results if row["kind"] == "train" and row["status"] == "ok"]
            size = 4 * run.meta["shared"]
            found[database.parts[-5], database.parts[-4], run.label].append(
                {
                    "seed": run.seed,
                    "curve": curve,
                    "updates": len(trained),
                    "steps": sum(row["steps"] for row in trained) / max(1, len(trained)),
                    "models": sum(row["bytes_down"] + row["bytes_up"] for row in run.results) / size / len(trained),
                    "shares": shares(trained),
                }
            )
    return found


def shares(trained: Sequence[dict[str, Any]]) -> list[float]:
    """Return each client's mean share of the average, over the second half of the server steps."""
    half = max(row["version"] for row in trained) / 2
    found = defaultdict(list)
    for row in trained:
        if row["version"] >= half:
            found[row["client"]].append(row["weight"])
    return [statistics.mean(found[client]) for client in sorted(found)]


def late(curve: Curve) -> float:
    """Return the mean over the second half of a curve's evaluations."""
    return statistics.mean(value for _, value in curve[len(curve) // 2 :])


def write(out: Path, results: Path, scale: settings.Scale) -> str:
    """Write the text and the figures; return the path of the text."""
    found = read(out)
    results.mkdir(parents=True, exist_ok=True)
    for part, name in (("synchronous", "synchronous"), ("uneven", "fast_and_slow"), ("corrupted", "corrupted")):
        curves(found, part, results / f"{name}.png")
    exchanged(found, results / "models_exchanged.png")
    path = results / "RESULTS.md"
    notes = path.read_text().partition("<!-- notes -->")[2] if path.exists() else "\n"
    path.write_text(text(found, scale) + "<!-- notes -->" + notes)
    return str(path)


def text(found: dict[tuple[str, str, str], list[dict[str, Any]]], scale: settings.Scale) -> str:
    """Return the text with its tables."""
    lines = [
        "# Metis on CIFAR-10", "",
        "`python benchmarks/metis/run.py` (`--scale full --device cuda` for the full scale).  Ten clients,",
        f"{'all' if scale.rows is None else f'{scale.rows:,}'} training images of {scale.side} x {scale.side} pixels"
        f"{'' if scale.side == settings.SIDE else ' (means of squares of the published ones)'},",
        f"`metis_cnn` with {dict(scale.model) or 'its full size'}, SGD {scale.training['lr']} with momentum",
        f"{scale.training['momentum']}, batch {scale.training['batch']}, {scale.training['epochs']} epochs per",
        "task, 5 % of each client's rows for validation.  Accuracy is the global model's on the common test set,",
        "in percent: the last one, the mean over the second half of the evaluations, and the best one; brackets",
        "are ranges over seeds.  A step takes a fast client one virtual second.", "",
    ]  # fmt: skip
    titles = {
        "synchronous": f"Synchronous, {scale.rounds} rounds",
        "uneven": f"Five fast and five slow clients (4 times slower), {scale.seconds:,.0f} virtual seconds",
        "corrupted": "Synchronous, and the second largest client has random labels",
    }
    for part, title in titles.items():
        cases = sorted({case for here, case, _ in found if here == part})
        for case in cases:
            lines += ["## " + title + ": " + case.replace("_", " "), "", *table(found, part, case), ""]
        if cases and part != "uneven":
            lines += ["Clients' shares of the average over the second half, in percent, largest client first:", ""]
            lines += [*client_shares(found, part, cases), ""]
        if cases:
            figure = {"synchronous": "synchronous", "uneven": "fast_and_slow", "corrupted": "corrupted"}[part]
            lines += [f"![Accuracy over virtual seconds]({figure}.png)", ""]
    lines += [
        "## Models exchanged", "",
        "![Models per update](models_exchanged.png)", "",
        "Each update sends one model down and one up.  Validation weighting also sends each model to every client:",
        "with ten clients ten more down (figure 9 of the paper counts eleven, with the upload itself).", "",
    ]  # fmt: skip
    return "\n".join(lines)


def table(found: dict[tuple[str, str, str], list[dict[str, Any]]], part: str, case: str) -> list[str]:
    """Return the table of one case, with the best recipe first."""
    lines = [
        "| recipe | last | second half | best | updates | steps per update | models per update | seeds |",
        "|---|---|---|---|---|---|---|---|",
    ]
    rows = []
    for (here, there, label), runs in found.items():
        if (here, there) == (part, case):
            last = [100 * run["curve"][-1][1] for run in runs]
            half = [100 * late(run["curve"]) for run in runs]
            best = [100 * max(value for _, value in run["curve"]) for run in runs]
            rows.append((statistics.mean(half), label, last, half, best, runs))
    for _, label, last, half, best, runs in sorted(rows, reverse=True):
        means = [statistics.mean(run[name] for run in runs) for name in ("updates", "steps", "models")]
        cells = f"{means[0]:.0f} | {means[1]:.0f} | {means[2]:.2f} | {len(runs)}"
        lines.append(f"| {label} | {spread(last)} | {spread(half)} | {spread(best)} | {cells} |")
    return lines


def client_shares(
    found: dict[tuple[str, str, str], list[dict[str, Any]]], part: str, cases: Sequence[str]
) -> list[str]:
    """Return the table of clients' shares of the average, mean over seeds."""
    lines = ["| sizes, classes | recipe | shares |", "|---|---|---|"]
    for (here, case, label), runs in sorted(found.items()):
        if here == part and case in cases:
            means = [100 * statistics.mean(own) for own in zip(*(run["shares"] for run in runs), strict=True)]
            lines.append(f"| {case.replace('_', ' ')} | {label} | {', '.join(f'{mean:.1f}' for mean in means)} |")
    return lines


def spread(values: Sequence[float]) -> str:
    """Format the mean, and the range if there are several values."""
    mean = f"{statistics.mean(values):.1f}"
    return mean if len(values) == 1 else f"{mean} [{min(values):.1f}, {max(values):.1f}]"


def curves(found: dict[tuple[str, str, str], list[dict[str, Any]]], part: str, path: Path) -> None:
    """Plot accuracy over virtual seconds, one panel per case: means over seeds, with their range."""
    cases = sorted({case for here, case, _ in found if here == part})
    if not cases:
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
            values = 100 * np.stack([np.interp(times, *run) for run in runs])
            axes.plot(times, values.mean(0), color=f"C{number}", label=label, lw=1.4)
            axes.fill_between(times, values.min(0), values.max(0), color=f"C{number}", alpha=0.1, lw=0)
        axes.set(title=case.replace("_", " "), xlabel="virtual seconds")
        axes.grid(alpha=0.3)
    panels[0][0].set_ylabel("accuracy in percent")
    panels[0][-1].legend(fontsize=7)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def exchanged(found: dict[tuple[str, str, str], list[dict[str, Any]]], path: Path) -> None:
    """Plot the models sent for one update, as in figure 9 of the paper."""
    known = {label: statistics.mean(run["models"] for run in runs) for (_, _, label), runs in found.items()}
    figure, axes = plt.subplots(figsize=(6.5, 3.6), layout="constrained")
    axes.barh(list(known), list(known.values()), color="#4c72b0")
    axes.set(xlabel="models sent for one update, both directions, 10 clients")
    figure.savefig(path, dpi=150)
    plt.close(figure)
