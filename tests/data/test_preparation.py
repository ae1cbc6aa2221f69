"""One preparation for the tables of all clients, compared with scikit-learn fitted to the pooled rows."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
import torch

from piebald.core.errors import SettingError
from piebald.data.clients.table_files import read_table
from piebald.data.partition import clients_from
from piebald.data.preparation import Preparation, PrepareSettings, guess_columns
from piebald.data.preparation.agreement import Unanswered, agree, simplest
from piebald.data.preparation.agreement import fitted as fitted_here
from piebald.data.preparation.answers import Answer, KindsQuestion, Question, answer, common_kinds
from piebald.data.preparation.column_models import (
    BooleanColumn,
    CategoryColumn,
    ClassTarget,
    DateColumn,
    NumberTarget,
    NumericColumn,
)
from piebald.data.preparation.columns import CodedTable, dates_of, numbers_of
from piebald.data.preparation.transformer import unfitted
from tests.data.pooled_preparation import fitted

SCALES = {"income": "log", "price": "power", "rank": "rank", "raw": "none"}


def site(rows: int, wards: str, seed: int) -> pandas.DataFrame:
    """A table with gaps in columns of every kind."""
    rng = np.random.default_rng(seed)
    days = pandas.Timestamp("2024-01-01") + pandas.to_timedelta(rng.integers(0, 400, rows), unit="D")
    frame = pandas.DataFrame(
        {
            "age": rng.normal(60, 10, rows).round(1), "income": rng.lognormal(3, 1, rows),
            "price": rng.gamma(2, 3, rows), "rank": rng.normal(size=rows).round(4), "raw": rng.integers(0, 9, rows),
            "ward": rng.choice(list(wards), rows),
            "smoker": rng.choice(["yes", "No"], rows, p=[0.3, 0.7]), "seen": days.strftime("%Y-%m-%d"),
            "drug": rng.choice([f"drug {number}" for number in range(30)], rows), "ill": rng.choice(["x", "y"], rows),
        }
    )  # fmt: skip
    for column in ("age", "price", "rank", "ward", "smoker", "seen", "drug"):
        frame.loc[rng.random(rows) < 0.1, column] = None
    return frame


SITES = [site(120, "ab", 1), site(90, "abc", 2), site(60, "bcd", 3)]
POOLED = pandas.concat(SITES, ignore_index=True)


def agreed(sites: Sequence[pandas.DataFrame], target: str = "ill", **options: Any) -> Preparation:
    """What these sites agree on."""
    classes = sorted({str(value) for frame in sites for value in frame[target]})

    def ask(question: Question) -> list[Answer]:
        return [answer(question, frame.drop(columns=target)) for frame in sites]

    return agree(ask, PrepareSettings(**options), target, classes)


@pytest.mark.full
def test_what_sites_agree_on_is_what_scikit_learn_learns_from_pooled_rows() -> None:
    here, reference = agreed(SITES, scale=SCALES, least_rows=1), fitted(POOLED, "ill", scale=SCALES, least_rows=1)
    assert here.feature_names_out == reference.feature_names_out
    for column, learnt in zip(here.columns, reference.columns, strict=True):
        if isinstance(column, NumericColumn | DateColumn):
            assert isinstance(learnt, NumericColumn | DateColumn)
            assert column.gaps == learnt.gaps
            for part, numbers in column.parts.items():
                wanted, exact = learnt.parts[part], numbers.scale in ("standard", "log")
                assert abs(numbers.median - wanted.median) <= numbers.error
                assert numbers.mean == pytest.approx(wanted.mean, rel=1e-9 if exact else 1e-5)
                assert numbers.deviation == pytest.approx(wanted.deviation, rel=1e-9 if exact else 1e-5)
                assert (numbers.exponent or 0) == pytest.approx(wanted.exponent or 0, abs=1e-6)
                assert np.allclose(numbers.quantiles, wanted.quantiles, rtol=0, atol=numbers.error)
        else:
            assert column == learnt
    inputs = here.transformer.transform(here.parsed(POOLED))
    by_fit = unfitted(reference.columns, 1).fit_transform(reference.parsed(POOLED))
    assert np.abs(inputs - by_fit).max() < 2e-6  # the power and ranks; all others below
    exact = [place for place, name in enumerate(here.feature_names_out) if name not in ("price", "rank")]
    assert np.abs(inputs - by_fit)[:, exact].max() < 1e-9


def test_categories_are_the_union_of_what_sites_have_enough_rows_of() -> None:
    frames = [pandas.DataFrame({"ward": ["a"] * 6 + ["b"] * 3, "ill": ["x", "y", "x"] * 3}),
              pandas.DataFrame({"ward": ["b"] * 5 + ["c"] * 4, "ill": ["x", "y", "x"] * 3})]  # fmt: skip
    here = agreed(frames, least_rows=5)
    assert here.columns == [CategoryColumn(name="ward", categories=["a", "b"], rare=True)]
    rows = pandas.DataFrame({"ward": ["b", "c", "never seen", "a"]})
    assert here.transform(rows).tolist() == [[0, 1, 0], [0, 0, 1], [0, 0, 1], [1, 0, 0]]
    with pytest.raises(SettingError, match="no column to predict from"):
        agreed(frames, least_rows=7)


def test_more_categories_than_columns_are_numbers_for_an_embedding() -> None:
    here = agreed(SITES, least_rows=1, columns={name: "leave out" for name in POOLED if name not in ("drug", "ill")})
    (column,) = here.columns
    assert isinstance(column, CategoryColumn)
    assert (column.coding, here.embedded) == ("embedding", {0: 30})
    told = here.transform(pandas.DataFrame({"drug": ["drug 0", "drug 9", None, "another"]}))
    assert told.ravel().tolist() == [0, 29, -2, -1]


def test_a_preparation_survives_json_and_hostile_json_is_refused() -> None:
    here = agreed(SITES, scale=SCALES)
    assert Preparation.from_json(here.to_json()) == here
    values = json.loads(here.to_json())
    for change in (
        {"columns": []},
        {"columns": [values["columns"][0]] * 2},
        {"columns": [{**values["columns"][0], "name": "a" * 1000}]},
        {"columns": [{**values["columns"][0], "values": {**values["columns"][0]["values"], "deviation": 0.0}}]},
        {"columns": [{**values["columns"][0], "values": {**values["columns"][0]["values"], "scale": "os.system"}}]},
        {"columns": [{**values["columns"][5], "categories": ["b", "a"]}]},
        {"more": 1},
    ):
        with pytest.raises(SettingError, match=r"^(?!.*\n).+$"):
            Preparation.from_json(json.dumps(values | change))
    with pytest.raises(SettingError):
        Preparation.from_json("{")


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        ([1, 2, None], "number"),
        (["1", "2.5", "?", "-3e4"], "number"),
        (["007", "008", "007"], "category"),
        (pandas.Categorical(["1", "2"]), "category"),
        ([*map(str, range(30)), "Miller"], "number"),  # a mistake, which is named when it is read
        (["yes", "NO", None], "boolean"),
        (["N"] * 3, "boolean"),
        (["F", "N", None], "category"),  # both would be false
        (["t", "y", "y"], "category"),
        ([True, False], "boolean"),
        (["2024-05-01", "2024-05-02T12:30", None], "date"),
        (list(pandas.to_datetime(["2024-05-01"])), "date"),
        (["north", "south", "north"], "category"),
        ([f"patient {number}" for number in range(30)], "identifier"),
        (["the patient came with a cough and was sent home again"] * 3, "text"),
    ],
)
def test_kinds_are_guessed_from_values(values: list[Any], kind: str) -> None:
    assert guess_columns(pandas.DataFrame({"x": values})) == {"x": kind}


@pytest.mark.parametrize(
    ("name", "values", "kind"),
    [
        ("PassengerId", np.arange(1, 31), "identifier"),
        ("row_names", np.arange(30) * 7, "identifier"),
        ("patient", np.arange(30) % 29, "number"),  # one of them twice
        ("PassengerId", np.arange(19), "number"),  # too few to tell
        ("cases", np.arange(30), "number"),
        ("uric acid", np.arange(30), "number"),
        ("id", np.arange(30) + 0.5, "number"),
    ],
)
def test_row_numbers_are_known_by_their_name_and_values(name: str, values: np.ndarray, kind: str) -> None:
    assert guess_columns(pandas.DataFrame({name: values})) == {name: kind}


def test_row_numbers_of_large_sites_are_so_at_small_ones() -> None:
    tables = [pandas.DataFrame({"PassengerId": np.arange(rows)}) for rows in (40, 5)]
    kinds = common_kinds([answer(KindsQuestion(), table) for table in tables])
    assert kinds == {"PassengerId": "identifier"}


def test_columns_that_differ_in_kind_between_sites_take_the_wider_one() -> None:
    """Numbers at one site and text at another are categories at both; a column without values has no say."""
    ill = ["x", "y"] * 5
    frames = [
        pandas.DataFrame({"code": [1, 2] * 5, "dose": [None] * 10, "ill": ill}),
        pandas.DataFrame({"code": ["1", "b"] * 5, "dose": [3.0] * 5 + [4.0] * 5, "ill": ill}),
    ]
    code, dose = agreed(frames).columns
    assert code == CategoryColumn(name="code", categories=["1", "2", "b"])
    assert isinstance(dose, NumericColumn)
    assert (dose.gaps, dose.values.median) == (True, 3.5)


def test_a_column_of_some_sites_alone_is_a_gap_at_the_others() -> None:
    frames = [pandas.DataFrame({"age": [50.0, 60.0] * 4, "ill": ["x", "y"] * 4}),
              pandas.DataFrame({"age": [70.0] * 8, "dose": [1.0, 3.0] * 4, "ill": ["x", "y"] * 4})]  # fmt: skip
    here = agreed(frames)
    assert here.feature_names_out == ["age", "dose", "dose is missing"]
    assert here.transform(pandas.DataFrame({"age": [50.0]}))[0, 2] == 1
    assert [*here.unlike_training(pandas.DataFrame({"age": [50.0]}))] == [
        "there is no column 'dose', as in training rows: all rows count as gaps in it"
    ]
    assert [*here.unlike_training(pandas.DataFrame({"dose": [1.0]}))] == []
    with pytest.raises(SettingError, match="the table has no column 'age', which the preparation reads: add it"):
        here.transform(pandas.DataFrame({"dose": [1.0]}))


@pytest.mark.parametrize(
    ("column", "value", "sentence"),
    [
        ("age", "old", "column 'age' must have a number in each row, got 'old' in row 2"),
        ("age", "inf", "column 'age' must have a finite number in each row"),
        ("smoker", "perhaps", "column 'smoker' must have true or false in each row, got 'perhaps' in row 2"),
        ("seen", "2024-02-31", "column 'seen' must have a date like 2024-05-31 in each row, got '2024-02-31' in row 2"),
    ],
)
def test_a_value_that_cannot_be_read_is_named_with_its_row(column: str, value: str, sentence: str) -> None:
    rows = POOLED.head(3).astype({column: object})
    rows.loc[1, column] = value
    with pytest.raises(SettingError, match=sentence):
        agreed(SITES).transform(rows)


def test_values_that_stand_for_gaps_are_gaps() -> None:
    frames = [frame.assign(age=frame.age.fillna(-9)) for frame in SITES]
    known, plain = agreed(frames, gaps=["-9"]), agreed(SITES)
    assert known.columns == plain.columns
    assert np.isnan(numbers_of(pandas.Series(["-9", "3", "unknown"]), ["-9", "unknown"])).tolist() == [
        True,
        False,
        True,
    ]


def test_dates_are_read_at_once_as_they_are_one_by_one() -> None:
    words = ["2024-05-31", "2024-5-1", "2024-05-31 12:30", "2024-05-31T12:30:15.123456+02:00", "1969-12-31T23:59:59Z"]
    days = dates_of(pandas.Series([*words, None, "?"]))["days"]
    expected = [pandas.Timestamp(word).timestamp() / 86_400 for word in words]
    assert days[:5].tolist() == expected
    assert np.isnan(days[5:]).all()
    with pytest.raises(SettingError, match=r"a date like 2024-05-31 in each row, got '31\.05\.2024' in row 2"):
        dates_of(pandas.Series(["2024-05-31", "31.05.2024"], name="seen"))


def test_rows_keep_their_labels_where_some_were_left_out() -> None:
    coded, numbers = CodedTable.of(POOLED[::2])
    assert coded.frame(numbers[:3], np.arange(3)).index.tolist() == [0, 2, 4]
    assert CodedTable.of(POOLED)[0].labels is None  # which would take memory
    assert CodedTable.of(POOLED.set_axis([*map(str, range(len(POOLED)))]))[0].labels is None


def test_a_number_far_from_all_training_rows_is_no_prediction(tmp_path: Path) -> None:
    agreed = fitted(POOLED, "ill")
    POOLED.head(3).assign(age=[50.0, 1e16, 1e40]).to_csv(tmp_path / "new.csv", index=False)
    rows = read_table(tmp_path / "new.csv")
    with pytest.raises(SettingError, match=r"new\.csv: column 'age' has a number in row 4 that is too far from those"):
        agreed.transform(rows)
    assert np.isfinite(agreed.transform(rows.head(2))).all()


@pytest.mark.parametrize("low", [-1.0, -1.5])
def test_a_number_without_a_logarithm_is_no_prediction(low: float) -> None:
    """Before, the answers were empty, or scikit-learn's error came through."""
    table = pandas.DataFrame({"dose": np.arange(30.0), "ill": ["no", "yes"] * 15})
    agreed = fitted(table, "ill", scale={"dose": "log"})
    with pytest.raises(SettingError, match=r"column 'dose' has a number in row 2 that has no logarithm of 1 \+ x"):
        agreed.transform(pandas.DataFrame({"dose": [0.0, low, -3.0]}))


