"""Models with noise: no row moves a sum by more than is stated, sites count it, and standard errors have it in them."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

import piebald
from piebald.core.errors import PiebaldError, SettingError
from piebald.federation.site.policy import Policy
from piebald.inference.linear_models import GlmOptions, fit_glm
from piebald.inference.models.clients import ModelClients, ModelColumns
from piebald.inference.models.noisy_sums import STEP, NoisyPlan
from piebald.inference.models.rows import ModelPlan, ModelRows
from piebald.inference.noisy_models import NoiseOptions, NoisyModel, _least_squares, _maximum
from piebald.inference.survival import CoxOptions, SurvivalOptions, fit_cox, fit_survival

from .sites import InProcess
from .test_models_at_sites import CODES, FEATURES, plan

TIMES = (5.0, 10.0, 20.0, 61.0)
BOUNDS = {"x": (-8.0, 10.0), "falls": (0.0, 60.0)}
NOISY = Policy(queries=["noisy_model_sums"], budget={"epsilon": 3.0, "delta": 1e-6})  # type: ignore[arg-type]


def noisy_plan(family: str, columns: int = 2) -> NoisyPlan:
    timed = {"time": "t"} if family in ("cox", "survival") else {}
    terms = tuple((str(place), None) for place in range(columns))
    made = ModelPlan(family=family, columns=terms, target=("y", None), **timed)  # type: ignore[arg-type]
    return NoisyPlan(made, ((-1.0, 1.0),) * columns, (0.0, 5.0), TIMES if timed else ())


def rows(x: Any, y: Any, time: Any) -> ModelRows:
    ones, count = np.ones(len(y)), len(y)
    return ModelRows(
        x=np.asarray(x, dtype=float), y=np.asarray(y, dtype=float), offset=0 * ones, weight=ones,
        time=np.asarray(time, dtype=float), entry=-np.inf * ones, cluster=np.arange(count).astype(object),
        stratum=np.zeros(count), dropped=0, steps=np.zeros((count, 0)),
    )  # fmt: skip


extremes = st.floats(-1e6, 1e6) | st.sampled_from([0.0, 1.0, -1.0, 1e300, -1e300])


@pytest.mark.parametrize("family", ["gaussian", "binomial", "poisson", "cox", "survival"])
@given(
    numbers=st.lists(extremes, min_size=4, max_size=4), targets=st.tuples(extremes, extremes),
    times=st.tuples(st.floats(0, 1e6), st.floats(0, 1e6)), point=st.lists(extremes, min_size=6, max_size=6),
)  # fmt: skip
@settings(max_examples=60)
def test_no_row_moves_the_sums_by_more_than_is_stated(
    family: str, numbers: list[float], targets: Any, times: Any, point: list[float]
) -> None:
    """Whatever rows, and whatever parameters a server sends: a large coefficient singles nobody out."""
    made, x = noisy_plan(family), np.array(numbers).reshape(2, 2)
    if family == "survival":
        x = np.eye(2)[[int(number > 0) for number in numbers[:2]]]
    parameters = np.array(point[: made.parameters])
    single = [made.vector(rows(x[[k]], [targets[k]], [times[k]]), parameters) for k in range(2)]
    moved = np.linalg.norm((single[0] - single[1]) * STEP)
    assert moved <= made.influence * (1 + 1e-6)


def table(count: int = 20_000) -> pandas.DataFrame:
    rng = np.random.default_rng(2)
    x = rng.uniform(-1, 1, (count, 3))
    eta = x @ [1.0, -0.5, 0.0] + 0.2
    ends, leaves = rng.exponential(10 * np.exp(-eta)), rng.uniform(0, 40, count)
    return pandas.DataFrame(x, columns=list("abc")).assign(
        site=rng.integers(0, 3, count).astype(str), number=eta + rng.normal(0, 0.5, count),
        ill=(rng.random(count) < 1 / (1 + np.exp(-eta))).astype(int), falls=rng.poisson(np.exp(eta)).clip(0, 12),
        time=np.minimum(ends, leaves), died=(ends <= leaves).astype(int), arm=np.where(x[:, 0] > 0, "old", "new"),
    )  # fmt: skip


TABLE = table()
COLUMNS = {name: (-1.0, 1.0) for name in "abc"}


@pytest.mark.parametrize(
    ("family", "target"), [("gaussian", "number"), ("binomial", "ill"), ("poisson", "falls"), ("cox", "died")]
)
def test_models_with_noise_are_near_those_without_and_say_how_near(family: str, target: str) -> None:
    common: dict[str, Any] = {"client": "site", "columns": list("abc")}
    noise: dict[str, Any] = {"epsilon": 8.0, "delta": 1e-6, "bounds": {**COLUMNS, "number": (-5, 5), "falls": (0, 12)}}
    if family == "cox":
        exact = piebald.cox(TABLE, time="time", event="died", **common)
        found = piebald.cox(TABLE, time="time", event="died", times=[2, 5, 10, 20, 40], **common, **noise)
    else:
        exact = piebald.glm(TABLE, target=target, family=family, **common)  # type: ignore[arg-type]
        found = piebald.glm(TABLE, target=target, family=family, **common, **noise)  # type: ignore[arg-type]
    assert isinstance(found, NoisyModel)
    assert found.names == exact.names
    assert found.privacy.epsilon_pld == pytest.approx(8.0, rel=1e-3)
    assert (found.errors > found.noise_errors).all()
    # six deviations of noise, and a bias of a tenth of the largest coefficient at most
    assert (np.abs(found.coefficients - exact.coefficients) < 6 * found.noise_errors + 0.1).all()
    assert found.rows == pytest.approx(20_000, rel=0.1)


class SeededClients:
    """Three clients who answer a question as sites do, with noise of a seed."""

    def __init__(self, own: ModelRows, seed: int) -> None:
        self.own, self.noise = own, np.random.default_rng(seed)

    def noisy_sums(self, query: Any, point: Any) -> tuple[Any, int]:
        total = query.sums.vector(self.own, point) * STEP
        return total + self.noise.normal(0, query.deviation * math.sqrt(3), len(total)), 3


LEVELS, TRUTH = (2.0, 5.0, 10.0, 15.0, 20.0), np.array([1.0, -0.5, 0.0])


def drawn(family: str, count: int, draw: Any) -> ModelRows:
    """Rows of a model with these coefficients, and 0.2 as the intercept; hazards rise or fall within intervals."""
    x = np.clip(draw.normal(-0.3, 0.4, (count, 3)), -1, 1)
    eta, never = x @ TRUTH + 0.2, np.zeros(count)
    if family != "cox":
        targets = {"gaussian": eta + draw.normal(0, 0.5, count), "poisson": draw.poisson(np.exp(eta)),
                   "binomial": draw.random(count) < 1 / (1 + np.exp(-eta))}  # fmt: skip
        return rows(x, targets[family], never)
    ends, leaves = 40 * draw.exponential(np.exp(-eta)) ** (1 / 1.2), draw.uniform(0, 25, count)
    return rows(x, ends <= leaves, np.minimum(ends, leaves))


def fitted(family: str, own: ModelRows, epsilon: float, seed: int) -> tuple[Any, Any, Any]:
    """The coefficients, and their variances by the rows and by the noise."""
    bounds = {**COLUMNS, "y": (-4.0, 4.0) if family == "gaussian" else (0.0, 10.0)}
    options = NoiseOptions(epsilon, 1e-6, bounds)
    terms, timed = tuple((name, None) for name in "abc"), {"time": "t"} if family == "cox" else {}
    plan = ModelPlan(family=family, columns=terms, target=("y", None), **timed)  # type: ignore[arg-type]
    columns: Any = SimpleNamespace(secure=False, split="train")
    query = options.question(columns, plan, list("abc"), "y", LEVELS if timed else ())
    clients: Any = SeededClients(own, seed)
    fit = _least_squares(clients, query) if family == "gaussian" else _maximum(clients, query, options.rounds)
    return fit.point[-3:], fit.own.diagonal()[-3:], fit.noise.diagonal()[-3:]


FAMILIES = ["gaussian", "binomial", "poisson", "cox"]


@pytest.mark.full
@pytest.mark.parametrize("family", FAMILIES)
def test_noise_errors_are_the_deviation_of_estimates(family: str) -> None:
    """Of the same rows, again and again."""
    own = drawn(family, 6000, np.random.default_rng(1))
    points, _, noise = map(np.array, zip(*(fitted(family, own, 3.0, seed) for seed in range(60)), strict=True))
    spread, stated = points.std(axis=0, ddof=1), np.sqrt(np.median(noise, axis=0))
    # a deviation of 60 numbers is within a factor of 1.36 of the true one but for one in a thousand
    assert (spread < 1.36 * stated).all()
    assert (stated < 1.7 * spread).all()


@pytest.mark.full
@pytest.mark.parametrize("epsilon", [1.0, 8.0])
@pytest.mark.parametrize("family", FAMILIES)
def test_intervals_with_noise_hold_the_true_coefficients(family: str, epsilon: float) -> None:
    """Of new rows each time; also where the noise is larger than what it hides."""
    inside, repeats = np.zeros(3), 100
    for seed in range(repeats):
        point, own, noise = fitted(family, drawn(family, 2000, np.random.default_rng(seed)), epsilon, seed)
        inside += np.abs(point - TRUTH) <= stats.norm.ppf(0.975) * np.sqrt(own + noise)
    assert (inside >= stats.binom.ppf(1e-3, repeats, 0.95)).all()


@pytest.mark.full
def test_intervals_without_noise_to_speak_of_are_those_of_the_rows() -> None:
    for family in FAMILIES:
        _, own, noise = fitted(family, drawn(family, 100_000, np.random.default_rng(1)), 50.0, 1)
        assert (noise < 0.1 * own).all()


def test_curves_with_noise_are_near_those_without() -> None:
    common: dict[str, Any] = {"client": "site", "time": "time", "event": "died", "group": "arm"}
    times = [1, 2, 5, 10, 20, 40]
    exact = piebald.survival(TABLE, times=times, **common)
    found = piebald.survival(TABLE, times=times, epsilon=1.0, delta=1e-6, **common)
    for name, curve in exact.curves.items():
        noisy = found.curves[name]
        assert np.abs(noisy.survival - curve.survival).max() < 0.05
        assert (noisy.errors[:4] > curve.errors[:4] * 0.9).all()
    assert found.test is not None
    assert found.test.p_value < 1e-6
    assert found.privacy is not None
    assert found.privacy.epsilon_pld == pytest.approx(1.0, rel=1e-3)


# -------------------------------------------------------------------------------------------------------- at sites


def at_sites(secure: bool, folder: Path, policy: Policy = NOISY) -> ModelClients:
    run = plan(secure, (60, 70, 80))
    columns = ModelColumns(run.clients, FEATURES, "falls", "train", CODES, secure)
    return ModelClients(columns, InProcess(run, [policy] * 3, None, folder), run.work, run.clients, lambda line: None)  # type: ignore[arg-type]


def masked() -> Policy:
    return NOISY.model_copy(update={"secure_aggregation": 3})


@pytest.mark.parametrize("secure", [False, True])
def test_sites_answer_with_noise_in_the_open_and_under_masks(secure: bool, tmp_path: Path) -> None:
    noise = NoiseOptions.of(1.0, 1e-6, BOUNDS, 2, TIMES)
    policy = masked() if secure else NOISY
    model = fit_glm(at_sites(secure, tmp_path / "a", policy), GlmOptions("falls", ["x", "arm"], "poisson", noise=noise))
    assert isinstance(model, NoisyModel)
    assert (model.clients, model.iterations) == (3, 2)
    model = fit_cox(at_sites(secure, tmp_path / "b", policy), CoxOptions("time", "died", ["x"], noise=noise))
    assert isinstance(model, NoisyModel)
    curves = fit_survival(
        at_sites(secure, tmp_path / "c", policy), SurvivalOptions("time", "died", "arm", TIMES, noise=noise)
    )
    assert curves.privacy is not None


def test_a_site_answers_no_more_than_its_budget_allows(tmp_path: Path) -> None:
    asked = at_sites(False, tmp_path)
    option = GlmOptions("falls", ["x"], "gaussian", noise=NoiseOptions.of(2.0, 1e-6, BOUNDS))
    fit_glm(asked, option)
    other = GlmOptions("falls", ["x", "arm"], "gaussian", noise=NoiseOptions.of(2.9, 1e-6, BOUNDS))
    with pytest.raises(PiebaldError, match="epsilon would be"):
        fit_glm(asked, other)


@pytest.mark.parametrize(
    ("policy", "reason"),
    [(Policy(), "only if its policy names it"), (Policy(queries=["noisy_model_sums"]), "no budget for noisy answers")],
)
def test_a_site_that_does_not_say_so_answers_nothing(policy: Policy, reason: str, tmp_path: Path) -> None:
    option = GlmOptions("falls", ["x"], "gaussian", noise=NoiseOptions.of(1.0, 1e-6, BOUNDS))
    with pytest.raises(PiebaldError, match=reason):
        fit_glm(at_sites(False, tmp_path, policy), option)


def test_the_policy_by_name_answers_with_noise_only() -> None:
    named = Policy.model_validate("noise")
    assert set(named.queries or ()) == {"evaluate", "noisy_sums", "noisy_model_sums"}
    assert named.budget is not None
    assert named.training is not None
    assert named.hides_rows
    other = Policy.model_validate({"preset": "noise", "budget": {"epsilon": 1.0, "delta": 1e-6}})
    assert other.budget is not None
    assert (other.budget.epsilon, other.training) == (1.0, named.training)
    with pytest.raises(ValueError, match="preset"):
        Policy.model_validate("quiet")


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"bounds": {}}, "epsilon needs bounds of column 'a'"),
        ({"delta": None}, "delta"),
        ({"robust": True}, "no robust errors"),
        ({"weights": "c", "columns": ["a"]}, "noise does not go with this model"),
        ({"epsilon": None, "delta": None}, "bounds belong to noise"),
    ],
)
def test_what_noise_does_not_go_with_is_refused(more: dict[str, Any], reason: str) -> None:
    good: dict[str, Any] = {"client": "site", "target": "ill", "columns": ["a", "b"], "family": "binomial"}
    noise: dict[str, Any] = {"epsilon": 1.0, "delta": 1e-6, "bounds": COLUMNS}
    with pytest.raises(SettingError, match=reason):
        piebald.glm(TABLE.head(200), **{**good, **noise, **more})


def test_a_row_that_the_model_does_not_take_is_no_refusal() -> None:
    """Whether such a row is there would be told by it."""
    odd = TABLE.head(300).assign(falls=lambda frame: np.where(frame.index == 7, -3.0, frame.falls))
    common: dict[str, Any] = {"client": "site", "target": "falls", "columns": ["a"], "family": "poisson"}
    with pytest.raises(SettingError, match="must be counts"):
        piebald.glm(odd, **common)
    found = piebald.glm(odd, **common, epsilon=1.0, delta=1e-6, bounds={"a": (-1, 1), "falls": (0, 12)})
    assert math.isfinite(found.coefficients[0])
