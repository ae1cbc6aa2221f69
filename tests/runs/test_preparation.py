"""Runs on tables as they are: prepared alike at all clients, metrics in the target's unit, newcomers, pages."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
import torch

import piebald
from piebald.cli import main
from piebald.core.errors import SettingError
from piebald.core.objective import METRICS, InUnit
from piebald.data.clients.prepared import preparation_of
from piebald.data.preparation import Preparation
from piebald.experiments.file import ExperimentSettings
from piebald.report import write_report
from piebald.runs.finished_run import Run
from tests.cases.test_tables import prices, wards

WARDS = "data = { source = 'rows.csv', client = 'hospital', target = 'ill' }\n"
PRICES = "data = { source = 'rows.csv', client = 'town', target = 'price', regression = true }\n"
REST = "measure = 'none'\nmodel = { name = 'logistic' }\nrecipe = { name = 'fedavg', lr = 0.1 }\n"


def experiment(folder: Path, table: pandas.DataFrame, data: str, rest: str = REST) -> Path:
    table.to_csv(folder / "rows.csv", index=False)
    (folder / "file.toml").write_text(rest + data)
    return folder / "file.toml"


def run(file: Path, *flags: str, rounds: int = 2, **options: Any) -> Run:
    settings = ExperimentSettings.load(file, flags)
    plan = settings.plan()
    options = {"runtime": plan.runtime, "unseen": settings.unseen, **options}
    return piebald.run(
        next(iter(plan.recipes.values())), plan.clients, plan.model, rounds=rounds, out=file.parent / "run",
        settings=settings.table(), measure="none", **options,
    )  # fmt: skip


@pytest.mark.full
def test_words_and_gaps_train_and_the_preparation_is_kept(tmp_path: Path) -> None:
    file = experiment(tmp_path, wards(), WARDS)
    made = run(file)
    agreed = Preparation.from_json((tmp_path / "run" / "preparation.json").read_text())
    assert agreed.feature_names_out == ["age", "age is missing", "ward=a", "ward=b", "ward=c"]
    assert Preparation(**made.meta["preparation"]) == agreed
    assert piebald.resume(tmp_path / "run", rounds=3).meta["preparation"] == made.meta["preparation"]
    page = write_report([tmp_path / "run"], tmp_path / "report")[0].read_text()
    for words in ("What was prepared", "3 categories, a column each", "an indicator of gaps", "north"):
        assert words in page


def test_later_rows_do_not_change_what_was_agreed_on(tmp_path: Path) -> None:
    file = experiment(tmp_path, wards(), WARDS)
    before = run(file).meta["preparation"]
    wards().assign(age=wards().age * 10).to_csv(tmp_path / "rows.csv", index=False)
    assert piebald.resume(tmp_path / "run", rounds=3).meta["preparation"] == before


def test_it_is_fitted_to_the_training_rows_of_clients_that_take_part(tmp_path: Path) -> None:
    table = wards().assign(age=wards().age.fillna(60.0))
    file = experiment(
        tmp_path,
        table,
        WARDS,
        f"unseen = 1\npartition = {{ kind = 'by_owner', owner = 'hospital', validation = 0.1 }}\n{REST}",
    )
    settings = ExperimentSettings.load(file)
    clients, plain = settings.plan().clients, ExperimentSettings.load(file, ["prepare='none'", "data.features=['age']"])
    raw = plain.plan().clients
    made = run(file)
    held_out = [str(one) for one in made.newcomers.names] if hasattr(made.newcomers, "names") else []
    agreed = preparation_of(clients)
    assert agreed is not None
    means = {}
    for left in range(3):
        rows = torch.cat([raw.rows(k, "train").x for k in range(3) if k != left])  # type: ignore[misc]
        means[str(raw.names[left])] = float(rows.double().mean())
    ours = agreed.columns[0].values.mean  # type: ignore[union-attr]
    (name,) = (name for name, mean in means.items() if mean == pytest.approx(ours, rel=1e-6))
    assert not held_out or held_out == [name]


@pytest.mark.full
def test_metrics_are_told_in_the_targets_own_unit(tmp_path: Path) -> None:
    table = prices()
    made = run(experiment(tmp_path, table, PRICES), rounds=40)
    slope, start = np.polyfit(table["size"], table.price, 1)
    line = float(np.abs(slope * table["size"] + start - table.price).mean())
    assert line == pytest.approx(4180, abs=10)
    assert made.final["mean"] == pytest.approx(line, rel=0.1)
    newcomer = table[:40].drop(columns="town")
    adapted = piebald.adapt(tmp_path / "run", newcomer, epochs=1)
    (whole,) = (method for method in adapted.methods if method.name == "global")
    assert whole.validation is not None
    assert 500 < whole.validation < 10_000  # of a few rows, in the target's own unit
    with pytest.raises(SettingError, match="no column 'size'"):
        piebald.adapt(tmp_path / "run", newcomer.drop(columns="size").assign(other=1.0), epochs=1)


def test_a_metric_in_another_unit_keeps_its_kind() -> None:
    outputs, targets = torch.tensor([[1.0], [2.0]]), torch.tensor([0.0, 4.0])
    assert InUnit(METRICS["absolute_error"], 5.0, 10.0)(outputs, targets).tolist() == [10.0, 20.0]
    gathered = InUnit(METRICS["concordance"], 0.0, 2.0)
    assert hasattr(gathered, "update") is hasattr(METRICS["concordance"], "update")
    assert not hasattr(InUnit(METRICS["absolute_error"], 5.0, 10.0), "update")


@pytest.mark.full
def test_engines_agree_on_metrics_of_scores(tmp_path: Path) -> None:
    file = experiment(tmp_path, prices(), PRICES)
    plan = ExperimentSettings.load(file).plan()
    figures = [
        piebald.run(plan.recipes["fedavg"], plan.clients, plan.model, rounds=2, measure="none",
                    runtime=piebald.Simulator(engine=engine)).final["mean"]
        for engine in ("sequential", "vmapped", "reference")
    ]  # fmt: skip
    assert figures == pytest.approx([figures[0]] * 3, rel=1e-4)


@pytest.mark.full
def test_newcomers_are_prepared_as_the_run(tmp_path: Path) -> None:
    run(experiment(tmp_path, wards(), WARDS))
    newcomer = wards()[:50].drop(columns="hospital")[["ward", "ill", "age"]]
    newcomer.to_csv(tmp_path / "new.csv", index=False)
    assert main(["adapt", str(tmp_path / "run"), "--data", str(tmp_path / "new.csv"), "--json"]) == 0
    by_frame = piebald.adapt(tmp_path / "run", newcomer, epochs=1)
    by_pair = piebald.adapt(tmp_path / "run", (newcomer.drop(columns="ill"), newcomer.ill.to_numpy()), epochs=1)
    assert by_frame.table() == by_pair.table()


def test_noise_that_hides_rows_leaves_numbers_as_they_are(tmp_path: Path) -> None:
    file = experiment(tmp_path, prices(), PRICES)
    noisy = "recipe={ name = 'dp_sgd', lr = 0.1, noise = 1.0 }"
    assert preparation_of(ExperimentSettings.load(file, [noisy]).plan().clients) is None
    plan = ExperimentSettings.load(file, [noisy, "prepare='federated'"]).plan()
    with pytest.raises(SettingError, match="constants of a preparation that are computed from the rows tell of each"):
        piebald.run(plan.recipes["dp_sgd"], plan.clients, plan.model, rounds=1)


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["prepare={ scale = { wage = 'log' } }"], "there is no column, which .prepare. names, 'wage'"),
        (["prepare={ least_rows = 0 }"], "least_rows must be at least 1, got 0"),
        (["prepare='local'"], "prepare"),
        (["prepare={ gap = ['?'] }"], "gap"),
        (["prepare='federated'", "data.standardise='federated'"], "prepare scales inputs, and data.standardise"),
        (
            ["prepare={ columns = { ward = 'number' } }"],
            "column 'ward' must have a number in each row, got 'c' in row 142",
        ),
    ],
)
def test_bad_settings_are_one_sentence(
    tmp_path: Path, flags: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file = experiment(tmp_path, wards(), WARDS)
    words = [word for flag in flags for word in ("--set", flag)]
    assert main(["run", str(file), *words, "--out", str(tmp_path / "bad"), "--quiet"]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert all(part in said for part in sentence.split(".prepare."))


def test_one_line_says_what_was_chosen(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = experiment(tmp_path, wards(), WARDS)
    assert main(["run", str(file), "--set", "rounds=1", "--out", str(tmp_path / "run")]) == 0
    first = capsys.readouterr().out.splitlines()[0]
    assert first == "prepared alike at all clients: 1 number (age), 1 category (ward), 5 inputs"
    assert main(["run", str(file), "--set", "rounds=1", "--out", str(tmp_path / "again"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["rounds"] == 1
