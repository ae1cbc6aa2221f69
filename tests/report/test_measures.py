"""Heterogeneity of clients: kept in a run folder and shown on its page."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import piebald
from piebald import data, partition
from piebald.report import write_report
from piebald.report.tables import History
from piebald.runtimes import Simulator
from piebald.storage.store import RunStore


def a_run(folder: Path, **more) -> Path:
    clients = partition.Disjoint(clients=3, classes_each=3, limit=300).split(data.digits())
    model = piebald.models.build_model("logistic", (1, 8, 8), 10)
    piebald.run("fedavg", clients, model, rounds=1, out=folder, **more)
    return folder


@pytest.mark.full
def test_the_page_shows_heterogeneity(tmp_path: Path) -> None:
    folder = a_run(tmp_path / "run", runtime=Simulator(fleet=partition.FastSlow()))
    page = Path(write_report([folder], tmp_path / "page")[0]).read_text("utf-8")
    (section,) = re.findall(r'<section id="partition".*?</section>', page, re.S)
    with History(folder) as history:
        whole = {row["name"]: row["value"] for row in history.measures if row["client"] is None}
        least = min(row["value"] for row in history.measures if row["name"] == "frechet" and row["client"] is not None)
    for number in (*whole.values(), least):
        assert f"{number:.4g}" in section
    for word in ("earth mover", "speed ratio", "squared units of the embedding"):
        assert word in section


@pytest.mark.full
def test_a_page_without_measures_has_no_such_table(tmp_path: Path) -> None:
    folder = a_run(tmp_path / "run", measure="none")
    page = Path(write_report([folder], tmp_path / "page")[0]).read_text("utf-8")
    assert "Heterogeneity of clients before" not in page
    assert 'id="partition"' in page  # the classes of each client are still there


def test_a_measure_is_kept_once(tmp_path: Path) -> None:
    with RunStore.create(None, {}) as store:
        for value in (1.0, 2.0):
            rows = [
                {"client": None, "name": "size_gini", "value": value},
                {"client": 0, "name": "rows", "value": value},
            ]
            store.measures(rows)
        assert [row["value"] for row in store.rows("measure")] == pytest.approx([2.0, 2.0])
