"""Average marginal effects: beside statsmodels, beside differences of means, at sites, and where there are none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
import statsmodels.formula.api as smf

import piebald
from piebald.core.errors import SettingError
from piebald.inference.linear_models import GlmOptions, fit_glm

from .test_models_at_sites import CODES, PLANS, pooled, sites


def visits(rows: int = 240) -> pandas.DataFrame:
    rng = np.random.default_rng(7)
    table = pandas.DataFrame({"site": rng.choice(["north", "south", "east"], rows), "age": rng.normal(60, 10, rows)})
    table["arm"], table["logdays"] = rng.choice(["new", "old"], rows), rng.normal(0, 0.3, rows)
    eta = 0.04 * (table.age - 60) + 0.5 * (table.arm == "old")
    table["ill"] = (eta + rng.logistic(size=rows) > 0).astype(int)
    table["falls"] = rng.negative_binomial(2, 2 / (2 + np.exp(1 + eta)))
    table["cost"], table["w"] = rng.gamma(2, np.exp(3 + 0.3 * eta)), rng.uniform(0.5, 3, rows)
    table["patient"] = rng.integers(0, 60, rows)
    return table


def fitted(target: str, family: Any, columns: Any = ("age", "arm"), **options: Any) -> Any:
    return piebald.glm(visits(), client="site", target=target, columns=columns, family=family, effects=True, **options)


@pytest.mark.parametrize(
    ("target", "family", "referee", "cluster"),
    [("ill", "binomial", smf.logit, None), ("ill", "binomial", smf.logit, "patient"),
     ("falls", "poisson", smf.poisson, None),
     ("falls", "poisson", smf.poisson, "patient"), ("falls", "negative_binomial", smf.negativebinomial, None)],
)  # fmt: skip
def test_effects_are_those_of_statsmodels(target: str, family: str, referee: Any, cluster: str | None) -> None:
    found, table = fitted(target, family, cluster=cluster), visits().assign(arm=lambda x: (x.arm == "old") * 1.0)
    how: Any = {} if cluster is None else {"cov_type": "cluster", "cov_kwds": {"groups": table.patient}}
    right = referee(f"{target} ~ age + arm", table).fit(disp=0, method="newton", maxiter=100, **how).get_margeff()
    assert found.effects.names == ("age", "arm=old")
    np.testing.assert_allclose(found.effects.coefficients, right.margeff, rtol=1e-6)
    np.testing.assert_allclose(found.effects.errors, right.margeff_se, rtol=1e-6)


@pytest.mark.parametrize(("family", "options"), [
    ("gamma", {}), ("gamma", {"weights": "w", "offset": "logdays"}), ("tweedie", {"power": 1.3, "weights": "w"}),
])  # fmt: skip
def test_effects_are_differences_of_means_and_their_errors_follow_from_the_covariance(
    family: str, options: dict[str, Any]
) -> None:
    found, table = fitted("cost", family, **options), visits()
    x = np.column_stack([np.ones(len(table)), table.age, table.arm == "old"])
    weight, offset = (table[name] if name in options.values() else 0 * table.age + value
                      for name, value in (("w", 1.0), ("logdays", 0.0)))  # fmt: skip

    def effects(point: Any) -> Any:
        def mean(step: Any) -> float:
            return float(np.average(np.exp((x + step) @ point + offset), weights=weight))

        return np.array([(mean(1e-5 * unit) - mean(-1e-5 * unit)) / 2e-5 for unit in np.eye(3)[1:]])

    steps = np.eye(3) * 1e-5
    slopes = np.stack([(effects(found.coefficients + s) - effects(found.coefficients - s)) / 2e-5 for s in steps], 1)
    np.testing.assert_allclose(found.effects.coefficients, effects(found.coefficients), rtol=1e-6)
    errors = np.sqrt(np.diag(slopes @ found.covariance @ slopes.T))
    np.testing.assert_allclose(found.effects.errors, errors, rtol=1e-4)


def test_of_a_straight_line_they_are_the_coefficients() -> None:
    found = fitted("cost", "gaussian")
    np.testing.assert_allclose(found.effects.coefficients, found.coefficients[1:], rtol=1e-12)
    np.testing.assert_allclose(found.effects.interval(), found.interval()[1:], rtol=1e-12)
    assert found.plain()["effects"]["age"]["effect"] == pytest.approx(found.coefficients[1])


@pytest.mark.parametrize("secure", [False, pytest.param(True, marks=pytest.mark.full)])
def test_effects_of_sites_are_those_of_their_pooled_rows(secure: bool, tmp_path: Path) -> None:
    wanted: Any = {"columns": ["x", "arm"], "family": "poisson", "offset": "logdays", "effects": True}
    found: Any = fit_glm(sites(secure, tmp_path), GlmOptions("falls", **wanted))
    here: Any = piebald.glm(pooled(PLANS[secure]), client="site", target="falls", categories=CODES, **wanted)
    np.testing.assert_allclose(found.effects.coefficients, here.effects.coefficients, rtol=1e-8)
    np.testing.assert_allclose(found.effects.errors, here.effects.errors, rtol=1e-8)


@pytest.mark.parametrize(("family", "options"), [
    ("binomial", {"random_intercept": "one_stage"}), ("poisson", {"epsilon": 1.0, "delta": 1e-6}),
])  # fmt: skip
def test_what_has_no_effects_is_refused(family: str, options: dict[str, Any]) -> None:
    with pytest.raises(SettingError, match="marginal effects are of models without random"):
        fitted("ill", family, ["age"], **options)


def test_terms_of_several_columns_are_told_to_be_alone() -> None:
    found: Any = piebald.glm(visits(), client="site", formula="ill ~ age * arm", effects=True)
    assert "Effects of age:arm=old are of the term alone" in found.effects.table().notes[0]
