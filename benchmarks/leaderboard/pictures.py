"""The pictures of the leaderboard: mean ranks with the critical difference, and gains over training alone."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.colors import TwoSlopeNorm
from matplotlib.figure import Figure
from methods import ALONE, BY_NAME, METHODS
from standings import Ranks, Standing


def draw_ranks(ranks: Ranks, path: Path) -> None:
    """Mean ranks as points, the best on top, each with the reach of the critical difference from the best."""
    figure = Figure(figsize=(7, 0.32 * len(ranks.methods) + 1.2), layout="constrained")
    panel = figure.subplots()
    places = np.arange(len(ranks.methods))[::-1]
    reach = ranks.ranks[0] + ranks.critical
    panel.axvspan(ranks.ranks[0], reach, color="#1f6fb4", alpha=0.12, lw=0, label="not told apart from the best")
    colours = ["#1f6fb4" if rank <= reach else "#8a8f98" for rank in ranks.ranks]
    panel.scatter(ranks.ranks, places, c=colours, zorder=3)
    panel.set_yticks(places, [BY_NAME[name].title for name in ranks.methods])
    panel.set_xlabel(f"mean rank over {ranks.federations} federations (1 is best)")
    panel.grid(axis="x", alpha=0.3)
    panel.legend(loc="upper right", frameon=False)
    panel.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=110)


def draw_gains(standings: Sequence[Standing], path: Path) -> None:
    """Points gained over training alone: a row for each method, a column for each federation."""
    methods = [m.name for m in METHODS if m.name != ALONE and any(m.name in one.results for one in standings)]
    table = np.full((len(methods), len(standings)), np.nan)
    for column, one in enumerate(standings):
        for row, name in enumerate(methods):
            if name in one.results:
                table[row, column] = 100 * (one.results[name].mean - one.results[ALONE].mean)
    figure = Figure(figsize=(1.05 * len(standings) + 2.4, 0.34 * len(methods) + 2.2), layout="constrained")
    panel = figure.subplots()
    panel.imshow(table, cmap="RdBu", norm=TwoSlopeNorm(0, -25, 25), aspect="auto")
    for (row, column), value in np.ndenumerate(table):
        if not np.isnan(value):
            panel.text(column, row, f"{value:+.1f}", ha="center", va="center", fontsize=8,
                       color="white" if abs(value) > 17 else "black")  # fmt: skip
    panel.set_xticks(range(len(standings)), [one.federation.words for one in standings], rotation=35, ha="right")
    panel.set_yticks(range(len(methods)), [BY_NAME[name].title for name in methods])
    panel.set_title("points of mean test accuracy over training alone", fontsize=10)
    figure.savefig(path, dpi=110)
