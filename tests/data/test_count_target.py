"""A count and an exposure of a table as the target of a network of rates."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import piebald
from piebald.cli import main
from piebald.contracts import Rows, Update
from piebald.core.errors import SettingError
from piebald.core.metrics import count_loss, poisson_deviance
from piebald.experiments.file import ExperimentSettings
from piebald.methods.queries.row_scores import TrainingTotals, constant_of
from piebald.models import build_model
from piebald.models.prediction import mean_outputs
from piebald.privacy.ledger import DisclosureRules, Withheld
from piebald.report.export.score import Scorer
from tests.fakes import simulate

pd = pytest.importorskip("pandas")
TARGET = {"count": "falls", "exposure": "days"}


def wards(rows: int = 150) -> Any:
    rng = np.random.default_rng(0)
    x, days = rng.normal(size=(rows, 2)).round(3), rng.integers(1, 30, rows)
    table = pd.DataFrame({"site": np.resize(["a", "b", "c"], rows), "x": x[:, 0], "z": x[:, 1], "days": days})
    return table.assign(falls=rng.poisson(days * np.exp(-2 + 0.5 * x[:, 0] - 0.3 * x[:, 1])))


def trained(
    table: Any,
    target: Any = TARGET,
    weights: str | None = None,
    engine: str = "batched",
    regression: bool = False,
    **options: Any,
) -> Any:
    clients = piebald.clients_from(table, client="site", target=target, test=0, weights=weights, features=["x", "z"],
                                   regression=regression)  # fmt: skip
    recipe = piebald.recipes.fedavg(lr=0.2, steps=1, batch=1000)
    options = {"rounds": 200, "evaluate_every": 0, "simulator": {"engine": engine}} | options
    return simulate(recipe, clients, build_model("mlp", (2,), 1, hidden=[]), **options)


def coefficients(run: Any) -> Any:
    return np.concatenate([part.detach().numpy().ravel() for part in run.model().parameters()])


@pytest.mark.parametrize("weights", [None, pytest.param("w", marks=pytest.mark.full)])
def test_full_batches_come_to_the_poisson_model_of_all_rows(weights: str | None) -> None:
    table = wards().assign(w=np.random.default_rng(1).integers(1, 4, 150), log=lambda rows: np.log(rows["days"]))
    names: Any = {"client": "site", "target": "falls", "columns": ["x", "z"], "offset": "log"}
    expected = piebald.glm(table, family="poisson", weights=weights, **names)
    run = trained(table, weights=weights)
    right = expected.coefficients
    assert coefficients(run) == pytest.approx([right[1], right[2], right[0]], abs=1e-3)
    rates = run.predictor().predict(table[["x", "z"]])
    assert list(rates) == ["rate"]
    assert rates["rate"].to_numpy() == pytest.approx(np.exp(right[0] + table[["x", "z"]] @ right[1:]), rel=3e-3)


@pytest.mark.full
@pytest.mark.parametrize("engine", ["sequential", "vmapped", "reference"])
def test_all_engines_come_to_the_same(engine: str) -> None:
    short: dict[str, Any] = {"rounds": 3}
    assert coefficients(trained(wards(), engine=engine, **short)) == pytest.approx(
        coefficients(trained(wards(), **short)), abs=1e-6
    )


def test_the_deviance_is_that_of_scikit_learn_and_unknown_targets_count_nowhere() -> None:
    metrics = pytest.importorskip("sklearn.metrics")
    rng = np.random.default_rng(2)
    count, days, outputs = rng.poisson(3, 40), rng.integers(1, 9, 40), rng.normal(size=40)
    targets = torch.tensor(np.stack([count, days], 1), dtype=torch.float32)
    means = days * np.exp(outputs)
    found = poisson_deviance(torch.tensor(outputs)[:, None].float(), targets)
    assert float(found.mean()) == pytest.approx(metrics.mean_poisson_deviance(count, means), rel=1e-5)
    alone = poisson_deviance(torch.tensor(outputs).float(), torch.tensor(count))
    assert float(alone.mean()) == pytest.approx(metrics.mean_poisson_deviance(count, np.exp(outputs)), rel=1e-5)
    targets[3, 0], targets[5, 1], scores = torch.nan, -100, torch.tensor(outputs).float().requires_grad_()
    loss = count_loss(scores, targets)
    loss.sum().backward()
    assert loss[[3, 5]].tolist() == [0, 0]
    assert scores.grad is not None
    assert scores.grad[[3, 5]].tolist() == [0, 0]
    assert bool(scores.grad.isfinite().all())


@pytest.mark.full
def test_counts_alone_take_the_loss_by_name() -> None:
    table = wards()
    with pytest.raises(SettingError, match=r"loss 'counts' predicts numbers, but the targets are .* classes"):
        trained(table, "falls", loss="counts")
    run = trained(table, "falls", loss="counts", regression=True)
    expected = piebald.glm(table, client="site", target="falls", columns=["x", "z"], family="poisson").coefficients
    assert coefficients(run) == pytest.approx([expected[1], expected[2], expected[0]], abs=2e-3)
    assert list(run.predictor().predict(table[["x", "z"]])) == ["falls"]


@pytest.mark.full
def test_a_comparison_has_the_constant_rate_of_training_rows_beside_methods() -> None:
    metrics = pytest.importorskip("sklearn.metrics")
    clients = piebald.clients_from(wards(), client="site", target=TARGET, test=0.3)
    compared = piebald.compare(["fedavg"], clients, build_model("mlp", (2,), 1, hidden=[]), rounds=1)
    assert list(compared.naive) == ["the constant rate", "all clients' constant rate"]
    train, test = ([clients.rows(c, split).y.double().numpy() for c in range(3)] for split in ("train", "test"))
    rates = [pairs.sum(0)[0] / pairs.sum(0)[1] for pairs in (*train, np.concatenate(train))]
    for scores, of_client in zip(compared.naive.values(), (rates[:3], [rates[3]] * 3), strict=True):
        expected = [
            metrics.mean_poisson_deviance(pairs[:, 0], pairs[:, 1] * rate)
            for pairs, rate in zip(test, of_client, strict=True)
        ]
        assert scores.client_means() == pytest.approx(expected, rel=1e-4)
    assert "constant rate" in str(compared)


def test_the_constant_rate_knows_no_unit_of_weights_and_has_half_a_count_where_nothing_was_counted() -> None:
    targets, weights = torch.tensor([[1.0, 10.0], [0.0, 10.0]]).double(), torch.tensor([2.0, 1.0]).double()
    for unit in (1.0, 0.01):
        assert constant_of("rate", targets, weights * unit).exp().item() == pytest.approx(2 / 30)
    assert constant_of("rate", targets[1:]).exp().item() == pytest.approx(0.5 / 10)
    assert constant_of("rate", torch.tensor([[3.0], [torch.nan], [1.0]])).exp().item() == pytest.approx(2)


def test_a_site_tells_sums_only_of_rows_that_its_rules_looked_at() -> None:
    """A pair that is unknown by half is in no sum, and must not make the row of another look like one of many."""
    others = torch.tensor([[90.0, -100.0]]).repeat(20, 1)
    inputs = SimpleNamespace(answered=lambda **answer: answer)

    def told(pairs: torch.Tensor) -> Any:
        rows = Rows(torch.zeros(len(pairs), 1), pairs)
        context = SimpleNamespace(disclosure=DisclosureRules(), rows=lambda split: [rows])
        return TrainingTotals.of("rate").answer(inputs, context, None)["vectors"]["totals"].tolist()  # type: ignore[arg-type]

    even = torch.tensor([[3.0, 10.0]]).repeat(20, 1)
    assert told(torch.cat([even, others])) == [[60, 200, 20]]
    # policies go by the number of rows, and not by sums
    assert TrainingTotals.of("rate").fewest_rows(Update({"totals": torch.tensor([60.0, 200.0, 4.0])}, 4, 0, {})) == 4
    assert TrainingTotals.of("rate").fewest_rows(Update({"totals": torch.tensor([2.0, 3.0, 4.0])}, 4, 0, {})) == 4
    alone = torch.cat([torch.tensor([[90.0, 10.0]]), torch.tensor([[0.0, 10.0]]).repeat(19, 1)])
    with pytest.raises(Withheld):
        told(torch.cat([alone, others]))


@pytest.mark.full
def test_an_exported_model_predicts_rates_as_the_run_does(tmp_path: Path) -> None:
    clients = piebald.clients_from(wards(), client="site", target=TARGET, features=["x", "z"])
    run = piebald.run("fedavg", clients, build_model("mlp", (2,), 1, hidden=[]), rounds=2, measure="none")
    scorer = Scorer(run.save(tmp_path / "folder"))
    pd.testing.assert_frame_equal(pd.DataFrame(scorer.predict(wards())), run.predict(wards()), rtol=1e-5)
    assert run.predict(wards()).to_numpy().min() > 0


@pytest.mark.full
def test_an_experiment_names_them_and_needs_no_loss(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    wards().to_csv(path := tmp_path / "wards.csv", index=False)
    file = tmp_path / "experiment.toml"
    file.write_text(
        f'rounds = 3\ndata.source = "{path}"\ndata.client = "site"\n'
        'data.target = { count = "falls", exposure = "days", per = 7 }\n'
        'model = { name = "mlp", hidden = [] }\nrecipe = { name = "fedavg", lr = 0.1 }\n'
    )
    settings = ExperimentSettings.load(file)
    assert 20 / 7 < float(settings.clients().rows(0, "train").y[:, 1].max()) < 30 / 7
    # as a run's folder keeps them, and as sites are told
    assert settings.table()["data"]["target"] == TARGET | {"per": 7}
    assert main(["run", str(file), "--out", str(tmp_path / "run"), "--quiet"]) == 0
    assert piebald.open(tmp_path / "run").score.name == "poisson_deviance"
    assert "classes" not in caplog.text  # few different counts are no codes of classes


def test_what_is_no_count_and_no_exposure_is_said_in_a_sentence() -> None:
    table = wards()
    with pytest.raises(SettingError, match=r"or \{ count = 'a column', exposure = 'a column' \} of rates"):
        piebald.clients_from(table, client="site", target={"count": "falls"})
    for per in (0, -1, "year"):
        with pytest.raises(SettingError, match="per of a target is how many units of exposure rates are for"):
            piebald.clients_from(table, client="site", target=TARGET | {"per": per})
    with pytest.raises(SettingError, match="per of a target"):
        piebald.clients_from(table, client="site", target={"time": "days", "event": "falls", "per": 2})
    with pytest.raises(SettingError, match="must be finite counts of at least 0"):
        trained(table.assign(falls=table["falls"].where(table.index != 4, -3)))
    with pytest.raises(SettingError, match="must be finite exposures above 0"):
        trained(table.assign(days=table["days"].where(table.index != 4, 0)))


@pytest.mark.parametrize("per", [100, 365.0])
def test_rates_are_for_as_many_units_as_is_said_and_predicted_alike(per: float) -> None:
    """The same model in another unit: its intercept is larger by the logarithm, and nothing else."""
    table = wards()
    table = table.assign(days=table["days"] * per)
    expected = coefficients(trained(wards()))
    run = trained(table, TARGET | {"per": per})
    assert coefficients(run) == pytest.approx(expected, abs=1e-5)
    assert run.predict(table).to_numpy() == pytest.approx(trained(wards()).predict(table).to_numpy(), rel=1e-4)


def test_counts_that_are_far_from_their_exposures_are_said_with_a_unit_that_brings_them_near(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A network begins with a rate of about 1: by falls in hundreds of days it came to nine times the deviance."""
    table = wards().assign(days=lambda rows: rows["days"] * 100)
    near = table["days"].sum() / table["falls"].sum()
    piebald.clients_from(table, client="site", target=TARGET)
    (said,) = caplog.messages
    assert f"'falls' comes once in {near:.3g} of 'days'" in said
    proposed = re.search(r"target = \{ count = 'falls', exposure = 'days', per = (\d+) \}", said)
    assert proposed is not None
    caplog.clear()
    piebald.clients_from(table, client="site", target=TARGET | {"per": int(proposed[1])})
    piebald.clients_from(wards(), client="site", target=TARGET)
    assert caplog.messages == []


