"""The cleaning that sites share: the same rows however they were written, in whatever order, and by whichever door."""

from __future__ import annotations

import logging
import re
from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import piebald
from piebald.core.errors import SettingError
from piebald.data.preparation.cleaning import Cleaning, Rules
from piebald.data.preparation.units import change_of_unit
from piebald.settings.toml_document import dumps

pd = pytest.importorskip("pandas")
TRUTHS = {}
for _site, _seed in (("graz", 1), ("berlin", 2), ("lyon", 3)):
    _rng = np.random.default_rng(_seed)
    TRUTHS[_site] = pd.DataFrame({
        "glucose": _rng.normal(6, 1, 40).round(2), "weight": _rng.normal(75, 10, 40).round(1),
        "sex": _rng.choice(["female", "male"], 40), "seen": pd.date_range("2024-01-05", periods=40).astype(str),
        "ill": _rng.integers(0, 2, 40),
    })  # fmt: skip
RULES: dict[str, Any] = {
    "map": {"sex": {"m": "male", "F": "female"}},
    "unit": {"weight": "kg"},
    "absent": {"weight": ["unknown", "-9"]},
    "by_site": {
        "berlin": {
            "unit": {"glucose": "mg/dl -> mmol/l"}, "map": {"ill": {"1": "0", "2": "1"}},
            "parse": {"seen": "day/month/year"},
        },
        "lyon": {"parse": {"glucose": "decimal comma", "weight": "decimal comma", "seen": "day.month.year"}},
    },
}  # fmt: skip


def raw() -> dict[str, Any]:
    """The same rows as three hospitals may write them."""
    tables = {site: table.copy() for site, table in TRUTHS.items()}
    graz, berlin, lyon = tables.values()
    graz["sex"] = graz.sex.map({"male": " M", "female": "f"})
    berlin["glucose"] = berlin.glucose * change_of_unit("mmol/l", "mg/dl", "glucose")[0]
    berlin["weight"] = [f"{kg / 0.45359237:.6f} lb" if row % 2 else f"{kg} kg" for row, kg in enumerate(berlin.weight)]
    berlin["ill"] += 1
    berlin["seen"] = pd.to_datetime(berlin.seen).dt.strftime("%d/%m/%Y")
    lyon["weight"] = [f"{kg:.1f}".replace(".", ",") for kg in lyon.weight]
    lyon["glucose"] = [f"{amount:.2f}".replace(".", ",") for amount in lyon.glucose]
    lyon["seen"] = pd.to_datetime(lyon.seen).dt.strftime("%d.%m.%Y")
    return tables


def files(folder: Path, tables: dict[str, Any], separator: str = ",") -> dict[str, Path]:
    for site, table in tables.items():
        table.to_csv(folder / f"{site}.csv", index=False, sep=separator)
    return {site: folder / f"{site}.csv" for site in tables}


def numbers_of(clients: Any) -> dict[str, Any]:
    return {
        str(name): np.concatenate([clients.rows(number, split).x.numpy() for split in ("train", "test")])
        for number, name in enumerate(clients.names)
    }


@pytest.mark.parametrize("separator", [",", ";", "\t", "|"])
def test_rows_are_those_of_the_truth_whatever_the_separator(tmp_path: Path, separator: str) -> None:
    cleaned = piebald.clients_from(files(tmp_path, raw(), separator), target="ill", prepare=RULES)
    expected = piebald.clients_from(TRUTHS, target="ill", prepare="federated")
    assert cleaned.classes == ["0", "1"]
    assert [column.name for column in cleaned.preparation.columns] == [*TRUTHS["graz"].columns[:-1]]
    for site, inputs in numbers_of(cleaned).items():
        np.testing.assert_allclose(inputs, numbers_of(expected)[site], atol=1e-4)


@pytest.mark.parametrize("order", [*permutations(TRUTHS)])
def test_the_order_of_sites_changes_nothing(order: tuple[str, ...]) -> None:
    tables = raw()
    one = numbers_of(piebald.clients_from({site: tables[site] for site in order}, target="ill", prepare=RULES))
    other = numbers_of(piebald.clients_from(tables, target="ill", prepare=RULES))
    assert all(np.array_equal(one[site], other[site]) for site in order)


