"""The status page of a federation's server: one page without scripts, whose charts the server draws."""

from __future__ import annotations

import base64
import hashlib
import time
from collections.abc import Mapping, Sequence
from importlib.resources import files
from typing import Any

from piebald.core.plain_text import printable
from piebald.federation.operate.run_view import Curve, RunView
from piebald.report.page import markup, palette, wording
from piebald.report.page.markup import Cell, Markup
from piebald.report.page.wording import NONE, MetricFormat

REFRESH = 10  # seconds after which a browser asks again
_WIDTH, _HEIGHT, _LEFT, _BOTTOM = 360, 190, 44, 22  # of a chart, in units of its picture

_STYLE = """
figure svg { width: 100%; height: auto; max-width: 34rem; }
svg text { fill: var(--soft); font-size: 11px; }
svg .rule { stroke: var(--grid); stroke-width: 1; }
svg .line { fill: none; stroke-width: 2; stroke-linejoin: round; }
.spark { width: 6rem; height: 1.4rem; vertical-align: middle; }
.keys li { display: flex; align-items: baseline; }
.top, main, footer { width: min(84rem, 100% - 2 * clamp(1rem, 4vw, 2.5rem)); }
.tiles { background: none; }
.tiles div { box-shadow: 0 0 0 1px var(--rule); }
.state { font-weight: 650; }
"""


def page(view: RunView) -> str:
    """The page as HTML; all text of others is escaped in it."""
    title = f"Piebald: {_name(view)}"
    sections = (_sites(view), _curves(view), _clusters(view), _privacy(view))
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="refresh" content="{REFRESH}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>{markup.text(title)}</title>\n<style>{style()}</style>\n</head>\n<body>\n"
        '<header class="top"><p class="brand">Piebald <span>status</span></p>'
        f"<p>{time.strftime('%Y-%m-%d %H:%M:%S UTC', time.gmtime())}</p></header>\n"
        f'<main id="content">\n{_top(view)}\n{"".join(sections)}\n</main>\n'
        f"<footer><p>Nothing can be changed here.  The page is read again every {REFRESH} seconds; "
        '<a href="/metrics">/metrics</a> and <a href="/status.json">/status.json</a> are for programs.</p></footer>\n'
        "</body>\n</html>\n"
    )


def style() -> str:
    """The style sheet, which is in the page."""

    def colours(palette: Sequence[str]) -> str:
        return " ".join(f"--series-{place}: {colour};" for place, colour in enumerate(palette))

    shared = files("piebald.report.page").joinpath("page.css").read_text("utf-8")
    dark = f"@media (prefers-color-scheme: dark) {{ :root {{ {colours(palette.DARK)} }} }}"
    return f":root {{ {colours(palette.LIGHT)} }}\n{dark}\n{shared}\n{_STYLE}"


