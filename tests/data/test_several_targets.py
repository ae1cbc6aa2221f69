"""Several columns of a table that are predicted together: numbers in their units, and labels."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import piebald
from piebald.core.errors import SettingError
from piebald.experiments.file import ExperimentSettings
from piebald.models import build_model
from piebald.runs.adaptation import from_table

pd = pytest.importorskip("pandas")
RNG = np.random.default_rng(3)
X = RNG.normal(size=(120, 2)).round(3)
NOISE = 0.3 * RNG.normal(size=(120, 2))
TABLE = pd.DataFrame({
    "plant": ["north", "south", "east"] * 40, "a": X[:, 0], "b": X[:, 1],
    "load_1": 300 + 20 * X[:, 0] + NOISE[:, 0], "load_2": 3 - 0.1 * X[:, 1] + NOISE[:, 1] / 100,
    "hot": (X[:, 0] > 0).astype(int), "wet": np.where(X[:, 1] > 0.3, "yes", "no"),
})  # fmt: skip
LOADS, LABELS = ["load_1", "load_2"], ["hot", "wet"]
HERE = piebald.Simulator(engine="batched")


def trained(targets: list[str], rounds: int = 40, **options: Any) -> tuple[piebald.Run, Any]:
    table = TABLE[["plant", "a", "b", *targets]]
    clients = piebald.clients_from(table, client="plant", target=targets, prepare="federated")
    model = build_model("mlp", (2,), len(targets), hidden=[])
    recipe = piebald.recipes.fedavg(lr=0.1)
    return piebald.run(recipe, clients, model, rounds=rounds, runtime=HERE, evaluate_every=rounds, **options), clients


@pytest.mark.full
def test_numbers_are_predicted_in_their_units_and_under_their_names(tmp_path: Path) -> None:
    run, clients = trained(LOADS)
    y = np.concatenate([clients.rows(client, "train").y.numpy() for client in range(3)])
    assert y.mean(0) == pytest.approx([0, 0], abs=1e-5)
    assert y.std(0) == pytest.approx([1, 1], abs=1e-4)
    predicted = run.predictor().predict(TABLE)
    assert list(predicted) == LOADS
    errors = (predicted - TABLE[LOADS]).abs().mean()
    assert errors.tolist() == pytest.approx(np.abs(NOISE).mean(0) * [1, 0.01], rel=0.2)
    test = [clients.rows(client, "test") for client in range(3)]
    rows = sum(map(len, test))
    mean = sum(np.abs(clients.unchanged.rows(n, "test").y.numpy() - predicted_of(run, part.x)).mean(1).sum()
               for n, part in enumerate(test)) / rows  # fmt: skip
    assert run.final["common"] == pytest.approx(mean, rel=1e-3)  # the metric is in the targets' units
    newcomer = from_table(TABLE, None, run.meta, 0.0, 0.0)
    assert newcomer.rows(0, "train").y.shape[1] == 2


def predicted_of(run: piebald.Run, x: Any) -> np.ndarray[Any, Any]:
    predictor = run.predictor()
    return predictor.meaning.answers(predictor.outputs(x)).numpy()


@pytest.mark.full
def test_labels_stay_as_they_are_and_may_be_unknown() -> None:
    run, clients = trained(LABELS, rounds=30, loss="multilabel")
    for client in range(3):
        assert set(clients.rows(client, "train").y.unique().tolist()) == {0.0, 1.0}
    predicted = run.predictor().predict(TABLE)
    assert list(predicted) == LABELS
    right = (predicted > 0.5).to_numpy() == np.stack([TABLE["hot"] == 1, TABLE["wet"] == "yes"], 1)
    assert right.mean() > 0.85
    table = TABLE[["plant", "a", "hot", "wet"]].astype({"hot": float})
    table.loc[[0, 5], "hot"], table.loc[[5, 7], "wet"] = np.nan, None
    made = piebald.clients_from(table, client="plant", target=LABELS, test=0.0, prepare="federated")
    y = np.concatenate([made.rows(client, "train").y.numpy() for client in range(3)])
    assert (len(y), int((y == -100).sum())) == (119, 2)  # row 5 has no label at all


def test_rows_without_one_of_several_numbers_are_left_out(caplog: pytest.LogCaptureFixture) -> None:
    table = TABLE[["plant", "a", *LOADS]].copy()
    table.loc[[3, 8], "load_2"] = np.nan
    made = piebald.clients_from(table, client="plant", target=LOADS, test=0.0, prepare="federated")
    assert sum(made.size(client, "train") for client in range(3)) == 118
    assert "in 2 of 120 rows" in caplog.text


def test_a_list_of_one_target_is_that_target() -> None:
    run, clients = trained(["load_1"], rounds=10)
    assert clients.rows(0, "train").y.dim() == 1
    assert list(run.predictor().predict(TABLE)) == ["load_1"]


@pytest.mark.parametrize("target", [LABELS, {"time": "load_1", "event": "hot"}])
def test_a_client_that_codes_labels_or_events_otherwise_is_named_with_its_own_values(
    target: Any, caplog: pytest.LogCaptureFixture
) -> None:
    columns = [*(target.values() if isinstance(target, dict) else target)]
    table = TABLE[["plant", "a", "b", *columns]]
    table = table.assign(hot=table.hot + (table.plant == "south"))
    clients = piebald.clients_from(table, client="plant", target=target, prepare="federated")
    assert "'hot': south has the classes '1, 2', and east, north have '0, 1'" in caplog.text
    loss = "survival" if isinstance(target, dict) else "multilabel"
    with pytest.raises(SettingError, match=r"client 'south', train rows: targets must be .* got 2 in "):
        piebald.run("fedavg", clients, build_model("mlp", (2,), 2 - isinstance(target, dict)), rounds=1, loss=loss)


def test_an_experiment_file_names_several_targets(tmp_path: Path) -> None:
    TABLE[["plant", "a", "b", *LOADS]].to_csv(tmp_path / "loads.csv", index=False)
    (tmp_path / "case.toml").write_text("""
