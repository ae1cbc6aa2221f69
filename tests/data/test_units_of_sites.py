"""Columns that one client, or rows to predict, have in another unit than most."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import pytest

import piebald
from piebald.advice.table_look import look_at_table
from piebald.core.errors import SettingError
from piebald.data.preparation.agreement import fitted
from piebald.data.preparation.units import CONVERSIONS, Spread, conversion_of, units_at_sites

pd = pytest.importorskip("pandas")
RNG = np.random.default_rng(4)
USUAL = {  # mean and deviation in a usual unit, and the change to another
    "glucose": (5.5, 1.4, 18.016, 0.0, "mg/dl for mmol/l"),
    "temperature": (36.9, 0.7, 1.8, 32.0, "degrees Fahrenheit for Celsius"),
    "outdoors": (9.0, 8.0, 1.8, 32.0, "degrees Fahrenheit for Celsius"),
    "kelvins": (9.0, 8.0, 1.0, 273.15, "Kelvin for degrees Celsius"),
    "weight": (72.0, 13.0, 2.20462, 0.0, "lb for kg"),
    "height": (1.71, 0.09, 100.0, 0.0, "cm"),
    "creatinine": (0.9, 0.3, 88.42, 0.0, "umol/l for mg/dl"),
    "age": (51.0, 17.0, 12.0, 0.0, "months for years"),
    "marker": (3.0, 2.0, 1000.0, 0.0, "another unit"),
}


def drawn(column: str, rows: int, other: bool = False, seed: int = 0) -> np.ndarray:
    mean, deviation, slope, offset, _ = USUAL[column]
    numbers = mean + deviation * np.random.default_rng(seed).normal(size=rows)
    return slope * numbers + offset if other else numbers


@pytest.mark.parametrize("column", USUAL)
@pytest.mark.parametrize("back", [False, True])
def test_the_client_with_another_unit_is_named(column: str, back: bool) -> None:
    sites = {name: Spread.of(drawn(column, 40 + 20 * n, back, n)) for n, name in enumerate(("north", "south", "east"))}
    sites["berlin"] = Spread.of(drawn(column, 50, not back, 9))
    (told,) = units_at_sites({column: sites})
    assert "has at berlin" in told
    assert back or USUAL[column][-1] in told


@pytest.mark.parametrize("column", [*USUAL, "skewed", "zero", "constant", "rare"])
def test_unlike_clients_in_one_unit_are_not_told(column: str) -> None:
    spreads = {}
    for n, name in enumerate("abcdef"):
        rng = np.random.default_rng(n)
        plain = {
            "skewed": rng.lognormal(0.3 * n, 1.0, 40), "zero": rng.normal(0.2 * n, 1 + n / 5, 40),
            "constant": np.full(40, 3.0 * (n > 2)), "rare": (rng.random(60) < 0.02 * n).astype(float),
        }  # fmt: skip
        numbers = plain[column] if column in plain else drawn(column, 40, seed=n) * (1 + n / 10)
        spreads[name] = Spread.of(numbers)
    assert list(units_at_sites({column: spreads})) == []


def test_conversions_and_their_inverses_agree() -> None:
    for conversion in CONVERSIONS:
        assert conversion.undone(conversion.slope * 7.0 + conversion.offset) == pytest.approx(7.0)
        assert conversion.inverse.undone(7.0) == pytest.approx(conversion.slope * 7.0 + conversion.offset)
    one = Spread(10, 5.0, 0.0)
    assert conversion_of(one, one, "x") is None


def hospitals(columns: list[str], off: str = "") -> pd.DataFrame:
    tables = []
    for n, site in enumerate(("north", "south", "berlin")):
        odd = off if site == "berlin" else ""
        table = {column: drawn(column, 60, column == odd, 3 * n + k) for k, column in enumerate(columns)}
        tables.append(pd.DataFrame({"site": site, **table, "ill": RNG.integers(0, 2, 60)}))
    return pd.concat(tables, ignore_index=True)


def test_run_and_look_say_which_site_has_another_unit(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    columns = ["glucose", "temperature"]
    for off in ("", *columns):
        caplog.clear()
        hospitals(columns, off).to_csv(tmp_path / "rows.csv", index=False)
        with caplog.at_level(logging.WARNING, "piebald"):
            piebald.clients_from(tmp_path / "rows.csv", client="site", target="ill")
        told = [record.getMessage() for record in caplog.records if "has at berlin" in record.getMessage()]
        looked = [text for text in look_at_table(tmp_path / "rows.csv", client="site", target="ill").warnings
                  if "has at berlin" in text]  # fmt: skip
        assert len(told) == len(looked) == bool(off)
        assert all(f"'{off}'" in text and USUAL[off][-1] in text for text in (*told, *looked))


@pytest.mark.parametrize("rows", [1, 3, 50])
@pytest.mark.parametrize("column", USUAL)
def test_rows_to_predict_in_another_unit_are_told_with_their_number(column: str, rows: int) -> None:
    agreed = fitted(pd.DataFrame({column: drawn(column, 200), "x": np.arange(200.0)}))
    usual = pd.DataFrame({column: drawn(column, rows, seed=1), "x": 3.0})
    assert list(agreed.unlike_training(usual)) == []
    if column in ("outdoors", "age", "marker") and rows < 50:
        return  # not every single number is far from all others
    told = list(agreed.unlike_training(pd.DataFrame({column: drawn(column, rows, True, 1), "x": 3.0})))
    assert len(told) == 1
    assert f"'{column}'" in told[0]
    assert f"{rows} of {rows} rows" in told[0]
    assert USUAL[column][-1] in told[0] or rows < 50


def test_single_rows_far_outside_are_counted() -> None:
    agreed = fitted(pd.DataFrame({"glucose": drawn("glucose", 200), "rare": (np.arange(200) == 7).astype(float)}))
    rows = pd.DataFrame({"glucose": drawn("glucose", 30, seed=2), "rare": 1.0})
    assert list(agreed.unlike_training(rows)) == []
    rows.loc[[4, 9], "glucose"] = [109.0, 900.0]
    (told,) = agreed.unlike_training(rows)
    assert "in 2 of 30 rows, such as 109 in row 5" in told


def test_a_word_among_numbers_is_no_error_of_units(tmp_path: Path) -> None:
    table = hospitals(["glucose"]).astype({"glucose": object})
    table.loc[3, "glucose"] = "high"
    table.to_csv(tmp_path / "rows.csv", index=False)
    assert any("high" in text for text in look_at_table(tmp_path / "rows.csv", client="site", target="ill").warnings)
    with pytest.raises(SettingError, match="high"):
        piebald.clients_from(tmp_path / "rows.csv", client="site", target="ill")
