"""Columns that one client, or rows to predict, have in another unit than most."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import pytest

import piebald
from piebald.advice.table_look import look_at_table
from piebald.core.errors import SettingError
from piebald.data.clients.prepared import preparation_of
from piebald.data.preparation.agreement import fitted
from piebald.data.preparation.answers import ValuesQuestion, answer
from piebald.data.preparation.units import CONVERSIONS, Spread, conversion_of, units_at_sites
from piebald.privacy.ledger import DisclosureRules

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
    assert "in 2 of 30 rows, such as 109 in row 5, which would be 6.05 in mmol/l: mg/dl for mmol/l?" in told


def test_a_single_number_in_another_unit_is_asked_about_beside_others_that_are_only_wrong() -> None:
    """Before, the middle of all odd numbers was, which no unit brings back."""
    agreed = fitted(pd.DataFrame({"glucose": drawn("glucose", 200), "fever": drawn("temperature", 200)}))
    for count in (1, 3, 12):
        rows = pd.DataFrame({"glucose": drawn("glucose", count, seed=2), "fever": drawn("temperature", count, seed=2)})
        assert list(agreed.unlike_training(rows)) == []
        rows.loc[count - 1, "glucose"] = 109.0
        (told,) = agreed.unlike_training(rows)
        assert f"in 1 of {count} rows, such as 109 in row {count}, which would be 6.05 in mmol/l" in told
        worse = pd.concat([rows, pd.DataFrame({"glucose": [5000.0, 9e6], "fever": 37.0})], ignore_index=True)
        (told,) = agreed.unlike_training(worse)
        assert f"in 3 of {count + 2} rows, such as 109 in row {count}, which would be 6.05 in mmol/l" in told
        rows.loc[count - 1, ["glucose", "fever"]] = [5000.0, 37.0]
        (told,) = agreed.unlike_training(rows)
        assert "would be" not in told  # what no unit brings back


def test_numbers_that_no_unit_brings_back_do_not_count_beside_one_that_some_does() -> None:
    """Numbers at the end of their range are told of only where they are in another unit."""
    agreed = fitted(pd.DataFrame({"temperature": drawn("temperature", 200)}))
    numbers = drawn("temperature", 200)
    high = float(np.median(numbers) + 6 * numbers.std())
    rows = pd.DataFrame({"temperature": [37.0, high, high, high, 98.6]})
    assert list(agreed.unlike_training(rows[:4])) == []
    (told,) = agreed.unlike_training(rows)
    assert "in 1 of 5 rows, such as 98.6 in row 5, which would be 37 in Celsius" in told


def hit(numbers: np.ndarray, huge: float = 1e7) -> np.ndarray:
    """The numbers, of which one is huge."""
    return np.concatenate([numbers[:-1], [huge]])


@pytest.mark.parametrize("huge", [1e4, 1e7, -1e9])
def test_one_huge_value_neither_hides_nor_feigns_another_unit(huge: float) -> None:
    usual = {name: Spread.of(drawn("glucose", 60, seed=n)) for n, name in enumerate(("north", "south", "east"))}
    skewed = {name: Spread.of(np.exp(drawn("marker", 60, seed=n) / 2)) for n, name in enumerate("abc")}
    odd = Spread.of(hit(drawn("glucose", 60, True, 9), huge))
    (told,) = units_at_sites({"glucose": usual | {"berlin": odd}})
    assert "has at berlin" in told
    assert "mg/dl for mmol/l" in told
    clean = {"glucose": usual | {"berlin": Spread.of(hit(drawn("glucose", 60, seed=9), huge))},
             "marker": skewed | {"berlin": Spread.of(hit(np.exp(drawn("marker", 60, seed=9) / 2), huge))}}  # fmt: skip
    assert list(units_at_sites(clean)) == []


@pytest.mark.parametrize("scale", ["standard", "log", "power", "rank", "none"])
@pytest.mark.parametrize("huge", [None, 1e6])
def test_what_is_outside_of_training_rows_does_not_depend_on_one_value(scale: str, huge: float | None) -> None:
    numbers = drawn("glucose", 300)
    training = pd.DataFrame({"glucose": numbers if huge is None else hit(numbers, huge), "x": np.arange(300.0)})
    agreed = fitted(training, scale={"glucose": scale})
    assert list(agreed.unlike_training(pd.DataFrame({"glucose": drawn("glucose", 80, seed=1), "x": 3.0}))) == []
    (told,) = agreed.unlike_training(pd.DataFrame({"glucose": drawn("glucose", 80, True, 1), "x": 3.0}))
    assert "80 of 80 rows" in told
    assert "mg/dl for mmol/l" in told
    (single,) = agreed.unlike_training(pd.DataFrame({"glucose": [109.0], "x": 3.0}))
    assert "1 of 1 rows" in single


def test_skewed_columns_are_no_alarm() -> None:
    """Their long side is measured by itself: a mean and a deviation take a waiting time of 200 for another unit."""
    rng = np.random.default_rng(0)
    for draw in (lambda n: rng.exponential(30, n), lambda n: rng.lognormal(0, 1, n), lambda n: rng.poisson(0.3, n)):
        agreed = fitted(pd.DataFrame({"wait": draw(2000).astype(float), "x": np.arange(2000.0)}))
        (column, other), rows = agreed.columns, [draw(200).astype(float) for _ in range(20)]
        bare = column.model_copy(update={"values": column.values.model_copy(update={"range": []})})
        told, by_moments = (
            sum(len(list(plan.unlike_training(pd.DataFrame({"wait": wait, "x": 3.0})))) for wait in rows)
            for plan in (agreed, agreed.model_copy(update={"columns": [bare, other]}))
        )
        assert told <= by_moments


@pytest.mark.parametrize("gaps", [0.0, 0.4])
@pytest.mark.parametrize("sites", [1, 3])
def test_ranges_are_the_quantiles_of_all_rows(gaps: float, sites: int) -> None:
    rng = np.random.default_rng(1)
    for numbers in (rng.normal(5, 2, 501), rng.lognormal(0, 2, 301), hit(rng.normal(size=60), 1e8), rng.poisson(3, 90)):
        column = np.where(rng.random(len(numbers)) < gaps, np.nan, numbers)
        split = rng.permutation(len(column)) < 20  # whose rows are not those of training
        frame = pd.DataFrame(
            {
                "a": column,
                "site": rng.integers(0, sites, len(column)).astype(str),
                "y": rng.random(len(column)),
                "test": np.where(split, "test", "train"),
            }
        )
        clients = piebald.clients_from(
            frame, client="site", target="y", regression=True, split={"column": "test"}, prepare="federated"
        )
        (learnt,) = (column.values for column in preparation_of(clients).columns)
        low, high = np.nanquantile(column[~split], [0.05, 0.95])
        assert learnt.range == pytest.approx([low, high], abs=2 * learnt.error + 1e-12)


def test_a_constant_column_has_no_range() -> None:
    for numbers in (np.full(50, 3.0), np.concatenate([np.zeros(99), [7.0]])):
        learnt = fitted(pd.DataFrame({"a": numbers, "x": np.arange(float(len(numbers)))})).columns[0].values
        assert learnt.range == []


def test_sites_tell_no_quantile_since_it_is_the_value_of_a_row() -> None:
    frame = pd.DataFrame({"a": drawn("glucose", 100)})
    question = ValuesQuestion(kinds={"a": "number"})
    assert len(answer(question, frame).numbers["a"].quantiles) == 3
    for rules in (DisclosureRules(), DisclosureRules(least=1, largest_share=1.0)):
        assert answer(question, frame, rules=rules).numbers["a"].quantiles == []


def test_a_word_among_numbers_is_no_error_of_units(tmp_path: Path) -> None:
    table = hospitals(["glucose"]).astype({"glucose": object})
    table.loc[3, "glucose"] = "high"
    table.to_csv(tmp_path / "rows.csv", index=False)
    assert any("high" in text for text in look_at_table(tmp_path / "rows.csv", client="site", target="ill").warnings)
    with pytest.raises(SettingError, match="high"):
        piebald.clients_from(tmp_path / "rows.csv", client="site", target="ill")
