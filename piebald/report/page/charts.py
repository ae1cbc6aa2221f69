"""The charts of every report: curves, budgets, distributions, gains and the partition."""

from __future__ import annotations

from piebald.report import findings
from piebald.report.chart import Box, Cells, Chart, ChartAxis, Line, curves, series, short
from piebald.report.comparison import Comparison
from piebald.report.learning_curves import Axis, thinned
from piebald.report.page import wording
from piebald.report.page.wording import MetricFormat
from piebald.report.tables import History

MANY_CLIENTS = 400  # values of a label above which individual clients are not drawn
WIDE = 300  # clients a heat map can show


def curve(comparison: Comparison, axis: Axis) -> Chart | None:
    """The mean over clients along an axis: a line for each label, with a band over its seeds."""
    bands = comparison.bands(axis)
    return curves(comparison.labels, bands, axis, comparison.metric) if bands else None


def spent(comparison: Comparison) -> Chart | None:
    """The privacy budget spent by round: a line for each label and unit, of its first run."""
    lines = []
    for label, runs in comparison.by_label.items():
        rows = [row for row in runs[0].spent if row["epsilon"] is not None]
        colour, dash = series(comparison.labels, label)
        for unit in dict.fromkeys(row["unit"] for row in rows):
            points = [(row["version"], row["epsilon"]) for row in rows if row["unit"] == unit]
            x, y = zip(*points, strict=True)
            lines.append(Line(name=f"{label}, {unit}", label=label, colour=colour, dash=dash, x=x, y=y))
    if not lines:
        return None
    return Chart(
        id="plot-spent",
        file="epsilon_over_rounds",
        title=f"Epsilon comes to {max(line.y[-1] for line in lines):.3g}",
        caption="The privacy budget that a run has spent after each round, by the privacy loss distribution.",
        marks=lines,
        x=ChartAxis(title="Rounds", zero=True, whole=True),
        y=ChartAxis(title="Epsilon", zero=True),
        wide=False,
    )


def distribution(comparison: Comparison) -> Chart | None:
    """The metric of individual clients: a box for each label."""
    shown, boxes = MetricFormat(comparison.metric), []
    for label in reversed(comparison.ranking()):  # drawn from the bottom up
        values = [value for final in comparison.finals[label] for value in final["per_client"].values()]
        colour, _ = series(comparison.labels, label)
        # beyond that, dots are a cloud, and the page grows by their numbers
        dots = len(values) <= MANY_CLIENTS
        boxes.append(Box(name=short(label), label=label, colour=colour, values=values, dots=dots))
    if not boxes:
        return None
    dots_said = " Each dot is one client in one run." if any(box.dots for box in boxes) else ""
    return Chart(
        id="plot-clients",
        title=findings.worst_tenth(comparison),
        caption=f"Final {shown.name} of individual clients. A box holds the middle half, the solid line is the median, "
        f"the dashed line the mean.{dots_said}",
        marks=boxes,
        x=ChartAxis(title=f"Final {shown.name} of individual clients", percent=shown.percent),
        height=110 + 64 * len(boxes),
    )


def gains(comparison: Comparison, base: str) -> Chart | None:
    """Differences of individual clients to a base label, sorted: a line for each label."""
    shown, lines = MetricFormat(comparison.metric), []
    for label in comparison.labels:
        differences = comparison.per_client(label, base) if label != base else []
        if not differences:
            continue
        colour, dash = series(comparison.labels, label)
        # percentages as points: plotly has no format for a signed difference of percentages
        thin = [100 * value if shown.percent else value for value in thinned(differences, 300)]
        shares = [place / max(1, len(thin) - 1) for place in range(len(thin))]
        lines.append(Line(name=label, label=label, colour=colour, dash=dash, x=shares, y=thin))
    if not lines:
        return None
    return Chart(
        id=f"plot-gains-{comparison.labels.index(base)}",
        file=f"gains_against_{comparison.by_label[base][0].recipe}",
        title=findings.gains(comparison, base),
        caption=f"Each client's {shown.name} minus its {shown.name} with {base} on the same seed; clients are sorted "
        f"by their gain. A line is {'above' if comparison.higher_is_better else 'below'} zero for clients that gain.",
        marks=lines,
        x=ChartAxis(title="Share of clients, largest loss first", percent=True),
        y=ChartAxis(title=f"Difference{' in points' if shown.percent else ''}", signed=True),
        wide=False,
    )


def partition(history: History) -> Chart | None:
    """Training rows of each class on each client."""
    counts = [row["counts"] for row in history.clients if row["counts"]]
    if not counts:
        return None
    classes = history.meta.get("classes") or [str(place) for place in range(len(counts[0]))]
    rest = f", the first {WIDE} of {len(counts):,}" if len(counts) > WIDE else ""
    seed = "" if history.seed is None else f", seed {history.seed}"
    cells = Cells(
        # None stays blank, where 0 would have the lightest colour
        z=[[row[place] or None for row in counts[:WIDE]] for place in range(len(counts[0]))],
        x=[short(history.names[row["client"]]) for row in history.clients if row["counts"]][:WIDE],
        y=[short(str(name)) for name in classes],
        unit="rows",
        hover="%{x}, class %{y}: %{z:,} rows",
    )
    return Chart(
        id="plot-partition",
        title=wording.holdings(counts),
        caption=f"Training rows of each class (down) on each client (across){rest}{seed}. A stronger colour means more "
        "rows; blank means none, and the colours start at zero.",
        marks=[cells],
        x=ChartAxis(title="Client"),
        y=ChartAxis(title="Class"),
        height=max(220, min(640, 110 + 22 * len(counts[0]))),
    )
