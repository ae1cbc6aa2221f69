"""The page's sections about participation and failures.

Updates, staleness, idle time and weight of each client; and what clients could not do, in which rounds, and why.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

from piebald.core.errors import failure_kind
from piebald.report.chart import COLOURS, Bars, Chart, ChartAxis, Share, group, series, short
from piebald.report.comparison import Comparison
from piebald.report.page import markup, wording
from piebald.report.page.markup import Cell
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
    candidates = [_bars(comparison, name, *words) for name, words in described.items()]
    candidates += [
        _weights(index, label, history) for index, (label, history) in enumerate(firsts.items()) if _moves(history)
    ]
    present = [chart for chart in candidates if chart]
    drawn += present
    body = markup.charts(markup.figure(chart) for chart in present)
    equal_sentences = " ".join(_equal(comparison, words[0], words[2]) for words in described.values()).strip()
    if not present and not equal_sentences:
        return ""
    return markup.section("participation", "Participation", equal_sentences, body)


def requests(history: History) -> dict[int, float]:
    """The number of used updates of each client."""
    counts: dict[int, float] = defaultdict(float)
    for row in trained(history):
        counts[row["client"]] += 1
    return dict(counts)


def staleness(history: History) -> dict[int, float]:
    """The mean number of server steps that each client's updates missed."""
    missed = defaultdict(list)
    for row in trained(history):
        missed[row["client"]].append(row["staleness"] or 0)
    return {client: sum(values) / len(values) for client, values in missed.items()}


def idle(history: History) -> dict[int, float]:
    """The share of the run's clock that each client spent without a task."""
    busy: dict[int, float] = defaultdict(float)
    for row in history.results:
        if row["kind"] == "train":
            busy[row["client"]] += (row["time"] or 0.0) - (row["sent"] or 0.0)
    duration = history.final["seconds"]
    return {client: max(0.0, 1 - spent / duration) for client, spent in busy.items()} if duration else {}


def trained(history: History) -> list[dict[str, Any]]:
    """The rows of used updates, sorted by server step."""
    rows = [row for row in history.results if row["kind"] == "train" and row["status"] == "ok"]
    return sorted(rows, key=lambda row: (row["version"], row["client"]))


def shares(history: History) -> tuple[list[float], dict[int, list[float]]]:
    """The times of server steps (their numbers where devices are instant), and each client's share in the global model.

    Where the server optimizer keeps the last model of every client, all of them count at every step, else only those
    that arrived.
    """
    keeps = (history.components.get("server_optimizer") or {}).get("kind") == "cached_average"
    clock = bool(history.final["seconds"])
    times = {row["version"]: row["time"] or 0.0 if clock else row["version"] for row in history.rounds}
    rows = defaultdict(list)
    for row in trained(history):
        rows[row["version"]].append(row)
    clients = sorted({row["client"] for arrived in rows.values() for row in arrived})
    weights: dict[int, float] = {}
    at: list[float] = []
    share_of: dict[int, list[float]] = {client: [] for client in clients}
    for version in sorted(rows):
        arrived_weights = {row["client"]: row["raw_weight" if keeps else "weight"] or 0.0 for row in rows[version]}
        # a cached model counts again at every step until the client sends another one
        weights = weights | arrived_weights if keeps else arrived_weights
        # a step without weight, such as of updates that all count nothing, has no shares
        total = sum(weights.values()) or 1.0
        at.append(times[version])
        for client in clients:
            share_of[client].append(weights.get(client, 0.0) / total)
    return at, share_of


def _moves(history: History) -> bool:
    """Return whether shares change over steps for another reason than the choice of clients."""
    table = history.components
    reweighted = (table.get("aggregation") or {}).get("kind") in ("dvw", "staleness_weighted")
    return reweighted or (table.get("scheduling") or {}).get("kind", "synchronous") != "synchronous"


def _stale(history: History) -> bool:
    return any(row["staleness"] for row in trained(history))


def _uneven(values: dict[int, float]) -> bool:
    """Return whether bars would differ: many equal bars say less than a sentence."""
    # relative to the largest, so that it holds for counts as well as for shares of time
    return bool(values) and max(values.values()) - min(values.values()) > 0.02 * max(values.values())


def _equal(comparison: Comparison, title: str, measure: Measure) -> str:
    """Return a sentence about labels whose clients are all alike in a measure."""
    parts = []
    for label, runs in comparison.by_label.items():
        values = measure(runs[0])
        if any(values.values()) and not _uneven(values):
            value = next(iter(values.values()))
            parts.append(f"{label} {f'{value:.0%}' if measure is idle else f'{value:.3g}'}")
    return f"{title}, the same for all that took part: {', '.join(parts)}." if parts else ""