def test_rates_of_several_models_are_averaged_as_rates() -> None:
    outputs = [torch.tensor([[0.0]]), torch.tensor([[2.0]])]
    mean = mean_outputs(outputs, "rates", torch.tensor([3.0, 1.0]).double())
    assert float(mean.exp()) == pytest.approx((3 + np.exp(2)) / 4)


@pytest.mark.long  # processes of sites
def test_sites_train_alike(tmp_path: Path) -> None:
    wards().drop(columns="z").to_csv(tmp_path / "wards.csv", index=False)
    (tmp_path / "experiment.toml").write_text(
        'rounds = 2\ndata.source = "wards.csv"\ndata.client = "site"\n'
        'data.target = { count = "falls", exposure = "days" }\n'
        'partition = { kind = "by_owner", owner = "site" }\n'
        'model = { name = "mlp", hidden = [] }\nrecipe = { name = "fedavg", lr = 0.1, steps = 2, batch = 1000 }\n'
    )
    models, constants = [], []
    for runtime in ("simulator", "federation"):
        words = ("--runtime", runtime, "--out", str(tmp_path / runtime), "--quiet")
        assert main(["run", str(tmp_path / "experiment.toml"), *words]) == 0
        run: Any = piebald.open(tmp_path / runtime)
        assert run.score.name == "poisson_deviance"
        models.append(coefficients(run))
        constants.append(run.naive("naive_of_all"))
    assert models[1] == pytest.approx(models[0], rel=1e-5)
    assert constants[1] == pytest.approx(constants[0], rel=1e-3)  # sites tell rounded scores
    assert constants[1]
