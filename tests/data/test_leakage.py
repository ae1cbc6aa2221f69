"""Warnings of identifiers that repeat across a split, and of copies of rows in two parts."""

from __future__ import annotations

import logging

import numpy as np
import pandas as pd
import pytest

import piebald
from piebald.data.partition.leakage import identifiers


def visits(people: int = 40, rows: int = 5) -> pd.DataFrame:
    """Several rows of each person, which are alike; the label is a coin of the person."""
    rng = np.random.default_rng(3)
    features = rng.normal(size=(people, 3)).repeat(rows, 0) + 0.05 * rng.normal(size=(people * rows, 3))
    table = pd.DataFrame(features, columns=["a", "b", "c"])
    return table.assign(site=np.arange(people).repeat(rows) % 2, ill=rng.integers(0, 2, people).repeat(rows))


def warnings_of(table: pd.DataFrame, caplog: pytest.LogCaptureFixture, **settings: object) -> str:
    with caplog.at_level(logging.WARNING, "piebald"):
        piebald.clients_from(table, client="site", target="ill", features=["a", "b", "c"], **settings)
    return caplog.text


@pytest.mark.parametrize("code", [lambda n: f"X{n * 7919 % 1000}", lambda n: n, lambda n: 100_000 + 37 * n])
@pytest.mark.parametrize("name", ["patient_id", "code"])
def test_a_column_that_names_people_across_the_split_is_told(caplog: pytest.LogCaptureFixture, code, name: str) -> None:
    table = visits().assign(**{name: [code(number) for number in range(40) for _ in range(5)]})
    told = warnings_of(table, caplog)
    assert f"column '{name}' looks like an identifier, and" in told
    assert f"set group = '{name}' in [split]" in told


def test_nothing_is_told_where_people_stay_together(caplog: pytest.LogCaptureFixture) -> None:
    table = visits().assign(person=[f"p{number}" for number in range(40) for _ in range(5)])
    assert warnings_of(table, caplog, split={"group": "person"}) == ""


def test_ages_amounts_and_categories_are_no_identifiers() -> None:
    rng = np.random.default_rng(0)
    table = pd.DataFrame({"age": rng.integers(20, 90, 400), "beds": rng.poisson(30, 400), "x": rng.normal(size=400)})
    table = table.assign(ward=rng.choice(list("abcdef"), 400), ill=rng.integers(0, 2, 400), row=np.arange(400))
    assert identifiers(table, "ill") == {}


def test_amounts_that_go_with_other_columns_are_no_identifiers() -> None:
    """Cars of one weight have nearly the same engine; so have those of nearly the same weight."""
    rng = np.random.default_rng(0)
    weight = rng.integers(1600, 2600, 1000)
    engine = weight / 10 + rng.normal(0, 5, 1000)
    year = np.arange(1000) // 15 + 1950
    cars = pd.DataFrame({"weight": weight, "engine": engine, "power": engine * 0.8, "heavy": weight > 2100})
    assert identifiers(cars, None) == identifiers(cars, "heavy") == {}
    spending = pd.DataFrame({"year": year, "dollars": 100.0 * year + rng.normal(0, 50, 1000)})
    assert identifiers(spending, None) == {}
    assert [*identifiers(spending.rename(columns={"year": "patient"}), None)] == ["patient"]


def test_numbers_of_people_in_the_order_of_their_first_visits_are_identifiers() -> None:
    """Neighbours are somewhat alike, as the lab drifts; visits of one person are much more so."""
    table = visits().drop(columns=["ill"])
    table[["a", "b", "c"]] += np.linspace(0, 2, len(table))[:, None]
    assert [*identifiers(table.assign(number=np.arange(40).repeat(5)), None)] == ["number"]


def test_copies_of_rows_in_two_parts_are_counted(caplog: pytest.LogCaptureFixture) -> None:
    table = visits(rows=1).assign(number=np.arange(40))
    twice = pd.concat([table, table], ignore_index=True).assign(number=np.arange(80))  # copied under new numbers
    told = warnings_of(twice, caplog, split={"test": 0.5, "stratify": False})
    assert "rows for testing or validation are equal to a row for training in all columns: remove copies" in told


def test_copies_are_told_in_a_small_table(caplog: pytest.LogCaptureFixture) -> None:
    """Before, fewer than n**2 possible rows hid them: 12 rows of 12 ages, three times each, are copies."""
    table = pd.DataFrame({"a": np.arange(12.0), "b": np.arange(12) % 3, "c": 0, "site": 0, "ill": np.arange(12) % 2})
    told = warnings_of(pd.concat([table] * 3, ignore_index=True), caplog, split={"test": 0.5, "stratify": False})
    assert "of 18 rows for testing or validation are equal to a row for training" in told


def test_equal_rows_mean_nothing_where_few_can_differ(caplog: pytest.LogCaptureFixture) -> None:
    rng = np.random.default_rng(0)
    table = pd.DataFrame(rng.integers(0, 2, (200, 3)), columns=["a", "b", "c"])
    assert warnings_of(table.assign(site=np.arange(200) % 2, ill=rng.integers(0, 2, 200)), caplog) == ""


def test_rows_of_different_ages_are_no_copies(caplog: pytest.LogCaptureFixture) -> None:
    """A whole number that each row has another of may be its number, and what is left are few values."""
    table = pd.DataFrame({"a": np.arange(40), "b": np.arange(40) // 2 % 3, "c": 0, "site": np.arange(40) % 2})
    assert "equal to a row" not in warnings_of(table.assign(ill=table.b // 2), caplog)


def test_values_of_a_group_at_several_clients_are_told(caplog: pytest.LogCaptureFixture) -> None:
    table = visits().assign(number=[number // 2 for number in range(40) for _ in range(5)])
    assert "20 groups have rows at several clients" in warnings_of(table, caplog, split={"group": "number"})
    caplog.clear()
    assert warnings_of(table, caplog, split={"group": ["site", "number"]}) == ""
