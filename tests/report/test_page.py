from __future__ import annotations

import base64
import gzip
import hashlib
import html
import json
import re
import subprocess
import sys
from html.parser import HTMLParser

import pytest

from piebald.core.errors import RunFolderError
from piebald.report import chart, write_report
from piebald.report.chart import series
from piebald.report.comparison import Comparison
from piebald.report.page import charts
from piebald.report.page.report_page import render
from piebald.report.page.wording import NOT_BEHIND
from piebald.report.paired import wilson
from piebald.report.tables import History

VOID = {"meta", "link", "line", "rect", "br", "img"}


class Outline(HTMLParser):
    """The page's elements, with its guarantees: balanced tags, unique ids, no foreign address."""

    def __init__(self, page):
        super().__init__()
        self.open, self.ids, self.tags, self.links, self.addresses = [], [], [], [], []
        self.feed(page)
        assert not self.open

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        for name, value in attributes:
            assert not name.startswith("on")
            if name == "id":
                self.ids.append(value)
            if name in ("src", "href"):
                (self.links if value.startswith("#") else self.addresses).append(value)
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        if tag not in VOID:
            assert self.open.pop() == tag


def drawn(page):
    return json.loads(re.search(r'<script type="application/json" id="charts">(.*?)</script>', page, re.S)[1])


def words(page):
    body = page[page.index("<body>") : page.index('<script type="application/json"')]
    return html.unescape(re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", body)))


def page_of(*stores):
    return render(Comparison([History(store) for store in stores]))


@pytest.fixture(scope="module")
def written(runs, tmp_path_factory):
    return write_report([runs], tmp_path_factory.mktemp("out") / "deep" / "report")


@pytest.fixture(scope="module")
def page(written):
    return written[0].read_text("utf-8")


def test_what_is_written(written):
    assert [path.name for path in written] == [
        "report.html",
        "accuracy_over_rounds.png",
        "accuracy_over_megabytes.png",
        "accuracy_over_seconds.png",
        "clients.png",
        "gains_against_local.png",
        "gains_against_fedavg.png",
        "requests.png",
        "partition.png",
    ]
    for path in written[1:]:
        assert path.read_bytes().startswith(b"\x89PNG")


def test_the_page_is_complete_and_loads_nothing(page):
    outline = Outline(page)
    assert len(outline.ids) == len(set(outline.ids))
    assert {link[1:] for link in outline.links} <= set(outline.ids)
    assert outline.addresses == ["data:,"]
    for landmark in ("header", "nav", "main", "footer", "h1"):
        assert outline.tags.count(landmark) == 1
    assert outline.tags.count("table") == outline.tags.count("caption")
    assert {chart["id"] for chart in drawn(page)} <= set(outline.ids)


@pytest.mark.full
def test_only_its_own_scripts_may_run(page):
    policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]*)"', page)[1]
    scripts = re.findall(r"<script>(.*?)</script>", page, re.S)
    assert len(scripts) == 1
    packed = re.search(r'<script type="application/gzip" id="plotly">(.*?)</script>', page)[1]
    for script in (*scripts, gzip.decompress(base64.b64decode(packed)).decode()):
        assert base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() in policy
    assert "default-src 'none'" in policy


def test_the_page_shows_the_results(page, runs):
    text = words(page)
    comparison = Comparison([History(path.parent) for path in sorted(runs.rglob("run.db"))])
    assert comparison.ranking()[0] == "hdafl"
    for row in comparison.summary():
        assert f"{100 * row['mean']:.1f}%" in text
    assert comparison.title() in text
    assert comparison.headline().removeprefix(f"{comparison.title()}; ") in text
    assert len(comparison.title().split()) <= 20
    assert "hdafl is " in comparison.headline()
    assert "hdafl is better than local for 100% of clients" in text
    assert "Every client holds 3 of 10 classes" in text
    assert "103,018 / 32,800" in text
    ids = [chart["id"] for chart in drawn(page)]
    assert ids == [
        "plot-version", "plot-bytes", "plot-seconds", "plot-clients", "plot-gains-0", "plot-gains-1",
        "plot-requests", "plot-partition",
    ]  # fmt: skip
    curves = {trace["name"]: trace for trace in drawn(page)[0]["data"] if "name" in trace}
    assert list(curves) == ["local", "fedavg", "distfl", "fedprox", "hdafl"]
    assert curves["hdafl"]["y"][-1] == pytest.approx(comparison.over_seeds("hdafl", "mean").mean)


