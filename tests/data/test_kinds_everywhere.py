"""The kinds of columns and targets are the same for a look, a training, trees, statistics and generalised models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import piebald
from piebald.advice.table_look import look_at_table
from piebald.inference.trees.encoding import tree_data

KINDS = {"age": "number", "smoker": "boolean", "seen": "date", "id": "category"}


@pytest.fixture
def odd(tmp_path: Path) -> Path:
    """A table of two sites: a target of 1.0 and 2.0, gaps, German booleans and dates, and ids with zeros in front."""
    rng, lines = np.random.default_rng(3), ["site,age,smoker,seen,id,ill"]
    for row in range(60):
        age = "" if row % 7 == 0 else f"{rng.normal(50, 9):.1f}"
        smoker = "" if row % 11 == 0 else ("ja", "nein")[int(rng.integers(2))]
        seen, ident = f"{1 + row % 28:02d}.0{1 + row % 9}.2024", ("007", "012")[int(rng.integers(2))]
        lines.append(f"{'ab'[row % 2]},{age},{smoker},{seen},{ident},{1.0 + rng.integers(2)}")
    (tmp_path / "odd.csv").write_text("\n".join(lines))
    return tmp_path / "odd.csv"


@pytest.mark.full
def test_an_odd_table_has_the_same_kinds_everywhere(odd: Path) -> None:
    looked = look_at_table(odd, client="site", target="ill", clients=False)
    assert {column["column"]: column["kind"] for column in looked.columns} == KINDS
    assert "regression" not in looked.experiment

    trained: Any = piebald.clients_from(odd, client="site", target="ill")
    assert {column.name: column.kind for column in trained.preparation.columns} == KINDS
    assert trained.classes == trained.preparation.classes == ["1", "2"]

    grown = tree_data(
        str(odd), client="site", target="ill", columns=None, features=None, objective=None, validation=None,
        test=None, seed=0, missing=None,
    )  # fmt: skip
    assert grown.encoding.preparation is not None
    assert {column.name: column.kind for column in grown.encoding.preparation.columns} == KINDS
    assert (grown.classes, grown.target.objective) == (("1", "2"), "binary")

    told = piebald.statistics(str(odd), client="site")
    # a date is a number of days, and a boolean 1 or 0
    assert {*told.numbers} == {"age", "smoker", "seen", "ill"}
    assert {name: [*column.counts] for name, column in told.texts.items()} == {"id": ["007", "012"]}

    model = piebald.glm(str(odd), client="site", target="ill", family="binomial")
    assert model.names == ("(intercept)", "age", "smoker", "seen", "id=012")


def test_a_generalised_model_of_classes_1_and_2_is_that_of_0_and_1(odd: Path) -> None:
    table = piebald.data.clients.client_tables.read_table(odd, "site")
    found = [
        piebald.glm(rows, client="site", target="ill", columns=["age"], family="binomial")
        for rows in (table, table.assign(ill=table.ill - 1.0))
    ]
    assert found[0].coefficients.tolist() == found[1].coefficients.tolist()


def test_words_for_true_and_false_are_one_boolean_whatever_the_language() -> None:
    """The same as 1 and 0, also as a target, as groups of curves and under masks."""
    pandas = pytest.importorskip("pandas")
    rng, rows = np.random.default_rng(4), 90
    plain = pandas.DataFrame({"age": rng.normal(size=rows), "smoker": rng.integers(0, 2, rows)}).astype(float)
    plain["ill"], plain["days"] = rng.integers(0, 2, rows), rng.integers(1, 9, rows)
    plain.loc[[3, 40, 80], "smoker"] = None
    words = [("no", "yes"), ("nein", "ja"), (False, True)]
    coded = {name: plain[30 * place : 30 * place + 30] for place, name in enumerate("abc")}
    written = {
        name: table.assign(**{column: table[column].map(dict(enumerate(words[place]))) for column in ("smoker", "ill")})
        for place, (name, table) in enumerate(coded.items())
    }
    asked: dict[str, Any] = {"tables": [("smoker", "ill")], "bins": 2, "bounds": dict.fromkeys(plain, (-9.0, 9.0))}
    for hidden in (False, True):
        categories = {"smoker": ["0", "1"], "ill": ["0", "1"]} if hidden else {}
        told, expected = (
            piebald.statistics(source, secure=hidden, categories=categories, **asked) for source in (written, coded)
        )
        assert (told.numbers, told.texts, told.tables) == (expected.numbers, expected.texts, expected.tables)
    models = [piebald.glm(source, target="ill", family="binomial") for source in (written, coded)]
    assert models[0].names == models[1].names == ("(intercept)", "age", "smoker", "days")
    assert models[0].coefficients.tolist() == models[1].coefficients.tolist()
    curves = [piebald.survival(source, time="days", event="ill", group="smoker").plain() for source in (written, coded)]
    assert curves[0] == curves[1]
    assert [*curves[0]["curves"]] == ["0", "1"]
    for ask in (piebald.statistics, lambda source, **said: piebald.cox(source, time="days", event="ill", **said)):
        with pytest.raises(piebald.SettingError, match="'smoker' has numbers, and 'ja' is none"):
            ask(written, categories={"smoker": ["ja", "nein"]})


@pytest.mark.parametrize(
    ("target", "classes"),
    [
        ([-1, 1], ["-1", "1"]),
        ([2.0, 10.0], ["2", "10"]),
        (["10", "9"], ["9", "10"]),
        ([True, False], ["0", "1"]),
        (["ja", "nein"], ["ja", "nein"]),
        ([*range(20)], [*map(str, range(20))]),
        ([*range(21)], None),
        ([36.6, 37.0], None),
    ],
)
def test_targets_are_classes_or_amounts_by_one_rule(target: list[Any], classes: list[str] | None) -> None:
    pandas = pytest.importorskip("pandas")
    rows = pandas.DataFrame({"site": "a", "x": range(3 * len(target)), "y": target * 3})
    assert piebald.data.preparation.classes_of(rows.y) == classes
    assert piebald.clients_from(rows, client="site", target="y", test=0.0).classes == classes
    grown = tree_data(
        rows, client="site", target="y", columns=None, features=None, objective=None, validation=None, test=0.0,
        seed=0, missing=None,
    )  # fmt: skip
    assert grown.classes == tuple(classes or ())


def test_many_whole_numbers_are_classes_where_they_are_named() -> None:
    pandas = pytest.importorskip("pandas")
    rows = pandas.DataFrame({"site": "a", "x": range(60), "y": [*range(1, 31)] * 2})
    names = [str(number) for number in range(1, 31)]
    named = piebald.clients_from(rows, client="site", target="y", classes=names, test=0.0)
    assert named.rows(0, "train").y.tolist() == [*range(30)] * 2  # by name, not by number