@pytest.mark.full
def test_large_tables_are_prepared_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    frame = POOLED.assign(site=["a", "b", "c"] * 90)
    whole = clients_from(frame, client="site", target="ill", prepare={})
    monkeypatch.setattr("piebald.core.tensor_store.BLOCK", 100)
    blocks = clients_from(frame, client="site", target="ill", prepare={})
    assert torch.equal(whole.rows(1, "train").x, blocks.rows(1, "train").x)
    frame.loc[230, "age"] = np.inf  # of the third block
    with pytest.raises(SettingError, match="column 'age' must have a finite number in each row, got inf in row 231"):
        clients_from(frame, client="site", target="ill", prepare={"columns": {"age": "number"}})


def test_free_text_is_refused_and_identifiers_are_left_out() -> None:
    note = ["the patient came with a cough and was sent home again"] * 8
    frame = pandas.DataFrame({"age": [1.0, 2.0] * 4, "note": note, "ill": ["x", "y"] * 4})
    with pytest.raises(SettingError, match="column 'note' has free text"):
        agreed([frame])
    assert agreed([frame], columns={"note": "leave out"}).left_out == {"note": "as [prepare] says"}
    named = SITES[0].assign(patient=[f"p{number}" for number in range(len(SITES[0]))])
    assert agreed([named]).left_out == {"patient": "nearly each row has another value"}
    with pytest.raises(SettingError, match=r"column, which \[prepare\] names"):
        agreed(SITES, scale={"wage": "log"})


