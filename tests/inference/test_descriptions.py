"""Means of groups, their tests, correlations and what follows from them, beside scipy, statsmodels and scikit-learn."""

from __future__ import annotations

import math
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
import statsmodels.api as sm
import statsmodels.formula.api as formulas
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from scipy import stats
from sklearn.decomposition import PCA
from statsmodels.stats.oneway import anova_oneway
from statsmodels.stats.outliers_influence import variance_inflation_factor

import piebald
from piebald.cli import main
from piebald.core.errors import PiebaldError, RuntimeFault, SettingError
from piebald.inference.descriptions import CorrelationOptions, GroupOptions, fit_correlations, fit_group_means
from piebald.inference.models.formula import Computed, Spline
from piebald.inference.models.rows import ModelPlan, model_rows
from piebald.inference.models.sums import check_sums
from piebald.inference.queries.columns import table_columns
from piebald.privacy.ledger import DisclosureRules, Withheld

from .sites import Policy
from .test_models_at_sites import PLANS, pooled, sites

CLOSE: dict[str, Any] = {"rtol": 1e-9, "atol": 1e-12}


def patients(rows: int = 240) -> pandas.DataFrame:
    rng = np.random.default_rng(4)
    table = pandas.DataFrame({"hospital": rng.choice(list("abc"), rows, p=[0.6, 0.3, 0.1])})
    table["sex"], table["ward"] = rng.choice(["f", "m"], rows), rng.choice(["x", "y", "z"], rows, p=[0.7, 0.2, 0.1])
    table["age"] = rng.normal(60, 12, rows) + 5 * (table.sex == "m")
    table["days"] = 19_000 + rng.integers(0, 200, rows)
    table["dose"] = rng.gamma(2, 3, rows) + 0.1 * table.age
    table["w"] = rng.uniform(0.2, 3, rows)
    table.loc[::7, "age"] = np.nan
    table.loc[3::11, "sex"] = None
    return table


def groups_of(table: pandas.DataFrame, column: str, by: str) -> dict[str, pandas.Series]:
    return {str(name): part[column].dropna() for name, part in table.groupby(by)}


@pytest.mark.parametrize("by", ["sex", "ward", "hospital"])
@pytest.mark.parametrize("column", ["age", "days", "dose"])
def test_groups_are_those_of_the_pooled_rows(by: str, column: str) -> None:
    table = patients()
    found = piebald.group_means(table, client="hospital", by=by, columns=[column])[column]
    parts = groups_of(table, column, by)
    assert found.groups == tuple(parts)
    assert found.counts.tolist() == [len(part) for part in parts.values()]
    assert found.dropped == len(table) - len(table[[column, by]].dropna())
    np.testing.assert_allclose(found.means, [part.mean() for part in parts.values()], **CLOSE)
    np.testing.assert_allclose(found.variances, [part.var() for part in parts.values()], **CLOSE)
    np.testing.assert_allclose(found.errors, [part.sem() for part in parts.values()], **CLOSE)
    anova = stats.f_oneway(*parts.values())
    np.testing.assert_allclose([found.anova.statistic, found.anova.p_value], anova, rtol=1e-8)
    welch = anova_oneway(list(parts.values()), use_var="unequal", welch_correction=True)
    np.testing.assert_allclose([found.welch.statistic, found.welch.p_value], [welch.statistic, welch.pvalue], rtol=1e-8)
    assert found.welch.residual_degrees == pytest.approx(welch.df_denom, rel=1e-9)
    if len(parts) == 2:
        first, second = parts.values()
        test = stats.ttest_ind(second, first, equal_var=False)
        ends = test.confidence_interval()
        np.testing.assert_allclose(found.difference, [second.mean() - first.mean(), ends.low, ends.high], rtol=1e-8)
        np.testing.assert_allclose(
            [found.welch.statistic, found.welch.p_value], [test.statistic**2, test.pvalue], rtol=1e-8
        )


