"""Case 32: a column that says how much each row counts, as in surveys and inverse probability weighting."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import piebald
from piebald import recipes
from piebald.contracts import WEIGHT, Disclosure, Rows, Task, Update
from piebald.core.errors import SettingError
from piebald.core.metrics import survival_loss
from piebald.core.objective import METRICS, objective_for
from piebald.core.targets import Weighted
from piebald.data.clients.data_source import DataSource, RunRows
from piebald.data.preparation.agreement import fitted
from piebald.data.preparation.preparation import PrepareSettings
from piebald.engines.scoring import value_of, values_of_rows
from piebald.experiments.file import ExperimentSettings
from piebald.experiments.run_settings import RunSettings
from piebald.federation.hub.run_terms import terms
from piebald.federation.site.gate import Gate
from piebald.federation.site.policy import Policy
from piebald.federation.site.site_process import SiteSettings, SiteWork
from piebald.federation.site.site_rows import SiteSource, own_rows
from piebald.inference.trees.forest import TreeSettings
from piebald.inference.trees.rounds import shares_of_weights
from piebald.methods.client_work import ClientWork
from piebald.methods.queries import Evaluate
from piebald.methods.queries.scores import weight_metric
from piebald.methods.transforms.gaussian import Gaussian
from piebald.privacy.ledger import DisclosureRules, Withheld
from piebald.privacy.secure_aggregation.transform import SecureAggregation
from piebald.runs.plain_models import PlainModels
from piebald.runs.prepare import prepare
from piebald.server.evaluation import _of_all
from tests.fakes import few, seeded, simulate

pd = pytest.importorskip("pandas")
ENGINES = ("sequential", "batched", "vmapped", "reference")
FULL = recipes.fedavg(lr=1.0, steps=1, batch=1000)


def survey(seed: int = 5, whole: bool = False) -> Any:
    """Three sites of unlike size, whose rows have weights; whole ones where they can be written out as rows."""
    rng, tables = np.random.default_rng(seed), []
    for site, rows, level in (("north", 24, 0), ("south", 17, 0.5), ("east", 9, -0.4)):
        x = rng.normal(size=(rows, 2)).round(3)
        weights = rng.integers(1, 4, rows) if whole else rng.uniform(0.3, 3, rows).round(2)
        ill = (x @ [1, -0.5] + level + rng.logistic(size=rows) > 0).astype(int)
        tables.append(pd.DataFrame({"site": site, "a": x[:, 0], "b": x[:, 1], "w": weights, "ill": ill}))
    return pd.concat(tables, ignore_index=True)


def clients(table: Any, weights: str | None = "w", **options: Any) -> Any:
    options = {"target": "ill", "test": 0} | options
    return piebald.clients_from(table, client="site", features=["a", "b"], weights=weights, **options)


def written_out(table: Any) -> Any:
    return table.loc[table.index.repeat(table["w"])].reset_index(drop=True)


class Logistic(nn.Module):
    """Two classes, one linear predictor: what a generalised linear model has."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 1)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        z = self.linear(x)
        return torch.cat([torch.zeros_like(z), z], 1)


def vector(run: piebald.Run) -> Any:
    return torch.cat([part.flatten() for part in run.model().state_dict().values()]).numpy()


def trained(held: Any, engine: str = "batched", recipe: Any = FULL, **options: Any) -> Any:
    model = options.pop("model", None) or seeded(Logistic)
    return vector(simulate(recipe, held, model, simulator={"engine": engine}, **{"rounds": 3} | options))


def test_full_batches_come_to_the_weighted_model_of_all_rows() -> None:
    linear_model = pytest.importorskip("sklearn.linear_model")
    table = survey()
    fit = linear_model.LogisticRegression(C=np.inf, tol=1e-8).fit(table[["a", "b"]], table["ill"], table["w"])
    found = trained(clients(table), recipe=recipes.fedavg(lr=2.0, steps=1, batch=1000), rounds=80)
    assert found == pytest.approx([*fit.coef_[0], *fit.intercept_], abs=1e-4)
    plain = linear_model.LogisticRegression(C=np.inf, tol=1e-8).fit(table[["a", "b"]], table["ill"])
    assert np.abs(fit.coef_ - plain.coef_).max() > 0.02


