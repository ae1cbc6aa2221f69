"""The HTML report: one file about one or more runs, without network access, for screens, phones and paper."""

from __future__ import annotations

from typing import Any

from piebald.report import findings
from piebald.report.chart import Axis, Chart, time_axis
from piebald.report.comparison import Comparison
from piebald.report.findings import MEASURES, work_by_label
from piebald.report.page import (
    charts,
    client_section,
    cluster_section,
    markup,
    participation_section,
    wording,
)
from piebald.report.page.details import heterogeneity, preparation, settings
from piebald.report.page.markup import Cell, document
from piebald.report.page.wording import NONE, MetricFormat

_CLOCKS: dict[Axis, str] = {"seconds": "Run's clock", "wall": "Real time"}
_BY = {"plot-version": "round", "plot-bytes": "traffic", "plot-seconds": "time", "plot-wall": "time",
       "plot-spent": "privacy budget"}  # fmt: skip
# Sections that explain the answer on the first screen, below a line that unfolds them.
FOLDED = {
    "clusters": "Clusters of clients",
    "gains": "Clients that gain and clients that lose",
    "participation": "Participation of clients",
    "cost": "Cost until a target",
    "partition": "Rows and classes of clients",
    "preparation": "Preparation of columns",
    "settings": "Settings of the runs",
}


def render(comparison: Comparison, target: float | None = None, drawn: list[Chart] | None = None) -> str:
    """Return the page as HTML.

    Args:
        comparison: what it shows.
        target: the value whose cost is shown, see `Comparison.target`.
        drawn: a list to which the page's charts are added.
    """
    drawn = [] if drawn is None else drawn
    sections = [
        ("results", "Results", _results(comparison)),
        ("progress", "Progress", _progress(comparison, drawn)),
        ("clients", "Clients", _clients(comparison, drawn)),
        ("clusters", "Clusters", cluster_section.section(comparison, drawn)),
        ("choices", "Choices", cluster_section.chosen_models(comparison)),
        ("gains", "Gains", _gains(comparison, drawn)),
        ("participation", "Participation", participation_section.section(comparison, drawn)),
        ("failures", "Failures", participation_section.failed_requests(comparison)),
        ("cost", "Cost", _cost(comparison, target)),
        ("partition", "Partition", _partition(comparison, drawn)),
        ("preparation", "Preparation", preparation(comparison)),
        ("settings", "Settings", settings(comparison)),
    ]
    sections = [
        (ident, label, markup.folded(FOLDED[ident], content, "part") if content and ident in FOLDED else content)
        for ident, label, content in sections
    ]
    title = f"Piebald: {comparison.title()}"
    return document("report", title, _top(comparison), sections, _footer(comparison), charts=drawn)


# -------------------------------------------------------------------------------------------------------- sections


def _top(comparison: Comparison) -> str:
    shown, ranked = MetricFormat(comparison.metric), comparison.ranking()
    clients = sorted({int(history.meta.get("clients") or len(history.clients)) for history in comparison.runs})
    seeds = {history.seed for history in comparison.runs}
    tiles: list[tuple[str, Cell]] = []
    if ranked:
        best = comparison.levels[ranked[0]]
        tail = comparison.over_seeds(ranked[0], "worst_decile")
        tiles += [(f"Best mean {shown.name}", markup.small(shown.value(best.mean), ranked[0]))]
        tiles += [("Its worst tenth", markup.small(shown.value(tail.mean if tail else None), "of clients"))]
    tiles += [
        ("Clients", markup.small(" to ".join(f"{n:,}" for n in sorted({clients[0], clients[-1]})), "in each run")),
        ("Runs", markup.small(f"{len(comparison.runs):,}", f"{wording.plural(len(comparison.labels), 'label')}, "
                                                           f"{wording.plural(len(seeds), 'seed')}")),
    ]  # fmt: skip
    unfinished = [history for history in comparison.runs if history.meta.get("status") != "finished"]
    sentences = findings.notes(comparison)[1:]
    if unfinished:
        names = ", ".join(f"{run.label} seed {run.seed} ({run.meta.get('status')})" for run in unfinished[:5])
        rest = f" and {len(unfinished) - 5} more" if len(unfinished) > 5 else ""
        runs = f"{wording.plural(len(unfinished), 'run')} {'has' if len(unfinished) == 1 else 'have'}"
        sentences.insert(0, f"{runs} not finished: {names}{rest}. Figures cover the rounds so far.")
    if ranked:
        sentences.append(_left_out(comparison))
    if ranked and comparison.unscored:
        sentences.append(f"In no mean, since they have no score: {wording.names(comparison.unscored)}.")
    title, rest = comparison.title(), comparison.headline()
    if len(comparison.labels) == 1 and rest.startswith(title.partition(", ")[0]):
        title, _, rest = rest.partition(", ")
    rest = rest.removeprefix(title).removeprefix("; ")
    lead = " ".join([*([f"{rest}."] if rest else []), *findings.notes(comparison)[:1]])
    return markup.top(title, lead, tiles, [sentence for sentence in sentences if sentence])