def test_one_table_with_a_column_of_clients_is_cleaned_as_several() -> None:
    together = pd.concat([table.assign(site=site) for site, table in raw().items()], ignore_index=True)
    one = numbers_of(piebald.clients_from(together, client="site", target="ill", prepare=RULES))
    other = numbers_of(piebald.clients_from(raw(), target="ill", prepare=RULES))
    assert all(np.array_equal(one[site], other[site]) for site in other)


def experiment(folder: Path, rules: dict[str, Any]) -> Path:
    files(folder, {site: table.assign(site=site) for site, table in raw().items()})
    settings = {
        "rounds": 1, "data": {"source": "[bgl]*.csv", "client": "site", "target": "ill"}, "prepare": rules,
        "model": {"name": "logistic"}, "recipe": {"name": "fedavg", "lr": 0.1},
    }  # fmt: skip
    (folder / "study.toml").write_text(dumps(settings))
    return folder / "study.toml"


def test_a_file_of_an_experiment_cleans_as_python_does(tmp_path: Path) -> None:
    from piebald.experiments.file import ExperimentSettings

    of_file = ExperimentSettings.load(experiment(tmp_path, RULES)).clients()
    other = piebald.clients_from(raw(), target="ill", prepare=RULES)
    assert of_file.preparation.cleaning == other.preparation.cleaning == Cleaning(**RULES)
    assert of_file.preparation.columns == other.preparation.columns


@pytest.mark.full
def test_predictions_clean_by_the_rules_of_the_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    from piebald.experiments.file import ExperimentSettings

    settings = ExperimentSettings.load(experiment(tmp_path, RULES))
    plan = settings.plan()
    run = piebald.run(plan.recipes["fedavg"], plan.clients, plan.model, rounds=1, out=tmp_path / "run")
    caplog.clear()
    of_raw = run.predictor("berlin").predict(raw()["berlin"])
    assert "column 'glucose' of berlin: mg/dl -> mmol/l in 40 of 40 rows" in caplog.text
    assert "outside" not in caplog.text
    assert of_raw.equals(run.predictor("berlin").predict(tmp_path / "berlin.csv"))
    np.testing.assert_allclose(of_raw, run.predictor().predict(TRUTHS["berlin"]), atol=1e-5)
    # rows of nobody are taken for numbers in the unit of most
    run.predictor().predict(raw()["berlin"].drop(columns="seen").assign(seen="2024-02-02"))
    assert "column 'glucose' has numbers outside of those of training rows" in caplog.text
    assert "mg/dl for mmol/l?" in caplog.text


def test_statistics_and_models_read_cleaned_rows() -> None:
    rules = {**RULES, "columns": {"seen": "leave out"}}
    pooled = pd.concat(TRUTHS.values())
    told = piebald.statistics(raw(), prepare=rules)
    for column in ("glucose", "weight", "ill"):
        assert told[column].mean == pytest.approx(pooled[column].mean(), rel=1e-6)
    assert told.texts["sex"].counts == pooled.sex.value_counts().to_dict()
    asked: dict[str, Any] = {"target": "weight", "columns": ["glucose", "sex"], "family": "gaussian"}
    of_raw, of_truth = piebald.glm(raw(), prepare=rules, **asked), piebald.glm(TRUTHS, **asked)
    np.testing.assert_allclose(of_raw.coefficients, of_truth.coefficients, rtol=1e-5)


@pytest.mark.full
def test_trees_read_cleaned_rows() -> None:
    pytest.importorskip("xgboost")
    grown = [
        piebald.trees(source, target="ill", prepare=rules, rounds=2, compare=False)
        for source, rules in ((raw(), RULES), (TRUTHS, {}))
    ]
    np.testing.assert_allclose(grown[0].predict(raw()["graz"]), grown[1].predict(TRUTHS["graz"]), atol=1e-5)


def test_what_was_changed_is_said_with_rows(caplog: pytest.LogCaptureFixture) -> None:
    table = raw()["berlin"]
    table.loc[[0, 1, 2], "weight"] = ["unknown", "-9", "Unknown "]
    piebald.clients_from({**raw(), "berlin": table}, target="ill", prepare=RULES)
    said = next(record.getMessage() for record in caplog.records if "glucose" in record.getMessage())
    assert said.startswith(f"cleaned by the rules {Cleaning(**RULES).digest}: ")
    assert "column 'weight' of berlin: gaps in 3, numbers read from text in 37, converted to kg in " in said
    assert "column 'ill' of berlin: spellings mapped in 40 of 40 rows" in said
    assert "column 'seen' of berlin: dates read as day/month/year in 40 of 40 rows" in said


