"""The page of a folder of runs: a list that can be filtered, from which runs are opened and compared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import quote

from piebald.core.plain_text import printable
from piebald.report.page import document, markup, wording
from piebald.report.page.markup import Cell, Markup
from piebald.report.page.wording import NONE, MetricFormat

COLUMNS = ("label", "state", "rounds", "seed", "metric", "score", "clients", "data", "changed")
_FOOTER = "Read from the run folders each time it is opened.  Nothing can be changed here."


def content_policy() -> str:
    """Return the policy of the list: its own style, no script, and a form that asks this server only."""
    return document.content_policy().replace("form-action 'none'", "form-action 'self'")


def runs_page(
    folder: str, runs: Mapping[str, Mapping[str, Any]], shown: Sequence[str], words: str, trouble: str
) -> str:
    """Return the list as HTML; all text of run folders is escaped in it.

    Args:
        folder: the folder of the runs.
        runs: the values of each run under `COLUMNS`, by the run's path in the folder.
        shown: the paths of the runs that are listed.
        words: what they are filtered by.
        trouble: why what was asked for is not shown, "" for nothing.
    """
    columns = [name for name in COLUMNS if any(runs[path].get(name) is not None for path in shown)]
    rows: list[list[Cell]] = [[_box(path), _link(path), *_cells(runs[path], columns)] for path in shown]
    caption = f"{wording.plural(len(shown), 'run')} of {len(runs):,}, the latest first.  Mark runs to compare them."
    table = markup.table(caption, ("", "run", *columns), rows, "list runs")
    field = f'<input type="search" name="words" value="{markup.text(words)}" aria-label="Filter">'
    form = (
        f'<form action="/"><p>{field} <button>Filter</button></p></form>'
        f'<form action="/compare">{table}<p><button>Compare the marked runs</button></p></form>'
    )
    notice = markup.notice(trouble) if trouble else ""
    top = f"<h1>Runs in {markup.text(printable(folder, 200))}</h1>{notice}"
    page = document.document("runs", "Piebald: runs", f"{top}{form}", [], _FOOTER)
    # the page has the policy of all pages without a script, and its form would be refused by it
    return page.replace(document.content_policy(), content_policy())


def _box(path: str) -> Markup:
    return Markup(f'<input type="checkbox" name="run" value="{markup.text(path)}" aria-label="{markup.text(path)}">')


def _link(path: str) -> Markup:
    # safe="", since a path may hold "&" and "#", which would end the value
    return Markup(f'<a href="/run?run={quote(path, safe="")}">{markup.text(printable(path, 80))}</a>')


def _cells(run: Mapping[str, Any], columns: Sequence[str]) -> list[Cell]:
    score = run.get("score")
    shown = MetricFormat(str(run.get("metric") or ""))
    values = {**run, "score": NONE if score is None else shown.value(score)}
    return [NONE if values.get(name) is None else printable(str(values[name]), 300) for name in columns]
