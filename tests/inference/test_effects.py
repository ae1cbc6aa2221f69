"""What a result says besides its numbers: which class counts as 1, ratios, few clusters, and who has no part in it."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pandas
import pytest
import statsmodels.formula.api as formulas
from scipy import stats

import piebald
from piebald.core.errors import SettingError
from piebald.inference.linear_models import GlmOptions, fit_glm

from .test_clients_as_columns import glm, visits
from .test_models_at_sites import plan, sites


def words() -> pandas.DataFrame:
    table = visits()
    table["state"] = np.where(table.ill == 1, "bad", "good")
    table["grade"] = np.digitize(table.score, [-1, 1])
    table["level"] = table.grade.map({0: "low", 1: "mid", 2: "top"})
    return table


@pytest.mark.parametrize("kind", [None, "one_stage", "two_stage"])
def test_the_class_that_counts_is_named_and_chosen(kind: Any) -> None:
    good, bad, numbers = (
        glm(words(), target=target, event=event, family="binomial", random_intercept=kind)
        for target, event in (("state", None), ("state", "bad"), ("ill", None))
    )
    assert (good.event, bad.event, numbers.event) == ("good", "bad", "1")
    np.testing.assert_allclose(bad.coefficients, numbers.coefficients, atol=1e-9)
    np.testing.assert_allclose(bad.coefficients, -good.coefficients, atol=1e-9)
    assert bad.plain()["event"] == "bad"


@pytest.mark.parametrize(("target", "event"), [("level", "top"), ("grade", "2"), ("ill", "0")])
def test_one_class_against_all_others(target: str, event: str) -> None:
    table = words()
    table["one"] = (table[target].astype(str) == event).astype(int)
    found, referee = glm(table, target=target, event=event), glm(table, target="one", family="binomial")
    assert found.family == "binomial"
    assert found.coefficients.tolist() == referee.coefficients.tolist()
    with pytest.raises(SettingError, match="event names a class of a binomial target"):
        glm(table, target=target, event=event, family="poisson")
    with pytest.raises(SettingError, match="there is no value of"):
        glm(table, target=target, event="none of them")


def test_an_event_of_hazards_is_named_and_chosen() -> None:
    table = words()
    table["end"] = np.where(table.died, "a death", "b lost")
    options: dict[str, Any] = {"client": "hospital", "time": "time", "columns": ["x"]}
    found = piebald.cox(table, event="end", event_value="a death", **options)
    numbers = piebald.cox(table, event="died", **options)
    assert (found.event, numbers.event, found.events) == ("a death", "1", numbers.events)
    assert found.coefficients.tolist() == numbers.coefficients.tolist()
    assert piebald.cox(table, event="end", **options).events == len(table) - found.events
    times: dict[str, Any] = {"client": "hospital", "time": "time"}
    curves = [piebald.survival(table, event="end", event_value="a death", **times),
              piebald.survival(table, event="died", **times)]  # fmt: skip
    assert curves[0].plain() == curves[1].plain()


@pytest.mark.parametrize("target", ["ill", "state"])
def test_a_target_of_two_values_is_no_straight_line_in_silence(target: str) -> None:
    found, stated = glm(words(), target=target), glm(words(), target=target, family="binomial")
    assert (found.family, found.coefficients.tolist()) == ("binomial", stated.coefficients.tolist())
    assert len(found.table().notes) == len(stated.table().notes) + 1
    assert glm(words(), target="score").family == "gaussian"
    line = glm(words(), target="ill", family="gaussian")
    assert (line.family, line.remarks) == ("gaussian", ())


def test_sites_whose_numbers_turn_out_to_be_0_and_1_are_said_to() -> None:
    """A site does not list the values of its numbers, so the squares show what they are."""
    for columns, remarks in ((GlmOptions("died", ["x"]), 1), (GlmOptions("falls", ["x"]), 0)):
        found = fit_glm(sites(False, None, run=plan(False)), columns)
        assert (found.family, len(found.remarks)) == ("gaussian", remarks)  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("family", "target", "name"),
    [
        ("binomial", "ill", "odds ratio"),
        ("poisson", "falls", "rate ratio"),
        ("negative_binomial", "falls", "rate ratio"),
    ],
)
def test_ratios_stand_beside_the_coefficients(family: Any, target: str, name: str) -> None:
    found = glm(visits(), target=target, family=family)
    intercept, x = found.table()
    assert [x[name], x[f"{name} 2.5 %"], x[f"{name} 97.5 %"]] == pytest.approx(
        [math.exp(found.coefficients[1]), *np.exp(found.interval()[1])]
    )
    assert intercept.get(name) is None  # a ratio to nothing
    assert found.plain()["coefficients"]["x"][name] == x[name]
    assert name not in glm(visits(), family="gaussian").table().columns


def test_few_clusters_have_student_s_distribution_and_a_remark() -> None:
    table = visits()
    few, many = glm(table, cluster="hospital"), glm(table, cluster="person")
    referee = formulas.ols("score ~ x", table).fit(
        cov_type="cluster", cov_kwds={"groups": pandas.factorize(table.hospital)[0]}, use_t=True
    )
    np.testing.assert_allclose(few.p_values, referee.pvalues, rtol=1e-8)
    np.testing.assert_allclose(few.interval(), referee.conf_int(), rtol=1e-8)
    assert (few.degrees, many.degrees) == (3, table.person.nunique() - 1)
    assert (len(few.remarks), len(many.remarks)) == (1, 0)
    hazards = piebald.cox(table, client="hospital", time="time", event="died", columns=["x"], cluster="client")
    assert hazards.p_values[0] == pytest.approx(2 * stats.t.sf(abs(hazards.statistics[0]), 3))
    assert len(hazards.remarks) == 1


def test_clients_without_a_row_or_a_model_are_named() -> None:
    table = visits()
    table.loc[table.hospital == "b", "x"] = np.nan
    found = glm(table)
    assert ([*found.left_out], found.clients) == (["b"], 3)
    assert "b (" in found.table().notes[-1]
    few = pandas.concat([table, table[table.hospital == "a"][:2].assign(hospital="e")])
    pooled = glm(few, random_intercept="two_stage")
    assert (sorted(pooled.left_out), pooled.fitted, pooled.clients) == (["b", "e"], 3, 4)
