"""The page's section about clusters: their members over rounds, divergence, scores, and excluded updates."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from piebald.report.averages import mean
from piebald.report.comparison import Comparison
from piebald.report.page import markup, wording
from piebald.report.page.charts import WIDE, Chart, group, short
from piebald.report.page.markup import Cell
from piebald.report.page.wording import NONE, MetricFormat
from piebald.report.tables import History

_COLUMNS = 12  # rounds that the chart of members shows at most
_MEMBERS = 60  # clients that the table of members names at most for a cluster
_LISTED = 30  # clients that the table of excluded updates lists at most


def section(comparison: Comparison, drawn: list[Chart]) -> str:
    """The section; empty where no run had more than one cluster or an excluded update."""
    pieces: list[str] = []
    for place, (label, runs) in enumerate(comparison.by_label.items()):
        history = runs[0]
        charts = [
            chart for chart in (members(history, place), accuracy(history, place), divergence(history, place)) if chart
        ]
        drawn += charts
        excluded = _excluded(history)
        if charts or excluded:
            seed = "" if history.seed is None else f", seed {history.seed}"
            pieces.append(f"<h3>{markup.text(f'{label}{seed}')}</h3>")
            pieces.append(f'<div class="charts">{"".join(markup.figure(chart) for chart in charts)}</div>')
            pieces.append(_groups(history) + excluded)
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


def members(history: History, place: int) -> Chart | None:
    """The cluster of each client over rounds, a row for each client by name."""
    every = memberships(history)
    found = sorted({cluster for now in every.values() for cluster in now.values()})
    if len(found) < 2 or len(every) < 2:
        return None
    versions = _picked(sorted(every))
    last = every[versions[-1]]
    clients = sorted(last, key=lambda client: (last[client], client))
    moved = sum(
        every[before][client] != every[after][client]
        for before, after in pairwise(versions)
        for client in every[before]
    )
    steps = [(place / len(found), (place + 1) / len(found)) for place in range(len(found))]
    colours = [[end, group(cluster)] for cluster, ends in zip(found, steps, strict=True) for end in ends]
    counts = Counter(last.values())
    sized = ", ".join(f"cluster {cluster}: {count}" for cluster, count in sorted(counts.items()))
    listed = clients[:WIDE]
    of = f" The first {WIDE} of {len(clients):,} clients." if len(clients) > WIDE else ""
    data = {
        "type": "heatmap",
        "z": [
            [found.index(every[version][client]) if client in every[version] else None for version in versions]
            for client in listed
        ],
        "text": [[str(every[version].get(client, "")) for version in versions] for client in listed],
        "x": [str(version) for version in versions],
        "y": [short(history.names[client]) for client in listed],
        "colorscale": colours,
        "zmin": -0.5,
        "zmax": len(found) - 0.5,
        "showscale": False,
        "xgap": 1,
        "ygap": 1 if len(listed) <= 100 else 0,
        "texttemplate": "%{text}" if len(listed) <= 40 and len(versions) <= 12 else "",
        "textfont": {"color": "$surface"},
        "hoverongaps": False,
        "hovertemplate": "%{y}, round %{x}: cluster %{text}<extra></extra>",
    }
    groups, moves = wording.plural(len(counts), "cluster"), wording.plural(moved, "move")
    return Chart(
        f"plot-clusters-{place}",
        f"{groups} at the end; {moves} between the rounds shown",
        f"The cluster of each client (down) after each round (across), as of the last round in which it took part; "
        f"blank before the first. At the end: {sized}.{of}",
        [data],
        {
            "height": max(240, min(900, 90 + 17 * len(listed))),
            "xaxis": {"type": "category", "title": {"text": "Rounds"}, "showgrid": False},
            "yaxis": {"type": "category", "autorange": "reversed", "showgrid": False},
            "hovermode": "closest",
        },
    )


def _groups(history: History) -> str:
    """The members of each cluster at the end, by name."""
    every = memberships(history)
    if not every or len(set((last := every[max(every)]).values())) < 2:
        return ""
    rows: list[list[Cell]] = []
    for cluster in sorted(set(last.values())):
        own = [history.names[client] for client in sorted(last) if last[client] == cluster]
        rows.append(
            [markup.swatch(group(cluster), f"cluster {cluster}"), wording.count(len(own)), wording.names(own, _MEMBERS)]
        )
    return markup.table("Members of each cluster at the end.", ["Cluster", "Clients", "Members"], rows, kind="text")


def divergence(history: History, place: int) -> Chart | None:
    """The last divergence matrix that a method recorded, with clients sorted by cluster."""
    rows = [row for row in history.notes if row["name"] == "divergence"]
    if not rows:
        return None
    clients, matrix = rows[-1]["value"]["clients"], rows[-1]["value"]["matrix"]
    members = memberships(history).get(rows[-1]["version"], {})
    order = sorted(range(len(clients)), key=lambda one: (members.get(clients[one], 0), clients[one]))[:WIDE]
    names = [short(history.names[clients[one]]) for one in order]
    largest = max(value for row in matrix for value in row)
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
                "zmax": largest or 1,
                "colorbar": {
                    "thickness": 10,
                    "outlinewidth": 0,
                    "tickfont": {"color": "$soft"},
                    "title": {"text": "nats", "side": "right", "font": {"color": "$soft"}},
                },
                "hovertemplate": "from %{y} to %{x}: %{z:.3~g} nats<extra></extra>",
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
    newest = max(max(points) for points in lines.values())
    finals = {cluster: mean(points[newest]) or 0.0 for cluster, points in lines.items() if newest in points}
    low, high = min(finals, key=finals.__getitem__), max(finals, key=finals.__getitem__)
    ends = [f"cluster {high} ends at {shown.value(finals[high])}", f"cluster {low} at {shown.value(finals[low])}"]
    return Chart(
        f"plot-cluster-scores-{place}",
        ", ".join(ends[: len(finals)]).capitalize(),
        f"{shown.name.capitalize()} over rounds: the mean over the clients that are in a cluster at the time.",
        [
            {
                "type": "scatter",
                "mode": "lines" if len(points) > 1 else "markers",
                "name": f"cluster {cluster}",
                "x": sorted(points),
                "y": [mean(points[version]) for version in sorted(points)],
                "line": {"color": group(cluster), "width": 2.25},
                "marker": {"color": group(cluster), "size": 9},
                "hovertemplate": "%{y:.1%}" if shown.percent else "%{y:.3~g}",
            }
            for cluster, points in sorted(lines.items())
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
    rows: list[list[Cell]] = [
        [
            history.names.get(client, str(client)),
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
