"""The pictures of the leaderboard: gains over training alone, of each method over federations and on each of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from textwrap import fill

import numpy as np
from matplotlib.colors import TwoSlopeNorm
from matplotlib.figure import Figure
from methods import ALONE, BY_NAME, NAIVE
from standings import Standing, gain, judged_on
from tiers import KINDS

MOST = 25  # points, beyond which a gain is drawn at the edge
BLUE, GREY, RED = "#1f6fb4", "#8a8f98", "#b4311f"


def title(method: str) -> str:
    """What readers call a row of the table."""
    return "Most frequent class" if method == NAIVE else BY_NAME[method].title


def draw_means(found: Sequence[Standing], methods: Sequence[str], path: Path) -> None:
    """A line for each method: a dot for each federation, the mean, and the interval for other federations."""
    figure = Figure(figsize=(8, 0.26 * len(methods) + 1.2), layout="constrained")
    panel = figure.subplots()
    for place, method in enumerate(reversed(methods)):
        own = judged_on(method, found)
        points = np.clip([one.points(method) for one in own], -MOST, MOST)
        colours = [{1: BLUE, -1: RED, 0: GREY}[one.side(method)] for one in own]
        panel.scatter(points, [place] * len(own), c=colours, s=14, zorder=3)
        mean, low, high = (min(max(end, -MOST), MOST) for end in gain(own, lambda one, name=method: name))
        panel.plot([mean], [place], "|", color="black", ms=10, zorder=4)
        if not np.isnan(low):
            panel.plot([low, high], [place, place], color="black", lw=1)
    panel.axvline(0, color="black", lw=0.8)
    panel.set_yticks(range(len(methods)), [title(method) for method in reversed(methods)], fontsize=8)
    panel.set_xlim(-MOST - 1, MOST + 1)
    panel.set_ylim(-0.6, len(methods) - 0.4)
    words = "points of test accuracy over Local; a dot is a federation, blue clearly above, red clearly below"
    panel.set_xlabel(words, fontsize=9)
    panel.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=100)


def draw_gains(found: Sequence[Standing], methods: Sequence[str], path: Path) -> None:
    """Points over training alone: rows are methods, columns federations by kind, a star where it is clear."""
    methods = [method for method in methods if method != ALONE]
    found = sorted(found, key=lambda one: list(KINDS).index(one.federation.kind))
    table = np.array([[one.points(name) if name in one.scores else np.nan for one in found] for name in methods])
    figure = Figure(figsize=(0.95 * len(found) + 2.6, 0.26 * len(methods) + 1.8), layout="constrained")
    panel = figure.subplots()
    panel.imshow(table, cmap="RdBu", norm=TwoSlopeNorm(0, -MOST, MOST), aspect="auto")
    for (row, column), value in np.ndenumerate(table):
        if not np.isnan(value):
            star = "*" if found[column].side(methods[row]) else ""
            colour = "white" if abs(value) > 0.7 * MOST else "black"
            panel.text(column, row, f"{value:+z.1f}{star}", ha="center", va="center", fontsize=7, color=colour)
    panel.set_xticks(
        range(len(found)), [fill(one.federation.words, 24) for one in found], rotation=35, ha="right", fontsize=8
    )
    panel.set_yticks(range(len(methods)), [title(method) for method in methods], fontsize=8)
    figure.savefig(path, dpi=100)
