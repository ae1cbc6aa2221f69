"""A raw trio of hospitals from a look to an answer with the planted truths, without a script of one's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import piebald
from piebald.advice.cleaning_rules import proposed
from piebald.advice.table_look import look_at_table
from piebald.data.preparation.cleaning import Cleaning
from piebald.data.preparation.preparation import PrepareSettings
from piebald.settings.toml_document import Document
from tests.advice.raw_hospitals import PLANTED, SITES, truth, write_raw

pd = pytest.importorskip("pandas")
COLUMNS = ["age", "glucose", "weight", "sex"]
RULES: dict[str, Any] = {
    "map": {"sex": {"F": "female", "weiblich": "female", "m": "male", "Male": "male"}},
    "unit": {"weight": "kg"},
    "absent": {"age": ["-9"], "weight": ["unbekannt"]},
    "by_site": {
        "berlin": {
            "map": {"ill": {"1": "0", "2": "1"}}, "unit": {"glucose": "mg/dl -> mmol/l"},
            "parse": {"seen": "day.month.year"},
        },
        "lyon": {"parse": {"glucose": "decimal comma", "weight": "decimal comma", "seen": "day/month/year"}},
    },
    "duplicates": "drop",
}  # fmt: skip


def expected() -> dict[str, Any]:
    """The rows as they should be, with the gaps that the hospitals have."""
    tables = truth()
    rows = np.arange(len(tables["graz"]))
    tables["graz"]["age"] = tables["graz"].age.mask(rows % 60 == 5)
    tables["berlin"]["weight"] = tables["berlin"].weight.mask(rows % 7 == 0)
    return tables


@pytest.mark.full
@pytest.mark.parametrize("separators", [",\t;", ";;;", "\t|\t"])
def test_rules_that_make_the_trio_alike_are_proposed(tmp_path: Path, separators: str) -> None:
    write_raw(tmp_path, truth(), separators)
    seen = look_at_table(
        str(tmp_path / "*" / "patients.csv"), client="hospital", target="ill", clean=True, clients=False
    )
    values = Document(seen.experiment, "study.toml").values
    assert Cleaning(**values["prepare"]) == Cleaning(**RULES)
    assert values["data"]["features"] == ["age", "glucose", "weight", "sex", "seen"]
    assert seen.warnings == ["column 'lab' has no value at lyon, so that a gap names the site: left out"]
    assert "12 of 732 rows are copies of earlier ones and left out" in seen.cleaned


def test_an_answer_to_raw_rows_is_that_to_the_true_ones_and_holds_what_was_planted(tmp_path: Path) -> None:
    write_raw(tmp_path, truth())
    raw = {site: tmp_path / site / "patients.csv" for site in SITES}
    asked: dict[str, Any] = {"target": "ill", "columns": COLUMNS, "family": "binomial"}
    model, other = piebald.glm(raw, prepare=RULES, **asked), piebald.glm(expected(), **asked)
    np.testing.assert_allclose(model.coefficients, other.coefficients, rtol=1e-4)
    assert model.rows == other.rows
    intervals = dict(zip(model.names, model.interval().tolist(), strict=True))
    for name, planted in PLANTED.items():
        assert intervals[name][0] < planted < intervals[name][1]
    # without the rules it is another answer, or none
    wrong = piebald.glm({site: raw[site] for site in ("graz", "berlin")}, prepare={
        **RULES, "by_site": {"berlin": {"map": {"ill": {"1": "0", "2": "1"}}}},
    }, **asked)  # fmt: skip
    assert abs(wrong.coefficients[wrong.names.index("glucose")]) < 0.1


def rules_of(tables: dict[str, list[Any]], target: str = "ill") -> Cleaning:
    frames = [pd.DataFrame({"v": [str(value) for value in values]}) for values in tables.values()]
    sites = [site for site, values in tables.items() for _ in values]
    return proposed(pd.concat(frames, ignore_index=True), sites, target)


RNG = np.random.default_rng(1)


@pytest.mark.full
@pytest.mark.parametrize("order", [("a", "b", "c"), ("c", "a", "b"), ("b", "c", "a")])
def test_the_unit_that_sites_without_one_mean_is_taken(order: tuple[str, ...]) -> None:
    kilograms = RNG.normal(76, 12, 60).round(1)
    tables = {
        "a": [f"{kg} kg" for kg in kilograms], "b": [f"{2.2046226 * kg:.1f} lb" for kg in kilograms],
        "c": [*kilograms],
    }  # fmt: skip
    assert rules_of({site: tables[site] for site in order}) == Cleaning(unit={"v": "kg"})


@pytest.mark.parametrize("point", ["decimal comma", "decimal point"])
def test_what_may_be_read_in_two_ways_is_read_as_others_are(point: str) -> None:
    numbers = RNG.integers(1001, 9999, 50)
    plain = numbers / 1000 if point == "decimal comma" else numbers
    doubtful = [f"{number // 1000},{number % 1000:03d}" for number in numbers]
    assert rules_of({"a": [*plain], "b": doubtful, "c": [*plain]}).by_site["b"].parse == {"v": point}


def test_dates_that_may_be_read_in_two_ways_follow_from_those_of_others() -> None:
    clear, unclear = [f"{day:02d}/03/2024" for day in range(10, 28)], [f"{day:02d}/03/2024" for day in range(1, 12)]
    assert rules_of({"a": clear, "b": unclear}).by_site["b"].parse == {"v": "day/month/year"}
    assert "b" not in rules_of({"a": ["2024-03-02"] * 9, "b": unclear}).by_site


@pytest.mark.parametrize("target", ["v", "another"])
def test_words_of_yes_and_no_become_the_numbers_that_others_write(target: str) -> None:
    """Before, they were proposed as gaps of a target, and as classes of their own elsewhere."""
    tables = {"a": ["oui", "non"] * 20, "b": ["Ja", "nein"] * 20, "c": [1, 0] * 20, "d": [2, 1] * 20}
    rules = rules_of(tables, target)
    assert rules.absent == {}
    assert {site: own.map for site, own in rules.by_site.items()} == {
        "a": {"v": {"oui": "1", "non": "0"}},
        "b": {"v": {"Ja": "1", "nein": "0"}},
        "d": {"v": {"1": "0", "2": "1"}},
    }
    # which of 1 and 2 is yes nobody tells; and two words of another kind are no gaps either
    assert rules_of({"a": ["oui", "non"] * 20, "d": [2, 1] * 20, "e": [1, 2] * 20}, target).is_empty
    assert rules_of({"a": ["low", "high"] * 20, "b": [0, 1] * 20, "c": [0, 1] * 20}, target).absent == {}
    assert rules_of({"a": ["unknown"] * 20, "b": [3, 1] * 20, "c": [2, 7] * 20}, target).absent == {"v": ["unknown"]}


def test_a_coding_changes_the_numbers_that_words_became_and_not_their_words() -> None:
    tables = {"a": ["yes", "no"] * 20, "b": [1, 0] * 20, **dict.fromkeys("cde", [2, 1] * 20)}
    rules = rules_of(tables, "v")
    assert {site: own.map["v"] for site, own in rules.by_site.items()} == {
        "a": {"yes": "2", "no": "1"},
        "b": {"1": "2", "0": "1"},
    }
    cleaned, _ = rules.applied(pd.DataFrame({"v": tables["a"]}, dtype=object), "a")
    assert {*map(str, cleaned.v)} == {"1", "2"}


def test_a_site_with_one_answer_alone_or_with_a_code_beside_has_no_gaps_of_yes_and_no() -> None:
    numbers = dict.fromkeys("bc", [0, 1] * 20)
    assert rules_of({"a": ["Nein"] * 40, **numbers}, "v").by_site["a"].map == {"v": {"Nein": "0"}}
    # a letter alone may be a sex, or true
    assert rules_of({"a": ["f"] * 40, **numbers}, "v").by_site == {}
    for words in (["yes", "no", "9"], ["low", "high", "9"]):
        assert rules_of({"a": words * 20, **numbers}, "v").absent == {}


def test_letters_of_sexes_mean_what_the_other_letter_of_a_site_says() -> None:
    """H is a man in French and in Spanish, and M is a man in French and a woman in Spanish."""
    tables = {"fr": ["H", "F"] * 9, "es": ["H", "M"] * 9, "de": ["m", "w"] * 9, "en": ["male", "female"] * 9}
    rules = rules_of(tables)
    assert rules.map == {"v": {"m": "male", "w": "female"}}
    assert {site: own.map["v"] for site, own in rules.by_site.items()} == {
        "fr": {"F": "female", "H": "male"},
        "es": {"H": "male", "M": "female"},
    }
    # where no other site says that these are sexes, H may be anything
    assert rules_of({"fr": ["H", "F"] * 9, "b": ["low", "x"] * 9}).is_empty
    assert rules_of({"fr": ["H", "F"] * 9, "es": ["F", "H"] * 9}).is_empty


def test_tables_that_are_alike_need_no_rules() -> None:
    rng = np.random.default_rng(0)
    alike = {site: rng.normal(5, 1, 40).round(2).tolist() for site in "abc"}
    assert rules_of(alike).is_empty
    assert rules_of({"a": ["x", "y"] * 20, "b": ["y", "x"] * 20}).is_empty
    # letters of other things, and unlike sites, are no spellings and no other coding
    assert rules_of({"a": ["m", "n", "f"] * 20, "b": ["m", "n"] * 20}).is_empty
    assert rules_of({"a": [0, 1] * 20, "b": [0] * 40, "c": [0, 1] * 20}, "v").is_empty
    assert PrepareSettings().cleaning is None
