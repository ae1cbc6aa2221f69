"""The status page of a federation's server: one page without scripts, whose charts the server draws."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from markupsafe import Markup

from piebald.core.plain_text import printable
from piebald.federation.operate.run_view import Curve, RunView
from piebald.report.page import markup, wording
from piebald.report.page.markup import Cell
from piebald.report.page.wording import NONE, MetricFormat

REFRESH = 10  # seconds after which a browser asks again
_FOOTER = Markup(
    f"Nothing can be changed here.  The page is read again every {REFRESH} seconds; "
    '<a href="/metrics">/metrics</a> and <a href="/status.json">/status.json</a> are for programs.'
)


def page(view: RunView) -> str:
    """Return the page as HTML; all text of others is escaped in it."""
    sections = [
        ("sites", "Sites", _sites(view)),
        ("curve", "Learning curve", _curves(view)),
        ("clusters", "Clusters", _clusters(view)),
        ("privacy", "Privacy", _privacy(view)),
    ]
    now = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
    return markup.document(
        "status", f"Piebald: {_name(view)}", _top(view), sections, _FOOTER, refresh=REFRESH, beside=now
    )


def content_policy() -> str:
    """Return a content security policy under which the page has its own style, no script, and fetches nothing."""
    return f"{markup.content_policy()}; frame-ancestors 'none'"


def _name(view: RunView) -> str:
    names = (view.status.get("federation"), view.meta.get("label") or "no run yet")
    return printable(": ".join(str(name) for name in names if name), 80)


def _state(view: RunView) -> Markup:
    """Return the state, since when it is so, and what would end it."""
    state, since, ends = view.status.get("state", "starting"), view.status.get("since"), view.status.get("ends")
    shown = [] if since is None else [f"for {wording.duration(max(0, int(time.time() - since)))}"]
    shown += [] if ends is None else [f"until {printable(ends, 200)}"]
    return markup.small(markup.span("state", state), ", ".join(shown))


def _top(view: RunView) -> str:
    shown, sites = MetricFormat(str(view.meta.get("metric") or "accuracy")), view.status.get("sites", ())
    ready = sum(row.get("state") == "ready" for row in sites)
    rounds, steps = view.meta.get("rounds"), view.status.get("steps", 0)
    end = "no fixed end" if rounds is None else f"of {rounds:,}"
    tiles: list[tuple[str, Cell]] = [
        ("State", _state(view)),
        ("Server steps", markup.small(f"{steps:,}", end)),
        ("Sites ready", markup.small(f"{ready:,}", f"of {len(sites):,}")),
    ]
    if view.loss:
        tiles.append(("Loss of training", markup.small(f"{view.loss[-1][1]:.3g}", f"at step {view.loss[-1][0]:,}")))
    for model, curve in view.scores.items():
        tiles.append(
            (f"Mean {shown.name}", markup.small(shown.value(curve[-1][1]), f"{model} model, step {curve[-1][0]:,}"))
        )
    for budget in view.privacy:
        about = f"of a {printable(budget['unit'])}, delta {budget['delta']:.0e}, {budget['steps']:,} steps"
        tiles.append(("Epsilon spent", markup.small(_epsilon(budget["epsilon"]), about)))
    model = f"{view.meta.get('model', '')}, {view.meta['parameters']:,} parameters" if "parameters" in view.meta else ""
    return markup.top(_name(view), printable(model), tiles)


# ------------------------------------------------------------------------------------------------------------- sites


def _sites(view: RunView) -> str:
    head = (
        "Site", "State", "Last word", "Loss, last steps", "Time of a task", "Staleness", "Done", "Absent", "Failed",
        "Late, refused", "MB from, to it", "Rows", "Piebald",
    )  # fmt: skip
    rows = [_site(view, number, row) for number, row in enumerate(view.status.get("sites", ()))]
    if not rows:
        return ""
    caption = (
        "Sites by name.  A loss is that of the site's own training: its line, its last value, and how far the mean of "
        "its last third lies from that of its first."
    )
    return markup.section("sites", "Sites", "", markup.table(caption, head, rows))


def _site(view: RunView, number: int, row: Mapping[str, Any]) -> list[Cell]:
    def count(name: str) -> str:
        return NONE if row.get(name) is None else f"{row[name]:,}"

    heard, state = row.get("heard"), row.get("state") or NONE  # between two runs sites have none
    refusal = f": {row['refused']}" if row.get("refused") else ""
    good = {"ready": True, "joining": None, NONE: None}.get(state, False)
    failed = view.failures.get(number, {})
    return [
        markup.name(printable(row.get("site"))),
        markup.judged(printable(f"{state}{refusal}", 120), good),
        NONE if heard is None else f"{wording.duration(max(0.0, round(time.time() - heard)))} ago",
        _drift(view.losses.get(number, [])),
        wording.duration(row.get("seconds")),
        count("staleness"),
        count("finished"),
        count("absent"),
        ", ".join(f"{times} {printable(kind)}" for kind, times in failed.items()) or "0",
        f"{count('late')}, {count('refusals')}",
        ", ".join(wording.megabytes((row.get(name) or 0) / 1e6) for name in ("received", "sent")),
        count("rows"),
        printable(row.get("version") or NONE, 40),
    ]


def _drift(curve: Curve) -> Cell:
    """A site's losses as a small line, the last one, and how much it changed."""
    if not curve:
        return NONE
    values = [value for _, value in curve]
    # thirds, since single losses of few batches jump
    third = max(1, len(values) // 3)
    drift = sum(values[-third:]) / third - sum(values[:third]) / third
    change = f"{drift:+.2g}".replace("-", wording.MINUS)
    return markup.small(markup.spark(values, f"{values[-1]:.3g}"), f"{change} in {len(values)} tasks")


# ------------------------------------------------------------------------------------------------------------ curves


def _curves(view: RunView) -> str:
    metric = MetricFormat(str(view.meta.get("metric") or "accuracy"))
    scores = {model: curve for model, curve in view.scores.items() if len(curve) > 1}
    figures = []
    if len(view.loss) > 1:
        figures.append(
            _figure("Loss of training", "Mean over the clients of a step.", {"loss": view.loss}, "{:.3g}".format)
        )
    if scores:
        figures.append(
            _figure(f"Mean {metric.name}", "Mean over clients, on rows that were held out.", scores, metric.value)
        )
    return markup.section("curve", "Learning curve", "", markup.charts(figures)) if figures else ""


def _figure(title: str, caption: str, curves: Mapping[str, Curve], written: Callable[[float], str]) -> str:
    steps = [step for curve in curves.values() for step, _ in curve]
    ticks: dict[float, str] = {min(steps): f"step {min(steps):,}", max(steps): f"{max(steps):,}"}
    return markup.line_chart(title, caption, curves, ticks, written)


# --------------------------------------------------------------------------------------------- clusters and privacy


def _clusters(view: RunView) -> str:
    if len(set(view.clusters.values())) < 2:
        return ""
    names = {number: printable(row.get("site")) for number, row in enumerate(view.status.get("sites", ()))}
    of: dict[int, list[str]] = {}
    for client, cluster in sorted(view.clusters.items()):
        of.setdefault(cluster, []).append(names.get(client, f"client {client}"))
    rows: list[list[Cell]] = [
        [f"{cluster}", f"{len(members):,}", wording.names(members, 12)] for cluster, members in sorted(of.items())
    ]
    caption = "Clusters of the last steps, as far as sites have trained in them."
    return markup.section(
        "clusters", "Clusters", "", markup.table(caption, ("Cluster", "Sites", "Names"), rows, "list")
    )


def _epsilon(value: float | None) -> str:
    return "infinite" if value is None else f"{value:.3g}"


def _privacy(view: RunView) -> str:
    budgets = view.meta.get("privacy") or ()
    if not budgets:
        return ""
    spent = {budget.get("unit"): budget for budget in view.privacy}
    rows: list[list[Cell]] = [
        [
            printable(budget.get("unit", "client")),
            _epsilon(spent[budget.get("unit")]["epsilon"]) if budget.get("unit") in spent else NONE,
            _epsilon(budget["epsilon_pld"]),
            f"{budget['delta']:.1g}",
            printable(budget["meaning"]),
        ]
        for budget in budgets
    ]
    head = ("Protected", "Epsilon so far", "Epsilon of the whole run", "Delta", "Meaning")
    caption = "Differential privacy of the updates that sites send, and of nothing else."
    return markup.section("privacy", "Privacy budget", "", markup.table(caption, head, rows, "text"))
