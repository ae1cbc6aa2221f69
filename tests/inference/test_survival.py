"""Cox regression, survival curves and log-rank tests, beside statsmodels and textbook formulas on the pooled rows."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pandas
import pytest
import statsmodels.api as sm
from numpy.typing import NDArray
from scipy import optimize, stats
from statsmodels.duration.survfunc import SurvfuncRight, survdiff

import piebald
from piebald.core.errors import SettingError
from piebald.inference.survival import Cox

CLOSE = 1e-8


def lives(tied: bool = False) -> pandas.DataFrame:
    """Lives at four sites of unequal size and hazard; the last site has no event."""
    rng, rows = np.random.default_rng(1), 240
    table = pandas.DataFrame({"site": rng.choice(list("abcd"), rows, p=[0.4, 0.3, 0.25, 0.05])})
    table["x"], table["arm"] = rng.normal(size=rows), rng.integers(0, 2, rows)
    table["ward"] = rng.integers(0, 30, rows)
    hazard = table.site.map({"a": 0.5, "b": 1.0, "c": 2.0, "d": 4.0}) * np.exp(0.7 * table.x - 0.4 * table.arm)
    ends, seen = rng.exponential(1 / hazard), rng.exponential(1.5, rows)
    table["time"], table["event"] = np.minimum(ends, seen), ((ends <= seen) & (table.site != "d")).astype(int)
    if tied:
        table["time"] = np.ceil(table.time * 8)
    return table


def entered(rows: pandas.DataFrame, apart: bool = False) -> pandas.DataFrame:
    """Return lives of which two thirds are observed from later on; `apart` from the times of others."""
    rng = np.random.default_rng(3)
    entry = np.where(rng.random(len(rows)) < 2 / 3, rng.random(len(rows)) * rows.time, 0.0)
    if bool((rows.time == rows.time.round()).all()):
        entry = np.floor(entry) + (0.5 if apart else 0.0)
    return rows.assign(entry=entry)


def fitted(rows: pandas.DataFrame, **options: Any) -> Cox:
    return piebald.cox(rows, client="site", time="time", event="event", columns=["x", "arm"], **options)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("ties", ["efron", "breslow"])
@pytest.mark.parametrize("stratified", [True, False])
def test_hazards_are_those_of_the_pooled_rows(tied: bool, ties: Any, stratified: bool) -> None:
    rows = lives(tied)
    found = fitted(rows, ties=ties, stratified=stratified)
    strata = rows.site if stratified else None
    referee = sm.PHReg(rows.time, rows[["x", "arm"]], status=rows.event, ties=ties, strata=strata)
    best = referee.fit(disp=0, method="newton", maxiter=100, tol=1e-14)
    np.testing.assert_allclose(found.coefficients, best.params, rtol=0, atol=CLOSE)
    np.testing.assert_allclose(found.errors, best.bse, rtol=0, atol=CLOSE)
    np.testing.assert_allclose(found.p_values, best.pvalues, rtol=1e-6)
    null = referee.loglike(np.zeros(2))
    assert [found.log_likelihood, found.null_log_likelihood] == pytest.approx([best.llf, null], rel=1e-12)
    assert (found.rows, found.events, found.clients, found.informative) == (240, rows.event.sum(), 4, 3)
    assert found.likelihood_ratio.p_value == pytest.approx(stats.chi2.sf(2 * (best.llf - null), 2), rel=1e-6)


@pytest.mark.parametrize("stratified", [True, False])
def test_errors_by_clusters_that_span_sites(stratified: bool) -> None:
    rows = lives(tied=True)
    rows = rows[rows.site != "d"]  # statsmodels has no residual of a row whose stratum has no event
    found = fitted(rows, ties="breslow", stratified=stratified, cluster="ward")
    strata = rows.site if stratified else None
    referee = sm.PHReg(rows.time, rows[["x", "arm"]], status=rows.event, ties="breslow", strata=strata)
    np.testing.assert_allclose(found.errors, referee.fit(groups=rows.ward, disp=0).bse, rtol=0, atol=CLOSE)
    assert (found.clusters, found.error_kind) == (30, "clustered")


def efron(rows: pandas.DataFrame, weight: NDArray[np.float64], point: NDArray[np.float64]) -> float:
    """Return the log partial likelihood with weights of rows: tied events share their mean weight."""
    x, total = rows[["x", "arm"]].to_numpy(float), 0.0
    for site in rows.site.unique():
        part = (rows.site == site).to_numpy()
        time, event = rows.time.to_numpy()[part], rows.event.to_numpy()[part] > 0
        eta, w = x[part] @ point, weight[part]
        risk = w * np.exp(eta)
        for moment in np.unique(time[event]):
            dying = event & (time == moment)
            count, mean = int(dying.sum()), w[dying].mean()
            total += (w[dying] * eta[dying]).sum()
            for place in range(count):
                total -= mean * math.log(risk[time >= moment].sum() - place / count * risk[dying].sum())
    return total


@pytest.mark.full
def test_robust_errors_with_tied_events_are_the_infinitesimal_jackknife() -> None:
    """The change of the estimate with a row's weight, for each row (Therneau and Grambsch 2000, section 7.1)."""
    rows = lives(tied=True)[::8].reset_index(drop=True)
    found, ones = fitted(rows, robust=True), np.ones(30)

    def slope(weight: NDArray[np.float64]) -> NDArray[np.float64]:
        steps = np.eye(2) * 1e-4
        pairs = [[efron(rows, weight, found.coefficients + sign * step) for sign in (1, -1)] for step in steps]
        return np.array([(up - down) / 2e-4 for up, down in pairs])

    assert np.abs(slope(ones)).max() < 1e-5
    shifts = np.array([(slope(ones + change) - slope(ones - change)) / 0.02 for change in 0.01 * np.eye(30)])
    naive = fitted(rows).covariance
    jackknife = shifts @ naive
    np.testing.assert_allclose(found.covariance, jackknife.T @ jackknife, rtol=2e-4)