def test_the_digest_names_the_rules_and_not_how_they_are_written() -> None:
    turned = {
        name: dict(reversed(rules.items())) if isinstance(rules, dict) else rules for name, rules in RULES.items()
    }
    assert Cleaning(**turned).digest == Cleaning(**RULES).digest
    assert len({Cleaning(**{**RULES, **change}).digest for change in ({}, {"map": {}}, {"duplicates": "drop"})}) == 3


def test_copies_of_rows_are_left_out_of_each_client_and_not_of_predictions() -> None:
    rules = {**RULES, "duplicates": "drop"}
    tables = {site: pd.concat([table, table.head(7)], ignore_index=True) for site, table in raw().items()}
    assert piebald.statistics(tables, prepare=rules).rows == [40, 40, 40]
    clients = piebald.clients_from(tables, target="ill", prepare=rules, test=0.0)
    assert [clients.size(number, "train") for number in range(3)] == [40, 40, 40]
    assert len(clients.preparation.cleaned(tables["graz"])) == 47


@pytest.mark.parametrize(
    ("rules", "why"),
    [
        ({"unit": {"age": "mg/dl -> mmol/l"}}, "unit of 'age': no conversion from 'mg/dl' to 'mmol/l' is known for a "
         "column of this name: write { factor = ..., offset = ... }"),
        ({"parse": {"seen": "day.month"}}, "parse of 'seen'"),
        ({"unit": {"seen": "kg"}, "parse": {"seen": "day.month.year"}}, "leave one of both out"),
        ({"map": {"gender": {"m": "male"}}}, "column, which [prepare] cleans, 'gender'"),
        ({"by_site": {"Berlin": {"map": {"sex": {"m": "male"}}}}}, "which by_site of [prepare] names, 'Berlin'"),
        ({"unit": {"weight": "mmol/l"}}, "column 'weight' has numbers in 'kg', and no conversion to 'mmol/l' is known"),
        ({"parse": {"sex": "number"}}, "column 'sex' must have a number in each row"),
        ({"parse": {"sex": "day.month.year"}}, "column 'sex' must have a date of the form day.month.year in each row"),
        ({"absent": ["unknown"]}, "absent"),
        ({"duplicates": "remove"}, "duplicates"),
    ],
)  # fmt: skip
def test_rules_that_do_not_fit_are_refused_in_a_sentence(rules: dict[str, Any], why: str) -> None:
    with pytest.raises(SettingError, match=re.escape(why)):
        piebald.clients_from(raw(), target="ill", prepare=rules)


def test_arrays_have_no_columns_to_clean() -> None:
    with pytest.raises(SettingError, match="clean the columns of tables, and client 'a' has none"):
        piebald.clients_from({"a": (np.ones((4, 1)), [0, 1, 0, 1])}, prepare={"map": {"sex": {"m": "male"}}})


@pytest.mark.parametrize(
    ("texts", "form", "numbers"),
    [
        (["1.234,5", "7"], "decimal comma", [1234.5, 7]),
        (["1.234", "12"], "decimal comma", [1234, 12]),
        (["1,234", "12.5"], "decimal point", [1234, 12.5]),
        (["12 %", "0.5"], "number", [0.12, 0.5]),
        (["70kg", "71 kg"], "number", [70, 71]),
        (["-3", "\u22124"], "number", [-3, -4]),
        (["37 °C", "36.5 °C"], "number", [37, 36.5]),
    ],
)
def test_numbers_are_read_as_they_are_written(
    tmp_path: Path, texts: list[str], form: str, numbers: list[float]
) -> None:
    pd.DataFrame({"v": texts, "ill": ["no", "yes"]}).to_csv(tmp_path / "a.csv", index=False)
    told = piebald.statistics({"a": tmp_path / "a.csv"}, columns=["v"], prepare={"parse": {"v": form}})
    assert told["v"].mean == pytest.approx(np.mean(numbers))


def test_what_may_be_read_in_two_ways_is_refused_until_parse_says_which(tmp_path: Path) -> None:
    pd.DataFrame({"v": ["1,234", "2,345"], "ill": ["no", "yes"]}).to_csv(tmp_path / "a.csv", index=False)
    with pytest.raises(SettingError, match="set parse of the column to 'decimal comma' or 'decimal point'"):
        piebald.statistics({"a": tmp_path / "a.csv"})
    means = [
        piebald.statistics({"a": tmp_path / "a.csv"}, columns=["v"], prepare={"parse": {"v": form}})["v"].mean
        for form in ("decimal comma", "decimal point")
    ]
    assert means == pytest.approx([1.7895, 1789.5])