def test_scaling_counts_each_row_once_as_a_pipeline_of_scikit_learn_does() -> None:
    pipeline, preprocessing = (pytest.importorskip(f"sklearn.{name}") for name in ("pipeline", "preprocessing"))
    linear_model = pytest.importorskip("sklearn.linear_model")
    table = survey()
    steps = pipeline.make_pipeline(preprocessing.StandardScaler(), linear_model.LogisticRegression())
    steps.fit(table[["a", "b"]], table["ill"], logisticregression__sample_weight=table["w"])
    held = clients(table, prepare="federated")
    inputs = torch.cat([held.rows(client, "train").x for client in range(3)]).numpy()
    assert np.sort(inputs, axis=0) == pytest.approx(np.sort(steps[0].transform(table[["a", "b"]]), axis=0), abs=1e-5)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_weight_of_two_is_a_row_twice(engine: str) -> None:
    table = survey(whole=True)
    expected = trained(clients(written_out(table), None), "reference")
    assert trained(clients(table), engine) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_weight_of_zero_is_a_row_left_out(engine: str) -> None:
    table = survey()
    out = table.index % 3 == 1
    left = trained(clients(table[~out]), recipe=recipes.fedavg(lr=0.5, batch=4))
    assert trained(clients(table.assign(w=table["w"].where(~out, 0))), engine, recipes.fedavg(lr=0.5, batch=4)) == (
        pytest.approx(left, abs=1e-6)
    )


BATCHED = {
    "batches": recipes.fedavg(lr=0.5, batch=5, epochs=2),
    "batch norm": recipes.fedavg(lr=0.5, batch=8),
    "proximal": recipes.fedprox(mu=0.1, lr=0.5, batch=5),
    "mixed rows": recipes.fedavg(lr=0.5, batch=8, augmentation=[{"kind": "mix_up"}]),
    "a loss of its own": recipes.fedlc(lr=0.5, batch=5),
    "normalised": recipes.fednova(lr=0.5, batch=5),
    "accumulated": recipes.fedavg(lr=0.5, batch=8, accumulate=2),
}


@pytest.mark.parametrize("engine", ENGINES[:3])
@pytest.mark.parametrize(
    "case",
    [case if case in ("batches", "mixed rows") else pytest.param(case, marks=pytest.mark.full) for case in BATCHED],
)
def test_all_engines_come_to_the_same(engine: str, case: str) -> None:
    def network() -> nn.Module:
        norm = [nn.BatchNorm1d(5)] if case == "batch norm" else []
        return nn.Sequential(nn.Linear(2, 5), *norm, nn.Tanh(), nn.Linear(5, 2))

    held, results = clients(survey(), test=0.2), []
    for name in ("reference", engine):
        run = simulate(
            BATCHED[case], held, seeded(network), simulator={"engine": name}, rounds=2, metrics=["f1", "auc"]
        )
        results.append((vector(run), {(row["client"], row["metric"]): row["value"] for row in run.scores}))
    assert results[1][0] == pytest.approx(results[0][0], abs=2e-5)
    assert results[1][1] == pytest.approx(results[0][1], abs=1e-4, nan_ok=True)
    assert np.abs(results[0][0] - trained(clients(survey(), None, test=0.2), model=seeded(network),
                                          recipe=BATCHED[case], rounds=2)).max() > 1e-3  # fmt: skip


@pytest.mark.parametrize("options", [{"workers": 2}, {"stack": 1}])
def test_workers_and_lone_clients_come_to_the_same(options: dict[str, Any]) -> None:
    run = simulate(FULL, clients(survey()), seeded(Logistic), rounds=3, simulator={"engine": "batched"} | options)
    assert vector(run) == pytest.approx(trained(clients(survey())), abs=1e-6)


def test_one_site_alone_may_have_weights() -> None:
    rows = {site: part.drop(columns="site") for site, part in survey(whole=True).groupby("site")}

    def held(site: str, part: Any) -> Any:
        x = torch.tensor(part[["a", "b"]].to_numpy(), dtype=torch.float32)
        weight = torch.tensor(part["w"].to_numpy(), dtype=torch.float32) if site == "north" else None
        return {"train": Rows(x, torch.tensor(part["ill"].to_numpy()), weight)}

    names = list(rows)
    lazy = piebald.LazyClients(3, lambda n: held(names[n], rows[names[n]]), names=names, classes=["0", "1"])
    repeated = survey(whole=True)
    repeated["w"] = repeated["w"].where(repeated["site"] == "north", 1)
    expected = trained(clients(written_out(repeated), None))
    for engine in ENGINES:
        assert trained(lazy, engine) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("recipe", [recipes.fedavg(lr=0.5, batch=5), recipes.fednova(lr=0.5, batch=5)])
