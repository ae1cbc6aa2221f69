"""Generalised linear models over clients are those of the pooled rows."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
from scipy import optimize

import piebald
from piebald.core.errors import SettingError
from piebald.inference.linear_models import Family

COLUMNS = ["age", "sex", "cp", "trestbps", "thalach", "exang", "oldpeak"]


def loss(family: Family, x: np.ndarray[Any, Any], y: np.ndarray[Any, Any], beta: np.ndarray[Any, Any]) -> float:
    """The negative log-likelihood, without what does not depend on the coefficients."""
    eta = x @ beta
    if family == "binomial":
        return float((np.logaddexp(0, eta) - y * eta).sum())
    return float((np.exp(eta) - y * eta).sum()) if family == "poisson" else float(np.square(y - eta).sum() / 2)


def pooled(family: Family, x: np.ndarray[Any, Any], y: np.ndarray[Any, Any]) -> tuple[Any, Any]:
    """Coefficients and errors of the pooled rows, by a general minimiser and the curvature at its end."""
    scale = np.abs(x).max(0)
    z = x / scale

    def slope(beta: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        eta = z @ beta
        mean = {"binomial": 1 / (1 + np.exp(-eta)), "poisson": np.exp(eta), "gaussian": eta}[family]
        return np.asarray(z.T @ (mean - y))

    def curve(beta: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        eta = z @ beta
        mean = 1 / (1 + np.exp(-eta))
        weight = {"binomial": mean * (1 - mean), "poisson": np.exp(eta), "gaussian": np.ones_like(eta)}[family]
        return np.asarray((z * weight[:, None]).T @ z)

    found = optimize.minimize(
        lambda beta: loss(family, z, y, beta), np.zeros(x.shape[1]), jac=slope, hess=curve, method="trust-exact",
        options={"gtol": 1e-9, "maxiter": 1000},
    )  # fmt: skip
    beta = found.x - np.linalg.solve(curve(found.x), slope(found.x))
    spread = 2 * loss(family, z, y, beta) / (len(y) - x.shape[1]) if family == "gaussian" else 1.0
    return beta / scale, np.sqrt(spread * np.diag(np.linalg.inv(curve(beta)))) / scale


@pytest.mark.parametrize(("family", "target"), [("binomial", "sick"), ("gaussian", "thalach"), ("poisson", "num")])
def test_four_hospitals_fit_the_model_of_their_pooled_rows(family: Family, target: str) -> None:
    if "PIEBALD_DATA" not in os.environ:
        pytest.skip("PIEBALD_DATA does not say where the data sets are")
    heart = pandas.read_csv(Path(os.environ["PIEBALD_DATA"]) / "heart" / "heart.csv.gz")
    heart["sick"] = (heart.num > 0).astype(int)
    heart["cp"] = heart.cp.map({1: "typical", 2: "atypical", 3: "other", 4: "none"})
    columns = [name for name in COLUMNS if name != target]
    found = piebald.glm(heart, target=target, columns=columns, family=family, client="site")
    whole = heart[[*columns, target]].dropna()
    coded = pandas.get_dummies(whole["cp"], dtype=float).drop(columns="atypical")
    x = np.column_stack([np.ones(len(whole)), whole[[name for name in columns if name != "cp"]], coded])
    coefficients, errors = pooled(family, x, whole[target].to_numpy(float))
    assert found.names[-3:] == ("cp=none", "cp=other", "cp=typical")
    assert found.coefficients.tolist() == pytest.approx(coefficients.tolist(), rel=1e-6)
    assert found.errors.tolist() == pytest.approx(errors.tolist(), rel=1e-6)
    assert (found.rows, found.dropped) == (len(whole), len(heart) - len(whole))
    assert found.deviance < found.null_deviance


def test_numbers_that_one_can_compute_by_hand() -> None:
    """Two groups: the logits, and the root of the sum of reciprocal counts (the textbook's 2 by 2 table)."""
    table = pandas.DataFrame({"g": [0] * 10 + [1] * 10, "y": [1] * 4 + [0] * 6 + [1] * 8 + [0] * 2})
    found = piebald.glm({"a": table[::2], "b": table[1::2]}, target="y", family="binomial")
    assert found.coefficients.tolist() == pytest.approx([math.log(4 / 6), math.log(8 / 2) - math.log(4 / 6)])
    assert found.errors[1] == pytest.approx(math.sqrt(1 / 4 + 1 / 6 + 1 / 8 + 1 / 2))
    assert found.p_values[1] == pytest.approx(math.erfc(found.statistics[1] / math.sqrt(2)))


def test_dates_count_in_days() -> None:
    days = np.random.default_rng(0).integers(0, 900, 40)
    seen = pandas.Series(pandas.to_datetime("2022-03-01") + pandas.to_timedelta(days, unit="D"))
    y = 0.25 * days + np.random.default_rng(1).normal(size=40)
    for form in ("%Y-%m-%d", "%d.%m.%Y"):
        table = pandas.DataFrame({"seen": seen.dt.strftime(form), "y": y})
        found = piebald.glm({"a": table[::2], "b": table[1::2]}, target="y")
        assert found.coefficients[1] == pytest.approx(np.polyfit(days, y, 1)[0], rel=1e-6)


@pytest.mark.parametrize(
    ("change", "family", "sentence"),
    [
        ({"y": [0, 0, 0, 0, 1, 1, 1, 1.0]}, "binomial", "separate"),
        ({"z": [2.0, 4, 6, 8, 10, 12, 14, 16]}, "gaussian", "x, z|z, x"),
        ({"x": [3.0] * 8}, "gaussian", "column 'x' is constant"),
        ({"y": [0, 1, 2, 1, 0, 1, 0, 1.0]}, "binomial", "must be 0 or 1, and client '.' has other numbers"),
        ({"y": [0, 1, 0.5, 1, 0, 1, 0, 1.0]}, "poisson", "must be counts"),
        ({"y": [1.0] * 8}, "binomial", "nothing to explain"),
        ({"y": list("abcabcab")}, "binomial", "text with 3 categories"),
        ({f"c{k}": np.arange(8.0) ** k for k in range(2, 9)}, "gaussian", "need more than"),
    ],
)  # fmt: skip
def test_models_that_do_not_exist_are_refused(change: dict[str, Any], family: Family, sentence: str) -> None:
    table = pandas.DataFrame({"x": np.arange(1.0, 9), "y": [0, 1, 0, 1, 0, 1, 0, 1.0], **change})
    with pytest.raises(SettingError, match=sentence):
        piebald.glm({"a": table[::2], "b": table[1::2]}, target="y", family=family)