def _results(comparison: Comparison) -> str:
    shown, labels = MetricFormat(comparison.metric), comparison.labels
    base = (comparison.made_by("local") or comparison.made_by("fedavg")) if len(labels) > 1 else None
    clock = time_axis(comparison.runs)
    differences = {row["label"]: row for row in comparison.paired(base)} if base else {}
    rows: list[list[Cell]] = []
    worked: list[list[Cell]] = []
    done = work_by_label(comparison)
    by_label = {row["label"]: row for row in comparison.summary()}
    unseen = any(row["unseen"] is not None for row in by_label.values())
    for label in comparison.ordered:
        row = by_label[label]
        interval = "one seed" if row["low"] is None else f"{shown.value(row['low'])} to {shown.value(row['high'])}"
        interval = f"range {interval}" if row["kind"] == "range" else interval
        if row["untrained"]:
            interval += f"; {shown.value(row['mean_all'])} with clients that never trained"
        cells: list[Cell] = [
            markup.key(labels, label),
            markup.small(shown.value(row["mean"]), "" if row["mean"] is None else interval),
        ]
        if base:
            cells.append(_difference(comparison, differences.get(label)))
        cells += [shown.value(row["worst_decile"]), shown.size(row["sd"]), shown.value(row["common"])]
        cells += [shown.value(row["unseen"])] if unseen else []
        ways = f"{wording.megabytes(row['mb_up'])} up, {wording.megabytes(row['mb_down'])} down"
        cells += [markup.small(wording.megabytes(row["mb_up"] + row["mb_down"]), ways)]
        real = wording.duration(row["wall"])
        cells += [markup.small(wording.duration(row["seconds"]), f"{real} real") if clock == "seconds" else real]
        rows.append(cells)
        counts = [row["rounds"], *(done[label][name] for name in MEASURES), row["parameters"], row["seeds"]]
        worked.append([markup.key(labels, label), *map(wording.count, counts)])
    measures = {f"always {name}": table for name, table in comparison.naive.items()}
    measures |= {f"{name} of each client alone": table for name, table in comparison.plain_alone.items()}
    for name, table in measures.items():
        rows.append([name, shown.value(table.mean), *[""] * (len(rows[0]) - 2)])
    head = ["Label", f"Mean {shown.name}", *([f"Difference to {base}"] if base else []), "Worst tenth", "SD of clients",
            "Common test set", *(["Unseen clients"] if unseen else []), "MB sent",
            _CLOCKS[clock]]  # fmt: skip
    pairs = (
        f", the difference to {base} on the same clients and seeds (in colour where it is more than chance)"
        if base
        else ""
    )
    held_out = "the mean over clients that were held out until the end, " if unseen else ""
    caption = (
        f"Final {shown.name} over clients, best first: mean over seeds with its 95% interval for other clients and "
        f"seeds{pairs}, the worst tenth of clients, the standard deviation over clients, {held_out}and the traffic of "
        "all clients."
    )
    work = "Work behind each method, means over runs: updates that were used, their local steps and their rows."
    effort = markup.table(work, ["Label", "Rounds", *map(str.capitalize, MEASURES), "Parameters", "Runs"], worked)
    return markup.section(
        "results", "Final figures", "", markup.table(caption, head, rows), markup.folded("Work of each method", effort)
    )


def _progress(comparison: Comparison, drawn: list[Chart]) -> str:
    curves = [charts.curve(comparison, axis) for axis in ("version", "bytes", time_axis(comparison.runs))]
    curves.append(charts.spent(comparison))
    present = [chart for chart in curves if chart]
    if not present:
        return ""
    drawn += present
    first, *rest = present
    note = "" if len(comparison.labels) == 1 else "Each label has a line, in the same colour everywhere on this page."
    body = markup.charts([markup.figure(first)])
    if rest:
        costs = markup.charts(markup.figure(chart) for chart in rest)
        body += markup.folded(f"The same by {', '.join(_BY[chart.id] for chart in rest)}", costs)
    return markup.section(
        "progress", findings.progress(comparison), note, markup.keys(comparison.labels, comparison.ranking()), body
    )


def _clients(comparison: Comparison, drawn: list[Chart]) -> str:
    chart = client_section.dots(comparison) or charts.distribution(comparison)
    if chart is None:
        return ""
    drawn.append(chart)
    keys = markup.keys(comparison.labels, comparison.ranking())
    each = client_section.table(comparison)
    folded = each and markup.folded("Each client: rows, scores, gain over alone", each)
    tables = folded, client_section.details(comparison)
    return markup.section_of(chart, "clients", keys, *tables)