@pytest.mark.parametrize("scale", [0.001, 1000.0])
def test_the_unit_of_weights_is_without_meaning(recipe: Any, scale: float) -> None:
    table = survey()
    scaled = trained(clients(table.assign(w=table["w"] * scale)), recipe=recipe)
    assert scaled == pytest.approx(trained(clients(table), recipe=recipe), abs=1e-5)


def test_a_site_counts_by_the_sum_of_its_weights() -> None:
    table = survey()
    run = simulate(FULL, clients(table), seeded(Logistic), rounds=1)
    sums = table.groupby("site")["w"].sum()
    shares = {run.names[row["client"]]: row["weight"] for row in run.results if row["kind"] == "train"}
    assert shares == pytest.approx((sums / sums.sum()).to_dict(), rel=1e-6)


def test_scores_are_those_of_scikit_learn_with_sample_weights() -> None:
    metrics = pytest.importorskip("sklearn.metrics")
    rng = np.random.default_rng(0)
    logits, true, w = rng.normal(size=(80, 2)), rng.integers(0, 2, 80), rng.uniform(0.1, 4, 80)
    score, label = logits[:, 1] - logits[:, 0], logits.argmax(1)
    shares = 1 / (1 + np.exp(-score))
    expected = {
        "accuracy": metrics.accuracy_score(true, label, sample_weight=w),
        "auc": metrics.roc_auc_score(true, score, sample_weight=w),
        "average_precision": metrics.average_precision_score(true, score, sample_weight=w),
        "balanced_accuracy": metrics.balanced_accuracy_score(true, label, sample_weight=w),
        "f1": metrics.f1_score(true, label, average="macro", sample_weight=w),
        "brier": metrics.brier_score_loss(true, shares, sample_weight=w),
        "log_loss": metrics.log_loss(true, shares, sample_weight=w),
        "sensitivity": metrics.recall_score(true, label, sample_weight=w),
        "specificity": metrics.recall_score(true, label, pos_label=0, sample_weight=w),
    }
    targets = Weighted(torch.from_numpy(true), torch.from_numpy(w))
    found = {name: float(value_of(METRICS[name], torch.from_numpy(logits), targets)) for name in expected}
    assert found == pytest.approx(expected, rel=1e-5)
    x, y = torch.from_numpy(logits[:, 0]), Weighted(torch.from_numpy(logits[:, 1]), torch.from_numpy(w))
    squared = metrics.mean_squared_error(logits[:, 1], logits[:, 0], sample_weight=w)
    assert float(value_of(METRICS["rmse"], x, y)) == pytest.approx(squared**0.5, rel=1e-6)
    assert float(value_of(METRICS["squared_error"], x, y)) == pytest.approx(squared, rel=1e-6)
    assert float(value_of(METRICS["r2"], x, y)) == pytest.approx(
        metrics.r2_score(logits[:, 1], logits[:, 0], sample_weight=w), rel=1e-6
    )


