"""What is kept of runs is read from their folder alone."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import piebald
from piebald.core.errors import RunFolderError
from piebald.experiments.file import ExperimentSettings
from piebald.report.tables import History
from piebald.storage.store import RunStore

pd = pytest.importorskip("pandas")
X = np.random.default_rng(0).normal(size=60)
TABLE = pd.DataFrame({"site": ["a", "b", "c"] * 20, "x": X, "ill": (X > 0).astype(int)})
TEXT = """
rounds = 2
data = { source = "rows.csv", client = "site", target = "ill" }
model = { name = "logistic" }
"""


def test_a_run_of_a_file_is_opened_without_its_rows_and_a_comparison_with_all_runs(tmp_path: Path) -> None:
    TABLE.to_csv(tmp_path / "rows.csv", index=False)
    (tmp_path / "case.toml").write_text(f'{TEXT}recipe = {{ name = "fedavg" }}\n')
    settings = ExperimentSettings.load(tmp_path / "case.toml")
    plan = settings.plan()
    given = {"rounds": 2, "settings": settings.table()}
    made = piebald.run(plan.recipes["fedavg"], plan.clients, plan.model, out=tmp_path / "runs/fedavg", **given)
    piebald.run("local", plan.clients, plan.model, out=tmp_path / "runs/local", **given).close()
    wanted, final = made.predictor().predict(TABLE), made.final
    made.close()
    (tmp_path / "rows.csv").unlink()
    run = piebald.open(tmp_path / "runs/fedavg")
    assert isinstance(run, piebald.Run)
    pd.testing.assert_frame_equal(run.predictor().predict(TABLE), wanted)
    assert run.final == final
    comparison = piebald.open(tmp_path / "runs")
    assert isinstance(comparison, piebald.Comparison)
    assert sorted(comparison.labels) == ["fedavg", "local"]
    assert {row["label"] for row in comparison.summary()} == {"fedavg", "local"}


def test_tables_of_a_run_from_python_are_read_and_an_empty_folder_is_refused(tmp_path: Path) -> None:
    clients = piebald.clients_from(TABLE, client="site", target="ill")
    model = piebald.models.build_model("logistic", (1,), 2)
    run = piebald.run("fedavg", clients, model, rounds=1, out=tmp_path / "run")
    final = run.final
    run.close()
    history = piebald.open(tmp_path / "run")
    assert type(history) is History
    assert history.final == final
    with pytest.raises(RunFolderError, match="is not a folder"):
        piebald.open(tmp_path / "run" / "none")
    with RunStore.open(tmp_path / "run") as store:
        store.set_meta(status="running")
    with pytest.raises(RunFolderError, match="holds no finished run"):
        piebald.open(tmp_path)


def test_a_folder_without_the_form_of_rows_does_not_have_them_read(tmp_path: Path) -> None:
    TABLE.to_csv(tmp_path / "rows.csv", index=False)
    (tmp_path / "case.toml").write_text(f'{TEXT}recipe = {{ name = "fedavg" }}\n')
    settings = ExperimentSettings.load(tmp_path / "case.toml")
    plan = settings.plan()
    given = {"rounds": 1, "settings": settings.table()}
    piebald.run(plan.recipes["fedavg"], plan.clients, plan.model, out=tmp_path / "run", **given).close()
    with RunStore.open(tmp_path / "run") as store:
        store.set_meta(rows=None)
    (tmp_path / "rows.csv").write_text("no table")
    with piebald.open(tmp_path / "run") as history:
        assert type(history) is History
