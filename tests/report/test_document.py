"""The document that all pages share: the report, the answer, the status page and the page of a transfer."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Callable

import pytest

from piebald.advice.answer_page import page as answer_page
from piebald.advice.evidence import ClientGain, with_shrunk
from piebald.core.result_table import ResultTable
from piebald.federation.operate import run_view
from piebald.federation.operate.run_view import RunView
from piebald.report.page import markup
from piebald.report.page.markup import document
from tests.report.test_page import Outline

EVIL = "</style></script><b onclick='x'>&\"$policy ${x}"


def answer() -> str:
    curves, row = {EVIL: {EVIL: 0.25, "all": 0.5}}, [EVIL, None, 0.123456]
    gains = with_shrunk([ClientGain(EVIL, 20, {}, 0.1, 0.02)])
    tables = {EVIL: ResultTable([row], [EVIL, "", "score"], title=EVIL)}
    return answer_page(EVIL, {EVIL: EVIL}, gains, 100, [EVIL], curves, (0.0, str, EVIL), tables, EVIL)


def status() -> str:
    curve, site = [(1, 0.25), (5, 0.5)], {"site": EVIL, "state": EVIL, "version": EVIL, "refused": EVIL}
    meta = {"label": EVIL, "model": EVIL, "parameters": 7, "metric": "accuracy"}
    view = RunView({"state": EVIL, "sites": [site, site]}, meta, curve, {EVIL: curve, "global": curve}, {0: curve})
    return run_view.page(view)


def transfer() -> str:
    section = markup.section("losses", EVIL, EVIL, markup.picture(b"\x89PNG", EVIL))
    return document("transfer", EVIL, f"<h1>{markup.text(EVIL)}</h1>", [("losses", "Losses", section)], EVIL)


@pytest.mark.parametrize("made", [answer, status, transfer])
def test_pages_without_charts_have_one_style_no_script_and_nobodys_markup(made: Callable[[], str]) -> None:
    page = made()
    outline = Outline(page)
    assert not {"script", "noscript", "b"} & set(outline.tags)
    assert [outline.tags.count(tag) for tag in ("style", "header", "nav", "main", "footer", "h1")] == [1] * 6
    assert len(outline.ids) == len(set(outline.ids))
    assert {link[1:] for link in outline.links} <= set(outline.ids)
    style = re.search(r"<style>(.*?)</style>", page, re.S)
    policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]*)"', page)
    assert style is not None
    assert policy is not None
    # the browser applies the style sheet only if its hash is this one
    assert f"'sha256-{base64.b64encode(hashlib.sha256(style[1].encode()).digest()).decode()}'" in policy[1]
    assert "unsafe" not in policy[1]
    assert "script-src" not in policy[1]
    assert "default-src 'none'" in policy[1]
    assert "style=" not in page  # an element's own style would be refused


def test_all_pages_have_the_same_style_sheet() -> None:
    charts = document("report", "x", "<h1>x</h1>", [], "x", charts=[])
    styles = {re.search(r"<style>(.*?)</style>", page, re.S)[1] for page in (answer(), status(), transfer(), charts)}  # type: ignore[index]
    assert len(styles) == 1


def test_only_a_page_that_asks_for_it_is_asked_for_again() -> None:
    assert 'http-equiv="refresh" content="10"' in status()
    assert "refresh" not in answer() + transfer()


@pytest.mark.parametrize(("values", "heights"), [([1.0, 2.0, 3.0], [1.0, 0.5, 0.0]), ([2.0, 2.0], [0.5, 0.5])])
def test_lines_go_from_the_lowest_value_to_the_highest_and_a_flat_one_is_in_the_middle(
    values: list[float], heights: list[float]
) -> None:
    """Heights are shares of the distance between the lowest and the highest of the three rules."""
    drawn = markup.line_chart("loss", "", {"loss": list(enumerate(values))}, {}, "{:.4g}".format)
    rules = sorted(float(y) for y in re.findall(r'class="rule"[^>]* y1="([\d.]+)"', drawn))
    points = [float(point.split(",")[1]) for point in drawn.split('points="')[1].split('"')[0].split()]
    assert [(y - rules[0]) / (rules[-1] - rules[0]) for y in points] == pytest.approx(heights, abs=0.01)
    assert rules[1] == pytest.approx((rules[0] + rules[-1]) / 2, abs=0.1)


def test_steps_stand_where_they_belong_not_one_after_another() -> None:
    """A curve that was evaluated at steps 0, 1 and 10: the second point is a tenth of the way."""
    drawn = markup.line_chart("loss", "", {"loss": [(0, 1.0), (1, 2.0), (10, 3.0)]}, {0: "0", 10: "10"}, str)
    places = [float(point.split(",")[0]) for point in drawn.split('points="')[1].split('"')[0].split()]
    assert (places[1] - places[0]) / (places[2] - places[0]) == pytest.approx(0.1, abs=0.01)
    assert re.findall(r'text-anchor="(start|end)">(\d+)<', drawn) == [("start", "0"), ("end", "10")]
