"""The page's section about clusters: their members over rounds, divergence, scores, and excluded updates."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

from piebald.report.chart import Cells, Chart, ChartAxis, Line, group, short, thinned
from piebald.report.comparison import Comparison
from piebald.report.page import markup, wording
from piebald.report.page.charts import WIDE
from piebald.report.page.markup import Cell
from piebald.report.page.wording import NONE, MetricFormat
from piebald.report.tables import History, mean

_COLUMNS = 12  # rounds that the chart of members shows at most
_MEMBERS = 60  # clients that the table of members names at most for a cluster
_RANKS = {"global": 0, "personal": 1, "chosen": 2}  # of a client's models, the one that it uses last
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
            pieces.append(markup.heading(f"{label}{seed}"))
            pieces.append(markup.charts(markup.figure(chart) for chart in charts))
            pieces.append(_groups(history) + excluded)
    if not pieces:
        return ""
    note = "The method numbers the clusters; a cluster that is found again in a later round keeps its number."
    return markup.section("clusters", "Clusters of clients", note, *pieces)


def memberships(history: History) -> dict[int, dict[int, int]]:
    """The cluster of each client after each server step, as of the last round in which the client took part."""
    now: dict[int, int] = {}
    after: dict[int, dict[int, int]] = {}
    # by step, since of each client the last step that it took part in counts
    for row in sorted(history.results, key=lambda row: row["version"]):
        if row["cluster"] is None or row["kind"] != "train":
            continue
        now[row["client"]] = row["cluster"]
        # a copy for each step, since memberships change later
        after[row["version"]] = dict(now)
    return after


def members(history: History, place: int) -> Chart | None:
    """The cluster of each client over rounds, a row for each client by name."""
    clusters_of = memberships(history)
    clusters = sorted({cluster for now in clusters_of.values() for cluster in now.values()})
    if len(clusters) < 2 or len(clusters_of) < 2:
        return None
    versions = thinned(sorted(clusters_of), _COLUMNS)
    last = clusters_of[versions[-1]]
    clients = sorted(last, key=lambda client: (last[client], client))
    # moves between the shown rounds only: a client may move there and back between them
    moved = sum(
        clusters_of[before][client] != clusters_of[after][client]
        for before, after in pairwise(versions)
        for client in clusters_of[before]
    )
    counts = Counter(last.values())
    sized = ", ".join(f"cluster {cluster}: {count}" for cluster, count in sorted(counts.items()))
    listed = clients[:WIDE]
    rest = f" The first {WIDE} of {len(clients):,} clients." if len(clients) > WIDE else ""
    cells = Cells(
        z=[
            [clusters.index(now[client]) if client in now else None for now in map(clusters_of.__getitem__, versions)]
            for client in listed
        ],
        texts=[[str(clusters_of[version].get(client, "")) for version in versions] for client in listed],
        x=[str(version) for version in versions],
        y=[short(history.names[client]) for client in listed],
        groups=[group(cluster) for cluster in clusters],
        hover="%{y}, round %{x}: cluster %{text}",
    )
    groups, moves = wording.plural(len(counts), "cluster"), wording.plural(moved, "move")
    return Chart(
        id=f"plot-clusters-{place}",
        title=f"{groups} at the end; {moves} between the rounds shown",
        caption=f"The cluster of each client (down) after each round (across), as of the last round in which it took "
        f"part; blank before the first. At the end: {sized}.{rest}",
        marks=[cells],
        x=ChartAxis(title="Rounds"),
        height=max(240, min(900, 90 + 17 * len(listed))),
    )


def _groups(history: History) -> str:
    """The members of each cluster at the end, by name."""
    clusters_of = memberships(history)
    if not clusters_of or len(set((last := clusters_of[max(clusters_of)]).values())) < 2:
        return ""
    rows: list[list[Cell]] = []
    for cluster in sorted(set(last.values())):
        names = [history.names[client] for client in sorted(last) if last[client] == cluster]
        rows.append(
            [
                markup.swatch(group(cluster), f"cluster {cluster}"),
                wording.count(len(names)),
                wording.names(names, _MEMBERS),
            ]
        )
    return markup.table("Members of each cluster at the end.", ["Cluster", "Clients", "Members"], rows, kind="text")


def divergence(history: History, place: int) -> Chart | None:
    """The last divergence matrix that a method recorded, with clients sorted by cluster."""
    rows = [row for row in history.notes if row["name"] == "divergence"]
    if not rows:
        return None
    clients, matrix = rows[-1]["value"]["clients"], rows[-1]["value"]["matrix"]
    members = memberships(history).get(rows[-1]["version"], {})
    order = sorted(range(len(clients)), key=lambda place: (members.get(clients[place], 0), clients[place]))[:WIDE]
    names = [short(history.names[clients[place]]) for place in order]
    cells = Cells(
        z=[[matrix[row][column] for column in order] for row in order],
        x=names,
        y=names,
        unit="nats",
        hover="from %{y} to %{x}: %{z:.3~g} nats",
    )
    return Chart(
        id=f"plot-divergence-{place}",
        title=f"Divergence of the clients' models, round {rows[-1]['version']}",
        caption="KL divergence of the models' outputs on the synthetic inputs, mean per input in nats, from the row's "
        "client to the column's client. Clients are sorted by cluster; pale blocks on the diagonal are models that "
        "agree.",
        marks=[cells],
        x=ChartAxis(title="Client"),
        height=460,
        wide=False,
    )


def accuracy(history: History, place: int) -> Chart | None:
    """The metric over rounds: the mean over the clients of each cluster."""
    shown, clusters_of = MetricFormat(history.metric), memberships(history)
    lines: dict[int, dict[int, list[float]]] = {}
    judged: dict[tuple[int, int], float] = {}  # by version and client, of the model that the client uses
    for row in sorted(history.scores, key=lambda row: _RANKS.get(row["model"], 0)):
        is_main = row["client"] is not None and row["metric"] == history.metric and row["value"] is not None
        if is_main and row["split"] == history.split and row["version"] in clusters_of:
            judged[row["version"], row["client"]] = row["value"]
    for (version, client), value in sorted(judged.items()):
        if (cluster := clusters_of[version].get(client)) is not None:
            lines.setdefault(cluster, {}).setdefault(version, []).append(value)
    if len(lines) < 2:
        return None
    newest = max(max(points) for points in lines.values())
    # a cluster that was dissolved before the end has no value there
    finals = {cluster: mean(points[newest]) or 0.0 for cluster, points in lines.items() if newest in points}
    low, high = min(finals, key=finals.__getitem__), max(finals, key=finals.__getitem__)
    ends = [f"cluster {high} ends at {shown.value(finals[high])}", f"cluster {low} at {shown.value(finals[low])}"]
    marks = [
        Line(
            name=f"cluster {cluster}",
            colour=group(cluster),
            x=sorted(points),
            y=[mean(points[version]) or 0.0 for version in sorted(points)],
        )
        for cluster, points in sorted(lines.items())
    ]
    return Chart(
        id=f"plot-cluster-scores-{place}",
        title=", ".join(ends[: len(finals)]).capitalize(),
        caption=f"{shown.name.capitalize()} over rounds: the mean over the clients that are in a cluster at the time.",
        marks=marks,
        x=ChartAxis(title="Rounds", zero=True, whole=True),
        y=ChartAxis(percent=shown.percent),
        height=460,
        wide=False,
    )


def _excluded(history: History) -> str:
    """A table of clients whose updates were excluded or refused: how often, and the first reason."""
    refusals: dict[int, list[Mapping[str, Any]]] = {}
    for row in history.results:
        if row["status"] in ("excluded", "refused") and row["kind"] == "train":
            refusals.setdefault(row["client"], []).append(row)
    if not refusals:
        return ""
    rows: list[list[Cell]] = [
        [
            history.names.get(client, str(client)),
            wording.count(len(times)),
            f"{times[0]['version']} to {times[-1]['version']}" if len(times) > 1 else str(times[0]["version"]),
            str(times[0]["reason"] or NONE),
        ]
        for client, times in sorted(refusals.items())[:_LISTED]
    ]
    rest = f" The first {_LISTED} of {len(refusals)}." if len(refusals) > _LISTED else ""
    caption = f"Clients whose updates were excluded or refused, with the first reason.{rest}"
    return markup.table(caption, ["Client", "Times", "Rounds", "Reason"], rows, kind="list")
