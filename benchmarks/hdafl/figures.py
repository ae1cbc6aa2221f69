"""The plots for RESULTS.md."""

from __future__ import annotations

from pathlib import Path

import federations
import finished_runs
import paper
import settings
from matplotlib.figure import Figure
from shared.pictures import clean

from piebald.report.comparison import Comparison

COLOURS = {
    "Local": "#8a8f98", "FedAvg": "#1f6fb4", "FedAvg_tuned": "#5aa9a0", "FedAvg_equal": "#c9a227",
    "HDAFL": "#c8401f", "LG-FedAvg": "#a070c0",
    federations.CENTRAL: "#14181f",
}  # fmt: skip


def draw(out: Path, folder: Path) -> list[Path]:
    """Draw the plots for which there are runs."""
    written = []
    found = {}
    for model, setting, cohort, made in finished_runs.comparisons(out, "digits"):
        found[model, setting, cohort] = made
    if found:
        panels = [key for key in found if key[2] == (2 if key[1] in settings.FEW else 10)]
        if panels:
            curves = {f"{key[1].replace('_', ' ')}, C = {key[2]}": found[key] for key in panels}
            written.append(_panels(curves, "version", "rounds", folder / "digits_over_rounds.png"))
        written.append(_differences(found, folder / "hdafl_minus_fedavg.png"))
    both = (finished_runs.BASE, finished_runs.OURS)
    if third := {where: runs for where in ("writer", "disjoint") if (runs := paper.made(out, where, both))}:
        written.append(_figure_3(third, folder / "figure_3.png"))
    flows = {}
    for model in settings.TRAFFIC_MODELS:
        for case in settings.TRAFFIC_CASES:
            if runs := finished_runs.traffic_runs(out, model, case):
                flows[f"{model}, {case.replace('_', ' ')}"] = Comparison(runs)
    if flows:
        written.append(_panels(flows, "version", "rounds", folder / "traffic_over_rounds.png"))
    return written


def _panels(curves: dict[str, Comparison], axis: str, name: str, path: Path) -> Path:
    columns = min(3, len(curves))
    rows = -(-len(curves) // columns)
    figure = Figure(figsize=(4.2 * columns, 3.2 * rows), layout="constrained")
    panels = figure.subplots(rows, columns, squeeze=False).ravel()
    for panel, (title, made) in zip(panels, curves.items(), strict=False):
        for label, colour in COLOURS.items():
            if label not in made.labels:
                continue
            if label == "Local" and axis == "version":  # its rounds are local epochs: only its end is comparable
                end = made.over_seeds(label, "mean")
                panel.axhline(100 * end.mean, color=colour, ls="--", label="Local, at its end")
            elif (band := made.band(label, axis)) is not None:
                panel.plot(band.x, [100 * y for y in band.mean], color=colour, label=settings.NAMES.get(label, label))
                panel.fill_between(
                    band.x, [100 * y for y in band.low], [100 * y for y in band.high], color=colour, alpha=0.15, lw=0
                )
        panel.set(xlabel=name, ylabel="accuracy, %", title=title)
        clean(panel)
    for panel in panels[len(curves) :]:
        panel.set_visible(False)
    lines, labels = panels[0].get_legend_handles_labels()
    figure.legend(lines, labels, loc="outside lower center", ncols=2 * columns, frameon=False)
    figure.savefig(path, dpi=120)
    return path


def _figure_3(found: dict[str, dict[int, Comparison]], path: Path) -> Path:
    """As Fig. 3 of the paper: a row for each setting, a panel for each method, a line for each number of clients."""
    figure = Figure(figsize=(8.4, 3.2 * len(found)), layout="constrained")
    panels = figure.subplots(len(found), 2, squeeze=False, sharey=True)
    for row, (setting, by_cohort) in zip(panels, found.items(), strict=True):
        for panel, label in zip(row, (finished_runs.OURS, finished_runs.BASE), strict=True):
            for cohort, made in by_cohort.items():
                if (band := made.band(label, "version")) is not None:
                    panel.plot(band.x, [100 * y for y in band.mean], label=f"C = {cohort}")
            panel.set(xlabel="rounds", ylabel="accuracy, %", title=f"{paper.TITLES[setting]}, {label}")
            panel.legend(frameon=False, fontsize=8)
            clean(panel)
    figure.savefig(path, dpi=120)
    return path


def _differences(found: dict, path: Path) -> Path:
    figure = Figure(figsize=(9, 0.32 * len(found) + 1.2), layout="constrained")
    panel = figure.subplots()
    names = []
    for place, ((_, setting, cohort), made) in enumerate(reversed(found.items())):
        row = next(row for row in made.paired("FedAvg") if row["label"] == "HDAFL")
        panel.plot(100 * row["difference"], place, "o", color=COLOURS["HDAFL"])
        if row["seeds"] > 2:
            panel.plot([100 * row["low"], 100 * row["high"]], [place, place], color=COLOURS["HDAFL"])
        names.append(f"{setting}, C = {cohort}")
    panel.axvline(0, color="#505a68", lw=1)
    panel.set_yticks(range(len(names)), names)
    panel.set(xlabel="HDAFL minus FedAvg, points of accuracy (95 % over seeds)")
    clean(panel)
    figure.savefig(path, dpi=120)
    return path