@pytest.mark.parametrize(
    ("unit", "usual", "name", "number", "converted"),
    [
        ("F", "C", "temp", 98.6, 37.0), ("°C", "Kelvin", "temp", 37.0, 310.15), ("mg/dL", "mmol/l", "LDL", 38.67, 1.0),
        ("lbs", "kg", "w", 2.20462, 1.0), ("in", "m", "height", 39.3701, 1.0), ("g", "kg", "w", 1500.0, 1.5),
        ("days", "years", "follow up", 365.25, 1.0), ("mmHg", "kPa", "pressure", 7.50062, 1.0),
        ("umol/l", "mg/dl", "creatinine", 88.42, 1.0),
    ],
)  # fmt: skip
def test_known_units_are_converted_there_and_back(
    unit: str, usual: str, name: str, number: float, converted: float
) -> None:
    factor, offset = change_of_unit(unit, usual, name) or (0, 0)
    assert factor * number + offset == pytest.approx(converted, rel=1e-4)
    back, far = change_of_unit(usual, unit, name) or (0, 0)
    assert back * converted + far == pytest.approx(number, rel=1e-4)


def test_rows_stay_named_by_what_the_file_holds(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    from piebald.data.clients.data_source import RunRows
    from piebald.data.preparation.preparation import PrepareSettings
    from piebald.federation.site.site_rows import SiteSource, own_rows

    caplog.set_level(logging.WARNING)
    files(tmp_path, raw())
    source = SiteSource(source="berlin.csv", target="ill")
    known = [
        own_rows(source, tmp_path, "berlin", RunRows(classes=("0", "1"), prepare=PrepareSettings(**rules)), ["berlin"])
        for rules in (RULES, {"by_site": {"berlin": {"map": {"ill": {"2": "0"}}}}})
    ]
    own = source.model_copy(update={"cleaning": Rules(absent={"ill": ["1"]})})
    known.append(
        own_rows(own, tmp_path, "berlin", RunRows(classes=("0", "1"), prepare=PrepareSettings(**RULES)), ["b"])
    )
    assert np.array_equal(known[0].records, known[2].records)
    # a server's rules change what is trained on, and not which rows a site counts its questions about
    assert np.array_equal(known[0].records, known[1].records)
    assert "of berlin: mg/dl -> mmol/l in 40 of 40 rows" in caplog.text


@pytest.mark.full
def test_onnx_says_that_it_takes_clean_rows(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("skl2onnx", reason="needs the extra: pip install '.[onnx]'")
    rows = raw().drop(columns="visit") if "visit" in raw() else raw()
    clients = piebald.clients_from(rows, target="ill", prepare=RULES)
    inputs = len(clients.preparation.feature_names_out)
    run = piebald.run("fedavg", clients, piebald.models.build_model("logistic", (inputs,), 2), rounds=1)
    run.save(tmp_path / "model.onnx")
    assert "rules of [prepare] are not in it" in caplog.text or "to clean and prepare them" in caplog.text


def test_rules_of_thousands_of_sites_cost_one_look() -> None:
    """Before, the columns that some site changes were listed again for each column."""
    table = pd.DataFrame({f"c{number}": ["m", "n"] for number in range(1000)})
    rules = Cleaning(by_site={f"s{site}": Rules(map={f"c{column}": {"m": "n"} for column in range(20)})
                              for site in range(1000)})  # fmt: skip
    listed = []

    class Counted(Cleaning):
        @property
        def all_changed(self) -> list[str]:
            listed.append(1)
            return super().all_changed

    cleaned, told = Counted(**{name: getattr(rules, name) for name in Cleaning.model_fields}).applied(table, "s7")
    assert cleaned.c19.tolist() == ["n", "n"]
    assert cleaned.c20.tolist() == ["m", "n"]
    assert (len(told), len(listed)) == (20, 1)


def test_a_factor_that_makes_numbers_infinite_is_refused_with_the_row() -> None:
    with pytest.raises(SettingError, match="column 'glucose' must have a finite number in each row, got inf"):
        piebald.clients_from(TRUTHS, target="ill", prepare={"unit": {"glucose": {"factor": 1e308}}})
