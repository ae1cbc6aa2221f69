"""Curves as matplotlib axes: the numbers and the colours of the page."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pytest
from matplotlib import pyplot
from matplotlib.colors import to_hex

from piebald.core.errors import SettingError
from piebald.report.chart import LIGHT, Cells, Chart, ChartAxis, Line, draw, paint
from piebald.report.comparison import Comparison
from piebald.report.page import charts, client_section
from piebald.report.page.charts import plotly_chart
from piebald.report.page.report_page import render
from piebald.report.tables import History
from piebald.storage.store import RunStore


@pytest.fixture(autouse=True)
def _no_window() -> Iterator[None]:
    with matplotlib.rc_context({"backend": "agg"}):
        yield
        pyplot.close("all")


def history(label: str, seed: int, scale: float = 1.0) -> History:
    """Two steps of 1 MB and 2 s, after which two clients have an accuracy and a loss."""
    store = RunStore.create(None, {"recipe": {"name": label}, "label": label, "seed": seed, "metric": "accuracy"})
    for version, value in ((1, 0.2), (2, 0.5)):
        store.commit(
            {"version": version, "time": 2.0 * version, "wall": 9.0, "bytes_down": 400_000, "bytes_up": 600_000}, []
        )
        for metric, mean in (("accuracy", scale * value), ("loss", 3.0 - version)):
            head = {"version": version, "model": "global", "split": "test", "metric": metric}
            store.scores([head | {"client": client, "value": mean + 0.01 * (seed - client)} for client in (0, 1)])
    return History(store)


def runs() -> list[History]:
    return [history("fedavg", 0), history("fedavg", 1), history("$local", 0, 1.5)]


@pytest.mark.parametrize(("over", "x"), [("rounds", [1, 2]), ("megabytes", [1.0, 2.0]), ("seconds", [2.0, 4.0])])
@pytest.mark.parametrize("metric", [None, "accuracy", "loss"])
def test_a_comparison_has_the_pages_numbers_and_colours(metric: str | None, over: str, x: list[float]) -> None:
    comparison = Comparison(runs())
    ax = comparison.plot(metric, over=over)
    assert isinstance(ax, matplotlib.axes.Axes)
    lines = {line.get_label(): line for line in ax.get_lines()}
    assert list(lines) == comparison.labels == ["fedavg", "$local"]
    for place, (label, line) in enumerate(lines.items()):
        scale, seeds = (1.0, [0, 1]) if label == "fedavg" else (1.5, [0])
        values = [2.0, 1.0] if metric == "loss" else [scale * 0.2, scale * 0.5]
        np.testing.assert_allclose(line.get_xdata(), x)
        np.testing.assert_allclose(line.get_ydata(), [value + 0.01 * (np.mean(seeds) - 0.5) for value in values])
        assert to_hex(line.get_color()) == LIGHT[place]
    assert len(ax.collections) == 1, "only one label has several seeds, and so a band"
    assert ax.get_ylabel() == f"Mean {metric or 'accuracy'} over clients"
    ax.figure.savefig(io.BytesIO())  # a dollar sign in a label is no formula


def test_the_page_and_the_plot_draw_the_same() -> None:
    comparison = Comparison(runs())
    chart: Any = charts.curve(comparison, "version")
    page = {trace["name"]: trace["y"] for trace in plotly_chart(chart)["data"] if "name" in trace}
    drawn = {line.get_label(): list(line.get_ydata()) for line in comparison.plot().get_lines()}
    assert drawn == page


def test_a_run_plots_itself_into_given_axes() -> None:
    _, (left, right) = pyplot.subplots(1, 2)
    run = history("fedavg", 0)
    assert run.plot(ax=right) is right
    assert not left.get_lines()
    assert len(right.get_lines()) == 1
    assert "loss" in run.metrics


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"metric": "acuracy"}, "did you mean 'accuracy'"),
        ({"over": "days"}, "over"),
        ({"ax": 3}, "Axes"),
    ],
)
def test_what_cannot_be_drawn_is_refused(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(SettingError, match=words):
        history("fedavg", 0).plot(**fields)


def test_a_run_without_evaluations_says_so() -> None:
    store = RunStore.create(None, {"recipe": {"name": "fedavg"}, "label": "a", "seed": 0, "metric": "accuracy"})
    with pytest.raises(SettingError, match="no client has been evaluated"):
        History(store).plot()


def runs_of_sites(clients: Sequence[str], classes: Sequence[str]) -> list[History]:
    """The runs, with names of clients and classes."""
    stores = [history._store for history in runs()]
    for store in stores:
        store.clients([{"client": number, "name": name, "counts": [3, 4]} for number, name in enumerate(clients)])
        store.set_meta(classes=list(classes))
    return [History(store) for store in stores]


@pytest.mark.full
def test_names_in_figures_are_no_formulas_and_may_have_letters_that_the_font_lacks(tmp_path: Path) -> None:
    """Before, a dollar sign in a client's name was a traceback, and a pictogram a warning on the terminal."""
    made = runs_of_sites(("$\\frac$", "\N{HOSPITAL} $x_{$"), ("$\\foo$", "\N{HOSPITAL}"))
    page: list[Chart] = []
    render(Comparison(made), drawn=page)
    drawn = draw(page, tmp_path)
    assert {"accuracy_over_rounds.png", "clients.png", "partition.png"} <= {path.name for path in drawn}


def test_names_in_figures_are_not_escaped_as_those_of_the_page() -> None:
    """Before, the site "A & B" was "A &amp; B" beside its dots."""
    made = Comparison(runs_of_sites(("A & B", "C"), ("<5", "more")))
    dots, cells = pyplot.subplots(1, 2)[1]
    few, rows = client_section.dots(made), charts.partition(made.runs[0])
    assert few is not None
    assert rows is not None
    paint(dots, few)
    assert {"A & B", "C"} <= {label.get_text() for label in dots.get_yticklabels()}
    paint(cells, rows)
    assert [label.get_text() for label in cells.get_yticklabels()] == ["<5", "more"]


@pytest.mark.parametrize("last", [2, 7, 300])
def test_an_axis_of_rounds_has_whole_rounds(last: int) -> None:
    line = Line(name="a", colour="series-0", x=range(last + 1), y=range(last + 1))
    chart = Chart(id="plot", title="", caption="", marks=[line], x=ChartAxis(title="Rounds", whole=True))
    ax = pyplot.subplots()[1]
    paint(ax, chart)
    assert all(tick == round(tick) for tick in ax.get_xticks())
    # plotly has at most ten ticks, so it writes fractions of few rounds alone
    assert (plotly_chart(chart)["layout"]["xaxis"].get("dtick") == 1) == (last <= 10)


def test_text_of_others_is_no_markup_of_the_page_and_as_it_is_in_a_picture() -> None:
    cells = Cells(z=[[1, None]], x=["<b>a", "b"], y=["c"], hover="%{z}")
    chart = Chart(id="plot", title="", caption="", marks=[cells], x=ChartAxis())
    assert plotly_chart(chart)["data"][0]["x"] == ["&lt;b&gt;a", "b"]