@pytest.mark.full
@few
@given(st.lists(st.integers(1, 4), min_size=6, max_size=12), st.integers(0, 99))
def test_every_metric_of_a_row_twice_is_that_of_its_weight(weights: list[int], seed: int) -> None:
    pytest.importorskip("sklearn")
    rng, n = np.random.default_rng(seed), len(weights)
    w, index = torch.tensor(weights, dtype=torch.float64), torch.arange(n).repeat_interleave(torch.tensor(weights))
    classes = torch.from_numpy(np.resize([0, 1], n))
    labels = torch.from_numpy(rng.integers(0, 2, (n, 3)).astype(np.float64))
    lives = torch.from_numpy(np.stack([rng.integers(1, 6, n), np.resize([1, 0], n)], 1).astype(np.float64))
    two, one, three = (torch.from_numpy(rng.normal(size=shape)) for shape in ((n, 2), (n,), (n, 3)))
    cases = [(name, two, classes) for name in ("accuracy", "f1", "balanced_accuracy", "brier", "calibration_error",
                                               "log_loss", "auc", "average_precision")]  # fmt: skip
    cases += [(name, three, labels) for name in ("label_accuracy", "f1", "balanced_accuracy", "sensitivity")]
    cases += [(name, one, two[:, 0]) for name in ("mae", "rmse", "squared_error", "r2")]
    cases += [("concordance", one, lives)]
    for name, outputs, targets in cases:
        alone = float(value_of(METRICS[name], outputs, Weighted(targets, w)))
        assert alone == pytest.approx(float(value_of(METRICS[name], outputs[index], targets[index])), rel=1e-5), name
    # Breslow's likelihood has tied rows apart, as rows that are written out are
    weighted = survival_loss(one, lives, w)
    assert float(weighted) == pytest.approx(float(survival_loss(one[index], lives[index])), rel=1e-5, abs=1e-7)


def test_values_of_rows_have_the_mean_and_the_error_of_a_weighted_mean() -> None:
    rng = np.random.default_rng(0)
    truth, guess = (torch.from_numpy(rng.normal(size=400)) for _ in range(2))
    w = torch.from_numpy(rng.uniform(0.1, 4, 400))
    values = values_of_rows(METRICS["mae"], guess, Weighted(truth, w)).numpy()
    assert values.mean() == pytest.approx(float(value_of(METRICS["mae"], guess, Weighted(truth, w))), rel=1e-6)
    errors, drawn = (guess - truth).abs().numpy(), rng.integers(0, 400, (4000, 400))
    means = (errors[drawn] * w.numpy()[drawn]).sum(1) / w.numpy()[drawn].sum(1)
    assert values.std() / 20 == pytest.approx(means.std(), rel=0.1)  # the bootstrap is the referee


@pytest.mark.parametrize("value", [-1.0, np.inf, np.nan, "much"])
def test_a_weight_that_is_none_is_named_with_its_file_row_and_column(tmp_path: Path, value: Any) -> None:
    table = survey().astype({"w": object})
    table.loc[3, "w"] = value
    table.to_csv(path := tmp_path / "rows.csv", index=False)
    with pytest.raises(SettingError, match=r"rows\.csv: .*'w' must .* number.*, got .* in row 5"):
        clients(str(path))
    with pytest.raises(SettingError, match=r"'w' must .* number.*, got .* in row 4"):
        clients(table)


def test_what_cannot_be_weighed_is_refused_in_a_sentence() -> None:
    table = survey()
    with pytest.raises(SettingError, match="there is no column 'v'"):
        clients(table, "v")
    with pytest.raises(SettingError, match="weights must be a column beside the client's and the target's, got 'ill'"):
        clients(table, "ill")
    with pytest.raises(SettingError, match="features must not include the weights column 'a'"):
        clients(table, "a")
    with pytest.raises(SettingError, match="all weights 'w' are 0"):
        clients(table.assign(w=0))
    with pytest.raises(SettingError, match="weights names columns of a table"):
        piebald.clients_from({"a": (np.zeros((4, 2)), [0, 1, 0, 1])}, weights="w")
    with pytest.raises(SettingError, match="dp_sgd hides single rows"):
        simulate(recipes.dp_sgd(lr=0.1, clip=1.0), clients(table), seeded(Logistic), rounds=1)

    def mean_loss(outputs: Any, targets: Any) -> Any:
        return nn.functional.cross_entropy(outputs, targets)

    with pytest.raises(SettingError, match="weights of rows need a loss with a value for each row"):
        simulate(FULL, clients(table), seeded(Logistic), rounds=1, loss=mean_loss)


def test_the_column_is_no_input_in_an_experiment_and_of_no_need_to_predict(tmp_path: Path) -> None:
    table = survey()
    table.to_csv(path := tmp_path / "rows.csv", index=False)
    rows: Any = DataSource(source=str(path), client="site", target="ill", weights="w").load(coded=True)
    assert list(rows.features) == ["a", "b"]
    assert rows.weights.numpy() == pytest.approx(table["w"].to_numpy(), rel=1e-6)
    held = piebald.clients_from(str(path), client="site", target="ill", weights="w")
    run = simulate(FULL, held, seeded(Logistic), rounds=1)
    assert held.rows(0, "train").weight is not None
    without = run.predictor().predict(table.drop(columns=["w", "ill", "site"]))
    assert without.equals(run.predictor().predict(table))


