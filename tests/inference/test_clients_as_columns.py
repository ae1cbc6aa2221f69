"""Clusters of any names and number, and clients as a covariate, beside statsmodels on the pooled rows."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
import statsmodels.api as sm
import statsmodels.formula.api as formulas
from statsmodels.duration.hazard_regression import PHReg

import piebald
from piebald.core.errors import PiebaldError, SettingError
from piebald.data.preparation.agreement import fitted
from piebald.data.preparation.preparation import Preparation
from piebald.inference.columns import ClientColumns
from piebald.inference.linear_models import Family, GlmOptions, fit_glm
from piebald.inference.models.clients import ModelClients, ModelColumns
from piebald.inference.models.formula import CLIENT
from piebald.inference.models.rows import ModelPlan, model_rows
from piebald.inference.models.sums import check_sums
from piebald.inference.survival import SurvivalOptions, fit_survival
from piebald.privacy.ledger import DisclosureRules, Withheld

from .sites import Policy
from .test_models_at_sites import ALLOWED, TIMES, plan, pooled, sites
from .test_preparation_at_sites import ALLOWED as TELLS_KINDS
from .test_preparation_at_sites import NAMES, Sites
from .test_values_at_sites import runtime

FAMILIES = {"poisson": sm.families.Poisson(), "binomial": sm.families.Binomial(), "gaussian": sm.families.Gaussian()}
CLOSE = 1e-8


def visits(people: int = 150, rows: int = 300) -> pandas.DataFrame:
    """Rows of four hospitals, one of them with few, and people who are seen in several of them."""
    rng = np.random.default_rng(3)
    hospital = rng.choice(["a", "b", "c", "d"], rows, p=[0.4, 0.3, 0.25, 0.05])
    level = pandas.Series(hospital).map({"a": 0.8, "b": 0.0, "c": -0.7, "d": 0.3}).to_numpy()
    x, person = rng.normal(size=rows) - level, rng.integers(0, people, rows)
    own = rng.normal(0, 0.5, people)[person]
    table = pandas.DataFrame({"hospital": hospital, "x": x, "person": [f"p {k:05d}" for k in person], "number": person})
    table["score"] = x + 2 * level + own + rng.normal(size=rows)
    table["ill"] = (rng.logistic(size=rows) < x / 2 + level + own).astype(int)
    table["falls"] = rng.poisson(np.exp(0.3 * x + level + own - 0.5))
    table["time"], table["died"] = np.ceil(rng.exponential(20 * np.exp(-x / 2 - level))), rng.random(rows) < 0.8
    return table


def glm(table: pandas.DataFrame, **options: Any) -> Any:
    options = {"client": "hospital", "target": "score", "columns": ["x"], **options}
    return piebald.glm(table, **options)


@pytest.mark.full
@pytest.mark.parametrize(("people", "rows"), [(150, 300), (100_000, 120_000)])
def test_clusters_may_be_words_and_numbers_of_any_count(people: int, rows: int) -> None:
    table = visits(people, rows)
    table["fraction"] = table.number + 1e-9 * table.number  # which differ in the ninth digit
    table["day"] = pandas.Timestamp("1900-01-01") + pandas.to_timedelta(table.number % 30_000, "D")
    fits = {name: glm(table, cluster=name) for name in ("person", "number", "fraction", "day")}
    for name, fit in fits.items():
        assert fit.clusters == table[name].nunique()
    for name in ("person", "fraction"):
        np.testing.assert_allclose(fits[name].errors, fits["number"].errors, rtol=1e-12)
    model = sm.OLS(table.score, sm.add_constant(table[["x"]]))
    referee = model.fit(cov_type="cluster", cov_kwds={"groups": table.number})
    np.testing.assert_allclose(fits["person"].errors, referee.bse, atol=CLOSE)


def test_hazards_have_clusters_named_by_words() -> None:
    table = visits()
    words, numbers = (
        piebald.cox(table, client="hospital", time="time", event="died", columns=["x"], cluster=name)
        for name in ("person", "number")
    )
    assert words.clusters == numbers.clusters == table.person.nunique()
    assert words.errors.tolist() == numbers.errors.tolist()


def test_rows_without_a_cluster_are_left_out() -> None:
    table = visits()
    table.loc[::10, "person"] = None
    found, referee = glm(table, cluster="person"), glm(table.dropna(), cluster="number")
    assert (found.rows, found.dropped, found.clusters) == (270, 30, referee.clusters)
    assert found.errors.tolist() == pytest.approx(referee.errors.tolist(), rel=1e-12)


@pytest.mark.parametrize(("family", "target"), [("gaussian", "score"), ("binomial", "ill"), ("poisson", "falls")])
@pytest.mark.parametrize(
    ("cluster", "name"), [(None, "hospital"), ("person", "C(hospital)"), ("client", "client"), ("hospital", "client")]
)
def test_a_client_is_a_covariate(family: Family, target: str, cluster: str | None, name: str) -> None:
    table = visits()
    found = glm(table, target=target, family=family, cluster=cluster, columns=["x", name])
    model = formulas.glm(f"{target} ~ x + C(hospital)", table, family=FAMILIES[family])
    groups = table.number if cluster == "person" else pandas.factorize(table.hospital)[0]
    how = {} if cluster is None else {"cov_type": "cluster", "cov_kwds": {"groups": groups}}
    referee = model.fit(tol=1e-14, **how)
    order = ["Intercept", "x", *(f"C(hospital)[T.{hospital}]" for hospital in "bcd")]
    shown = name.removeprefix("C(").removesuffix(")")
    assert found.names == ("(intercept)", "x", *(f"{shown}={hospital}" for hospital in "bcd"))
    np.testing.assert_allclose(found.coefficients, referee.params[order], atol=CLOSE)
    np.testing.assert_allclose(found.errors, referee.bse[order], atol=CLOSE)


def test_numbers_are_categories_where_a_formula_says_so() -> None:
    table = visits()
    table["grade"] = table.number % 12
    found = glm(table, columns=["x", "C(grade)"])
    referee = formulas.ols("score ~ x + C(grade)", table).fit()
    assert found.names[2:] == tuple(f"grade={grade}" for grade in range(1, 12))
    np.testing.assert_allclose(found.coefficients[1], referee.params["x"], atol=CLOSE)
    np.testing.assert_allclose(found.coefficients[2:], referee.params[1:12], atol=CLOSE)
    with pytest.raises(SettingError, match="'x' has 300 different values, at most 100 are categories"):
        glm(table, columns=["C(x)"])


def test_a_column_may_be_called_as_a_formula_is_written() -> None:
    table = visits()
    wanted = glm(table, columns=["x"]).coefficients.tolist()
    for name in ("HbA1C(%)", "C(hospital)", "C(none)", " x"):
        found = glm(table.rename(columns={"x": name}), columns=[name])
        assert (found.names[1], found.coefficients.tolist()) == (name, wanted)
    with pytest.raises(SettingError, match="none"):
        glm(table, columns=["C(none)"])


def test_a_table_s_own_column_goes_before_the_name_of_the_client() -> None:
    table = visits()
    parts = {
        name: part.drop(columns="hospital").assign(site=part.number % 3) for name, part in table.groupby("hospital")
    }
    found = piebald.glm(parts, target="score", columns=["x", "site"])
    assert found.names == ("(intercept)", "x", "site")
    assert piebald.glm(parts, target="score", columns=["x", "client"]).names[2:] == ("client=b", "client=c", "client=d")


def test_clients_without_rows_have_no_coefficient() -> None:
    table = visits()
    for absent in ("a", "c"):  # others are compared with the first client that has rows
        table.loc[table.hospital == absent, "x"] = np.nan
        found = glm(table, columns=["x", "hospital"])
        referee = formulas.ols("score ~ x + C(hospital)", table.dropna()).fit()
        first, *others = referee.params
        np.testing.assert_allclose(found.coefficients, [first, others[-1], *others[:-1]], atol=CLOSE)
    few = pandas.concat([table[table.hospital.isin(["b", "d"])].groupby("hospital").head(4), table[table.x.isna()]])
    more = pandas.concat([few, *(few[few.x.isna()].assign(hospital=f"e{k}") for k in range(9))])
    assert glm(more, columns=["x", "hospital"]).rows == 8  # fewer than there are clients
    table.loc[table.hospital == "b", "x"] = np.nan
    with pytest.raises(SettingError, match="all rows are of one client"):
        glm(table, columns=["x", "hospital"])


def test_hazards_and_curves_by_client() -> None:
    table = visits()
    names: dict[str, Any] = {"client": "hospital", "time": "time", "event": "died"}
    found = piebald.cox(table, columns=["x", "hospital"], stratified=False, **names)
    dummies = pandas.get_dummies(table.hospital, dtype=float)[["b", "c", "d"]]
    referee = PHReg(table.time, pandas.concat([table.x, dummies], axis=1), table.died, ties="efron").fit()
    np.testing.assert_allclose(found.coefficients, referee.params, rtol=1e-6)
    np.testing.assert_allclose(found.errors, referee.bse, rtol=1e-6)
    # a baseline of each client has all that its coefficient would say
    apart, without = (piebald.cox(table, columns=columns, **names) for columns in (["x", "hospital"], ["x"]))
    assert (apart.names, apart.coefficients.tolist()) == (without.names, without.coefficients.tolist())
    curves = piebald.survival(table, group="hospital", **names)
    copied = piebald.survival(table.assign(ward=table.hospital), group="ward", **names)
    assert [curve.plain() for curve in curves.curves.values()] == [curve.plain() for curve in copied.curves.values()]
    assert curves.test == copied.test


@pytest.mark.parametrize("cluster", [None, "client", "died"])
def test_a_site_is_a_covariate_of_its_own_rows(cluster: str | None) -> None:
    table = pooled(plan(False))
    options: dict[str, Any] = {"columns": ["x", "client"], "family": "poisson", "offset": "logdays", "cluster": cluster}
    found = fit_glm(sites(False, None), GlmOptions("falls", **options))
    if cluster == "died":
        table["ward"] = table.site + table.died.astype(str)
        options["cluster"] = "ward"
    here = piebald.glm(table, client="site", target="falls", **options)
    assert found.names == here.names == ("(intercept)", "x", "client=b", "client=c")
    np.testing.assert_allclose(found.coefficients, here.coefficients, atol=1e-10)
    np.testing.assert_allclose(found.errors, here.errors, atol=1e-10)
    curves = fit_survival(sites(False, None), SurvivalOptions("time", "died", "client", TIMES))
    copied = piebald.survival(table.assign(copy=table.site), client="site", time="time", event="died", group="copy")
    assert [*curves.curves] == [*copied.curves] == ["a", "b", "c"]
    assert curves.curves["b"].survival.tolist() == copied.curves["b"].survival.tolist()


def test_a_site_that_refuses_has_no_coefficient() -> None:
    run, said = plan(False), list[str]()
    asked = sites(False, None, run=run, say=said.append)
    asked._sites.runtime._sites[0]._policy = Policy()  # type: ignore[attr-defined]
    found = fit_glm(asked, GlmOptions("falls", ["x", "client"]))
    assert (found.names, [*found.left_out]) == (("(intercept)", "x", "client=c"), ["a"])


def test_coefficients_of_sites_are_under_the_rules_of_disclosure(tmp_path: Path) -> None:
    # as many rows as the coefficients of one site need, whose number sites do not raise
    careful = Policy(queries=["model_sums"], least_rows=10)
    large = plan(False, (130, 150, 170))
    found = fit_glm(sites(False, tmp_path / "a", careful, run=large), GlmOptions("falls", ["x", "site"]))
    assert found.rows == 450
    few = plan(False, (130, 150, 8))
    left = fit_glm(sites(False, tmp_path / "b", careful, run=few), GlmOptions("falls", ["x", "site"]))
    assert ([*left.left_out], left.names) == (["c"], ("(intercept)", "x", "site=b"))
    for kind, options in ((fit_glm, GlmOptions("falls", ["x", "site"])),
                          (fit_survival, SurvivalOptions("time", "died", "site", TIMES))):  # fmt: skip
        with pytest.raises(SettingError, match="a coefficient of each client is of sums that masks are to hide"):
            kind(sites(True, tmp_path / "c", ALLOWED), options)  # type: ignore[operator]


@pytest.mark.parametrize(("family", "least"), [("gaussian", 9), ("ordinal", 12), ("multinomial", 18)])
def test_a_model_has_a_third_as_many_coefficients_as_rows_besides_those_of_clients(family: Any, least: int) -> None:
    others = [(CLIENT, str(number)) for number in range(40)]
    levels = () if family == "gaussian" else ("0", "1", "2")
    plan = ModelPlan(family=family, columns=(("0", None), ("1", None), *others), target=("2", None), levels=levels)
    numbers = np.concatenate([np.zeros(42), np.ones(42)])
    rules = DisclosureRules(least=2, largest_share=0.9)
    for rows in (least - 1, least):
        columns = {"0": np.arange(rows) % 2.0, "1": np.arange(rows) // 2 % 2.0, "2": np.arange(rows) % 3.0}
        own = model_rows(plan, ClientColumns("7", rows, columns, {}))
        with nullcontext() if rows == least else pytest.raises(Withheld):
            check_sums(plan, "moments", own, numbers, rules)


@pytest.mark.full
@pytest.mark.parametrize("block", [1 << 17, 25])  # rows that are prepared at once
def test_sites_number_the_words_of_clusters_and_tell_none(
    block: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("piebald.core.tensor_store.BLOCK", block)
    rng, tables = np.random.default_rng(8), {}
    for name, rows in zip(NAMES, (80, 60, 40), strict=True):
        person = rng.integers(0, 25, rows)
        tables[name] = pandas.DataFrame(
            {"age": rng.normal(60, 10, rows).round(1), "patient": [f"{name} {k}" for k in person]}
        )
        tables[name]["ill"] = np.where(rng.random(rows) < 0.3 + 0.02 * person, "yes", "no")
        tables[name].loc[::17, "patient"] = None
    extra = "prepare = { columns = { patient = 'leave out' }, least_rows = 1 }\n"
    asked = Sites(tmp_path, tables, extra)
    values = asked.agree([TELLS_KINDS] * 3).as_values(["patient"])
    assert not any(b"north 1" in body for body in asked.bodies)
    told, ready = runtime((asked, values), "model_sums")
    columns = ModelColumns(ready.clients, None, "ill", "train", {}, False)
    options = GlmOptions("ill", ["age"], "binomial", cluster="patient")
    found = fit_glm(ModelClients(columns, told, ready.work, ready.clients), options)  # type: ignore[arg-type]
    here = piebald.glm(tables, target="ill", columns=["age"], family="binomial", cluster="patient")
    assert (found.clusters, found.rows, found.dropped) == (here.clusters, here.rows, here.dropped)
    np.testing.assert_allclose(found.errors, here.errors, rtol=1e-10)


def test_labels_are_no_inputs_of_a_model() -> None:
    preparation = fitted(visits()[["x", "hospital"]], least_rows=1).as_values(["hospital"])
    with pytest.raises(SettingError, match="is no input of a model"):
        Preparation.from_json(preparation.to_json().replace('"form": "values"', '"form": "inputs"'))


def test_a_random_intercept_and_a_coefficient_of_clients_are_one_too_many() -> None:
    with pytest.raises(PiebaldError, match="leave random_intercept out"):
        glm(visits(), columns=["x", "hospital"], random_intercept="two_stage")