@pytest.mark.full
def test_the_figures_take_a_target_of_ones_own(runs, tmp_path):
    page = write_report([runs / "fedavg"], tmp_path, target=0.5)[0].read_text("utf-8")
    assert "first reached 50.0%; means" in words(page)


EVIL = [
    "<script>alert(1)</script>",
    "</script><b>bold",
    "\"><img src=x onerror='alert(1)'>",
    "$series-0 ${x} $$",
    "é<!--",
]


@pytest.mark.parametrize("evil", EVIL)
def test_values_of_a_run_folder_are_escaped(run, evil):
    names = [evil, *map(str, range(9))]
    settings = {"data": evil}
    first = run(
        None, "hdafl", label=evil, classes=10, rounds=2, settings=settings, model=evil, status=evil, finish=False
    )
    first.set_meta(classes=names, piebald=evil, created=evil)
    page = page_of(first, run(None, "fedavg", rounds=2), run(None, "local", rounds=2))
    outline = Outline(page)  # balanced, and no attribute of an event
    assert outline.tags.count("script") == 3  # charts, plotly.js and the page's own
    assert "img" not in outline.tags
    assert evil in words(page)
    charts = drawn(page)
    named = [trace["name"] for chart in charts for trace in chart["data"] if "name" in trace]
    assert html.escape(evil, quote=False) in named or any("…" in name for name in named)
    assert not any("<" in name for name in named)


def test_an_unfinished_run_is_reported_so_far(run):
    text = words(page_of(run(None, rounds=4, finish=False)))
    assert "1 run has not finished: fedavg seed 1 (running)" in text
    assert "fedavg ends at" in text


def test_a_run_without_scores_or_clients_has_a_page(run):
    store = run(None, rounds=3, every=99, clients=0)
    page = page_of(store)
    assert "No client has been evaluated yet" in words(page)
    assert drawn(page) == []
    assert "Settings and versions" in words(page)


def test_one_seed_has_neither_band_nor_interval(run):
    page = page_of(run(None, "fedavg", rounds=5), run(None, "hdafl", rounds=5))
    assert "one seed" in words(page)
    assert all("fill" not in trace for trace in drawn(page)[0]["data"])


def test_a_difference_that_seeds_do_not_settle_is_said_to_be_open(run):
    stores = [run(None, recipe, seed=seed, rounds=4) for recipe in ("fedavg", "hdafl") for seed in (1, 2)]
    for place, store in enumerate(stores):
        store._db.execute("UPDATE score SET value = ?", (0.5 + 0.1 * (place in (1, 2)) + 0.01 * place,))
    page = page_of(*stores)
    assert NOT_BEHIND in words(page)
    assert 'class="good"' not in page
    assert 'class="even"' in page


def test_where_devices_are_instant_real_time_is_shown(run):
    store = run(None, rounds=3)
    store._db.execute("UPDATE step SET time = 0")
    assert [chart["id"] for chart in drawn(page_of(store))][2] == "plot-wall"


def test_an_error_is_better_when_small(run):
    stores = [
        run(None, recipe, rounds=6, metric="squared_error", higher_is_better=False) for recipe in ("fedavg", "hdafl")
    ]
    for store in stores:
        store._db.execute("UPDATE score SET metric = 'squared_error', value = 3 - 2 * value")
    text = words(page_of(*stores))
    assert "hdafl leads at" in text
    assert "hdafl is better than" in text
    assert "A line is below zero for clients that gain" in text
    assert "squared error" in text
    assert "%" not in text.partition("Final figures")[2].partition("Progress")[0].split("95% interval")[0]


@pytest.mark.full
def test_many_clients_are_summed_up_and_many_labels_told_apart(run, monkeypatch):
    monkeypatch.setattr(charts, "MANY_CLIENTS", 5)
    stores = [run(None, "fedavg", seed=1, label=f"method {i}", clients=450, rounds=2, every=2) for i in range(10)]
    page = page_of(*stores)
    boxes = next(chart for chart in drawn(page) if chart["id"] == "plot-clients")["data"]
    assert all("q1" in box and "x" not in box for box in boxes)
    assert "the first 300 of 450" in words(page)
    looks = {series([f"method {i}" for i in range(10)], f"method {i}") for i in range(10)}
    assert len(looks) == 10
    assert len(page) < 1_500_000


