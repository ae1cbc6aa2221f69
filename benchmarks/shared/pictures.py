"""What pictures of benchmarks have in common."""

from __future__ import annotations

from matplotlib.axes import Axes


def clean(panel: Axes) -> None:
    """Give a panel a light grid, and no frame above and on the right."""
    panel.grid(color="#e8ebef")
    panel.set_axisbelow(True)
    panel.spines[["top", "right"]].set_visible(False)
