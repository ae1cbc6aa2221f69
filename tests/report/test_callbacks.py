"""Callbacks are told what the run folder keeps, and cannot change the run; trackers keep it, also after a kill."""

from __future__ import annotations

import logging
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import piebald
from piebald import data, models, partition
from piebald.core.errors import SettingError
from piebald.report.callbacks import Callback
from piebald.runs.finished_run import Run


def run(recipe: str = "fedavg", **more: Any) -> Run:
    clients = partition.Iid(clients=3, limit=90).split(data.digits())
    return piebald.run(recipe, clients, models.build_model("logistic", (1, 8, 8), 10), **{"rounds": 3} | more)


class Listener(Callback):
    def __init__(self) -> None:
        self.told: list[tuple[str, Any]] = []

    def on_start(self, run):
        self.told.append(("start", run))

    def on_result(self, result):
        self.told.append(("result", dict(result)))

    def on_server_step(self, step):
        self.told.append(("step", dict(step)))

    def on_evaluation(self, version, scores):
        self.told.append(("evaluation", (version, [dict(row) for row in scores])))

    def on_end(self, history, status):
        self.told.append(("end", (history.final["mean"], status)))

    def rows(self, what: str) -> list[Any]:
        return [row for kind, row in self.told if kind == what]


def test_what_is_told_is_what_is_kept(tmp_path: Path) -> None:
    listener = Listener()
    made = run(out=tmp_path / "run", callbacks=[listener])
    assert [kind for kind, _ in listener.told[:3]] == ["start", "evaluation", "result"]
    assert listener.rows("start")[0].meta["label"] == "fedavg"
    assert [row["version"] for row in listener.rows("step")] == [1, 2, 3]
    assert [row | {"wall": 0} for row in made.rounds] == [row | {"wall": 0} for row in listener.rows("step")]
    told = sorted(listener.rows("result"), key=lambda row: row["id"])
    assert [{name: row[name] for name in told[0]} for row in made.results] == told
    scores = [row for _, rows in listener.rows("evaluation") for row in rows]
    assert sorted(map(str, scores)) == sorted(str({name: row[name] for name in scores[0]}) for row in made.scores)
    assert listener.rows("end") == [(made.accuracy, "finished")]


class Meddler(Callback):
    """Does whatever a callback could do to change a run by what it is given or by what is global."""

    def on_start(self, run):
        with pytest.raises(TypeError):
            run.meta["seed"] = 7
        self._disturb()

    def on_result(self, result):
        with pytest.raises(TypeError):
            result["loss"] = 0
        self._disturb()

    def on_server_step(self, step):
        with pytest.raises(TypeError):
            del step["version"]
        self._disturb()

    def on_evaluation(self, version, scores):
        scores.clear()
        self._disturb()

    def _disturb(self):
        torch.manual_seed(0)
        np.random.seed(0)
        random.seed(0)


@pytest.mark.parametrize("recipe", ["scaffold", "ditto", "async_fedavg"])
def test_a_callback_cannot_change_the_run(recipe: str, caplog: pytest.LogCaptureFixture) -> None:
    with_it = run(recipe, callbacks=[Meddler()])
    assert not [line for line in caplog.messages if "own models" not in line]  # it did all it wanted
    assert torch.equal(with_it.start(), run(recipe).start())


