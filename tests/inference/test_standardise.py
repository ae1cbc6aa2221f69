"""Standard scores by constants of all clients' training rows, from the experiment's file to the exported model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
import torch
from sklearn.preprocessing import StandardScaler

import piebald
from piebald import models
from piebald.core.errors import SettingError
from piebald.data.partition import LazyClients, Standardisation, clients_from, standardised
from piebald.data.partition.leakage import SPLITS
from piebald.experiments.file import ExperimentSettings
from piebald.runs.finished_run import Run


def clients(poison: float = 0.0) -> Any:
    """Three unlike clients with given parts; `poison` changes their validation and test rows."""
    rng = np.random.default_rng(1)
    parts = {}
    for k in range(3):
        x = rng.normal(5 * k, 10.0**k, (30, 3))
        x[:, 2] = 7.0
        y = (x[:, 0] > 5 * k).astype(int)
        parts[str(k)] = {
            "train": (x[:20], y[:20]),
            "validation": (x[20:25] + poison, y[20:25]),
            "test": (x[25:] + poison, y[25:]),
        }
    return clients_from(parts)


def test_constants_are_those_of_the_pooled_training_rows() -> None:
    raw, found = clients(), standardised(clients())
    scaler = StandardScaler().fit(np.concatenate([raw.rows(k, "train").x.double().numpy() for k in range(3)]))
    assert found.standardisation.mean == pytest.approx(scaler.mean_.tolist(), rel=1e-14)
    assert found.standardisation.deviation == pytest.approx(scaler.scale_.tolist(), rel=1e-14)
    assert found.standardisation.deviation[2] == 1.0
    for k in range(3):
        for split in SPLITS:
            wanted = scaler.transform(raw.rows(k, split).x.double().numpy())
            assert torch.allclose(found.rows(k, split).x, torch.from_numpy(wanted).float(), rtol=1e-6, atol=1e-7)
    assert found.common is not None
    assert (found.rows(0, "train").x == found.pool()[torch.from_numpy(found.indices(0, "train"))].x).all()


def test_validation_and_test_rows_do_not_count() -> None:
    assert standardised(clients(1e6)).standardisation == standardised(clients()).standardisation


def test_lazy_clients_are_standardised_as_they_are_loaded() -> None:
    raw = clients()
    lazy = LazyClients(
        3, lambda k: {split: (raw.rows(k, split).x.numpy(), raw.rows(k, split).y.numpy()) for split in SPLITS},
        classes=raw.classes,
    )  # fmt: skip
    found = standardised(lazy)
    assert not found.in_memory()
    assert found.standardisation == standardised(raw).standardisation
    assert torch.equal(found.rows(2, "test").x, standardised(raw).rows(2, "test").x)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_inputs_that_are_no_finite_numbers_are_refused(bad: float) -> None:
    x = np.ones((10, 2), dtype=np.float32)
    x[4, 1] = bad
    lazy = LazyClients(1, lambda _: {"train": (torch.from_numpy(x), torch.zeros(10))})
    with pytest.raises(SettingError):
        standardised(lazy)


def test_wrong_constants_are_refused() -> None:
    with pytest.raises(SettingError, match="standardise has constants for 1 numbers, but inputs have 3"):
        standardised(clients(), Standardisation(mean=[0.0], deviation=[1.0]))
    with pytest.raises(SettingError, match="standardised already"):
        standardised(standardised(clients()))
    tokens = clients_from({"a": (np.ones((4, 2), dtype=np.int64), [0, 1, 0, 1])}, tokens=True)
    with pytest.raises(SettingError, match="token ids have no mean"):
        standardised(tokens)
    for mean, deviation in (([0.0], [0.0]), ([0.0, 1.0], [1.0]), ([float("nan")], [1.0]), ([0.0], [-1.0])):
        with pytest.raises(ValueError, match=r"deviation|finite"):
            Standardisation(mean=mean, deviation=deviation)


@pytest.fixture
def table(tmp_path: Path) -> Path:
    """A table of two hospitals whose columns have very unlike units."""
    rng = np.random.default_rng(2)
    frame = pandas.DataFrame({"site": rng.choice(["a", "b"], 120), "age": rng.normal(50, 9, 120)})
    frame["dose"] = rng.normal(3e5, 1e5, 120)
    frame["sick"] = np.where(frame.dose / 1e5 + frame.age / 9 > 8.5, "yes", "no")
    frame.to_csv(tmp_path / "rows.csv", index=False)
    (tmp_path / "file.toml").write_text(
        "rounds = 2\nprepare = 'none'\nmodel = { name = 'logistic' }\nmeasure = 'none'\n"
        "recipe = { name = 'fedavg', lr = 0.5 }\n"
        "data = { source = 'rows.csv', client = 'site', target = 'sick', standardise = 'federated' }\n"
    )
    return tmp_path


def run(folder: Path, *flags: str) -> Run:
    settings = ExperimentSettings.load(folder / "file.toml", flags)
    plan = settings.plan()
    (recipe,) = plan.recipes.values()
    return piebald.run(
        recipe, plan.clients, plan.model, rounds=settings.rounds, out=folder / "run", settings=settings.table(),
        unseen=settings.unseen, runtime=plan.runtime,
    )  # fmt: skip


def test_a_run_keeps_its_constants_for_newcomers_resume_and_export(table: Path) -> None:
    made = run(table)
    constants = made.standardisation
    assert constants is not None
    assert json.loads(json.dumps(made.meta["settings"]))["data"]["standardise"] == constants.model_dump()
    assert made.accuracy > 0.8  # without standard scores, doses of 300,000 make this model useless

    frame = pandas.read_csv(table / "rows.csv")
    raw = torch.tensor(frame[["age", "dose"]].to_numpy(), dtype=torch.float32)
    made.save(table / "model.safetensors")
    again = models.StandardisedInputs(models.Logistic([2], 2), [0.0] * 2, [1.0] * 2)
    piebald.load_weights(again, table / "model.safetensors")
    assert torch.allclose(again(raw), made.model()(constants.applied(raw)), atol=1e-5)

    adapted = piebald.adapt(table / "run", (raw.numpy(), frame.sick.to_numpy()), validation=0.4, epochs=1)
    (untrained,) = (method for method in adapted.methods if method.name == "global")
    assert untrained.validation is not None
    assert untrained.validation > 0.8

    frame.assign(dose=frame.dose * 10).to_csv(table / "rows.csv", index=False)  # later rows change no constants
    assert piebald.resume(table / "run", rounds=3).standardisation == constants


def test_clients_that_are_held_out_do_not_count(table: Path) -> None:
    with pytest.raises(SettingError, match=r"unseen holds clients out, whose rows would count in data\.standardise"):
        run(table, "unseen=1")


def test_a_run_is_not_resumed_with_other_inputs(table: Path) -> None:
    made = standardised(clients())
    piebald.run("fedavg", made, models.Logistic([3], 2), rounds=1, out=table / "mine")
    with pytest.raises(SettingError, match="by other constants than the run"):
        piebald.adapt(
            table / "mine", standardised(clients_from({"n": (np.ones((9, 3)), [0, 1, 0] * 3)})), clients=made,
            model=models.Logistic([3], 2),
        )  # fmt: skip
    with pytest.raises(SettingError, match="not standardised as in the run"):
        piebald.resume(table / "mine", clients(), models.Logistic([3], 2), rounds=2)


@pytest.mark.parametrize(
    "recipe",
    [
        piebald.recipes.dp_sgd(lr=0.1, noise=1.0),
        piebald.recipes.fedavg().with_(
            aggregation="equal_weighted", transforms=[{"kind": "gaussian", "clip": 1.0, "noise": 1.0}]
        ),
        piebald.recipes.fedavg().with_(transforms=[{"kind": "gaussian", "clip": 1.0, "where": "client"}]),
    ],
)
def test_constants_that_tell_of_rows_are_refused_beside_noise(recipe: piebald.Recipe) -> None:
    model = models.build_model("mlp", (3,), 2)
    computed = standardised(clients())
    with pytest.raises(SettingError, match="no privacy budget counts them: give constants that are known otherwise"):
        piebald.run(recipe, computed, model, rounds=1)
    known = standardised(clients(), Standardisation(mean=[0.0, 0.0, 7.0], deviation=[10.0, 10.0, 1.0]))
    assert piebald.run(recipe, known, model, rounds=1).results