def test_targets_are_classes_by_name_or_standard_scores() -> None:
    rows = pandas.DataFrame({"age": [1.0, 2.0, 4.0], "ill": ["b", "a", "b"], "price": [200_000.5, 3e5, 7e5]})
    assert fitted_here(rows[["age", "ill"]], "ill", least_rows=1).target == ClassTarget(name="ill", classes=["a", "b"])
    target = fitted_here(rows[["age", "price"]], "price").target
    assert isinstance(target, NumberTarget)
    assert (target.mean, target.deviation) == pytest.approx((rows.price.mean(), rows.price.std(ddof=0)), rel=1e-12)


def test_medians_are_means_where_counts_are_not_told() -> None:
    """A site that hides small numbers of rows answers no counts; the stated bound is one deviation."""

    def ask(question: Question) -> list[Answer]:
        if question.about == "counts":
            raise Unanswered("not told")
        return [answer(question, frame[["age"]]) for frame in SITES]

    (column,) = agree(ask, PrepareSettings(), "ill", ["x", "y"]).columns
    assert isinstance(column, NumericColumn)
    assert column.values.median == pytest.approx(POOLED.age.mean())
    assert abs(POOLED.age.median() - column.values.median) <= column.values.error


@pytest.mark.parametrize(
    ("low", "high", "number"),
    [(61.29999, 61.30001, 61.3), (-0.4, 0.2, 0.0), (2.0, 2.0, 2.0), (-61.30001, -61.29999, -61.3), (0.0, 1e-9, 1e-9),
     (123_456.0, 123_499.0, 123_490.0), (-5e-7, -1e-7, -1e-7), (1e17, 1e17 + 64, 1e17 + 64)],
)  # fmt: skip
def test_the_number_with_the_fewest_digits_in_an_interval(low: float, high: float, number: float) -> None:
    assert simplest(low, high) == pytest.approx(number, rel=1e-15, abs=1e-300)
    assert low < simplest(low, high) <= high or low == high