def _bars(comparison: Comparison, name: str, title: str, caption: str, measure: Measure) -> Chart | None:
    bars, percent = [], measure is idle
    for label, runs in comparison.by_label.items():
        values = measure(runs[0])
        if not _uneven(values):
            continue
        # the largest first, since what is cut off at the end should be the least
        clients = sorted(values, key=lambda client: -values[client])[:SHOWN]
        names = [short(runs[0].names.get(client, str(client))) for client in clients]
        colour, _ = series(comparison.labels, label)
        bars.append(Bars(name=label, label=label, colour=colour, x=names, y=[values[client] for client in clients]))
    if not bars:
        return None
    return Chart(
        id=f"plot-{name}",
        title=title,
        caption=caption,
        marks=bars,
        x=ChartAxis(title="Client"),
        y=ChartAxis(title="Share of time" if percent else "Number", percent=percent, zero=True),
        height=320,
        wide=False,
    )


def _weights(place: int, label: str, history: History) -> Chart | None:
    """The shares of clients in the global model over time, stacked."""
    at, share_of = shares(history)
    if len(at) < 3 or not 2 <= len(share_of) <= COLOURS * 4:
        return None
    # rounded up, so that there are never more points than allowed
    stride = -(-len(at) // POINTS)
    layers = [
        Share(
            name=short(history.names.get(client, f"client {client}"), 40),
            colour=group(number),
            x=at[::stride],
            y=values[::stride],
        )
        for number, (client, values) in enumerate(share_of.items())
    ]
    heaviest = max(share_of, key=lambda client: mean(share_of[client]) or 0.0)
    names = {client: history.names.get(client, f"client {client}") for client in share_of}
    heavy, first = names[heaviest], names[next(iter(share_of))]
    averages = sorted((mean(values) or 0.0 for values in share_of.values()), reverse=True)
    clear = averages[0] > 1.1 * averages[1]  # a headline about a hair's breadth would be none
    over = "time" if history.final["seconds"] else "server steps"
    return Chart(
        id=f"plot-weights-{place}",
        title=f"{label}: {heavy} has the largest weight" if clear else f"{label}: weight of each client",
        caption=f"Share of each client in the global model over {over}, {first} at the bottom.",
        marks=layers,
        x=ChartAxis(title="Seconds on the run's clock" if over == "time" else "Server steps", whole=over != "time"),
        y=ChartAxis(title="Share", percent=True),
        height=320,
        wide=False,
    )


MOST_FAILURES = 200  # rows of the table


def failed_requests(comparison: Comparison) -> str:
    """The section; empty where every client could do what it was asked."""
    rows = [(run, *row) for run in comparison.runs for row in _rows(run)]
    if not rows:
        return ""
    rows.sort(key=lambda row: failure_kind(row[-1]) is None)  # those of clients' own work before lost connections
    names = list(dict.fromkeys(name for _, name, *_ in rows))
    shown: list[list[Cell]] = [
        [name, kind, rounds, markup.name(reason), markup.key(comparison.labels, run.label), wording.count(run.seed)]
        for run, name, kind, rounds, reason in rows[:MOST_FAILURES]
    ]
    first = f", the first {MOST_FAILURES} of {len(rows):,}" if len(rows) > MOST_FAILURES else ""
    caption = f"What clients could not do{first}. It left them out of these rounds, or without a score there."
    head = ["Client", "Work", "Rounds", "Reason", "Label", "Seed"]
    heading = f"{wording.names(names)} could not do all that was asked"
    sentences = {(run.label, run.seed): "; ".join(run.absence_sentences) for run in comparison.runs if run.absences}
    absent = " ".join(f"{label}, seed {seed}: {sentence}." for (label, seed), sentence in sentences.items())
    return markup.section("failures", heading, absent, markup.table(caption, head, shown, kind="text"))


def _rows(run: History) -> list[tuple[str, str, str, str]]:
    """Return name, kind of work, rounds and reason of each failure, and of clients without rows to be judged by."""
    rows = [(row["name"], row["kind"], wording.rounds(row["rounds"]), row["reason"]) for row in run.failures]
    silent = set(run.unscored) - {row["name"] for row in run.failures if row["kind"] == "evaluate"}
    reasons = run.reasons([name for name in run.unscored if name in silent], "evaluate")
    return rows + [(name, "evaluate", "all rounds", reason) for name, reason in reasons.items() if reason]
