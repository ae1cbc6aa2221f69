"""Offsets, weights, dispersion, robust errors and random intercepts, beside statsmodels on the pooled rows."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pandas
import pytest
import statsmodels.api as sm
from numpy.typing import NDArray
from scipy import special
from statsmodels.stats.meta_analysis import combine_effects

import piebald
from piebald.core.errors import SettingError
from piebald.inference.linear_models import Family, Glm, MixedGlm, PooledGlm

CLOSE = 1e-8
FAMILIES = {"poisson": sm.families.Poisson(), "binomial": sm.families.Binomial(), "gaussian": sm.families.Gaussian()}


def falls() -> pandas.DataFrame:
    """Falls in three homes, with days of exposure."""
    rng, tables = np.random.default_rng(0), []
    for home, rows in (("a", 80), ("b", 60), ("c", 40)):
        days, x = rng.integers(1, 60, rows), rng.normal(size=rows)
        columns = {"home": home, "days": days, "logdays": np.log(days), "x": x}
        tables.append(pandas.DataFrame({**columns, "falls": rng.poisson(days * np.exp(-3 + 0.4 * x))}))
    return pandas.concat(tables, ignore_index=True)


def trial() -> pandas.DataFrame:
    """The same rows with weights, some of them 0, gaps, wards that span homes, and a target of each family."""
    rows, rng = falls(), np.random.default_rng(1)
    intercepts = rows.home.map({"a": -1.0, "b": 0.0, "c": 2.0})
    rows["weight"] = rng.integers(0, 4, len(rows)).astype(float)
    rows["ward"] = rng.integers(0, 15, len(rows))
    rows["fell"] = (rng.random(len(rows)) < special.expit(rows.x + intercepts)).astype(int)
    rows["score"] = 2 * rows.x + intercepts + rng.normal(size=len(rows))
    rows["burst"] = rng.poisson(rows.days * np.exp(-3 + 0.4 * rows.x + intercepts / 2) * rng.gamma(2, 0.5, len(rows)))
    rows.loc[rows.index[::17], "logdays"] = math.nan
    return rows


def fitted(rows: pandas.DataFrame, target: str, **options: Any) -> Any:
    return piebald.glm(rows, client="home", target=target, columns=["x"], **options)


def design(rows: pandas.DataFrame) -> NDArray[np.float64]:
    return np.asarray(sm.add_constant(rows[["x"]].to_numpy()))


@pytest.mark.parametrize(("family", "target"), [("poisson", "falls"), ("binomial", "fell"), ("gaussian", "score")])
@pytest.mark.parametrize("robust", [{}, {"cluster": "ward"}, {"cluster": "home"}, {"cluster": "client"}])
def test_offsets_weights_and_clusters(family: Family, target: str, robust: dict[str, str]) -> None:
    rows = trial()
    found = fitted(rows, target, family=family, offset="logdays", weights="weight", **robust)
    used = rows[(rows.weight > 0) & rows.logdays.notna()]
    model = sm.GLM(used[target], design(used), FAMILIES[family], used.logdays, var_weights=used.weight)
    referee = model.fit(tol=1e-14)
    if robust:
        groups = used.ward if robust["cluster"] == "ward" else pandas.factorize(used.home)[0]
        with pytest.warns(match="cov_type not fully supported with var_weights"):  # its clusters are
            referee = model.fit(tol=1e-14, cov_type="cluster", cov_kwds={"groups": groups}, use_t=True)
        assert (found.clusters, found.degrees) == (len(set(groups)), len(set(groups)) - 1)
    np.testing.assert_allclose(found.coefficients, referee.params, rtol=0, atol=CLOSE)
    np.testing.assert_allclose(found.errors, referee.bse, rtol=0, atol=CLOSE)
    np.testing.assert_allclose(found.deviance, referee.deviance, rtol=CLOSE)
    assert (found.rows, found.dropped) == (len(used), len(rows) - len(used))
    if family != "gaussian" or robust:  # without clusters statsmodels takes the normal distribution there, too
        np.testing.assert_allclose(found.p_values, referee.pvalues, rtol=1e-6, atol=1e-300)
        np.testing.assert_allclose(found.interval(0.9), referee.conf_int(0.1), rtol=0, atol=CLOSE)


@pytest.mark.parametrize(("family", "target"), [("poisson", "falls"), ("gaussian", "score")])
def test_likelihoods_and_null_models_with_an_offset(family: Family, target: str) -> None:
    rows = trial().dropna()
    found = fitted(rows, target, family=family, offset="logdays")
    referee = sm.GLM(rows[target], design(rows), FAMILIES[family], rows.logdays).fit(tol=1e-14)
    assert found.log_likelihood == pytest.approx(referee.llf, rel=1e-10)
    assert found.null_deviance == pytest.approx(referee.null_deviance, rel=1e-10)


def test_robust_errors_are_white_s_with_the_correction_of_small_samples() -> None:
    rows = trial()
    found = fitted(rows, "score", robust=True)
    referee = sm.OLS(rows.score, design(rows)).fit(cov_type="HC1")
    np.testing.assert_allclose(found.errors, referee.bse, rtol=0, atol=CLOSE)
    assert (found.error_kind, found.clusters) == ("robust", None)


def test_a_negative_binomial_s_dispersion_is_estimated() -> None:
    rows = trial().dropna()
    found = fitted(rows, "burst", family="negative_binomial", offset="logdays")
    referee = sm.NegativeBinomial(rows.burst, design(rows), offset=rows.logdays)
    referee = referee.fit(disp=0, method="newton", maxiter=200, tol=1e-14)
    np.testing.assert_allclose([*found.coefficients, found.alpha], referee.params, rtol=0, atol=CLOSE)
    np.testing.assert_allclose([*found.errors, found.alpha_error], referee.bse, rtol=0, atol=CLOSE)
    assert found.log_likelihood == pytest.approx(referee.llf, rel=1e-10)
    family = sm.families.NegativeBinomial(alpha=found.alpha)
    other = sm.GLM(rows.burst, design(rows), family, rows.logdays).fit(tol=1e-14)
    assert found.deviance == pytest.approx(other.deviance, rel=CLOSE)
    assert found.null_deviance == pytest.approx(other.null_deviance, rel=CLOSE)


@pytest.mark.parametrize("reml", [True, False])
def test_a_linear_mixed_model_of_one_stage(reml: bool) -> None:
    rows = trial()
    found = fitted(rows, "score", random_intercept="one_stage", reml=reml)
    assert isinstance(found, MixedGlm)
    referee = sm.MixedLM(rows.score, design(rows), groups=rows.home).fit(reml=reml, gtol=1e-9)
    np.testing.assert_allclose(found.coefficients, referee.fe_params, rtol=0, atol=CLOSE)
    np.testing.assert_allclose(found.errors, referee.bse_fe, rtol=0, atol=CLOSE)
    np.testing.assert_allclose([found.between, found.residual], [referee.cov_re.iloc[0, 0], referee.scale], rtol=1e-7)
    assert found.log_likelihood == pytest.approx(referee.llf, rel=1e-10)


@pytest.mark.full
@pytest.mark.parametrize(("family", "target"), [("binomial", "fell"), ("poisson", "burst")])
def test_mixed_models_of_other_targets_maximise_the_integral_over_intercepts(family: Family, target: str) -> None:
    rows = trial().dropna()
    offset = "logdays" if family == "poisson" else None
    found = fitted(rows, target, family=family, offset=offset, random_intercept="one_stage")

    def minus_log_likelihood(point: NDArray[np.float64]) -> float:
        total, places = 0.0, np.linspace(-12, 12, 4001)  # trapezia, exact for what is smooth and 0 at its ends
        for _, part in rows.groupby("home"):
            eta, y = design(part) @ point[:2] + (part.logdays.to_numpy() if offset else 0.0), part[target].to_numpy()
            line = eta[:, None] + point[2] * places
            each = y[:, None] * line - (np.logaddexp(0, line) if family == "binomial" else np.exp(line))
            constant = 0.0 if family == "binomial" else float(special.gammaln(y + 1).sum())
            exponent = each.sum(0) - places**2 / 2
            area = np.trapezoid(np.exp(exponent - exponent.max()), places)
            total += exponent.max() + math.log(area) - math.log(2 * math.pi) / 2 - constant
        return -total

    best = np.array([*found.coefficients, math.sqrt(found.between)])
    assert minus_log_likelihood(best) == pytest.approx(-found.log_likelihood, rel=1e-10)
    steps = np.eye(3) * 1e-3
    slopes = [(minus_log_likelihood(best + step) - minus_log_likelihood(best - step)) / 2e-3 for step in steps]
    curves = np.array([
        [minus_log_likelihood(best + a + b) - minus_log_likelihood(best + a - b) - minus_log_likelihood(best - a + b)
         + minus_log_likelihood(best - a - b) for b in steps] for a in steps
    ]) / 4e-6  # fmt: skip
    spread = np.linalg.inv(curves)
    # a Newton step from there goes nowhere, in standard errors
    assert np.abs(spread @ slopes / np.sqrt(np.diag(spread))).max() < 1e-4
    np.testing.assert_allclose(found.errors, np.sqrt(np.diag(spread))[:2], rtol=1e-4)


def test_models_of_single_clients_are_pooled_by_random_effects() -> None:
    rows = trial().dropna()
    lonely = pandas.concat([rows, rows[:1].assign(home="with one row")])  # it has no model of its own
    found = fitted(lonely, "burst", family="poisson", offset="logdays", random_intercept="two_stage")
    assert isinstance(found, PooledGlm)
    assert (found.fitted, found.clients, found.degrees) == (3, 4, 2)
    assert [*found.left_out] == ["with one row"]
    parts = [part for _, part in rows.groupby("home")]
    fits = [sm.GLM(p.burst, design(p), FAMILIES["poisson"], p.logdays).fit(tol=1e-14) for p in parts]
    for place in range(2):
        estimates = np.array([fit.params.iloc[place] for fit in fits])
        referee = combine_effects(estimates, np.array([fit.bse.iloc[place] ** 2 for fit in fits]), method_re="chi2")
        ours = [values[place] for values in (found.fixed, found.fixed_errors, found.coefficients)]
        theirs = [referee.mean_effect_fe, referee.sd_eff_w_fe, referee.mean_effect_re]
        ours += [found.effect_errors[place], found.errors[place]]
        theirs += [referee.sd_eff_w_re, referee.sd_eff_w_re_hksj]
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=CLOSE)
        np.testing.assert_allclose([found.between[place], found.heterogeneity[place]], [referee.tau2, referee.q], CLOSE)


def test_intercepts_that_do_not_differ_have_no_variance() -> None:
    rows = falls()
    rows["score"] = rows.x + np.tile([1.0, -1.0], 90)  # all homes alike, more than by chance
    found = fitted(rows, "score", random_intercept="one_stage")
    assert found.between == 0
    np.testing.assert_allclose(found.coefficients, sm.OLS(rows.score, design(rows)).fit().params, atol=CLOSE)
    other = fitted(rows, "falls", family="poisson", offset="logdays", random_intercept="one_stage")
    pooled = fitted(rows, "falls", family="poisson", offset="logdays")
    np.testing.assert_allclose(other.coefficients, pooled.coefficients, atol=1e-6)
    assert (other.between, other.log_likelihood) == (0, pytest.approx(pooled.log_likelihood, abs=1e-6))


@pytest.mark.parametrize(
    ("change", "options", "sentence"),
    [
        ({"x": [1.0, 2, 3, 4] * 2, "y": [0, 0, 1, 1] * 2}, {"family": "binomial"}, "separate the target"),
        ({"z": np.arange(8.0) * 3}, {}, "are constant or depend on each other over all clients"),
        ({"w": -np.ones(8)}, {"weights": "w"}, "weights must be at least 0, and client 'a' has -1"),
        ({"w": np.zeros(8)}, {"weights": "w"}, "need more than 2 rows without gaps, got 0"),
        ({"w": list("abcdefgh")}, {"weights": "w"}, "weights must be a column of numbers, and 'w' holds text"),
        ({"w": [math.nan] * 8}, {"offset": "w"}, "need more than 2 rows without gaps, got 0"),
        ({"w": ["one"] * 8}, {"cluster": "w"}, "robust errors need at least 2 clusters, got 1"),
        ({}, {"columns": ["x"], "offset": "x"}, "columns must not include the offset 'x'"),
        ({"y": [3.0] * 8}, {"family": "negative_binomial"}, "no more dispersed than a Poisson model says"),
        ({}, {"cluster": "client", "random_intercept": "two_stage"}, "leave one of them out"),
        ({}, {"family": "negative_binomial", "random_intercept": "one_stage"}, "no random intercept in one stage"),
        ({"y": np.arange(8.0)}, {"random_intercept": "one_stage"}, "explain the target exactly"),
        ({}, {"weights": "nothing"}, "there is no column 'nothing'"),
    ],
)  # fmt: skip
def test_what_no_model_has_is_refused(change: dict[str, Any], options: dict[str, Any], sentence: str) -> None:
    table = pandas.DataFrame({"x": np.arange(8.0), "y": [2, 0, 1, 5, 0, 3, 1, 4.0], **change})
    with pytest.raises(SettingError, match=sentence):
        piebald.glm({"a": table[:4], "b": table[4:]}, target="y", **options)


def test_a_model_is_read_by_programs_and_on_a_page() -> None:
    found = fitted(trial(), "burst", family="negative_binomial", cluster="ward")
    assert isinstance(found, Glm)
    plain = found.plain()
    assert (plain["alpha"], plain["rows"], plain["clusters"]) == (found.alpha, 180, 15)
    assert plain["coefficients"]["x"]["97.5 %"] == found.interval()[1, 1]
    assert f"<td>{found.coefficients[1]:.4g}</td>" in found._repr_html_()
    pooled = fitted(trial(), "score", random_intercept="two_stage").plain()
    assert [len(pooled[name]) for name in ("fixed", "between", "heterogeneity")] == [2, 2, 2]
