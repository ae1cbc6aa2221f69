"""Cases 05 and 08: tables with words, gaps and large targets, which all clients prepare alike."""

from __future__ import annotations

import numpy as np
import pandas
import pytest

from tests.cases.conftest import FromFile

QUICK = 'runtime = { kind = "simulator", engine = "batched", stack = 3 }\nevaluate = { every = 20 }\n'
WARDS = f"""
rounds = 20
data = {{ source = "rows.csv", client = "hospital", target = "ill", standardise = "federated" }}
model = {{ name = "mlp" }}
recipe = {{ name = "fedavg", lr = 0.1 }}
{QUICK}"""
PRICES = f"""
rounds = 60
data = {{ source = "rows.csv", client = "town", target = "price", regression = true, standardise = "federated" }}
model = {{ name = "logistic" }}
recipe = {{ name = "fedavg", clip = 1.0 }}
{QUICK}"""


def wards() -> pandas.DataFrame:
    """Words that not every hospital has, and gaps."""
    rng, tables = np.random.default_rng(0), []
    for hospital, rows, names in (("north", 80, "ab"), ("south", 60, "ab"), ("east", 40, "bc")):
        age, ward = rng.normal(60, 10, rows).round(1), rng.choice(list(names), rows)
        ill = np.where(age / 60 + 0.3 * (ward == "b") + 0.4 * rng.normal(size=rows) > 1.1, "yes", "no")
        tables.append(pandas.DataFrame({"hospital": hospital, "age": age, "ward": ward, "ill": ill}))
    table = pandas.concat(tables, ignore_index=True)
    table.loc[rng.random(len(table)) < 0.1, "age"] = np.nan
    return table


def prices(unit: float = 1.0) -> pandas.DataFrame:
    """Targets of 200,000 in two towns."""
    rng, tables = np.random.default_rng(0), []
    for town, rows in (("north", 80), ("south", 60)):
        size = rng.normal(50, 10, rows).round(1)
        price = unit * (4000 * size + 5000 * rng.normal(size=rows)).round()
        tables.append(pandas.DataFrame({"town": town, "size": size, "price": price}))
    return pandas.concat(tables, ignore_index=True)


def line(table: pandas.DataFrame) -> float:
    """The absolute error of the line through the pooled rows."""
    slope, start = np.polyfit(table["size"], table.price, 1)
    return float(np.abs(slope * table["size"] + start - table.price).mean())


@pytest.mark.full
def test_words_and_gaps_train_as_they_are(from_file: FromFile) -> None:
    run = from_file(WARDS, wards())
    assert run.meta["preparation"] is not None
    assert run.accuracy > 0.65  # 0.61 for the most frequent answer


def test_a_word_that_only_one_hospital_has_gets_a_column_at_all(from_file: FromFile) -> None:
    table = wards().assign(ward=lambda rows: rows.ward.where(rows.hospital == "east", "a"))
    run = from_file(WARDS, table, "rounds=1", "evaluate.every=0")
    assert next(run.model().parameters()).shape[1] == 5  # age, its gaps, and three wards


@pytest.mark.full
def test_a_column_of_gaps_alone_at_one_hospital_is_filled_in_from_the_others(from_file: FromFile) -> None:
    table = wards().assign(age=lambda rows: rows.age.where(rows.hospital != "south"))
    assert from_file(WARDS, table).accuracy > 0.6


@pytest.mark.full
@pytest.mark.parametrize("unit", [1.0, 1e-6])
def test_targets_of_any_unit_are_learned_and_told_in_that_unit(from_file: FromFile, unit: float) -> None:
    table = prices(unit)
    run = from_file(PRICES, table)
    assert run.score.name == "absolute_error"
    assert run.score.value == pytest.approx(line(table), rel=0.1)  # 4,180; 204,000 where the mean is predicted


@pytest.mark.full
def test_a_network_learns_them_too(from_file: FromFile) -> None:
    """Its constant rate makes it wobble about the line; a rate that falls does not."""
    decay = 'recipe={ name = "fedavg", clip = 1.0, lr_schedule = { kind = "cosine", rounds = 60 } }'
    table = prices()
    run = from_file(PRICES, table, 'model={ name = "mlp" }', decay)
    assert run.score.value == pytest.approx(line(table), rel=0.25)


@pytest.mark.full
def test_a_town_whose_prices_are_in_another_unit_does_not_stop_the_other(from_file: FromFile) -> None:
    table = prices()
    table.loc[table.town == "south", "price"] /= 1000
    run = from_file(PRICES, table)
    assert run.final["status"] == "finished"
    assert np.isfinite(run.score.value)