rounds = 1
data = { source = "loads.csv", client = "plant", target = ["load_1", "load_2"] }
model = { name = "mlp", hidden = [] }
recipe = { name = "fedavg", lr = 0.1 }
""")
    settings = ExperimentSettings.load(tmp_path / "case.toml")
    plan = settings.plan()
    run = piebald.run(
        plan.recipes["fedavg"], plan.clients, plan.model, rounds=1, settings=settings.table(), runtime=HERE
    )
    assert list(run.predictor().predict(TABLE)) == LOADS
    again = ExperimentSettings.of_table(settings.table(), "again").plan()
    assert again.clients.rows(0, "train").y.tolist() == plan.clients.rows(0, "train").y.tolist()
    with pytest.raises(SettingError, match="names 2 columns"):
        settings.data.only_target  # noqa: B018


@pytest.mark.parametrize(
    ("target", "message"),
    [
        (["load_1", "load_1"], "different columns"),
        (["load_1", "plant"], "different columns"),
        (["load_1", "loud"], "no column 'loud'"),
        (["load_1", "word"], "must have numbers, or yes and no"),
    ],
)
def test_targets_that_cannot_be_predicted_together_are_refused(target: list[str], message: str) -> None:
    table = TABLE.assign(word=["u", "v", "w"] * 40)
    with pytest.raises(SettingError, match=message):
        piebald.clients_from(table, client="plant", target=target, prepare="federated")
    with pytest.raises(SettingError, match="features must not include the target"):
        piebald.clients_from(TABLE, client="plant", target=LOADS, features=["a", "load_2"], prepare="federated")


@pytest.mark.full
def test_classes_with_an_order_are_predicted_as_probabilities_in_that_order(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    words = ["none", "mild", "strong"]  # not by alphabet
    pain = np.array(words)[np.digitize(X[:, 0] + NOISE[:, 0], [-0.5, 0.5])]
    TABLE[["plant", "a", "b"]].assign(pain=pain).to_csv(tmp_path / "pain.csv", index=False)
    text = (
        f"rounds = 60\nloss = 'ordinal'\n"
        f"data = {{ source = '{tmp_path}/pain.csv', client = 'plant', target = 'pain' ORDER }}"
        "\nmodel = { name = 'logistic' }\nrecipe = { name = 'fedavg', lr = 0.3 }\n"
    )
    file = tmp_path / "run.toml"
    file.write_text(text.replace("ORDER", ""))
    with pytest.raises(SettingError, match=r"the order of the classes 'mild, none, strong' is taken from the alphabet"):
        ExperimentSettings.load(file).plan()
    file.write_text(text.replace("ORDER", f", classes = {words}"))
    plan = ExperimentSettings.load(file).plan()
    run = piebald.run(plan.recipes["fedavg"], plan.clients, plan.model, rounds=60, loss="ordinal", runtime=HERE)
    predicted = run.predictor().predict(TABLE)
    assert list(predicted) == words
    assert predicted.sum(axis=1).to_numpy() == pytest.approx(1)
    ranks = predicted.to_numpy() @ np.arange(3)
    assert np.corrcoef(ranks, X[:, 0])[0, 1] > 0.9
    assert run.final["common"] < 0.5  # classes away from the right one, on average
    clients = piebald.clients_from(str(tmp_path / "pain.csv"), client="plant", target="pain", prepare="federated")
    piebald.run("fedavg", clients, build_model("logistic", (2,), 3), rounds=1, loss="ordinal")
    assert "is taken from the alphabet: give clients_from(..., classes=[...])" in caplog.text
