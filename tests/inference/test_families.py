"""Levels, ordered or not, and amounts above 0, beside statsmodels on the pooled rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
import statsmodels.api as sm
from statsmodels.miscmodels.ordinal_model import OrderedModel

import piebald
from piebald.core.errors import PiebaldError, SettingError
from piebald.inference.linear_models import GlmOptions, fit_glm
from piebald.inference.models.likelihood import level_terms, row_terms
from piebald.inference.noisy_models import NoiseOptions

from .sites import Policy
from .test_models_at_sites import FEATURES, InProcess, ModelClients, ModelColumns, plan, pooled, sites

CLOSE = 1e-6


def pains(rows: int = 240) -> pandas.DataFrame:
    """Pain from 0 to 3, the same in words, wards, and costs, of which some are 0."""
    rng = np.random.default_rng(5)
    table = pandas.DataFrame({"site": rng.choice(["north", "south", "east"], rows), "age": rng.normal(60, 10, rows)})
    table["arm"] = rng.choice(["new", "old"], rows)
    eta = 0.05 * (table.age - 60) + 0.5 * (table.arm == "old")
    table["pain"] = np.digitize(eta + rng.logistic(size=rows), [-1, 0, 1])
    table["words"] = table.pain.map({0: "none", 1: "mild", 2: "strong", 3: "unbearable"})
    choice = rng.gumbel(size=(rows, 3)) + np.stack([0 * eta, eta, -eta], 1)
    table["ward"] = np.array(["a", "b", "c"])[choice.argmax(1)]
    table["cost"] = rng.gamma(2, np.exp(3 + 0.3 * eta))
    table["bill"] = table.cost * (rng.random(rows) < 0.7)
    table["stay"] = rng.uniform(0.1, 1, rows)
    table["weight"], table["patient"] = rng.integers(1, 4, rows).astype(float), rng.integers(0, 60, rows)
    return table


def fitted(target: str, family: Any, table: pandas.DataFrame | None = None, **options: Any) -> Any:
    table = pains() if table is None else table
    return piebald.glm(table, client="site", target=target, columns=["age", "arm"], family=family, **options)


def design(table: pandas.DataFrame) -> pandas.DataFrame:
    return pandas.DataFrame({"age": table.age, "arm=old": (table.arm == "old").astype(float)})


ORDER = {"words": ["none", "mild", "strong", "unbearable"]}


@pytest.mark.parametrize(("target", "categories"), [("pain", None), ("words", ORDER)])
@pytest.mark.parametrize("cluster", [None, "patient"])
def test_proportional_odds(target: str, categories: Any, cluster: str | None) -> None:
    table = pains()
    found = fitted(target, "ordinal", categories=categories, cluster=cluster)
    how = {} if cluster is None else {"cov_type": "cluster", "cov_kwds": {"groups": table.patient}}
    model = OrderedModel(table.pain, design(table), distr="logit")
    referee = model.fit(method="newton", disp=0, tol=1e-9, maxiter=100, **how)
    names = ("none|mild", "mild|strong", "strong|unbearable") if categories else ("0|1", "1|2", "2|3")
    assert found.names == (*names, "age", "arm=old")
    np.testing.assert_allclose(found.coefficients[3:], referee.params[:2], rtol=CLOSE)
    np.testing.assert_allclose(
        found.coefficients[:3], model.transform_threshold_params(referee.params)[1:-1], rtol=CLOSE
    )
    np.testing.assert_allclose(found.errors[3:], referee.bse[:2], rtol=1e-5)
    assert found.log_likelihood == pytest.approx(referee.llf, rel=1e-9)
    assert found.null_deviance == pytest.approx(-2 * referee.llnull, rel=1e-9)
    assert found.table()[-1]["odds ratio"] == pytest.approx(np.exp(referee.params["arm=old"]), rel=1e-6)


def test_two_ordered_levels_are_a_logistic_model() -> None:
    table = pains()
    table["any"] = (table.pain > 0).astype(int)
    two, logistic = fitted("any", "ordinal", table), fitted("any", "binomial", table)
    np.testing.assert_allclose(two.coefficients, [-logistic.coefficients[0], *logistic.coefficients[1:]], rtol=1e-8)
    np.testing.assert_allclose(two.errors, logistic.errors, rtol=1e-8)


def test_levels_without_order() -> None:
    table = pains()
    found = fitted("ward", "multinomial", table)
    referee = sm.MNLogit(pandas.factorize(table.ward, sort=True)[0], sm.add_constant(design(table)))
    referee = referee.fit(method="newton", disp=0, tol=1e-9)
    assert found.names == tuple(f"{ward}: {name}" for ward in "bc" for name in ("(intercept)", "age", "arm=old"))
    np.testing.assert_allclose(found.coefficients, referee.params.to_numpy().T.ravel(), rtol=CLOSE)
    np.testing.assert_allclose(found.errors, referee.bse.to_numpy().T.ravel(), rtol=CLOSE)
    assert found.log_likelihood == pytest.approx(referee.llf, rel=1e-9)


def test_effects_on_probabilities_of_levels_without_order() -> None:
    table = pains()
    found = fitted("ward", "multinomial", table, effects=True).effects
    referee = sm.MNLogit(pandas.factorize(table.ward, sort=True)[0], sm.add_constant(design(table)))
    right = referee.fit(method="newton", disp=0, tol=1e-9).get_margeff()
    assert found.names == tuple(f"{ward}: {name}" for ward in "abc" for name in ("age", "arm=old"))
    np.testing.assert_allclose(found.coefficients, right.margeff.T.ravel(), rtol=CLOSE)
    np.testing.assert_allclose(found.errors, right.margeff_se.T.ravel(), rtol=CLOSE)


@pytest.mark.parametrize("cluster", [None, "patient"])
def test_effects_on_probabilities_of_ordered_levels(cluster: str | None) -> None:
    """`OrderedModel` has no `get_margeff`: differences of its predictions, and the delta method by its covariance."""
    table, x = pains(), design(pains()).to_numpy()
    found = fitted("pain", "ordinal", table, cluster=cluster, effects=True)
    model = OrderedModel(table.pain, design(table), distr="logit")
    how: Any = {} if cluster is None else {"cov_type": "cluster", "cov_kwds": {"groups": table.patient}}
    referee = model.fit(method="newton", disp=0, tol=1e-9, maxiter=100, **how)

    def effects(parameters: Any) -> Any:
        steps = np.eye(2) * 1e-4
        slopes = [(model.predict(parameters, x + step) - model.predict(parameters, x - step)) / 2e-4 for step in steps]
        return np.stack([slope.mean(0) for slope in slopes], 1).ravel()

    point, steps = referee.params.to_numpy(), np.eye(5) * 1e-4
    changes = np.stack([(effects(point + step) - effects(point - step)) / 2e-4 for step in steps], 1)
    assert found.effects.names == tuple(f"{level}: {name}" for level in range(4) for name in ("age", "arm=old"))
    np.testing.assert_allclose(found.effects.coefficients, effects(point), rtol=1e-5, atol=1e-7)
    covariance = changes @ referee.cov_params().to_numpy() @ changes.T
    np.testing.assert_allclose(found.effects.errors, np.sqrt(np.diag(covariance)), rtol=1e-4)
    assert found.effects.degrees == found.degrees


def test_effects_on_all_levels_together_are_0_and_those_of_two_are_those_of_a_logistic_model() -> None:
    table = pains()
    table["any"] = (table.pain > 0).astype(int)
    logistic = fitted("any", "binomial", table, effects=True).effects
    for family in ("ordinal", "multinomial"):
        found: Any = fitted("any", family, table, effects=True).effects
        np.testing.assert_allclose(found.coefficients, [*-logistic.coefficients, *logistic.coefficients], rtol=1e-7)
        np.testing.assert_allclose(found.errors, [*logistic.errors, *logistic.errors], rtol=1e-7)
        whole = fitted("pain", family, table, effects=True).effects.coefficients.reshape(4, 2)
        np.testing.assert_allclose(whole.sum(0), 0, atol=1e-12)


@pytest.mark.parametrize(
    ("family", "target", "power"), [("gamma", "cost", 1.5), ("tweedie", "bill", 1.3), ("tweedie", "cost", 1.9)]
)
@pytest.mark.parametrize("options", [{}, {"weights": "weight"}, {"offset": "stay"}])
def test_amounts_with_a_power_of_the_mean_for_variance(family: Any, target: str, power: float, options: Any) -> None:
    table, log = pains(), sm.families.links.Log()
    found = fitted(target, family, power=power, **options)
    kind = sm.families.Gamma(log) if family == "gamma" else sm.families.Tweedie(log, var_power=power)
    weights, offset = table.weight if "weights" in options else None, table.stay if "offset" in options else None
    model = sm.GLM(table[target], sm.add_constant(design(table)), kind, offset, var_weights=weights)
    referee = model.fit(tol=1e-14, maxiter=200)
    np.testing.assert_allclose(found.coefficients, referee.params, rtol=CLOSE, atol=1e-9)
    np.testing.assert_allclose(found.errors, referee.bse, rtol=CLOSE)
    assert found.dispersion == pytest.approx(referee.scale, rel=CLOSE)
    assert [found.deviance, found.null_deviance] == pytest.approx([referee.deviance, referee.null_deviance], rel=CLOSE)


def test_errors_of_amounts_by_clusters_have_the_expected_information() -> None:
    table = pains()
    found = fitted("cost", "gamma", cluster="patient")
    x = sm.add_constant(design(table)).to_numpy()
    residuals = table.cost.to_numpy() / np.exp(x @ found.coefficients) - 1
    scores = pandas.DataFrame(x * residuals[:, None]).groupby(table.patient).sum().to_numpy()
    bread, groups = np.linalg.inv(x.T @ x), len(scores)
    factor = groups / (groups - 1) * (len(x) - 1) / (len(x) - 3)
    np.testing.assert_allclose(found.covariance, factor * bread @ scores.T @ scores @ bread, rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize("family", ["ordinal", "multinomial"])
def test_derivatives_of_levels_are_those_of_their_likelihood(family: Any) -> None:
    rng, step = np.random.default_rng(2), 1e-5
    y, eta = rng.integers(0, 4, 50).astype(float), np.sort(rng.normal(size=(50, 3)), axis=1)[:, ::-1]
    terms = level_terms(family, y, eta)
    assert np.isfinite(level_terms(family, y, eta * 1e3).value).all()
    assert np.isfinite(level_terms(family, y, eta[:, ::-1]).value).all()  # thresholds that have crossed
    for first in range(3):
        moved = np.eye(3)[first] * step
        up, down = level_terms(family, y, eta + moved), level_terms(family, y, eta - moved)
        np.testing.assert_allclose((up.value - down.value) / (2 * step), terms.scores[first], atol=1e-6)
        for second in range(3):
            curve = (up.scores[second] - down.scores[second]) / (2 * step)
            np.testing.assert_allclose(-curve, terms.weights[first][second], atol=1e-6)


def test_gamma_is_the_limit_of_the_power() -> None:
    y, eta = np.array([0.5, 2.0]), np.array([0.1, 0.4])
    gamma, near = row_terms("gamma", y, eta), row_terms("tweedie", y, eta, power=1.9999999)
    for name in ("deviance", "squares"):
        np.testing.assert_allclose(getattr(gamma, name), getattr(near, name), rtol=1e-5)
    np.testing.assert_allclose(gamma.scores[0], near.scores[0], rtol=1e-5)


@pytest.mark.parametrize(
    ("target", "family", "options", "sentence"),
    [
        ("words", "ordinal", {}, "the order of words like 'mild' is not known"),
        ("cost", "ordinal", {}, "has 240 known levels, 2 to 20 are allowed"),
        ("words", "ordinal", {"categories": {"words": ["none", "mild"]}}, "has 'strong', which is none of the levels"),
        ("pain", "ordinal", {"categories": {"pain": ["0", "1", "2"]}}, "has '3', which is none of the levels 0, 1, 2"),
        ("ward", "multinomial", {"categories": {"ward": ["a", "b", "c", "c"]}}, "must be different"),
        ("bill", "gamma", {}, "must be above 0"),
        ("pain", "ordinal", {"random_intercept": "one_stage"}, "has no random intercept in one stage"),
        ("cost", "tweedie", {"power": 2.0}, "power must be between 1 and 2"),
        ("pain", "ordinal", {"epsilon": 1.0, "delta": 1e-6, "bounds": {"age": (0, 99)}}, "noise does not go with"),
    ],
)  # fmt: skip
def test_what_a_family_does_not_take_is_refused(target: str, family: Any, options: Any, sentence: str) -> None:
    with pytest.raises(SettingError, match=sentence):
        fitted(target, family, **options)


def levels(place: int, inputs: Any) -> None:
    inputs[:, 2] = np.arange(len(inputs)) % 3


GRADES = {"arm": ["0", "1", "2"]}


def asked(run: Any, policy: Policy, folder: Path | None = None, secure: bool = False) -> Any:
    columns = ModelColumns(run.clients, FEATURES, "falls", "train", GRADES, secure)
    return ModelClients(columns, InProcess(run, [policy] * 3, None, folder), run.work, run.clients, lambda line: None)


@pytest.mark.parametrize(
    ("family", "target"), [("ordinal", "arm"), ("multinomial", "arm"), ("gamma", "time"), ("tweedie", "falls")]
)
@pytest.mark.parametrize("secure", [False, pytest.param(True, marks=pytest.mark.full)])
def test_families_of_sites_are_those_of_their_pooled_rows(
    family: Any, target: str, secure: bool, tmp_path: Path
) -> None:
    run = plan(secure, change=levels)
    policy = Policy(queries=["model_sums", "masked_model_sums"], least_rows=1)
    options = GlmOptions(target, ["x"], family, effects=True)
    found: Any = fit_glm(asked(run, policy, tmp_path, secure), options)
    here: Any = piebald.glm(
        pooled(run), client="site", target=target, columns=["x"], family=family, categories=GRADES, effects=True
    )
    np.testing.assert_allclose(found.effects.coefficients, here.effects.coefficients, atol=1e-8)
    np.testing.assert_allclose(found.effects.errors, here.effects.errors, atol=1e-8)
    assert found.names == here.names
    np.testing.assert_allclose(found.coefficients, here.coefficients, atol=1e-9)
    np.testing.assert_allclose(found.errors, here.errors, atol=1e-9)


def test_a_site_tells_nothing_of_a_level_of_few_rows() -> None:
    def rare(place: int, inputs: Any) -> None:
        inputs[:, 2] = np.where(np.arange(len(inputs)) < 4, 2, np.arange(len(inputs)) % 2)

    careful = Policy(queries=["model_sums"], least_rows=10)
    for family in ("ordinal", "multinomial"):
        enough = fit_glm(asked(plan(False, (130, 150, 170), change=levels), careful), GlmOptions("arm", ["x"], family))
        assert enough.rows == 450
        with pytest.raises(PiebaldError, match="too few rows contribute"):
            fit_glm(asked(plan(False, (130, 150, 170), change=rare), careful), GlmOptions("arm", ["x"], family))


def test_noise_is_for_no_other_family() -> None:
    noise = NoiseOptions.of(1.0, 1e-6, {"x": (-5, 5), "time": (0, 60)})
    with pytest.raises(SettingError, match="noise does not go with this model"):
        fit_glm(sites(False, None), GlmOptions("time", ["x"], "gamma", noise=noise))
