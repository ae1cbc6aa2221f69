"""Case 11: rates with exposure, and models with what else inference needs, beside statsmodels on the pooled rows."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pandas
import pytest
import statsmodels.api as sm
from statsmodels.duration.hazard_regression import PHReg

import piebald
from piebald.cli import main
from tests.inference.test_glm_inference import falls


def test_rates_with_exposure_are_those_of_the_pooled_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    falls().to_csv(tmp_path / "falls.csv", index=False)
    asked = ["--client", "home", "--target", "falls", "--family", "poisson", "--column", "x", "--offset", "logdays"]
    assert main(["glm", str(tmp_path / "falls.csv"), *asked, "--json"]) == 0
    table = json.loads(capsys.readouterr().out)["coefficients"]
    assert {name: (round(row["coefficient"], 4), round(row["std. error"], 4)) for name, row in table.items()} == {
        "(intercept)": (-2.8686, 0.0597),
        "x": (0.3495, 0.0564),
    }


def patients() -> pandas.DataFrame:
    """Patients of four hospitals, one of them with a single one: tied times, entries, counts, and a word."""
    rng, tables = np.random.default_rng(5), []
    for hospital, rows, level in (("a", 60, 0.2), ("b", 50, -0.3), ("c", 40, 0.5), ("d", 1, 0.0)):
        days, x = rng.integers(1, 60, rows), rng.normal(size=rows)
        ward = np.resize(["u", "v"], rows)
        ends, censored = np.ceil(rng.exponential(20 / np.exp(0.5 * x + level), rows)), rng.integers(5, 60, rows)
        rate = days * np.exp(-3 + 0.4 * x + level + 0.3 * (ward == "v"))
        columns = {"hospital": hospital, "days": days, "logdays": np.log(days), "x": x, "ward": ward}
        columns |= {"weight": rng.integers(1, 4, rows), "falls": rng.poisson(rate)}
        columns |= {"burst": rng.poisson(rate * rng.gamma(2, 0.5, rows)), "entry": rng.integers(0, 4, rows) / 2 + 0.25}
        columns |= {"time": np.minimum(ends, censored) + 2, "event": (ends <= censored).astype(int)}
        tables.append(pandas.DataFrame(columns))
    return pandas.concat(tables, ignore_index=True)


def design(rows: pandas.DataFrame, constant: bool) -> np.ndarray:
    columns = np.column_stack([rows.x, rows.ward == "v"]).astype(float)
    return np.asarray(sm.add_constant(columns)) if constant else columns


def test_weights_and_errors_by_hospital_beside_an_exposure() -> None:
    rows = patients()
    ours = piebald.glm(
        rows, client="hospital", target="falls", columns=["x", "ward"], family="poisson", offset="logdays",
        cluster="client",
    )  # fmt: skip
    model = sm.GLM(rows.falls, design(rows, True), family=sm.families.Poisson(), offset=rows.logdays)
    theirs = model.fit(cov_type="cluster", cov_kwds={"groups": pandas.factorize(rows.hospital)[0]}, tol=1e-12)
    np.testing.assert_allclose(ours.coefficients, theirs.params, rtol=1e-8)
    np.testing.assert_allclose(ours.errors, theirs.bse, rtol=1e-8)


def test_counts_that_scatter_more_than_poisson_s() -> None:
    rows = patients()
    ours = piebald.glm(
        rows, client="hospital", target="burst", columns=["x", "ward"], family="negative_binomial", offset="logdays"
    )
    start = sm.GLM(rows.burst, design(rows, True), family=sm.families.Poisson(), offset=rows.logdays).fit().params
    model = sm.NegativeBinomial(rows.burst, design(rows, True), offset=rows.logdays)
    theirs = model.fit(start_params=[*start, 0.5], method="newton", tol=1e-12, disp=0, maxiter=200)
    np.testing.assert_allclose(ours.coefficients, theirs.params[:-1], rtol=1e-6)
    np.testing.assert_allclose(ours.errors, theirs.bse[:-1], rtol=1e-5)


@pytest.mark.parametrize("ties", ["efron", "breslow"])
def test_hazards_with_tied_times_and_entries_by_hospital(ties: str) -> None:
    rows = patients()
    ours = piebald.cox(
        rows, client="hospital", time="time", event="event", columns=["x", "ward"], entry="entry", ties=ties
    )
    model = PHReg(rows.time, design(rows, False), rows.event, strata=rows.hospital, entry=rows.entry, ties=ties)
    theirs = model.fit()
    np.testing.assert_allclose(ours.coefficients, theirs.params, rtol=1e-6)
    np.testing.assert_allclose(ours.errors, theirs.bse, rtol=1e-6)