def test_a_table_travels_as_numbers() -> None:
    columns, numbers = CodedTable.of(POOLED.drop(columns="ill"))
    again = columns.frame(numbers[5:9])
    assert guess_columns(again) == guess_columns(POOLED.drop(columns="ill").iloc[5:9])
    here = agreed(SITES)
    assert np.array_equal(here.transform(again), here.transform(POOLED.iloc[5:9]))


def test_booleans_take_what_is_common_and_constant_columns_become_zero() -> None:
    frame = pandas.DataFrame({"fit": ["yes", "yes", None], "one": [7.0, 7.0, 7.0], "ill": ["x", "y", "x"]})
    here = agreed([frame])
    assert here.columns[0] == BooleanColumn(name="fit", gaps=True, common=True)
    assert here.transform(frame).tolist() == [[0, 1, 0], [0, 1, 0], [0, 1, 1]]


def test_clients_of_a_table_are_prepared_by_training_rows_alone() -> None:
    frame = pandas.concat(
        [frame.assign(site=name) for name, frame in zip("abc", SITES, strict=True)], ignore_index=True
    )
    clients = clients_from(frame, client="site", target="ill", prepare={"least_rows": 1})
    raw = clients_from(frame[["site", "raw", "ill"]], client="site", target="ill")
    train = np.concatenate([raw.rows(client, "train").x.numpy() for client in range(3)])  # type: ignore[union-attr]
    place = clients.preparation.feature_names_out.index("raw")  # type: ignore[union-attr]
    rows = np.concatenate([clients.rows(client, "train").x.numpy() for client in range(3)])  # type: ignore[union-attr]
    assert rows[:, place] == pytest.approx(((train - train.mean()) / train.std()).ravel(), abs=1e-6)
    rows = clients.rows(0, "test").x.numpy()  # type: ignore[union-attr]
    assert rows.shape[1] == len(clients.preparation.feature_names_out)  # type: ignore[union-attr]
    with pytest.raises(SettingError, match="prepare is for the columns of"):
        clients_from({"a": (np.ones((4, 2)), [0, 1, 0, 1])}, prepare="federated")