def test_a_callback_that_fails_is_one_warning_and_the_others_are_told(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(Callback):
        def on_server_step(self, step):
            raise ValueError("disk full")

    listener = Listener()
    made = run(callbacks=[Broken(), listener])
    assert made.final["status"] == "finished"
    assert len(listener.rows("step")) == 3
    (warning,) = (record.getMessage() for record in caplog.records if record.levelno == logging.WARNING)
    assert warning == "Broken failed and is told nothing more; the run goes on: ValueError: disk full"


class Interrupting(Listener):
    """Ctrl-C after a number of server steps."""

    def __init__(self, after: int) -> None:
        super().__init__()
        self.after = after

    def on_server_step(self, step):
        super().on_server_step(step)
        if step["version"] == self.after:
            raise KeyboardInterrupt


def interrupted(folder: Path, **more: Any) -> Run:
    """A run that is stopped after two server steps and resumed."""
    clients = partition.Iid(clients=3, limit=90).split(data.digits())
    model = models.build_model("logistic", (1, 8, 8), 10)
    first, second = Interrupting(2), Listener()
    with pytest.raises(KeyboardInterrupt):
        piebald.run("fedavg", clients, model, rounds=4, out=folder, callbacks=[first], checkpoint_every=1, **more)
    assert first.rows("end")[0][1] == "stopped"
    made = piebald.resume(folder, clients, model, callbacks=[second])
    assert second.rows("start")[0].version == 2
    assert [row["version"] for row in second.rows("step")] == [3, 4]
    piebald.resume(folder, clients, model, callbacks=[third := Listener()])
    assert third.told == []  # it was finished
    return made


@pytest.mark.full
def test_tensorboard_has_every_step_once_also_after_a_kill(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    made = interrupted(tmp_path / "run", trackers=["tensorboard"])
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    events.Reload()
    means = [(event.step, event.value) for event in events.Scalars("test/global/accuracy/mean")]
    assert means == [(point["version"], pytest.approx(point["mean"])) for point in made.curve]
    assert [event.step for event in events.Scalars("server/bytes_up")] == [1, 2, 3, 4]
    assert events.Tags()["images"]


@pytest.mark.full
@pytest.mark.parametrize("store", ["folder", "sqlite"])
@pytest.mark.filterwarnings("ignore::Warning")  # MLflow's own, about its packages
def test_mlflow_has_one_run_also_after_a_kill(tmp_path: Path, store: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow")
    if store == "sqlite":
        pytest.importorskip("alembic")  # mlflow-skinny comes without databases
    uri = str(tmp_path / "mlruns") if store == "folder" else f"sqlite:///{tmp_path / 'runs.db'}"
    monkeypatch.chdir(tmp_path)
    made = interrupted(tmp_path / "it's", trackers=[{"kind": "mlflow", "uri": uri}])
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    client = mlflow.MlflowClient(uri)
    experiment = client.get_experiment_by_name("fedavg")
    (found,) = client.search_runs([experiment.experiment_id])
    assert found.info.status == "FINISHED"
    assert found.data.params["training.lr"] == str(made.meta["recipe"]["table"]["training"]["lr"])
    steps = client.get_metric_history(found.info.run_id, "test/global/accuracy/mean")
    assert sorted({(one.step, one.value) for one in steps}) == [(p["version"], p["mean"]) for p in made.curve]
    assert any(one.path.endswith("report.html") for one in client.list_artifacts(found.info.run_id, "report"))


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::Warning")
def test_wandb_writes_offline(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    run(out=tmp_path / "run", trackers=[{"kind": "wandb", "folder": str(tmp_path)}])
    assert list(tmp_path.glob("wandb/offline-run-*/*.wandb"))


def test_trackers_are_refused_in_a_sentence_before_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for given, said in [
        ("tensorboard", "trackers must be"),
        (["tensorbord"], "there is no tracker 'tensorbord': did you mean 'tensorboard'"),
        ([{"kind": "mlflow", "url": "x"}], "url"),
    ]:
        with pytest.raises(SettingError, match=said):
            run(out=tmp_path / "run", trackers=given)
    monkeypatch.setattr("piebald.report.callbacks.tracker.find_spec", lambda package: None)
    with pytest.raises(SettingError, match=r"the package of tracker 'wandb' is missing: pip install"):
        run(out=tmp_path / "run", trackers=["wandb"])
    assert not (tmp_path / "run").exists()


def test_a_tracker_that_fails_is_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("tensorboard")
    (tmp_path / "taken").write_text("mine")
    made = run(trackers=[{"kind": "tensorboard", "folder": str(tmp_path / "taken")}])
    assert made.final["status"] == "finished"
    assert len([record for record in caplog.records if record.levelno == logging.WARNING]) == 1


def test_scores_of_groups_are_summarized() -> None:
    from piebald.report.callbacks.tracker import summaries

    rows = [
        {"client": client, "model": "personal", "split": "test", "metric": "loss", "value": float(client)}
        for client in range(20)
    ] + [{"client": None, "model": "global", "split": "common", "metric": "loss", "value": 3.0}]
    clusters = {client: client % 2 for client in range(20)}
    assert summaries(rows, clusters, "loss", False) == summaries(rows, clusters, "accuracy", True)
    assert summaries(rows, clusters, "loss", True)["test/personal/loss/worst_tenth"] == 0.5  # a loss of one's own
    assert summaries(rows, clusters, "accuracy", True) == {
        "test/personal/loss/mean": 9.5,
        "test/personal/loss/worst_tenth": 18.5,  # a loss is bad where it is high
        "test/personal/loss/cluster_0": 9.0,
        "test/personal/loss/cluster_1": 10.0,
        "common/global/loss": 3.0,
    }
