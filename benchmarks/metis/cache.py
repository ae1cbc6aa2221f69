"""Figure 2 of the paper: what the benchmark of the model cache measured, read from its own table."""

from __future__ import annotations

from pathlib import Path

RESULTS = Path(__file__).parents[1] / "model_cache" / "RESULTS.md"
LEVEL = 2.0  # as often as this the time may differ between few and many clients and still be called constant


def growth(path: Path = RESULTS) -> dict[int, tuple[float, float]]:
    """By the number of parameters: the time of a step with most clients over that with fewest, cached and summed.

    A full sum may not have been measured with most clients; then it is that of the most with which it was.
    """
    found: dict[int, list[tuple[float, float | None]]] = {}
    lines = path.read_text("utf-8").splitlines() if path.exists() else []
    for line in lines:
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("|") and cells[0].replace(",", "").isdigit():
            full = None if cells[3] == "not run" else float(cells[3])
            found.setdefault(int(cells[0].replace(",", "")), []).append((float(cells[2]), full))
    times = {size: ([one for one, _ in rows], [full for _, full in rows if full]) for size, rows in found.items()}
    return {size: (cached[-1] / cached[0], summed[-1] / summed[0]) for size, (cached, summed) in times.items()}


def judged(path: Path = RESULTS) -> tuple[str, str]:
    """Our figures for figure 2, and how they compare with the paper's: constant with the cache, growing without."""
    found = growth(path)
    if not found:
        return "-", "not run"
    cached, summed = ([pair[place] for pair in found.values()] for place in (0, 1))
    ours = (
        f"from the fewest clients to the most a step takes {min(cached):.1f} to {max(cached):.1f} times as long with "
        f"the cache, {min(summed):.0f} to {max(summed):.0f} times without, see [its table]"
        "(../../benchmarks/model_cache/RESULTS.md)"
    )
    if max(cached) > LEVEL:
        return ours, "opposite: the time grows with the cache as well"
    return ours, "agrees" if min(summed) > LEVEL else "opposite: the time does not grow without the cache either"