def test_few_clients_are_dots_beside_their_names(run):
    stores = [run(None, recipe, seed=seed, clients=5, rounds=3) for recipe in ("fedavg", "hdafl") for seed in (1, 2)]
    for store in stores:
        store.clients([{"client": c, "name": name, "test": 7} for c, name in enumerate(SITES)])
    page = page_of(*stores)
    chart = next(chart for chart in drawn(page) if chart["id"] == "plot-clients")
    assert {trace["type"] for trace in chart["data"]} == {"scatter"}
    assert set(chart["layout"]["yaxis"]["ticktext"]) == set(SITES)
    assert all(name in words(page) for name in SITES)
    legend = re.findall(r'data-series="([^"]*)"', page)
    table = re.findall(r'<th scope="row"><svg.*?class="name">(.*?)</span>', page)
    ranked = Comparison([History(store) for store in stores]).ranking()
    assert legend[:2] == table[:2] == ranked  # the same order in legend and table


def test_clients_that_never_trained_are_marked_and_left_out_with_both_numbers_shown(run):
    stores = [run(None, recipe, clients=12, rounds=1) for recipe in ("fedavg", "hdafl")]  # ten of twelve train
    page = page_of(*stores)
    text = words(page)
    dots = next(chart for chart in drawn(page) if chart["id"] == "plot-clients")["data"]
    assert [trace["marker"]["symbol"].count("circle-open") for trace in dots] == [2, 2]
    for trace in dots:  # a score's own interval, within 0 and 1
        bars = zip(trace["x"], trace["error_x"]["arrayminus"], trace["error_x"]["array"], strict=True)
        assert all(-1e-9 <= x - below < x + above <= 1 + 1e-9 for x, below, above in bars)
    assert text.count("\N{DAGGER} ") >= 4  # two clients with each of two methods
    assert "\N{DAGGER} never trained with this method." in text
    for row in Comparison([History(store) for store in stores]).summary():
        assert row["untrained"] == 2
        assert f"{100 * row['mean']:.1f}%" in text
        assert f"{100 * row['mean_all']:.1f}% with clients that never trained" in text


SITES = ["Basel", "Budapest", "Cleveland", "Long Beach", "Zurich"]


def test_unequal_work_is_a_banner(run):
    stores = [run(None, "fedavg", rounds=3), run(None, "hdafl", rounds=9)]
    assert "The methods did unequal work:" in words(page_of(*stores))
    assert "unequal work" not in words(page_of(stores[0], run(None, "hdafl", rounds=3)))


def test_colours_of_clusters_are_not_those_of_methods():
    assert not set(chart.LIGHT) & set(chart.GROUPS_LIGHT)
    assert not set(chart.DARK) & set(chart.GROUPS_DARK)


@pytest.mark.full
def test_heat_maps_start_at_zero(page):
    heat = next(chart for chart in drawn(page) if chart["id"] == "plot-partition")["data"][0]
    largest = max(cell or 0 for row in heat["z"] for cell in row)
    assert (heat["zmin"], heat["zmax"]) == (0, largest)  # plotly ignores one without the other


def test_a_report_that_cannot_be_made(runs, tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(RunFolderError, match="file is a file: choose a folder for the report"):
        write_report([runs / "local"], tmp_path / "file")
    with pytest.raises(RunFolderError, match="the report cannot be written to"):
        write_report([runs / "local"], tmp_path / "file" / "below")
    (tmp_path / "empty").mkdir()
    with pytest.raises(RunFolderError, match="there is no run in"):
        write_report([tmp_path / "empty"], tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.full
def test_importing_the_store_loads_no_plotting_package():
    program = (
        "import sys, piebald.report, piebald.storage.store, piebald.report.tables, piebald.report.comparison; "
        "print({'pandas', 'plotly', 'matplotlib', 'scipy'} & set(sys.modules))"
    )
    root = str(charts.__file__).rsplit("piebald", 1)[0]
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=root, check=True)
    assert done.stdout.strip() == "set()"


def test_the_interval_of_a_clients_score_is_wilsons() -> None:
    """Beside statsmodels; none of one row reaches a half, and all of them has no lower end at 1."""
    proportion = pytest.importorskip("statsmodels.stats.proportion")
    for right, rows in ((0, 1), (7, 31), (31, 31)):
        assert wilson(right / rows, rows) == pytest.approx(
            proportion.proportion_confint(right, rows, method="wilson"), abs=1e-6
        )