def test_weighted_means_are_those_of_weighted_least_squares() -> None:
    table = patients()
    table.loc[5, "w"], table.loc[9, "w"] = 0.0, np.nan
    whole = piebald.group_means(table, client="hospital", weights="w", columns=["age"])["age"]
    rows = table[["age", "w", "sex"]].dropna(subset=["age", "w"]).query("w > 0")
    referee = sm.WLS(rows.age, np.ones(len(rows)), weights=rows.w).fit()
    assert (whole.counts[0], whole.dropped) == (len(rows), len(table) - len(rows))
    np.testing.assert_allclose(
        [whole.means[0], whole.errors[0]], [referee.params.iloc[0], referee.bse.iloc[0]], **CLOSE
    )
    described = sm.stats.DescrStatsW(rows.age, rows.w, ddof=0)
    np.testing.assert_allclose(whole.variances[0], described.var * len(rows) / (len(rows) - 1), **CLOSE)
    by_sex = piebald.group_means(table, client="hospital", by="sex", weights="w", columns=["age"])["age"]
    fit = formulas.wls("age ~ C(sex)", rows.dropna(), weights=rows.dropna().w).fit()
    np.testing.assert_allclose([by_sex.anova.statistic, by_sex.anova.p_value], [fit.fvalue, fit.f_pvalue], rtol=1e-8)
    # the unit of weights is without meaning
    tenfold = piebald.group_means(
        table.assign(w=10 * table.w), client="hospital", by="sex", weights="w", columns=["age"]
    )["age"]
    np.testing.assert_allclose(tenfold.errors, by_sex.errors, rtol=1e-12)


def test_correlations_inflation_and_components_are_those_of_the_pooled_rows() -> None:
    table = patients()
    names = ["age", "days", "dose", "w"]
    found = piebald.correlations(table, client="hospital")
    rows = table[names].dropna()
    assert (found.names, found.rows, found.dropped) == (tuple(names), len(rows), len(table) - len(rows))
    np.testing.assert_allclose(found.means, rows.mean(), **CLOSE)
    np.testing.assert_allclose(found.covariance, rows.cov(), **CLOSE)
    np.testing.assert_allclose(found.matrix, rows.corr(), **CLOSE)
    p_values = [[stats.pearsonr(rows[a], rows[b]).pvalue if a != b else 0 for b in names] for a in names]
    np.testing.assert_allclose(found.p_values, p_values, rtol=1e-8, atol=1e-300)
    design = sm.add_constant(rows).to_numpy()
    np.testing.assert_allclose(found.inflation, [variance_inflation_factor(design, k) for k in range(1, 5)], rtol=1e-9)
    for standardised, inputs in ((False, rows), (True, (rows - rows.mean()) / rows.std())):
        components, referee = found.components(standardised), PCA().fit(inputs)
        np.testing.assert_allclose(components.loadings, referee.components_, rtol=1e-7, atol=1e-9)
        np.testing.assert_allclose(components.variances, referee.explained_variance_, rtol=1e-9)
        np.testing.assert_allclose(components.explained, referee.explained_variance_ratio_, rtol=1e-9)


def test_weighted_correlations_are_statsmodels() -> None:
    table = patients()
    found = piebald.correlations(table, client="hospital", columns=["age", "dose"], weights="w")
    rows = table[["age", "dose", "w"]].dropna()
    referee = sm.stats.DescrStatsW(rows[["age", "dose"]], rows.w)
    np.testing.assert_allclose(found.matrix, referee.corrcoef, **CLOSE)
    assert np.isnan(found.p_values).all()


def test_categories_are_columns_of_correlations() -> None:
    table = patients()
    found = piebald.correlations(table, client="hospital", columns=["dose", "ward"])
    rows = table[["dose"]].assign(y=(table.ward == "y") * 1.0, z=(table.ward == "z") * 1.0)
    assert found.names == ("dose", "ward=y", "ward=z")
    np.testing.assert_allclose(found.matrix, rows.corr(), **CLOSE)


