"""The page's section about clusters, from real runs."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import piebald
from piebald import data, recipes
from piebald.data.partition import Disjoint, FlipPairs, Iid
from piebald.models import build_model
from piebald.report.chart import Cells
from piebald.report.comparison import Comparison
from piebald.report.page import cluster_section, report_page, wording
from piebald.report.page.charts import plotly_chart
from piebald.report.tables import History

TRAINING: dict[str, Any] = {"lr": 0.1, "epochs": 2, "batch": 10}


@pytest.fixture(scope="module")
def clustered(tmp_path_factory: pytest.TempPathFactory) -> Comparison:
    """FedAvg and DistFL on six clients of three types, one of which replaces its model."""
    clients = Disjoint(clients=6, classes_each=3, shared_by=2).split(data.digits())
    stage = {"kind": "model_replacement", "clients": [5], "scale": 300.0}
    made = {
        "fedavg": recipes.fedavg(**TRAINING),
        "distfl": recipes.distfl(probes=40, **TRAINING).with_(transforms=[stage]),
    }
    out = tmp_path_factory.mktemp("runs")
    options: dict[str, Any] = {"rounds": 3, "runtime": piebald.Simulator(workers=0, engine="sequential")}
    model = build_model("cnn_bn", (1, 8, 8), 10, channels=(8, 8))
    return piebald.compare(made, clients, model, out=out, **options)


@pytest.mark.full
def test_the_page_shows_clusters_divergence_scores_and_excluded_updates(clustered: Comparison, tmp_path: Path) -> None:
    html = report_page.render(clustered)
    assert 'id="clusters"' in html
    assert "variance below 0" in html
    drawn: list[Any] = []
    cluster_section.section(clustered, drawn)
    assert [chart.id for chart in drawn] == ["plot-clusters-1", "plot-cluster-scores-1", "plot-divergence-1"]
    assert json.loads(json.dumps([plotly_chart(chart) for chart in drawn], allow_nan=False))


def test_the_members_of_clusters_are_shown_by_name(clustered: Comparison) -> None:
    history = clustered.by_label["distfl"][0]
    chart = cluster_section.members(history, 0)
    assert chart is not None
    (cells,) = chart.marks
    assert isinstance(cells, Cells)
    every = cluster_section.memberships(history)
    last = every[max(every)]
    at_the_end = {name: int(row[-1]) for name, row in zip(cells.y, cells.texts, strict=True)}
    assert at_the_end == {history.names[client]: cluster for client, cluster in last.items()}
    html = report_page.render(clustered)
    for cluster in set(last.values()):
        own = [history.names[client] for client in sorted(last) if last[client] == cluster]
        assert wording.names(own, 60) in html
    assert "series" not in str(cells.groups)  # the colours of clusters are not those of methods


@pytest.mark.parametrize(
    ("clusters", "said"),
    [
        ([(0, 1, 2), (0, 1, 0)], "Cluster 1 ends at 50.0%, cluster 0 at 40.0%"),  # cluster 2, at 90 %, has no members
        ([(0, 1, 2), (1, 1, 1)], "Cluster 1 ends at 43.3%"),
    ],
)
def test_a_cluster_without_members_at_the_end_does_not_end_at_anything(
    clusters: list[tuple[int, int, int]], said: str
) -> None:
    values = [(0.6, 0.7, 0.9), (0.5, 0.5, 0.3)]
    results = [
        {"version": version, "client": client, "cluster": cluster, "kind": "train"}
        for version, now in enumerate(clusters)
        for client, cluster in enumerate(now)
    ]
    scores = [  # the model that a client uses counts, whichever is recorded first
        {"version": version, "client": client, "metric": "accuracy", "split": "test", "value": value, "model": model}
        for version, now in enumerate(values)
        for client, used in enumerate(now)
        for model, value in (("personal", used), ("global", 0.0))
    ]
    chart = cluster_section.accuracy(
        SimpleNamespace(metric="accuracy", split="test", results=results, scores=scores), 0
    )
    assert chart is not None
    assert chart.title == said


def test_the_heat_map_is_the_matrix_sorted_by_cluster(clustered: Comparison) -> None:
    history = clustered.by_label["distfl"][0]
    chart = cluster_section.divergence(history, 0)
    assert chart is not None
    recorded = [row for row in history.notes if row["name"] == "divergence"][-1]["value"]
    place = {history.names[client]: row for row, client in enumerate(recorded["clients"])}
    (trace,) = plotly_chart(chart)["data"]
    order = [place[name] for name in trace["x"]]
    assert np.array_equal(np.array(trace["z"]), np.array(recorded["matrix"])[np.ix_(order, order)])
    assert (trace["zmin"], trace["zmax"]) == (0, np.max(recorded["matrix"]))


def test_settings_with_their_default_are_not_among_those_that_tell_recipes_apart(clustered: Comparison) -> None:
    table = report_page.render(clustered).rsplit("The recipe of each label", 1)[1].split("</table>")[0]
    assert "model_replacement" in table
    for default in ("lr_schedule", "dampening", "parameter_groups", "checkpointing"):
        assert default not in table


@pytest.mark.full
def test_runs_with_one_cluster_have_no_such_section(clustered: Comparison) -> None:
    drawn: list[Any] = []
    assert cluster_section.section(Comparison(clustered.by_label["fedavg"]), drawn) == ""
    assert drawn == []


@pytest.mark.full
def test_the_privacy_budget_is_in_the_settings() -> None:
    stage = {"kind": "gaussian", "clip": 1.0, "noise": 1.0}
    clients = Iid(clients=3, changes=(FlipPairs(pairs=((0, 1),), clients=(0,)),)).split(data.digits())
    run = piebald.run(
        recipes.fedavg(lr=0.1).with_(transforms=[stage], aggregation="equal_weighted"),
        clients,
        build_model("logistic", (1, 8, 8), 10),
        rounds=2,
    )
    html = report_page.render(Comparison([History(run._store)]))
    assert "Epsilon (PLD)" in html
    assert "server sees every update" in html


@pytest.mark.full
def test_the_budget_of_dp_sgd_protects_rows() -> None:
    clients = Iid(clients=3).split(data.digits())
    recipe = recipes.dp_sgd(lr=0.5, noise=2.0, batch=50)
    run = piebald.run(recipe, clients, build_model("logistic", (1, 8, 8), 10), rounds=2)
    html = report_page.render(Comparison([History(run._store)]))
    assert "whether a row is present" in html
    assert "Epsilon (opacus, PRV)" in html
    assert "add or remove one row" in html
