"""The page's sections about clusters and about choices of clients.

Of clusters: their members over rounds, divergence, scores, and excluded updates.  Of clients that chose their models:
each choice, and the scores of its candidates.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from markupsafe import Markup

from piebald.methods.choice.best_for_each import WORDS, loses
from piebald.methods.choice.candidates import CANDIDATES
from piebald.methods.choice.knn_per import NEIGHBOURS
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
    for index, (label, runs) in enumerate(comparison.by_label.items()):
        history = runs[0]
        charts = [
            chart for chart in (members(history, index), accuracy(history, index), divergence(history, index)) if chart
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


MOST_CHOICES = 200  # clients in a table

_TOLD = (
    "Each site chose its model when the run had ended, and told nobody: best-for-each.json or knn-per.json in the "
    "site's folder says which."
)


def chosen_models(comparison: Comparison) -> str:
    """The section; empty where clients take what they are given."""
    firsts = {label: runs[0] for label, runs in comparison.by_label.items()}
    chosen = {label: run for label, run in firsts.items() if run.choices}
    # in a federation sites choose and tell nobody, so a run without choices is not one where none was made
    silent = any(run.meta.get("keep", "last") not in ("last", "best") and not run.choices for run in firsts.values())
    if not chosen and not silent:
        return ""
    tables = [_table(comparison, label, run) for label, run in chosen.items()]
    heading = headline(next(iter(chosen.values())).choices) if len(chosen) == 1 else "The model that each client chose"
    return markup.section("choices", heading, _TOLD if silent else "", *tables)


def headline(choices: Sequence[Mapping[str, Any]]) -> str:
    """Return the number of clients that took each model, in one sentence."""
    counts = Counter(str(choice["chosen"]) for choice in choices if choice["chosen"])
    parts = [f"{count:,} {_choice_words(name)}" for name, count in counts.most_common()]
    return f"Of {wording.plural(len(choices), 'client')}, {', '.join(parts) or 'none has chosen'}"


def against_alone(choices: Sequence[Mapping[str, Any]]) -> str:
    """Return the number of clients that are worse off than alone, in one sentence; empty if not measured."""
    compared = [choice for choice in choices if choice.get("alone")]
    if not compared:
        return ""
    worse = [choice for choice in compared if loses(choice)]
    named = (
        f": {', '.join(str(choice['name']) for choice in worse[:5])}{', ...' if len(worse) > 5 else ''}"
        if worse
        else ""
    )
    return (
        f"{len(worse):,} of {wording.plural(len(compared), 'client')} would be better off alone, by more than two "
        f"standard errors of the loss on the rows that models are judged by{named}."
    )


def _choice_words(name: str) -> str:
    return f"took {WORDS[name]}".replace("its ", "their ")


def _table(comparison: Comparison, label: str, history: History) -> str:
    shown, choices = MetricFormat(history.metric), history.choices
    names = [
        name for name in (*CANDIDATES, NEIGHBOURS) if any(name in choice.get("candidates", ()) for choice in choices)
    ]
    rows: list[list[Cell]] = []
    for choice in choices[:MOST_CHOICES]:
        tried, judged = choice.get("candidates", {}), choice.get("judged", {})
        cells: list[Cell] = [str(choice["name"]), _chosen(choice)]
        cells += [_scored(shown, tried.get(name)) for name in names]
        cells += [_scored(shown, judged.get(role)) for role in ("chosen", "local")]
        rows.append([*cells, str(choice["why"])])
    head = ["Client", "Chosen", *(name.replace("_", "-") for name in names), "Chosen, judged", "Alone, judged", "Why"]
    rest = (
        f" The first {MOST_CHOICES} of {len(choices):,} clients; the run folder has all."
        if len(choices) > MOST_CHOICES
        else ""
    )
    seed = "" if history.seed is None else f", seed {history.seed}"
    caption = (
        f"{label}{seed}: {shown.name} and, below it, loss of each candidate on the client's validation rows, and "
        f"of the chosen and the local model on {history.split} rows. {against_alone(choices)}{rest}"
    )
    return markup.table(caption, head, rows, kind="list")


def _chosen(choice: Mapping[str, Any]) -> Cell:
    name = str(choice["chosen"] or NONE).replace("_", "-")
    if mixture := choice.get("mixture"):
        return markup.small(name, f"{mixture['share']:.0%} {mixture['of'].replace('_', '-')}")
    if near := choice.get(NEIGHBOURS):
        return markup.small(name, f"{near['lam']:.0%} of {near['k']}")
    passes = choice.get("epochs")
    return markup.small(name, f"{passes} more pass{'' if passes == 1 else 'es'}") if passes else name


def _scored(shown: MetricFormat, scores: Mapping[str, float | None] | None) -> Cell | Markup:
    if scores is None:
        return NONE
    loss = scores.get("loss")
    return markup.small(shown.value(scores.get(shown.metric)), NONE if loss is None else f"{loss:.3g}")
