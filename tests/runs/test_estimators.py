"""`FederatedClassifier` and `FederatedRegressor`: scikit-learn's own checks, and clients as groups of rows."""

from __future__ import annotations

import pickle
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from sklearn.base import clone
from sklearn.linear_model import LinearRegression, LogisticRegression
from sklearn.metrics import accuracy_score
from sklearn.model_selection import GroupKFold, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import estimator_checks_generator
from torch import nn

from piebald import FederatedClassifier, FederatedRegressor, recipes
from piebald.core.errors import SettingError

QUICK: dict[str, Any] = {"model": {"name": "mlp", "hidden": [16]}, "rounds": 4, "settings": {"lr": 0.2, "epochs": 2}}
CHECKS = [
    (f"{type(estimator).__name__}-{getattr(check, 'func', check).__name__}-{place}", estimator, check)
    for estimator in (FederatedClassifier(**QUICK), FederatedRegressor(**QUICK))
    for place, (_, check) in enumerate(estimator_checks_generator(estimator))
    if "array_api" not in str(check)  # for estimators of which a tag says that they take such arrays
]


@pytest.mark.full
@pytest.mark.parametrize(
    ("estimator", "check"), [pytest.param(estimator, check, id=name) for name, estimator, check in CHECKS]
)
def test_scikit_learn_finds_its_conventions(estimator: Any, check: Any) -> None:
    """All checks of `check_estimator`, none of which is expected to fail."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # checks provoke them
        check(clone(estimator))


@pytest.mark.long
@pytest.mark.parametrize("estimator", [FederatedClassifier(), FederatedRegressor()])
def test_the_defaults_pass_as_well(estimator: Any) -> None:
    from sklearn.utils.estimator_checks import check_estimator

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        check_estimator(estimator, on_skip=None)


def unlike(rows: int = 200) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Two clients, one of which has the classes of the other one the other way round."""
    rng = np.random.default_rng(0)
    x, groups = rng.normal(size=(rows, 3)), np.array(["north", "south"])[np.arange(rows) % 2]
    return x, np.where((x[:, 0] > 0) == (groups == "north"), "ill", "well"), groups


def test_groups_are_clients_and_have_their_own_models() -> None:
    x, y, groups = unlike()
    fitted = FederatedClassifier("ditto", random_state=0, rounds=8, settings={"lr": 0.3, "lam": 0.01}).fit(x, y, groups)
    assert fitted.clients_.tolist() == ["north", "south"]
    assert fitted.classes_.tolist() == ["ill", "well"]
    assert accuracy_score(y, fitted.predict(x, groups)) > 0.9
    assert accuracy_score(y, fitted.predict(x)) < 0.7  # no one model can be right for both
    shares = fitted.predict_proba(x, groups)
    for client in ("north", "south"):  # rows keep their places
        here = groups == client
        np.testing.assert_allclose(fitted.predict_proba(x[here], groups[here]), shares[here], atol=1e-6)
    with pytest.raises(SettingError, match=r"groups must be clients that were fitted \(north and south\), got 'west'"):
        fitted.predict(x, ["west"] * len(x))
    with pytest.raises(ValueError, match="inconsistent numbers of samples"):
        fitted.predict(x, groups[:3])


def test_without_a_global_model_groups_must_be_named() -> None:
    x, y, groups = unlike()
    fitted = FederatedClassifier("local", random_state=0, rounds=8, settings={"lr": 0.3}).fit(x, y, groups)
    assert accuracy_score(y, fitted.predict(x, groups)) > 0.9
    with pytest.raises(SettingError, match="local has no global model: give groups"):
        fitted.predict(x)
    alone = FederatedClassifier("local", random_state=0, rounds=2).fit(x, y)  # but for one client there is one model
    assert alone.predict(x).shape == (len(x),)


def test_a_logistic_model_comes_near_to_that_of_scikit_learn() -> None:
    rng = np.random.default_rng(1)
    x = rng.normal(size=(300, 4)) * [1, 10, 1000, 0.1] + [0, 5, 1e4, 3]
    z = (x - x.mean(0)) / x.std(0)
    y = (z @ [1, -2, 1, 0.5] + rng.logistic(size=300) > 0).astype(int)
    groups = np.arange(300) % 3
    fitted = FederatedClassifier(
        "fedavg", "logistic", rounds=40, settings={"lr": 1.0, "batch": 100, "epochs": 3}, random_state=0
    )
    fitted.fit(x, y, groups)
    reference = LogisticRegression(C=np.inf).fit(z, y).predict_proba(z)
    np.testing.assert_allclose(fitted.predict_proba(x), reference, atol=0.03)


