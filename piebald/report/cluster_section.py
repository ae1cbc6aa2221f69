"""The page's section about clusters: their members over rounds, divergence, scores, and excluded updates."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from piebald.report import markup, wording
from piebald.report.charts import COLOURS, WIDE, Chart, short
from piebald.report.comparison import Comparison
from piebald.report.markup import Cell
from piebald.report.tables import History, mean
from piebald.report.wording import NONE, MetricFormat

_COLUMNS = 12  # rounds that the chart of members shows at most
_LISTED = 30  # clients that the table of excluded updates lists at most


def section(comparison: Comparison, drawn: list[Chart]) -> str:
    """The section; empty where no run had more than one cluster or an excluded update."""
    pieces: list[str] = []
    for place, (label, runs) in enumerate(comparison.by_label.items()):
        history = runs[0]
        charts = [
            chart for chart in (flow(history, place), accuracy(history, place), divergence(history, place)) if chart
        ]
        drawn += charts
        excluded = _excluded(history)
        if charts or excluded:
            seed = "" if history.seed is None else f", seed {history.seed}"
            pieces.append(f"<h3>{markup.text(f'{label}{seed}')}</h3>")
            pieces.append(f'<div class="charts">{"".join(markup.figure(chart) for chart in charts)}</div>{excluded}')
    if not pieces:
        return ""
    note = "The method numbers the clusters; a cluster that is found again in a later round keeps its number."
    return markup.section("clusters", "Clusters of clients", note, *pieces)


def memberships(history: History) -> dict[int, dict[int, int]]:
    """The cluster of each client after each server step, as of the last round in which the client took part."""
    now: dict[int, int] = {}
    found: dict[int, dict[int, int]] = {}
    for row in sorted(history.results, key=lambda row: row["version"]):
        if row["cluster"] is None or row["kind"] != "train":
            continue
        now[row["client"]] = row["cluster"]
        found[row["version"]] = dict(now)
    return found


def flow(history: History, place: int) -> Chart | None:
    """The moves of clients between clusters over rounds."""
    every = memberships(history)
    if len({cluster for members in every.values() for cluster in members.values()}) < 2 or len(every) < 2:
        return None
    versions = _picked(sorted(every))
    nodes = [(version, cluster) for version in versions for cluster in sorted(set(every[version].values()))]
    number = {node: place for place, node in enumerate(nodes)}
    links: Counter[tuple[int, int]] = Counter()
    for before, after in pairwise(versions):
        for client, cluster in every[after].items():
            if client in every[before]:
                links[number[before, every[before][client]], number[after, cluster]] += 1
    sizes = {node: sum(cluster == node[1] for cluster in every[node[0]].values()) for node in nodes}
    span = max(len(versions) - 1, 1)
    moved = sum(
        every[before][client] != every[after][client]
        for before, after in pairwise(versions)
        for client in every[before]
    )
    last = Counter(every[versions[-1]].values())
    data = {
        "type": "sankey",
        "arrangement": "snap",
        "node": {
            "label": [f"{cluster}" if version in (versions[0], versions[-1]) else "" for version, cluster in nodes],
            "color": [_colour(cluster) for _, cluster in nodes],
            "customdata": [
                f"round {version}, cluster {cluster}: {sizes[version, cluster]} clients" for version, cluster in nodes
            ],
            "hovertemplate": "%{customdata}<extra></extra>",
            "x": [0.001 + 0.998 * versions.index(version) / span for version, _ in nodes],
            "pad": 14,
            "thickness": 12,
            "line": {"width": 0},
        },
        "link": {
            "source": [source for source, _ in links],
            "target": [target for _, target in links],
            "value": list(links.values()),
            "color": [f"{_colour(nodes[source][1])}/0.35" for source, _ in links],
            "hovertemplate": "%{value} clients<extra></extra>",
        },
        "textfont": {"color": "$ink", "size": 12},
    }
    sized = ", ".join(f"cluster {cluster}: {count}" for cluster, count in sorted(last.items()))
    return Chart(
        f"plot-clusters-{place}",
        f"{wording.plural(len(last), 'cluster')} at the end; {wording.plural(moved, 'move')} between the rounds shown",
        f"Clusters from round {versions[0]} (left) to round {versions[-1]} (right); the width of a band is the number "
        f"of clients in it. At the end: {sized}.",
        [data],
        {"height": 360, "margin": {"l": 12, "r": 12, "t": 12, "b": 12}},
    )


def divergence(history: History, place: int) -> Chart | None:
    """The last divergence matrix that a method recorded, with clients sorted by cluster."""
    rows = [row for row in history.notes if row["name"] == "divergence"]
    if not rows:
        return None
    clients, matrix = rows[-1]["value"]["clients"], rows[-1]["value"]["matrix"]
    members = memberships(history).get(rows[-1]["version"], {})
    order = sorted(range(len(clients)), key=lambda one: (members.get(clients[one], 0), clients[one]))[:WIDE]
    names = [str(clients[one]) for one in order]
    return Chart(
        f"plot-divergence-{place}",
        f"Divergence of the clients' models, round {rows[-1]['version']}",
        "KL divergence of the models' outputs on the synthetic inputs, mean per input in nats, from the row's client "
        "to the column's client. Clients are sorted by cluster; pale blocks on the diagonal are models that agree.",
        [
            {
                "type": "heatmap",
                "z": [[matrix[row][column] for column in order] for row in order],
                "x": names,
                "y": names,
                "colorscale": [[0, "$heat-low"], [1, "$heat-high"]],
                "zmin": 0,
                "colorbar": {
                    "thickness": 10,
                    "outlinewidth": 0,
                    "tickfont": {"color": "$soft"},
                    "title": {"text": "nats", "side": "right", "font": {"color": "$soft"}},
                },
                "hovertemplate": "from client %{y} to client %{x}: %{z:.3~g} nats<extra></extra>",
            }
        ],
        {
            "height": 460,
            "xaxis": {"type": "category", "title": {"text": "Client"}, "showgrid": False, "nticks": 12},
            "yaxis": {"type": "category", "autorange": "reversed", "showgrid": False, "nticks": 12},
            "hovermode": "closest",
        },
        wide=False,
    )


def accuracy(history: History, place: int) -> Chart | None:
    """The metric over rounds: the mean over the clients of each cluster."""
    shown, every = MetricFormat(history.metric), memberships(history)
    lines: dict[int, dict[int, list[float]]] = {}
    for row in history.scores:
        wanted = row["client"] is not None and row["metric"] == history.metric and row["value"] is not None
        if wanted and row["split"] == history.split and row["version"] in every:
            cluster = every[row["version"]].get(row["client"])
            if cluster is not None:
                lines.setdefault(cluster, {}).setdefault(row["version"], []).append(row["value"])
    if len(lines) < 2:
        return None
    finals = {cluster: mean(points[max(points)]) or 0.0 for cluster, points in lines.items()}
    low, high = min(finals, key=finals.__getitem__), max(finals, key=finals.__getitem__)
    return Chart(
        f"plot-cluster-scores-{place}",
        f"Cluster {high} ends at {shown.value(finals[high])}, cluster {low} at {shown.value(finals[low])}",
        f"{shown.name.capitalize()} over rounds: the mean over the clients that are in a cluster at the time.",
        [
            {
                "type": "scatter",
                "mode": "lines+text" if len(points) > 1 else "markers+text",
                "text": _named(len(points), nth, f"cluster {cluster}"),
                "textposition": "bottom center",
                "textfont": {"color": _colour(cluster)},
                "cliponaxis": False,
                "name": f"cluster {cluster}",
                "x": sorted(points),
                "y": [mean(points[version]) for version in sorted(points)],
                "line": {"color": _colour(cluster), "width": 2.25},
                "marker": {"color": _colour(cluster), "size": 9},
                "hovertemplate": "%{y:.1%}" if shown.percent else "%{y:.3~g}",
            }
            for nth, (cluster, points) in enumerate(sorted(lines.items()))
        ],
        {
            "height": 460,
            "hovermode": "x unified",
            "xaxis": {"title": {"text": "Rounds"}, "rangemode": "tozero"},
            "yaxis": {"tickformat": ".0%"} if shown.percent else {},
        },
        wide=False,
    )


def _excluded(history: History) -> str:
    """A table of clients whose updates were excluded or refused: how often, and the first reason."""
    found: dict[int, list[Mapping[str, Any]]] = {}
    for row in history.results:
        if row["status"] in ("excluded", "refused") and row["kind"] == "train":
            found.setdefault(row["client"], []).append(row)
    if not found:
        return ""
    names = {row["client"]: str(row["name"]) for row in history.clients}
    rows: list[list[Cell]] = [
        [
            short(names.get(client, str(client))),
            wording.count(len(times)),
            f"{times[0]['version']} to {times[-1]['version']}" if len(times) > 1 else str(times[0]["version"]),
            str(times[0]["reason"] or NONE),
        ]
        for client, times in sorted(found.items())[:_LISTED]
    ]
    more = f" The first {_LISTED} of {len(found)}." if len(found) > _LISTED else ""
    caption = f"Clients whose updates were excluded or refused, with the first reason.{more}"
    return markup.table(caption, ["Client", "Times", "Rounds", "Reason"], rows, kind="list")


def _picked(versions: Sequence[int]) -> list[int]:
    """At most `_COLUMNS` versions, evenly spread, with the first and the last."""
    if len(versions) <= _COLUMNS:
        return list(versions)
    return [versions[round(place * (len(versions) - 1) / (_COLUMNS - 1))] for place in range(_COLUMNS)]


def _named(points: int, nth: int, name: str) -> list[str]:
    """A line's name at one of its points, a different one for each line, so that names do not overlap."""
    here = (points - 1 - nth) % points
    return [name if place == here else "" for place in range(points)]


def _colour(cluster: int) -> str:
    return f"$series-{(cluster + 1) % COLOURS}"
