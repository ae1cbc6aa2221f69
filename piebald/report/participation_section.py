"""The page's section about participation: how much each client worked, how stale, how long idle, with what weight."""

from __future__ import annotations

import html
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from piebald.report import charts, markup
from piebald.report.charts import Chart, series
from piebald.report.comparison import Comparison
from piebald.report.tables import History, mean

Measure = Callable[[History], dict[int, float]]

SHOWN = 60  # clients a chart can show
POINTS = 240  # points in time a chart of weights can show


def section(comparison: Comparison, drawn: list[Chart]) -> str:
    """The section; empty where devices take no simulated time and no update is stale."""
    firsts = {label: runs[0] for label, runs in comparison.by_label.items()}
    if not any(history.final["seconds"] or _stale(history) for history in firsts.values()):
        return ""
    described = {
        "requests": ("Updates of each client", "Updates that were used, in the first run of each label.", requests),
        "staleness": (
            "Staleness of each client",
            "Mean number of server steps that a client's update missed.",
            staleness,
        ),
        "idle": ("Idle time of each client", "Share of the run's clock without a task.", idle),
    }
    found = [_bars(comparison, name, *words) for name, words in described.items()]
    found += [_weights(label, history) for label, history in firsts.items() if _moves(history)]
    present = [chart for chart in found if chart]
    drawn += present
    body = "".join(markup.figure(chart) for chart in present)
    return markup.section("participation", "Participation", "", f'<div class="charts">{body}</div>') if present else ""


def requests(history: History) -> dict[int, float]:
    """The number of used updates of each client."""
    found: dict[int, float] = defaultdict(float)
    for row in trained(history):
        found[row["client"]] += 1
    return dict(found)


def staleness(history: History) -> dict[int, float]:
    """The mean number of server steps that each client's updates missed."""
    found = defaultdict(list)
    for row in trained(history):
        found[row["client"]].append(row["staleness"] or 0)
    return {client: sum(values) / len(values) for client, values in found.items()}


def idle(history: History) -> dict[int, float]:
    """The share of the run's clock that each client spent without a task."""
    busy: dict[int, float] = defaultdict(float)
    for row in history.results:
        if row["kind"] == "train":
            busy[row["client"]] += (row["time"] or 0.0) - (row["sent"] or 0.0)
    whole = history.final["seconds"]
    return {client: max(0.0, 1 - spent / whole) for client, spent in busy.items()} if whole else {}


def trained(history: History) -> list[dict[str, Any]]:
    """The rows of used updates, sorted by server step."""
    rows = [row for row in history.results if row["kind"] == "train" and row["status"] == "ok"]
    return sorted(rows, key=lambda row: (row["version"], row["client"]))


def shares(history: History) -> tuple[list[float], dict[int, list[float]]]:
    """The times of server steps, and each client's share in the global model at each of them.

    Where the server optimizer keeps the last model of every client, all of them count at every step, else only those
    that arrived.
    """
    keeps = (_table(history).get("server_optimizer") or {}).get("kind") == "cached_average"
    times = {row["version"]: row["time"] or 0.0 for row in history.rounds}
    rows = defaultdict(list)
    for row in trained(history):
        rows[row["version"]].append(row)
    clients = sorted({row["client"] for arrived in rows.values() for row in arrived})
    weights: dict[int, float] = {}
    at: list[float] = []
    found: dict[int, list[float]] = {client: [] for client in clients}
    for version in sorted(rows):
        now = {row["client"]: row["raw_weight" if keeps else "weight"] or 0.0 for row in rows[version]}
        weights = weights | now if keeps else now
        whole = sum(weights.values()) or 1.0
        at.append(times[version])
        for client in clients:
            found[client].append(weights.get(client, 0.0) / whole)
    return at, found


def _moves(history: History) -> bool:
    """Whether shares change over steps for another reason than which clients were asked."""
    table = _table(history)
    reweighted = (table.get("aggregation") or {}).get("kind") in ("dvw", "staleness_weighted")
    return reweighted or (table.get("scheduling") or {}).get("kind", "synchronous") != "synchronous"


def _table(history: History) -> dict[str, Any]:
    recipe = history.meta.get("recipe")
    return recipe.get("table") or {} if isinstance(recipe, dict) else {}


def _stale(history: History) -> bool:
    return any(row["staleness"] for row in trained(history))


def _bars(comparison: Comparison, name: str, title: str, caption: str, measure: Measure) -> Chart | None:
    data, percent = [], measure is idle
    for label, runs in comparison.by_label.items():
        values = measure(runs[0])
        if not values or not any(values.values()):
            continue
        clients = sorted(values)[:SHOWN]
        colour, _ = series(comparison.labels, label)
        data.append(
            {
                "type": "bar",
                "name": html.escape(label, quote=False),
                "x": clients,
                "y": [values[client] for client in clients],
                "marker": {"color": colour},
                "hovertemplate": "%{y:.0%}" if percent else "%{y:.3~g}",
            }
        )
    if not data:
        return None
    few = max(len(bars["x"]) for bars in data) <= 20
    axis = {"title": {"text": "Share of time" if percent else "Number"}, "rangemode": "tozero"}
    return Chart(
        f"plot-{name}",
        title,
        caption,
        data,
        {
            "height": 320,
            "hovermode": "x unified",
            "barmode": "group",
            "xaxis": {"title": {"text": "Client"}, "dtick": 1 if few else None},
            "yaxis": axis | ({"tickformat": ".0%"} if percent else {}),
        },
        wide=False,
    )


def _weights(label: str, history: History) -> Chart | None:
    """The shares of clients in the global model over time, stacked."""
    at, found = shares(history)
    if len(at) < 3 or not 2 <= len(found) <= charts.COLOURS * 4:
        return None
    every = -(-len(at) // POINTS)
    data = [
        {
            "type": "scatter",
            "mode": "lines",
            "stackgroup": "all",
            "name": f"client {client}",
            "x": at[::every],
            "y": values[::every],
            "line": {"width": 0.5, "color": f"$series-{place % charts.COLOURS}", "shape": "hv"},
            "fillcolor": f"$series-{place % charts.COLOURS}/{0.75 if place < charts.COLOURS else 0.4}",
            "hovertemplate": "%{y:.1%}",
        }
        for place, (client, values) in enumerate(found.items())
    ]
    heaviest = max(found, key=lambda client: mean(found[client]) or 0.0)
    return Chart(
        f"plot-weights-{html.escape(label)}",
        f"{label}: client {heaviest} has the largest weight",
        "Share of each client in the global model over time, client 0 at the bottom.",
        data,
        {
            "height": 320,
            "hovermode": "x unified",
            "xaxis": {"title": {"text": "Seconds on the run's clock"}},
            "yaxis": {"title": {"text": "Share"}, "tickformat": ".0%", "range": [0, 1]},
        },
        wide=False,
    )