def function_of_time(name: str, rows: pandas.DataFrame) -> NDArray[np.float64]:
    """Return the function of each event's time, of the pooled rows."""
    ends = rows.time[rows.event == 1].to_numpy()
    if name == "km":
        curve = SurvfuncRight(rows.time, rows.event, entry=rows.entry)
        before = np.concatenate([[1.0], curve.surv_prob])
        return 1 - before[np.searchsorted(curve.surv_times, ends)]  # the curve just before each event
    return np.asarray({"identity": ends, "log": np.log(ends), "rank": stats.rankdata(ends)}[name])


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("transform", ["identity", "log", "km", "rank"])
def test_proportional_hazards_are_tested_by_scaled_schoenfeld_residuals(transform: Any, tied: bool) -> None:
    """Grambsch and Therneau 1994, from residuals row by row."""
    rows = entered(lives(tied))
    found = fitted(rows, transform=transform, ties="breslow", entry="entry")
    x, products = rows[["x", "arm"]].to_numpy(float), []
    for place in np.flatnonzero(rows.event):
        risk = ((rows.site == rows.site[place]) & (rows.time >= rows.time[place])).to_numpy()
        risk = risk & (rows.entry < rows.time[place]).to_numpy()
        share = np.exp(x[risk] @ found.coefficients)
        products.append(x[place] - share @ x[risk] / share.sum())
    times = function_of_time(transform, rows)
    apart = times - times.mean()
    scaled = len(times) * np.array(products) @ found.covariance
    spread = len(times) * np.diag(found.covariance) * (apart @ apart)
    sizes = np.square(apart @ scaled) / spread
    assert [test.statistic for test in found.proportional.values()] == pytest.approx(sizes.tolist(), rel=1e-9)
    sums = apart @ np.array(products)
    overall = len(times) * sums @ found.covariance @ sums / (apart @ apart)
    assert found.proportional_overall.statistic == pytest.approx(overall, rel=1e-9)
    assert found.proportional["x"].p_value == pytest.approx(stats.chi2.sf(sizes[0], 1))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("ties", ["efron", "breslow"])
