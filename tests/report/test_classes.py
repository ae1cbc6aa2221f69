"""Right and wrong answers by class: the counts of a run are those of its scores and of its clients' rows."""

from __future__ import annotations

import re
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import piebald
from piebald import data, models, partition
from piebald.cli import main
from piebald.core.errors import RunFolderError, SettingError
from piebald.report import write_report
from piebald.report.class_rows import class_rows
from piebald.report.tables import History

HERE = piebald.Simulator(engine="sequential", workers=0)
CLASSES = 10


@pytest.fixture(scope="module")
def clients() -> partition.PooledClients:
    return partition.Dirichlet(clients=3, alpha=0.4, limit=240, validation=0.2, test=0.3).split(data.digits())


def trained(clients: Any, recipe: str = "ditto", **more: Any) -> piebald.Run:
    options = {"rounds": 2, "runtime": HERE, "measure": "none"} | more
    return piebald.run(
        recipe, clients, lambda seed: models.build_model("mlp", (1, 8, 8), 10, seed, hidden=(8,)), **options
    )


def check(run: History, clients: Any, asked: list[int] | None = None) -> None:
    """The counts add up to the scores and to the classes of the rows, which come from elsewhere."""
    assert list(run.class_counts) == (list(range(len(clients))) if asked is None else asked)
    for client, matrix in run.class_counts.items():
        held = np.bincount(clients.rows(client, "test").y.numpy(), minlength=CLASSES)
        assert matrix.sum(1).tolist() == held.tolist()
        assert matrix.trace() / matrix.sum() == pytest.approx(run.per_client[client])
    rows = run.class_errors()
    assert sum(row["rows"] for row in rows) == sum(clients.size(client, "test") for client in run.class_counts)


@pytest.mark.parametrize("keep", ["last", "best", "best_for_each", "knn_per"])
def test_counts_are_of_the_model_that_a_client_ends_with(keep: str, clients) -> None:
    run = trained(clients, keep=keep)
    check(run, clients)
    wanted = {"last": {"personal"}, "best": {"personal"}, "best_for_each": {"chosen"}, "knn_per": {"chosen"}}[keep]
    ended = run.best or 2
    assert {row["model"] for row in run.confusion if row["version"] == ended} == wanted


@pytest.mark.full
def test_counts_follow_the_run(clients, tmp_path: Path) -> None:
    def model(seed: int) -> Any:
        return models.build_model("mlp", (1, 8, 8), 10, seed, hidden=(8,))

    trained(clients, "fedavg", rounds=1, out=tmp_path / "run", evaluate_clients=2).close()
    run = piebald.resume(tmp_path / "run", clients, model, rounds=3)
    check(run, clients, asked=list(run.per_client))
    assert len(run.per_client) == 2
    run.close()
    again = piebald.resume(tmp_path / "run", clients, model, rounds=4)
    check(again, clients, asked=list(again.per_client))
    again.close()


@pytest.mark.full
def test_the_page_and_the_command_have_them_and_damage_is_said(clients, tmp_path: Path, capsys) -> None:
    folder = tmp_path / "run"
    run = trained(clients, "fedavg", out=folder)
    name, row = run.names[1], run.class_errors(1)[0]
    run.close()
    page = Path(write_report([folder], tmp_path / "page")[0]).read_text()
    (single,) = re.findall(r"<details><summary>fedavg, client by client.*?</details>", page, re.S)
    assert page.index("<summary>Right and wrong answers by class") < page.index(single)
    (line,) = (line for line in re.findall(r"<tr>.*?</tr>", single, re.S) if f">{name}<" in line)
    assert f">{row['right']} of {row['rows']}<" in line
    assert main(["errors", str(folder), "--client", name]) == 0
    shown = capsys.readouterr().out.splitlines()[2].split()
    assert shown[:3] == [row["class"], str(row["rows"]), str(row["right"])]
    assert main(["errors", str(folder), "--client", "nobody"]) == 2
    assert "no client whose answers were counted called 'nobody'" in capsys.readouterr().err
    with closing(sqlite3.connect(folder / "run.db")) as db, db:
        db.execute("UPDATE confusion SET predicted = 10 WHERE rowid = 1")
    with History(folder) as history, pytest.raises(RunFolderError, match="which cannot be with 10 classes"):
        history.class_errors()


def test_what_cannot_be_counted_is_refused_or_left_out(clients, monkeypatch) -> None:
    assert trained(clients, "fedavg", rounds=1, per_class=False).class_counts == {}
    assert trained(clients, "fedavg", rounds=1, evaluate_every=0).class_counts == {}
    with pytest.raises(SettingError, match="per_class needs evaluations"):
        trained(clients, evaluate_every=0, per_class=True)
    numbers = partition.clients_from({"a": (np.eye(8, dtype="float32"), np.arange(8.0, dtype="float32"))}, test=0.5)
    line = models.build_model("logistic", (8,), 1)
    assert piebald.run("fedavg", numbers, line, rounds=1, runtime=HERE).class_counts == {}
    with pytest.raises(SettingError, match="per_class needs classes"):
        piebald.run("fedavg", numbers, line, rounds=1, runtime=HERE, per_class=True)
    monkeypatch.setattr("piebald.server.evaluation.MOST_CLIENTS", 2)
    assert trained(clients, "fedavg", rounds=1).class_counts == {}
    with pytest.raises(SettingError, match="at most 2 clients, 3 are evaluated"):
        trained(clients, per_class=True)


def test_rows_of_classes_say_what_is_mistaken_for_what() -> None:
    matrix = np.array([[5, 2, 1], [0, 0, 0], [4, 0, 0]])
    cat, owl = (list(row.values()) for row in class_rows(matrix, ["cat", "dog", "owl"]))
    assert cat == ["cat", 8, 5, 0.625, "dog", 2, 4]
    assert owl == ["owl", 4, 0, 0.0, "cat", 4, 1]