@pytest.mark.parametrize("amounts", [False, True])
def test_trees_from_sums_are_those_of_xgboost_with_weights_on_all_rows(amounts: bool) -> None:
    xgboost = pytest.importorskip("xgboost")
    rng = np.random.default_rng(0)
    table = survey(whole=True).assign(a=lambda rows: rows["a"].round(1), b=lambda rows: rows["b"].round(1))
    table["ill"] = (table["a"] + rng.normal(size=len(table))).round(2) if amounts else table["ill"]
    options: dict[str, Any] = {"target_bounds": (-9.0, 9.0)} if amounts else {}
    grown = piebald.trees(
        table, client="site", target="ill", row_weights="w", form="histogram", largest_weight=3.0, rounds=4,
        max_depth=3, test=0.0, evaluate_split="train", **options,
    )  # fmt: skip
    assert grown.encoding.columns == ["a", "b"]
    rows = xgboost.DMatrix(table[["a", "b"]], label=table["ill"], weight=table["w"])
    rows.set_base_margin(np.full(len(table), grown.boosted.start.margins[0]))
    settings = {"objective": "reg:squarederror" if amounts else "binary:logistic", "base_score": 0.5, "max_depth": 3,
                "tree_method": "exact"}  # fmt: skip
    expected = xgboost.train(settings, rows, 4).predict(rows)
    found = np.asarray(grown.predict(table))
    assert (found if amounts else found[:, 1]) == pytest.approx(expected, abs=1e-5)


def test_weights_of_trees_without_a_bound_are_refused_in_a_sentence() -> None:
    pytest.importorskip("xgboost")
    with pytest.raises(SettingError, match="needs the largest weight of a row, which must not be taken from the rows"):
        piebald.trees(survey(), client="site", target="ill", row_weights="w", form="histogram", rounds=1)
    with pytest.raises(SettingError, match="columns must not include the weights 'w'"):
        piebald.trees(survey(), client="site", target="ill", row_weights="w", columns=["a", "w"])


def test_under_masks_sites_count_by_the_same_sums() -> None:
    held = clients(survey())
    masked = FULL.with_(transforms=[SecureAggregation(largest_share=0.9)])
    assert trained(held, recipe=masked) == pytest.approx(trained(held), abs=1e-4)


def test_a_site_takes_the_column_that_the_run_names(tmp_path: Path) -> None:
    north = survey().query("site == 'north'").drop(columns="site")
    north.to_csv(tmp_path / "north.csv", index=False)
    agreed = PrepareSettings(agreed=fitted(north[["a", "b", "ill"]], target="ill"))
    run = RunRows(classes=["0", "1"], columns={"target": "ill", "weights": "w"}, prepare=agreed)
    rows = own_rows(SiteSource(source="north.csv"), tmp_path, "north", run, ["north", "south"])
    parts = [rows.rows(0, split) for split in ("train", "validation", "test")]
    assert all(part.x.shape[1] == 2 for part in parts)
    weights = torch.cat([part.weight for part in parts if part.weight is not None])
    assert sorted(weights.tolist()) == pytest.approx(sorted(north["w"]))


# -- what leaves a site, and what arrives


def at_site(folder: Path, named: str | None, own: str | None) -> SiteWork | Any:
    """The run of one site, whose experiment and whose `site.toml` name a column of weights, or none."""
    for site, rows in survey().groupby("site"):
        rows.drop(columns="site").to_csv(folder / f"{site}.csv", index=False)
    survey().to_csv(folder / "all.csv", index=False)
    columns, names = {"target": "ill", "features": ["a", "b"]}, ["east", "north", "south"]
    settings = {"model": {"name": "logistic"}, "recipe": {"name": "fedavg"}}
    table = {"source": str(folder / "all.csv"), "client": "site", **columns}
    plan = ExperimentSettings.of_table(settings | {"data": table, "prepare": "none"}, "the test's settings").plan()
    work = prepare(next(iter(plan.recipes.values())), plan.clients, plan.model, RunSettings(rounds=1)).work
    sites = {"kind": "sites", "clients": names, "inputs": [2], "classes": ["0", "1"]}
    data = {"name": "digits", **columns} | ({} if named is None else {"weights": named})
    told = terms(work, settings | {"partition": sites, "data": data}, names, names, ["0", "1"])
    source = {"source": "north.csv"} | ({} if own is None else {"weights": own})
    credentials = cast(Any, SimpleNamespace(party="north", folder=folder))
    site = SiteWork(credentials, SiteSettings.model_validate({"data": source}), folder, local=True)
    return site(json.loads(told))