@pytest.mark.parametrize("stratified", [True, False])
def test_rows_are_at_risk_from_their_entry_on(tied: bool, ties: Any, stratified: bool) -> None:
    """Beside statsmodels, where no entry is at the time of an event."""
    rows = entered(lives(tied), apart=True)
    found = fitted(rows, ties=ties, stratified=stratified, entry="entry")
    strata = rows.site if stratified else None
    referee = sm.PHReg(
        rows.time, rows[["x", "arm"]], status=rows.event, ties=ties, strata=strata, entry=rows.entry.to_numpy()
    )
    best = referee.fit(disp=0, method="newton", maxiter=100, tol=1e-14)
    np.testing.assert_allclose(found.coefficients, best.params, rtol=0, atol=CLOSE)
    np.testing.assert_allclose(found.errors, best.bse, rtol=0, atol=CLOSE)
    assert found.log_likelihood == pytest.approx(best.llf, rel=1e-12)
    assert np.abs(found.coefficients - fitted(rows, ties=ties, stratified=stratified).coefficients).max() > 1e-3


def test_a_row_that_enters_at_an_event_is_not_at_risk_there() -> None:
    """As in R, where intervals are open on the left: moved after it by a little, nothing changes."""
    rows = entered(lives(tied=True))
    assert rows.entry.isin(rows.time[rows.event == 1]).sum() > 20
    later = fitted(rows.assign(entry=rows.entry + 1e-6 * (rows.entry > 0)), entry="entry")
    found = fitted(rows, entry="entry")
    np.testing.assert_allclose(found.coefficients, later.coefficients, rtol=1e-12)
    earlier = fitted(rows.assign(entry=rows.entry - 1e-6), entry="entry")
    assert np.abs(found.coefficients - earlier.coefficients).max() > 1e-4


@pytest.mark.parametrize("transform", ["identity", "km", "rank"])
def test_whole_weights_are_rows_that_are_there_so_often(transform: Any) -> None:
    """With Breslow's ties, robust errors by cluster, entry times, and tests of proportional hazards."""
    rows = entered(lives(tied=True)).assign(often=lambda table: 1 + table.ward % 3)
    options: dict[str, Any] = {"ties": "breslow", "entry": "entry", "cluster": "ward", "transform": transform}
    found = fitted(rows, weights="often", **options)
    there = fitted(rows.loc[rows.index.repeat(rows.often)], **options)
    np.testing.assert_allclose(found.coefficients, there.coefficients, rtol=0, atol=CLOSE)
    np.testing.assert_allclose(found.covariance, there.covariance, rtol=0, atol=CLOSE)
    assert found.log_likelihood == pytest.approx(there.log_likelihood, rel=1e-12)
    tests = [[test.statistic for test in model.proportional.values()] for model in (found, there)]
    assert tests[0] == pytest.approx(tests[1], rel=1e-8)
    assert (found.events, there.events) == (rows.event.sum(), rows.often[rows.event == 1].sum())


@pytest.mark.full
@pytest.mark.parametrize("tied", [False, True])
def test_weights_of_any_size_maximise_the_weighted_likelihood(tied: bool) -> None:
    rows = lives(tied)[::4].reset_index(drop=True)
    rows["weight"] = np.random.default_rng(7).uniform(0.2, 3, len(rows))
    weight = rows.weight.to_numpy()
    found = fitted(rows, weights="weight")
    assert found.log_likelihood == pytest.approx(efron(rows, weight, found.coefficients), rel=1e-10)
    best = optimize.minimize(lambda point: -efron(rows, weight, point), np.zeros(2), method="Nelder-Mead",
                             options={"xatol": 1e-9, "fatol": 1e-12})  # fmt: skip
    np.testing.assert_allclose(found.coefficients, best.x, atol=1e-6)
    steps = np.eye(2) * 1e-3
    curvature = [
        [
            sum(
                a * b * efron(rows, weight, found.coefficients + a * first + b * second)
                for a in (1, -1)
                for b in (1, -1)
            )
            for second in steps
        ]
        for first in steps
    ]
    np.testing.assert_allclose(np.linalg.inv(found.covariance), -np.array(curvature) / 4e-6, rtol=1e-4, atol=1e-5)
    robust, shifts = fitted(rows, weights="weight", robust=True), []
    for row in np.eye(len(rows)):  # the infinitesimal jackknife
        up, down = (fitted(rows.assign(weight=weight * (1 + sign * 1e-3 * row)), weights="weight") for sign in (1, -1))
        shifts.append((up.coefficients - down.coefficients) / 2e-3)
    np.testing.assert_allclose(robust.covariance, np.transpose(shifts) @ shifts, rtol=1e-4)