def test_contingency_tables_are_tested_without_noise_alone() -> None:
    table = patients()
    found = piebald.statistics(table, client="hospital", columns=["sex", "ward"], tables=[("sex", "ward")])
    counts = pandas.crosstab(table.sex, table.ward)
    referee, test = stats.chi2_contingency(counts, correction=False), found.tests["sex", "ward"]
    np.testing.assert_allclose(
        [test.statistic, test.degrees, test.p_value], [referee.statistic, referee.dof, referee.pvalue], rtol=1e-12
    )
    assert found.plain()["tables"][0]["test"]["degrees"] == 2
    words = {"sex": ["f", "m"], "ward": ["x", "y", "z"]}
    noisy = piebald.statistics(
        table, client="hospital", columns=["sex", "ward"], tables=[("sex", "ward")], categories=words, epsilon=1,
        delta=1e-5, quantiles=(),
    )  # fmt: skip
    assert noisy.tests == {}
    # a category that nobody has is expected of nobody
    alone = piebald.statistics(table.assign(ward="x"), client="hospital", columns=["sex", "ward"],
                               tables=[("sex", "ward")], categories=words)  # fmt: skip
    assert alone.tests == {}


VALUES = st.sampled_from([0.0, 1.0, 1.0, -3.5, 1e6, 1e6 + 1, 1e-9, math.nan])