def _gains(comparison: Comparison, drawn: list[Chart]) -> str:
    shown = MetricFormat(comparison.metric)
    bases = [base for recipe in ("local", "fedavg") if (base := comparison.made_by(recipe))]
    figures: list[str] = []
    rows: list[list[Cell]] = []
    for base in bases:
        if (chart := charts.gains(comparison, base)) is None:
            continue
        drawn.append(chart)
        figures.append(markup.figure(chart))
        for row in sorted(comparison.paired(base), key=lambda row: comparison.ordered.index(row["label"])):
            better, worse = findings.gaining(comparison, row["label"], base)
            deepest = comparison.per_client(row["label"], base)[0]
            rows.append([
                markup.key(comparison.labels, row["label"]),
                base,
                _difference(comparison, row),
                wording.interval(row, shown),
                f"{better:.0%}",
                f"{worse:.0%}",
                shown.difference(deepest),
                wording.count(row["seeds"]),
            ])  # fmt: skip
    if not figures:
        return ""
    unit = f" ({shown.points.strip()})" if shown.points else ""
    head = [
        "Label",
        "Compared with",
        f"Mean difference{unit}",
        "95% interval",
        "Clients that gain",
        "Clients that lose",
        "Worst client",
        "Seeds",
    ]
    caption = f"Differences in final {shown.name} on the same seeds: the mean over clients, and individual clients."
    return markup.section(
        "gains",
        "Clients that gain and clients that lose",
        "An average hides the clients that would be better off with another method, or training alone.",
        markup.keys(comparison.labels, comparison.ranking()),
        markup.charts(figures),
        markup.folded("Differences as a table", markup.table(caption, head, rows)),
    )


def _cost(comparison: Comparison, target: float | None) -> str:
    chosen = target is not None
    # zero is a target, too
    target = target if target is not None else comparison.target()
    if target is None or not comparison.ranking():
        return ""
    shown, clock = MetricFormat(comparison.metric), time_axis(comparison.runs)
    rows = comparison.to_target(target)
    # the share of runs first: a low cost of the few runs that were lucky is no low cost
    rows.sort(key=lambda row: (-row["reached"] / row["runs"], row["mb"] or 0.0, row["rounds"] or 0.0))
    body: list[list[Cell]] = [
        [markup.key(comparison.labels, row["label"]), wording.count(row["rounds"]), wording.megabytes(row["mb"]),
         wording.duration(row[clock]), f"{row['reached']} of {row['runs']}"]
        for row in rows
    ]  # fmt: skip
    base = comparison.made_by("fedavg") or comparison.ranking()[-1]
    reason = "" if chosen else f", which every run of {base} reaches"
    goal = f"the mean {shown.name} over clients first reached {shown.value(target)}{reason}"
    caption = f"Cost until {goal}; means over the runs that reached it."
    head = ["Label", "Rounds", "MB, both ways", _CLOCKS[clock], "Runs that reached it"]
    return markup.section("cost", findings.cheapest(comparison, target), "", markup.table(caption, head, body))


def _partition(comparison: Comparison, drawn: list[Chart]) -> str:
    chart = next((chart for history in comparison.runs if (chart := charts.partition(history))), None)
    table = next((table for history in comparison.runs if (table := heterogeneity(history))), "")
    if chart is None:
        return markup.section("partition", "Heterogeneity of clients", "", table) if table else ""
    drawn.append(chart)
    return markup.section_of(chart, "partition", "", table and markup.folded("Measures of heterogeneity", table))


# -------------------------------------------------------------------------------------------------------- helpers


def _difference(comparison: Comparison, row: dict[str, Any] | None) -> Cell:
    """The difference of a row of `Comparison.paired`, in colour where it is more than chance."""
    if row is None:
        return NONE
    good = (row["difference"] > 0) == comparison.higher_is_better if wording.is_significant(row) else None
    return markup.judged(MetricFormat(comparison.metric).difference(row["difference"]), good)


def _left_out(comparison: Comparison) -> str:
    """A sentence about clients that never trained."""
    untrained = {row["label"]: row["untrained"] for row in comparison.summary() if row["untrained"]}
    if not untrained:
        return ""
    each = wording.names([f"{label} ({wording.count(number)})" for label, number in untrained.items()])
    return f"Clients that never trained are left out of means, and marked below: {each}, in the mean over runs."


def _footer(comparison: Comparison) -> str:
    versions = sorted({str(history.meta.get("piebald", "unknown")) for history in comparison.runs})
    return f"Made with Piebald from {wording.plural(len(comparison.runs), 'run')} of version {', '.join(versions)}."
