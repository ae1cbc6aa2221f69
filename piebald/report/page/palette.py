"""The colours and dashes of the page and of figures."""

from __future__ import annotations

# Distinguishable with any kind of colour vision, with a contrast of at least 3 : 1 to the background.
LIGHT = ("#737a86", "#1569c3", "#cc8251", "#006051", "#5b1576", "#916900", "#4f8bea", "#7b0c00")
DARK = ("#98a0ab", "#00aafe", "#ee7500", "#c9f7bd", "#f6c5ff", "#f5b800", "#5d78ee", "#b56f69")
# Of clusters and clients, so that none is taken for a label: other hues than those above.
GROUPS_LIGHT = ("#0e8a8a", "#c2338a", "#5f8a00", "#7a5bd6", "#a8563f", "#3a7d57", "#9a3fb0", "#4c6a92")
GROUPS_DARK = ("#3fd0cf", "#ff7cc4", "#b5e04a", "#b9a2ff", "#ff9e80", "#7fdcae", "#e08cf5", "#9fb4d8")
COLOURS = len(LIGHT)  # further series repeat the colours with other dashes
DASHES = ("solid", "dash", "dot", "dashdot")