def test_the_experiment_of_a_federation_names_the_column_for_its_sites(tmp_path: Path) -> None:
    """Before, sites took all columns of [data] but this one, and their rows counted alike."""
    for own in (None, "w"):
        made = at_site(tmp_path, "w", own)
        assert sorted(made.clients.rows(1, "train").weight.tolist())[-1] > 1.5
        assert made.work.weighted
    assert at_site(tmp_path, None, None).clients.rows(1, "train").weight is None
    with pytest.raises(SettingError) as refused:
        at_site(tmp_path, None, "w")
    assert "names a column of weights, and the run's rows have none" in str(refused.value.__cause__)


@pytest.mark.parametrize(
    ("claim", "counts"), [(math.nan, 0), (math.inf, 2**40), (-1.0, 0), (1e300, 2**40), (0.0, 0), (2.5, 2.5)]
)
def test_a_claimed_weight_is_a_number_that_can_be(claim: float, counts: float) -> None:
    assert Update({}, 10, 1, {WEIGHT: claim}).counts == counts


def work_of(*transforms: Any, experiment: dict[str, Any] | None = None, held: Any = None) -> ClientWork:
    recipe = recipes.fedavg(lr=0.1).with_(transforms=list(transforms))
    options = RunSettings.of_keywords({"rounds": 1}, experiment)
    return prepare(recipe, clients(survey()) if held is None else held, seeded(Logistic), options).work


@pytest.mark.parametrize("query", [None, Evaluate()])
def test_who_has_no_weights_gains_nothing_by_claiming_one(query: Evaluate | None) -> None:
    rows: Any = {"train": 10, "validation": 10, "test": 10}
    for named, allowed in (({"weights": "w"}, 1e6), ({}, 10.0)):
        work = work_of(experiment={"data": {"source": "x.csv", **named}})
        task = Task(1, 0, 0, {"model": work.initial}, query=query)
        form, vectors = work.result_form(task, rows), {} if query else {"model": work.initial}
        steps = 0 if query else 1
        assert form.reject_reason(vectors, 10, steps, {WEIGHT: allowed}) is None
        for claim in (math.nan, math.inf, -1.0):
            assert form.reject_reason(vectors, 10, steps, {WEIGHT: claim}) is not None
    assert form.reject_reason(vectors, 10, steps, {WEIGHT: 11.0}) == (
        "sent a weight of 11 for 10 rows, but the run's [data] names no column of weights"
    )


@pytest.mark.parametrize("noise", [False, True])
def test_a_site_counts_under_masks_what_it_has_announced(noise: bool) -> None:
    """Before, rounding and noise took some of it away after it was announced, and the site hid nobody in any round."""
    table = survey()
    table.loc[table["site"] == "north", "w"] = 1722.3 / 24  # a size begins at 1722.16
    held = clients(table)
    noises = [Gaussian(clip=1.0, noise=0.1, where="client")] * noise
    work = work_of(*noises, SecureAggregation(largest_share=0.9), held=held)
    north = held.names.index("north")
    rows, gate = held.rows(north, "train"), Gate(Policy(), work, held, north, None)
    task, told = Task(1, north, 0, {"model": work.initial}), {"loss": 0.5, WEIGHT: float(rows.weight.double().sum())}
    update, reason = gate.checked(task, Update({"model": work.initial}, 24, 1, told, 1.0))
    assert (update is not None, reason) == (True, None)
    assert update is not None
    assert update.counts == work.counted(rows)
    assert (update.counts == 24) is noise


def test_noise_in_scores_is_for_rows_without_weights() -> None:
    """A row in place of another may weigh as much as all others, so no noise of a share of them hides it."""
    rows = clients(survey()).rows(0, "train")
    assert Evaluate().row_influence(rows) == {}
    assert Evaluate().row_influence(Rows(rows.x, rows.y)) != {}