def content_policy() -> str:
    """A content security policy under which the page has its own style, no script, and fetches nothing."""
    known = base64.b64encode(hashlib.sha256(style().encode()).digest()).decode()
    return (
        f"default-src 'none'; style-src 'sha256-{known}'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


def _name(view: RunView) -> str:
    return printable(view.meta.get("label") or "no run yet", 80)


def _top(view: RunView) -> str:
    shown, sites = MetricFormat(str(view.meta.get("metric") or "accuracy")), view.status.get("sites", ())
    ready = sum(row.get("state") == "ready" for row in sites)
    rounds, steps = view.meta.get("rounds"), view.status.get("steps", 0)
    of = "no fixed end" if rounds is None else f"of {rounds:,}"
    tiles: list[tuple[str, Cell]] = [
        ("State", Markup(f'<span class="state">{markup.text(view.status.get("state", "starting"))}</span>')),
        ("Server steps", markup.small(f"{steps:,}", of)),
        ("Sites ready", markup.small(f"{ready:,}", f"of {len(sites):,}")),
    ]
    if view.loss:
        tiles.append(("Loss of training", markup.small(f"{view.loss[-1][1]:.3g}", f"at step {view.loss[-1][0]:,}")))
    for model, curve in view.scores.items():
        tiles.append(
            (f"Mean {shown.name}", markup.small(shown.value(curve[-1][1]), f"{model} model, step {curve[-1][0]:,}"))
        )
    for budget in view.privacy:
        epsilon = budget["epsilon_pld"]
        told = "infinite" if epsilon is None else f"{epsilon:.3g}"
        tiles.append(("Epsilon spent", markup.small(told, f"delta {budget['delta']:.0e}, {budget['steps']:,} steps")))
    model = f"{view.meta.get('model', '')}, {view.meta['parameters']:,} parameters" if "parameters" in view.meta else ""
    lead = f'<p class="lead">{markup.text(printable(model))}</p>' if model else ""
    return f"<h1>{markup.text(_name(view))}</h1>{lead}{markup.facts('tiles', tiles)}"


# ------------------------------------------------------------------------------------------------------------- sites


def _sites(view: RunView) -> str:
    head = (
        "Site", "State", "Last word", "Loss, last steps", "Time of a task", "Staleness", "Done", "Failed", "Late",
        "Refused", "MB from it", "MB to it", "Rows", "Piebald",
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

    heard, state = row.get("heard"), str(row.get("state"))
    why = f": {row['refused']}" if row.get("refused") else ""
    good = {"ready": True, "joining": None}.get(state, False)
    failed = view.failures.get(number, {})
    return [
        Markup(f'<span class="name">{markup.text(printable(row.get("site")))}</span>'),
        markup.judged(printable(f"{state}{why}", 120), good),
        NONE if heard is None else f"{wording.duration(max(0.0, round(time.time() - heard)))} ago",
        _drift(view.losses.get(number, [])),
        wording.duration(row.get("seconds")),
        count("staleness"),
        count("finished"),
        ", ".join(f"{times} {printable(kind)}" for kind, times in failed.items()) or "0",
        count("late"),
        count("refusals"),
        wording.megabytes((row.get("received") or 0) / 1e6),
        wording.megabytes((row.get("sent") or 0) / 1e6),
        count("rows"),
        printable(row.get("version") or NONE, 40),
    ]


def _drift(curve: Curve) -> Cell:
    """A site's losses as a small line, the last one, and how much it changed."""
    if not curve:
        return NONE
    values = [value for _, value in curve]
    low, high = min(values), max(values)
    wide, tall = 96 / max(len(values) - 1, 1), 16 / ((high - low) or 1.0)
    points = " ".join(f"{wide * place:.1f},{18 - tall * (value - low):.1f}" for place, value in enumerate(values))
    line = (
        f'<svg class="spark" viewBox="0 0 96 20" aria-hidden="true"><polyline class="line" points="{points}" '
        'stroke="var(--series-1)"/></svg>'
    )
    third = max(1, len(values) // 3)
    drift = sum(values[-third:]) / third - sum(values[:third]) / third
    change = f"{drift:+.2g}".replace("-", wording.MINUS)
    return Markup(f"{line} {values[-1]:.3g}<small>{markup.text(change)} in {len(values)} tasks</small>")


# ------------------------------------------------------------------------------------------------------------ curves


def _curves(view: RunView) -> str:
    metric = MetricFormat(str(view.meta.get("metric") or "accuracy"))
    drawn = []
    if len(view.loss) > 1:
        drawn.append(
            _figure("Loss of training", "Mean over the clients of a step.", {"loss": view.loss}, "{:.3g}".format)
        )
    scores = {name: curve for name, curve in view.scores.items() if len(curve) > 1}
    if scores:
        drawn.append(
            _figure(f"Mean {metric.name}", "Mean over clients, on rows that were held out.", scores, metric.value)
        )
    if not drawn:
        return ""
    return markup.section("curve", "Learning curve", "", f'<div class="charts">{"".join(drawn)}</div>')


def _figure(title: str, caption: str, curves: Mapping[str, Curve], written: Any) -> str:
    """A chart of lines over server steps."""
    steps = [step for curve in curves.values() for step, _ in curve]
    values = [value for curve in curves.values() for _, value in curve]
    low, high, first, last = min(values), max(values), min(steps), max(steps)
    span = (high - low) or 1.0
    inner, tall = _WIDTH - _LEFT - 8, _HEIGHT - _BOTTOM - 10

    def place(step: int, value: float) -> str:
        x = _LEFT + inner * (step - first) / max(last - first, 1)
        return f"{x:.1f},{10 + tall * (1 - (value - low) / span):.1f}"

    rules = ""
    for share in (0.0, 0.5, 1.0):
        y = 10 + tall * (1 - share)
        rules += f'<line class="rule" x1="{_LEFT}" x2="{_WIDTH - 8}" y1="{y:.1f}" y2="{y:.1f}"/>'
        rules += (
            f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{markup.text(written(low + share * span))}</text>'
        )
    rules += f'<text x="{_LEFT}" y="{_HEIGHT - 5}">step {first:,}</text>'
    rules += f'<text x="{_WIDTH - 8}" y="{_HEIGHT - 5}" text-anchor="end">{last:,}</text>'
    lines = "".join(
        f'<polyline class="line" stroke="var(--series-{1 + number % (palette.COLOURS - 1)})" '
        f'points="{" ".join(place(step, value) for step, value in curve)}"/>'
        for number, curve in enumerate(curves.values())
    )
    named = [markup.swatch(f"$series-{1 + number % (palette.COLOURS - 1)}", name) for number, name in enumerate(curves)]
    keys = "".join(f"<li>{one.html}</li>" for one in named)
    legend = f'<ul class="keys">{keys}</ul>' if len(curves) > 1 else ""
    spoken = f"{title}: from {written(values[0])} to {written(values[-1])}"
    head = f"<figcaption><h3>{markup.text(title)}</h3><p>{markup.text(caption)}</p></figcaption>{legend}"
    picture = (
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{markup.text(spoken)}">{rules}{lines}</svg>'
    )
    return f'<figure class="half">{head}{picture}</figure>'


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


def _privacy(view: RunView) -> str:
    budgets = view.meta.get("privacy") or ()
    if not budgets:
        return ""

    def epsilon(budget: Mapping[str, Any]) -> str:
        return "infinite" if budget["epsilon_pld"] is None else f"{budget['epsilon_pld']:.3g}"

    spent = {budget.get("unit"): budget for budget in view.privacy}
    rows: list[list[Cell]] = [
        [
            printable(budget.get("unit", "client")),
            epsilon(spent[budget.get("unit")]) if budget.get("unit") in spent else NONE,
            epsilon(budget),
            f"{budget['delta']:.1g}",
            printable(budget["meaning"]),
        ]
        for budget in budgets
    ]
    head = ("Protected", "Epsilon so far", "Epsilon of the whole run", "Delta", "Meaning")
    caption = "Differential privacy of the updates that sites send, and of nothing else."
    return markup.section("privacy", "Privacy budget", "", markup.table(caption, head, rows, "text"))
