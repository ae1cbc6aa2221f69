"""One HTML document for all pages: self-contained, without network access, for screens, phones and paper."""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from typing import Any

from markupsafe import Markup

from piebald.core.plain_text import visible
from piebald.report import chart
from piebald.report.chart import Chart
from piebald.report.page.markup import Cell, asset, templates
from piebald.report.page.plotly_chart import plotly_chart

# plotly.js 4.1.1 with lines, bars, boxes and heat maps alone (npm: plotly.js-cartesian-dist-min, MIT licence).  As
# base64 of gzip, which the page unpacks, it has 0.66 MB in place of the 4.8 MB of all of plotly.js.
_PLOTLY = "plotly-cartesian.min.js.gz"

Section = tuple[str, str, str]  # its id, the text of the link to it, and its HTML


def document(
    kind: str,
    title: str,
    top: str,
    sections: Sequence[Section],
    footer: Cell,
    *,
    charts: Sequence[Chart] | None = None,
    refresh: int | None = None,
    beside: str = "",
) -> str:
    """Return a page as HTML.

    Args:
        kind: "report", "answer", "status", "transfer" or "runs": what stands beside the name, and the page's CSS class.
        title: the page's title.
        top: its head, as HTML.
        sections: its sections; empty ones are left out.
        footer: its last sentence.
        charts: what its script draws; None for a page without a script.
        refresh: seconds after which a browser asks for the page again.
        beside: a text in the bar at its top.
    """
    scripts, policy = _scripts(charts) if charts is not None else ({"script": None}, content_policy())
    page = templates().get_template("page.html").render(
        kind=kind, title=title, policy=Markup(policy), refresh=refresh, style=Markup(_style()), beside=beside,
        top=Markup(top), sections=[(ident, link, Markup(body)) for ident, link, body in sections if body],
        footer=footer, **scripts,
    )  # fmt: skip
    return visible(page)  # whatever a section was made of


def content_policy(*scripts: str) -> str:
    """Return a content security policy that runs only these scripts, and fetches nothing.

    Without scripts only the page's own style sheet is allowed; plotly sets styles of elements.
    """
    allowed = " ".join(map(_hash, scripts))
    style = f"script-src {allowed}; style-src 'unsafe-inline'" if scripts else f"style-src {_hash(_style())}"
    # a page of a run from elsewhere may hold any label: whatever is not listed by hash cannot run or be fetched
    return f"default-src 'none'; {style}; img-src data: blob:; base-uri 'none'; form-action 'none'"


def _hash(content: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"


def _scripts(charts: Sequence[Chart]) -> tuple[dict[str, Any], str]:
    """Return the charts and what draws them as HTML, and the policy under which it may run."""
    # plotly is unpacked here only to state its hash, by which the browser lets it run
    packed = files("piebald.report.page").joinpath(_PLOTLY).read_bytes() if charts else b""
    plotly, script = gzip.decompress(packed).decode() if charts else "", asset("page.js")
    plain = json.dumps([plotly_chart(chart) for chart in charts], allow_nan=False, separators=(",", ":"))
    # no "<" ends the script element, whatever a label is called
    parts = {"charts": plain.replace("<", "\\u003c"), "plotly": base64.b64encode(packed).decode(), "script": script}
    return {name: Markup(part) for name, part in parts.items()}, content_policy(plotly, script)


@cache
def _style() -> str:
    def block(**palettes: tuple[str, ...]) -> str:
        variables = (
            f"--{name}-{place}: {colour};" for name, colours in palettes.items() for place, colour in enumerate(colours)
        )
        return f":root {{ {' '.join(variables)} }}"

    light = block(series=chart.LIGHT, group=chart.GROUPS_LIGHT)
    dark = block(series=chart.DARK, group=chart.GROUPS_DARK)
    return f"\n{light}\n@media (prefers-color-scheme: dark) {{ {dark} }}\n{asset('page.css')}\n"