def test_hazards_that_change_are_told() -> None:
    rng = np.random.default_rng(2)
    arm = np.repeat([0, 1], 150)
    time = np.where(arm == 1, rng.weibull(3, 300), rng.weibull(0.7, 300))
    rows = pandas.DataFrame({"site": np.tile(["a", "b"], 150), "arm": arm, "time": time, "event": 1})
    found = piebald.cox(rows, client="site", time="time", event="event")
    assert found.proportional["arm"].p_value < 1e-4


def test_an_offset_is_a_column_whose_coefficient_is_one() -> None:
    rows = lives()
    found = piebald.cox(rows, client="site", time="time", event="event", columns=["arm"], offset="x")
    best = optimize.minimize_scalar(
        lambda arm: -efron(rows, np.ones(240), np.array([1.0, arm])), bracket=(-1, 1), tol=1e-12
    )
    assert found.coefficients[0] == pytest.approx(best.x, abs=1e-6)
    assert found.log_likelihood == pytest.approx(-best.fun, rel=1e-10)


@pytest.mark.parametrize("tied", [False, True])
def test_curves_and_their_intervals(tied: bool) -> None:
    rows = lives(tied).assign(group=lambda table: np.where(table.arm == 1, "new", "old"))
    found = piebald.survival(rows, client="site", time="time", event="event", group="group")
    for name, curve in found.curves.items():
        part = rows[rows.group == name]
        referee = SurvfuncRight(part.time, part.event)
        np.testing.assert_allclose(curve.survival, referee.surv_prob, rtol=0, atol=CLOSE)
        np.testing.assert_allclose(curve.errors, referee.surv_prob_se, rtol=0, atol=CLOSE)
        assert (curve.at_risk.tolist(), curve.events.tolist()) == (referee.n_risk.tolist(), referee.n_events.tolist())
        log = np.log(-np.log(curve.survival))
        half = stats.norm.isf(0.025) * curve.errors / (curve.survival * np.log(curve.survival))
        ends = np.exp(-np.exp(np.stack([log - half, log + half], 1)))
        np.testing.assert_allclose(curve.interval, ends, rtol=0, atol=CLOSE)
        assert curve.median == referee.quantile(0.5)
        assert curve.median_interval == pytest.approx(referee.quantile_ci(0.5, method="cloglog"))
        assert curve.rows == len(part)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("stratified", [False, True])
@pytest.mark.parametrize("groups", [2, 3])
def test_log_rank_tests(tied: bool, stratified: bool, groups: int) -> None:
    rows = lives(tied)
    rows["group"] = np.array(list("uvw"))[rows.ward % groups]
    found = piebald.survival(rows, client="site", time="time", event="event", group="group", stratified=stratified)
    statistic, p_value = survdiff(rows.time, rows.event, rows.group, strata=rows.site if stratified else None)
    assert found.test is not None
    assert (found.test.statistic, found.test.p_value) == pytest.approx((statistic, p_value), rel=1e-8)
    assert found.expected.sum() == pytest.approx(rows.event.sum())


def test_times_between_those_that_are_counted_count_as_the_next() -> None:
    rows = lives()
    found = piebald.survival(rows, client="site", time="time", event="event", times=[0.5, 1.0, 1.5])
    curve = found.curves["all"]
    rounded = np.ceil(rows.time * 2) / 2
    referee = SurvfuncRight(rounded, rows.event)
    np.testing.assert_allclose(curve.survival, referee.surv_prob[: len(curve.times)], atol=1e-12)
    assert (curve.times.tolist(), curve.rows) == ([0.5, 1.0, 1.5], 240)