def test_numbers_come_back_in_their_own_unit() -> None:
    rng = np.random.default_rng(1)
    x = rng.normal(size=(300, 2)) * [1, 50] + [7, 1000]
    y = 20_000 + 3000 * x[:, 0] - 40 * x[:, 1] + rng.normal(0, 100, 300)
    fitted = FederatedRegressor("fedavg", "logistic", rounds=20, settings={"lr": 0.1}, random_state=0)
    fitted.fit(x, y, np.arange(300) % 3)
    assert fitted.score(x, y) > 0.99
    difference = fitted.predict(x) - LinearRegression().fit(x, y).predict(x)
    assert np.abs(difference).max() < 0.1 * y.std()


@pytest.mark.full
def test_a_fitted_estimator_is_a_value() -> None:
    x, y, groups = unlike(60)
    frame = pd.DataFrame(x, columns=["age", "dose", "weight"])
    fitted = FederatedClassifier("ditto", **(QUICK | {"model": "logistic"}), random_state=3).fit(frame, y, groups)
    assert fitted.feature_names_in_.tolist() == ["age", "dose", "weight"]
    assert fitted.n_iter_ == 4
    again = pickle.loads(pickle.dumps(fitted))
    np.testing.assert_array_equal(again.predict_proba(frame, groups), fitted.predict_proba(frame, groups))
    same = clone(fitted).fit(frame, y, groups)
    np.testing.assert_array_equal(same.predict_proba(frame, groups), fitted.predict_proba(frame, groups))
    other = clone(fitted).set_params(random_state=4).fit(frame, y, groups)
    assert not np.array_equal(other.predict_proba(frame), fitted.predict_proba(frame))


def test_it_is_a_step_of_a_pipeline_and_of_cross_validation() -> None:
    x, _, groups = unlike()
    y = x[:, 0] > 0
    estimator = make_pipeline(StandardScaler(), FederatedClassifier(**QUICK, random_state=0))
    scores = cross_val_score(estimator, x, y, groups=groups, cv=GroupKFold(2))
    assert scores.min() > 0.85


def test_recipes_modules_and_a_folder_as_of_run(tmp_path: Path) -> None:
    x, y, groups = unlike(60)
    recipe = recipes.fedprox(mu=0.1, lr=0.1)
    fitted = FederatedClassifier(recipe, lambda seed: nn.Linear(3, 2), rounds=1, out=tmp_path / "run").fit(x, y, groups)
    assert fitted.predictors_.keys() == {None}
    assert (tmp_path / "run/run.db").exists()
    with pytest.raises(SettingError, match="settings are those of a recipe by name"):
        FederatedClassifier(recipe, settings={"lr": 0.1}).fit(x, y)
    with pytest.raises(SettingError, match="there is no recipe 'fedavgg'"):
        FederatedClassifier("fedavgg").fit(x, y)
    with pytest.raises(SettingError, match="there is no model 'mlpp'"):
        FederatedClassifier(model="mlpp").fit(x, y)


def test_probabilities_with_a_temperature_keep_their_order() -> None:
    x, y, groups = unlike()
    plain, calibrated = (
        FederatedClassifier(**QUICK, validation=0.3, calibrate=calibrate, random_state=0).fit(x, y, groups)
        for calibrate in (False, True)
    )
    shares, others = plain.predict_proba(x)[:, 0], calibrated.predict_proba(x)[:, 0]
    assert (np.argsort(shares) == np.argsort(others)).all()
    assert not np.allclose(shares, others)


def test_a_table_may_have_words_and_gaps() -> None:
    rng = np.random.default_rng(0)
    ward, age = rng.choice(["a", "b", "c"], 120), rng.normal(50, 10, 120)
    y = np.where((ward == "a") | (age > 60), "ill", "well")
    frame = pd.DataFrame({"age": np.where(rng.random(120) < 0.1, np.nan, age), "ward": ward})
    fitted = FederatedClassifier(**QUICK, random_state=0).fit(frame, y, groups=np.arange(120) % 2)
    assert fitted.score(frame, y) > 0.85
    unseen = pd.DataFrame({"age": [55.0, np.nan], "ward": ["a", "never seen"]})
    assert fitted.predict(unseen)[0] == "ill"
    with pytest.raises(SettingError, match=r"y must have a class in each row, got nan \(NaN\) in row 4: leave it out"):
        FederatedClassifier(**QUICK).fit(frame, pd.Series(y, dtype=object).where(np.arange(len(y)) != 3))
    with pytest.raises(SettingError, match="groups must name the client of each row, got none in row 1"):
        FederatedClassifier(**QUICK).fit(frame, y, [None, *["north"] * (len(y) - 1)])
    with pytest.raises(ValueError, match="feature names should match"):
        fitted.predict(frame[["ward", "age"]])
    with pytest.raises(ValueError, match="could not convert string to float"):
        FederatedClassifier(**QUICK).fit(frame.to_numpy(), y)  # an array has no columns to be prepared