@pytest.mark.parametrize(("heaviest", "told"), [(2.0, True), (1000.0, False)])
def test_a_sum_of_weights_that_one_row_has_the_most_of_stays_at_its_site(heaviest: float, told: bool) -> None:
    weight = torch.ones(50)
    weight[7] = heaviest
    rows, rules = Rows(torch.zeros(50, 2), torch.zeros(50), weight), cast(Disclosure, DisclosureRules())
    context: Any = SimpleNamespace(
        disclosure=rules, rows=lambda split: [rows], weights=lambda split: weight.sum().view(1)
    )
    if told:
        assert weight_metric(context, "test")[WEIGHT].tolist() == [51.0]
    else:
        with pytest.raises(Withheld):
            weight_metric(context, "test")


def test_trees_from_sums_count_no_row_more_than_the_largest_weight() -> None:
    for weights in (None, np.array([0.1, 0.5, 7.0])):
        shares = shares_of_weights(weights, 3, TreeSettings(form="histogram", largest_weight=0.5))
        assert shares.max() == 1


def test_the_most_frequent_class_of_all_is_by_weights_also_where_the_first_client_has_no_training_rows() -> None:
    table = pd.DataFrame({"site": ["a"] * 2 + ["b"] * 8, "x": 0.0, "ill": ["no", "yes"] + ["no"] * 6 + ["yes"] * 2,
                          "w": [1, 1] + [1] * 6 + [9, 9], "part": ["test"] * 2 + ["train"] * 8})  # fmt: skip
    clients = piebald.clients_from(table, client="site", target="ill", weights="w", split="part")
    assert np.argmax(_of_all(clients, "classes")) == 1  # of fewer rows, which weigh more


@pytest.mark.parametrize("amounts", [False, True])
def test_plain_models_are_those_of_scikit_learn_with_sample_weights(amounts: bool) -> None:
    table = survey().assign(cost=lambda held: 3 * held.a + held.b + held.index % 5)
    target = "cost" if amounts else "ill"
    clients = piebald.clients_from(
        table[["site", "a", "b", "w", target]], client="site", target=target, weights="w", test=0.3, regression=amounts
    )
    objective = objective_for(clients.rows(0, "train").y)
    models = PlainModels(clients, objective)
    assert "shrunken LDA" not in models.makers  # it knows no weights
    for name, make in models.makers.items():
        for client in range(len(clients)):
            train, test = clients.rows(client, "train"), clients.rows(client, "test")
            weight, judged = np.asarray(train.weight), models.judged(name, client, test)
            if len(train.y.unique()) < 2:  # of one class there is a constant answer
                continue
            made = make()
            if hasattr(made, "steps"):
                scaler = made[0].fit(train.x.numpy(), sample_weight=weight)
                own = made[-1].fit(scaler.transform(train.x.numpy()), train.y.numpy(), sample_weight=weight)
                right = own.predict(scaler.transform(test.x.numpy()))
            else:
                right = made.fit(train.x.numpy(), train.y.numpy(), sample_weight=weight).predict(test.x.numpy())
            assert judged is not None
            told = judged[1].numpy() if amounts else judged[1].argmax(1).numpy()
            np.testing.assert_allclose(told, right, rtol=1e-4, atol=1e-5)
            score = float(value_of(objective.metrics[objective.metric], *judged[1:]))
            errors = np.abs(right - test.y.numpy()) if amounts else right == test.y.numpy()
            assert score == pytest.approx(np.average(errors, weights=test.weight), rel=1e-4)


def test_trees_take_the_column_where_it_is_named_as_their_weights() -> None:
    pytest.importorskip("xgboost")
    asked: dict[str, Any] = {"client": "site", "target": "ill", "rounds": 3, "compare": False}
    named, usual = (piebald.trees(survey(), **asked, **{name: "w"}) for name in ("weights", "row_weights"))
    assert named.plain() == usual.plain()
    assert named.plain() != piebald.trees(survey(), **asked).plain()
    with pytest.raises(SettingError, match="no column 'nowhere'"):
        piebald.trees(survey(), **asked, weights="nowhere")