def test_a_curve_that_ends_at_zero_has_no_interval_there() -> None:
    rows = pandas.DataFrame({"site": list("aab"), "time": [1.0, 2.0, 3.0], "event": [1, 1, 1]})
    found = piebald.survival(rows, client="site", time="time", event="event")
    curve = found.curves["all"]
    assert curve.survival.tolist() == pytest.approx([2 / 3, 1 / 3, 0])
    assert np.isnan(curve.interval).tolist() == [[False, False], [False, False], [True, True]]
    assert found.plain()["curves"]["all"]["interval"][2] == [None, None]
    assert (curve.median, found.test) == (2.0, None)
    seen = piebald.survival(rows.assign(event=0), client="site", time="time", event="event").curves["all"]
    assert (seen.median, seen.rows, len(seen.times)) == (math.inf, 3, 0)


@pytest.mark.parametrize(
    ("change", "options", "sentence"),
    [
        ({"event": [2] * 6}, {}, "the event must be 0 or 1, 1 for an event, and client 'a' has other numbers"),
        ({"event": [0] * 6}, {}, "no row has an event: 'event' is 0"),
        ({"time": [-1.0, 1, 2, 3, 4, 5]}, {}, "times must be at least 0, and client 'a' has -1"),
        ({"x": [0, 0, 0, 1, 1, 1]}, {}, "columns x are constant or depend on each other within each client"),
        ({"x": [0, 0, 0, 1, 1, 1]}, {"stratified": False}, "columns x separate the target"),
        ({"x": [4.0] * 6}, {}, "column 'x' is constant over all clients, like a baseline"),
        ({}, {"columns": []}, "at least one column"),
        ({}, {"columns": ["time"]}, "columns must not include the time 'time'"),
        ({"time": list("abcdef")}, {}, "time must be a column of numbers"),
        ({"event": list("abcabc")}, {}, "text with 3 categories"),
        ({"in": [0, 2.0, 0, 0, 0, 0]}, {"columns": ["x"], "entry": "in"}, "client 'a' has a row that enters at 2 and"),
        ({"in": list("abcdef")}, {"entry": "in"}, "entry must be a column of numbers"),
    ],
)  # fmt: skip
def test_what_no_model_has_is_refused(change: dict[str, Any], options: dict[str, Any], sentence: str) -> None:
    table = pandas.DataFrame({"x": [0.5, -1, 2, 0, 1, -2], "time": [1.0, 2, 3, 4, 5, 6], "event": [1, 1, 0, 0, 0, 1]})
    table = table.assign(**change)
    with pytest.raises(SettingError, match=sentence):
        piebald.cox({"a": table[:3], "b": table[3:]}, time="time", event="event", **options)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"group": "time"}, "group 'time' holds numbers: name its values"),
        ({"times": []}, "times must be increasing numbers"),
        ({"times": [2.0, 1.0]}, "times must be increasing numbers"),
    ],
)
def test_curves_that_cannot_be_counted_are_refused(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(SettingError, match=sentence):
        piebald.survival(lives(), client="site", time="time", event="event", **options)


def test_clients_whose_targets_are_times_and_events() -> None:
    """As `loss = "survival"` takes them, and of two categories the second is an event."""
    rows = lives()
    parts = {
        site: (part[["x"]].to_numpy(), {"time": part.time.to_numpy(), "event": part.event.to_numpy()})
        for site, part in rows.groupby("site")
    }
    clients = piebald.clients_from(parts, test=0.0, validation=0.0)
    found = piebald.cox(clients, time="time", event="event", features=["x"])
    words = rows.assign(event=rows.event.map({0: "alive", 1: "dead"}))
    same = piebald.cox(words, client="site", time="time", event="event", columns=["x"])
    np.testing.assert_allclose(found.coefficients, same.coefficients, rtol=1e-5)  # inputs are of 32 bits
    assert found.plain()["proportional"].keys() == {"x"}
    assert "p (proportional)" in found._repr_html_()