@settings(max_examples=8, deadline=None)
@given(st.data())
def test_degenerate_columns_have_a_referees_numbers_or_none(data: st.DataObject) -> None:
    rows = data.draw(st.integers(2, 12))
    lists = st.lists(VALUES, min_size=rows, max_size=rows)
    table = pandas.DataFrame({name: data.draw(lists) for name in ("a", "b")})
    table["g"] = data.draw(st.lists(st.sampled_from(["u", "v", "lonely"]), min_size=rows, max_size=rows))
    table["site"] = ["s", "t"] * (rows // 2) + ["t"] * (rows % 2)
    if table.a.notna().any():
        found = piebald.group_means(table, client="site", by="g", columns=["a"])["a"]
        parts = {name: part for name, part in groups_of(table, "a", "g").items() if len(part)}
        assert found.groups == tuple(parts)
        np.testing.assert_allclose(found.means, [part.mean() for part in parts.values()], rtol=1e-9, atol=1e-15)
        variances = np.array([part.var() for part in parts.values()])
        np.testing.assert_allclose(found.variances, variances, rtol=1e-6, atol=1e-12)
        found.plain(), found.welch.plain()
        if (variances > 1e-12).all() and len(parts) == 2:
            test = stats.ttest_ind(*parts.values(), equal_var=False)
            np.testing.assert_allclose(found.welch.statistic, test.statistic**2, rtol=1e-5)
        elif (variances > 1e-12).all() and len(parts) > 2:
            welch = anova_oneway(list(parts.values()), use_var="unequal", welch_correction=True)
            np.testing.assert_allclose(found.welch.statistic, welch.statistic, rtol=1e-5)
    whole = table[["a", "b"]].dropna()
    if len(whole) < 2:
        with pytest.raises(SettingError, match="correlations need at least 2 rows"):
            piebald.correlations(table, client="site", columns=["a", "b"])
        return
    found = piebald.correlations(table, client="site", columns=["a", "b"])
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        varies = np.array([whole[name].nunique() > 1 for name in ("a", "b")])
        exact = whole - whole.iloc[0]  # a referee that does not lose digits beside a million
        expected = exact.corr().to_numpy().copy()
    expected[~varies], expected[:, ~varies] = np.nan, np.nan
    np.testing.assert_allclose(found.matrix, expected, rtol=0, atol=1e-6)
    assert ((found.inflation >= 1 - 1e-9) | np.isnan(found.inflation)).all()
    found.table(), found.plain()
    if varies.any():
        components = found.components()
        assert components.variances.sum() == pytest.approx(varies.sum())
    else:
        with pytest.raises(SettingError, match="no column varies"):
            found.components()


def test_copies_explain_each_other() -> None:
    table = patients()[["hospital", "dose", "w"]].assign(half=lambda rows: rows.dose / 2, flat=3.0)
    found = piebald.correlations(table, client="hospital")
    inflation = dict(zip(found.names, found.inflation.tolist(), strict=True))
    assert (inflation["dose"], inflation["half"]) == (math.inf, math.inf)
    assert inflation["w"] < 2
    assert math.isnan(inflation["flat"])
    assert len(found.components().names) == 3


@pytest.mark.parametrize("secure", [False, pytest.param(True, marks=pytest.mark.full)])
def test_sites_describe_their_pooled_rows(secure: bool, tmp_path: Path) -> None:
    table = pooled(PLANS[secure])
    found = fit_group_means(sites(secure, tmp_path / "a"), GroupOptions("arm", "time", ["x"]))["x"]
    here = piebald.group_means(table, client="site", by="arm", weights="time", columns=["x"])["x"]
    assert found.groups == here.groups == ("0", "1")
    for part in ("counts", "means", "variances"):
        np.testing.assert_allclose(getattr(found, part), getattr(here, part), rtol=1e-9)
    told = fit_correlations(sites(secure, tmp_path / "b"), CorrelationOptions(["x", "time", "falls"]))
    expected = piebald.correlations(table, client="site", columns=["x", "time", "falls"])
    np.testing.assert_allclose(told.matrix, expected.matrix, rtol=0, atol=1e-10)
    if secure:
        with pytest.raises(SettingError, match="masks are to hide"):
            fit_group_means(sites(secure, tmp_path / "c"), GroupOptions("site", None, ["x"]))


def test_all_questions_are_among_those_that_terms_name() -> None:
    clients = sites(False, None)
    columns = clients.columns
    asked, ask = list[Any](), columns.query
    columns.query = lambda plan, *rest: (asked.append(plan), ask(plan, *rest))[1]  # type: ignore[method-assign,func-returns-value]
    for options, fit in ((GroupOptions("arm"), fit_group_means), (CorrelationOptions(), fit_correlations)):
        stated = {query.plan for query in options.questions(columns)}  # type: ignore[attr-defined]
        asked.clear()
        fit(clients, options)  # type: ignore[operator]
        assert {*asked} == stated


def test_small_groups_of_a_site_are_not_told() -> None:
    told = fit_group_means(
        sites(False, None, Policy(queries=["model_sums"], least_rows=20)), GroupOptions("arm", None, ["x"])
    )
    assert {*told.left_out} == {"a", "b"}  # whose arms have fewer rows
    assert told["x"].counts.sum() == 70
    with pytest.raises(PiebaldError, match="too few rows contribute to a sum"):
        fit_group_means(
            sites(False, None, Policy(queries=["model_sums"], least_rows=40)), GroupOptions("arm", None, ["x"])
        )
    with pytest.raises((RuntimeFault, SettingError), match="does not answer 'model_sums'"):
        fit_correlations(sites(False, None, Policy(queries=["statistics"])), CorrelationOptions(["x", "time"]))


RULES = DisclosureRules()
COUNT = 400


def checked(*steps: Any) -> None:
    """Ask a site for a column that is computed by these steps, and for nothing that singles out a row by itself."""
    rng = np.random.default_rng(1)
    table = np.column_stack([np.arange(COUNT) / 4 + 20, rng.normal(50, 5, COUNT), rng.normal(size=COUNT)])
    plan = ModelPlan(family="gaussian", columns=(Computed(steps=steps),), target=("2", None))
    rows = model_rows(plan, table_columns(table))
    numbers = np.array([rows.x.mean(), rows.x.std() or 1.0, 0.0, 0.0])
    check_sums(plan, "likelihood", rows, numbers, RULES)


AGE, PAY = ("0", None), ("1", None)
ONE_AGE = (AGE, 57.0, "subtract", 2.0, "power", -50.0, "multiply", "exp")  # 1 for one row, and else 0


@pytest.mark.parametrize("steps", [
    ONE_AGE,
    (1.0, *ONE_AGE, "subtract"),
    (PAY, 1.0, *ONE_AGE, "add", "multiply"),  # all pays, and one of them twice
    (PAY, *ONE_AGE, "multiply", PAY, "add"),
    (AGE, 57.0, "subtract", "abs", 0.001, "add", -10.0, "power"),
    (AGE, Spline(degree=1, knots=(20.0, 20.0, 57.0, 57.2, 57.4, 120.0, 120.0), index=2), PAY, "multiply"),
])  # fmt: skip
def test_no_step_of_a_computed_column_singles_out_a_row(steps: Any) -> None:
    with pytest.raises(Withheld):
        checked(*steps)


@pytest.mark.parametrize("steps", [
    (AGE, 50.0, "subtract", PAY, "multiply"),
    (AGE, "log"),
    (AGE, 2.0, "power"),
    (AGE, Spline(degree=3, knots=(*[20.0] * 4, 50.0, 80.0, *[120.0] * 4), index=3), PAY, "multiply"),
])  # fmt: skip
def test_columns_of_usual_formulas_are_told(steps: Any) -> None:
    checked(*steps)


@pytest.mark.parametrize("steps", [
    (), (AGE,), (2.0, 3.0, "add"), (AGE, "add"), (AGE, AGE), (AGE, 2.0), (AGE, 1e9, "power"), (AGE, PAY, "power"),
    (AGE, "__import__"), (AGE, "eval"), (AGE, math.inf, "add"), (AGE, *["log"] * 70), (AGE, {"degree": 3, "knots": []}),
    (AGE, {"degree": 1, "knots": [0, 0, 5, 5, 9, 9], "index": 0}), (AGE, {"degree": 0, "knots": [0, 1], "index": 7}),
    (AGE, {"degree": 10**9, "knots": [0, 1], "index": 0}), (AGE, ["0", None, "os.system"], "add"), (AGE, "log", ["x"]),
])  # fmt: skip
def test_steps_that_make_no_column_are_refused_when_they_come(steps: Any) -> None:
    with pytest.raises(ValidationError):
        Computed.model_validate({"steps": steps})


def test_tables_are_written_for_papers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = str(tmp_path / "rows.csv")
    patients().to_csv(file, index=False)
    saved = [str(tmp_path / f"table.{suffix}") for suffix in ("html", "csv", "md", "txt")]
    flags = [flag for name in saved for flag in ("--save", name)]
    command = ["statistics", file, "--client", "hospital"]
    assert main([*command, "--by", "sex", "--column", "age", "--column", "ward", *flags]) == 0
    assert "Categories have no mean: ward" in capsys.readouterr().out
    html, numbers, markdown, text = (Path(name).read_text() for name in saved)
    assert html.startswith("<table><thead><tr><th>column, mean (sd)</th><th>f</th><th>m</th><th>p</th></tr></thead>")
    assert numbers.startswith("column,sex,count,left out,mean,sd,std. error\nage,f,")
    assert markdown.startswith("| column, mean (sd) | f | m | p |")
    assert "age" in text
    assert main([*command, "--correlations", "--save", str(tmp_path / "c.csv")]) == 0
    assert "Principal components" in capsys.readouterr().out
    assert main([*command, "--save", str(tmp_path / "c.pdf")]) == 2
    assert main([*command, "--by", "sex", "--bins", "3"]) == 2
    assert main([*command, "--correlations", "--by", "sex"]) == 2
