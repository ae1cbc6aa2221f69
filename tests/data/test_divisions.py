"""[split]: which rows of a client are for training, validation and testing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd
import pytest
from sklearn.model_selection import GroupKFold, TimeSeriesSplit

import piebald
from piebald import data
from piebald.core.errors import SettingError
from piebald.data.clients.lists import Lists
from piebald.data.partition.leakage import RowKeys, three_ways
from piebald.data.partition.split import SplitSettings, folds_of, hold_out

SPLITS = ("train", "validation", "test")


def visits(patients: int = 10, rows: int = 4, **columns: Any) -> pd.DataFrame:
    """Rows of patients at two hospitals, the first with twice as many patients."""
    rng = np.random.default_rng(0)
    hospital = np.where(np.arange(patients) % 3 == 0, "south", "north").repeat(rows)
    patient = np.array([f"p{number}" for number in range(patients)]).repeat(rows)
    table = pd.DataFrame({"hospital": hospital, "patient": patient, "dose": rng.normal(size=patients * rows)})
    return table.assign(ill=np.where(rng.random(len(table)) < 0.5, "yes", "no"), **columns)


def divided(table: pd.DataFrame, split: Any, **arguments: Any) -> dict[str, pd.DataFrame]:
    return data.train_validation_test_split(table, split, client="hospital", target="ill", **arguments)


@pytest.mark.parametrize(
    "split",
    [
        {"group": "patient", "test": 0.3, "validation": 0.2},
        {"group": "patient", "test": 2, "validation": 1},
        {"group": "patient", "order": "day"},
        {"group": "patient", "folds": 3, "fold": 1, "validation": 0.2},
        {"group": "patient", "stratify": False},
        {"group": "patient", "hold_out": ["south"]},
    ],
)
def test_a_patient_is_on_one_side_also_where_two_hospitals_have_rows_of_it(split: Mapping[str, Any]) -> None:
    table = visits(30, day=np.arange(120) % 17)
    table.loc[::7, "hospital"] = "west"  # one in seven rows is at another hospital than the patient's others
    parts = divided(table, split)
    assert sum(map(len, parts.values())) == len(table)
    sides = pd.concat([part.assign(side=name) for name, part in parts.items()])
    assert sides.groupby("patient").side.nunique().max() == 1
    assert all(len(parts[name]) for name in ("train", "test"))


def test_groups_of_a_list_of_columns_are_those_of_each_hospital() -> None:
    """Hospitals that number their own patients have a patient 1 each, who are two people."""
    table = visits(40, rows=1, number=np.arange(40) // 2)
    apart = divided(table, {"group": ["hospital", "number"], "test": 0.3})
    shares = apart["test"].hospital.value_counts() / table.hospital.value_counts()
    for hospital, own in table.groupby("hospital"):
        groups = own.number.nunique()
        assert apart["test"][apart["test"].hospital == hospital].number.nunique() == round(0.3 * groups)
    assert shares.min() > 0.15


@pytest.mark.parametrize(("groups", "folds"), [([7, 5, 4, 4, 3, 2, 1, 1, 1], 3), ([1] * 10, 5), ([9, 1, 1, 1], 2)])
def test_folds_of_groups_have_the_sizes_of_scikit_learn(groups: list[int], folds: int) -> None:
    group = np.repeat(np.arange(len(groups)), groups)
    ours = folds_of(np.zeros(len(group), dtype=np.int64), folds, 3, group=group)
    expected = [len(test) for _, test in GroupKFold(folds).split(group, groups=group)]
    assert sorted(np.bincount(ours, minlength=folds)) == sorted(expected)
    assert all(len(set(ours[group == number])) == 1 for number in range(len(groups)))


def test_each_row_is_a_test_row_in_one_fold_and_classes_are_spread() -> None:
    table = visits(20)
    parts = [divided(table, {"folds": 4, "fold": fold}) for fold in range(4)]
    assert sorted(np.concatenate([part["test"].index for part in parts])) == list(range(80))
    for part in parts:
        counts = part["test"].groupby(["hospital", "ill"]).size()
        whole = table.groupby(["hospital", "ill"]).size()
        assert ((counts - whole / 4).abs() <= 1).all()
        assert set(part["train"].index) == set(table.index) - set(part["test"].index)


def test_the_last_rows_are_for_testing_and_those_before_for_validation() -> None:
    days = pd.date_range("2024-01-28", periods=40).strftime("%d.%m.%Y")  # as text, the order would be another one
    table = visits(date=np.random.default_rng(1).permutation(days))
    parts = divided(table, {"order": "date", "test": 0.25, "validation": 5})
    for hospital, own in table.assign(at=pd.to_datetime(table.date, format="%d.%m.%Y")).groupby("hospital"):
        ordered = own.sort_values("at").index
        tests, held = round(0.25 * len(own)), 5
        by_part = {name: set(part[part.hospital == hospital].index) for name, part in parts.items()}
        assert by_part["test"] == set(ordered[-tests:])
        assert by_part["validation"] == set(ordered[-tests - held : -tests])


def test_given_parts_are_taken_and_validation_rows_come_from_training_where_there_are_none() -> None:
    table = visits(part=np.where(np.arange(40) % 4 == 3, " Test", "train"))
    parts = divided(table, "part")
    assert set(parts["test"].index) == {*range(3, 40, 4)}
    with_validation = divided(table, {"column": "part", "validation": 0.25})
    assert set(with_validation["test"].index) == {*range(3, 40, 4)}
    assert len(with_validation["validation"]) == 10


@pytest.mark.parametrize("size", [1, 2, 5, 30])
def test_numbers_of_rows_leave_one_to_train_on(size: int) -> None:
    client = np.repeat([0, 1], [size, 40])
    chosen = hold_out(client, 4, key=1)
    assert chosen[client == 0].sum() == min(4, size - 1)
    assert chosen[client == 1].sum() == 4


def test_a_column_is_spread_evenly_in_place_of_classes() -> None:
    table = visits(20, sex=np.where(np.arange(80) % 8 < 2, "f", "m"))
    test = divided(table, {"stratify": "sex", "test": 0.5})["test"]
    assert test.sex.value_counts().to_dict() == {"m": 30, "f": 10}
    with pytest.raises(SettingError, match="stratify = true needs classes, and targets are none"):
        data.train_validation_test_split(visits(), {"stratify": True}, client="hospital", target="dose")


def test_clients_have_the_parts_of_their_table() -> None:
    """`clients_from`, an experiment's data and a table that is read as it is are divided alike."""
    table, split = visits(30), SplitSettings(group="patient", test=0.3, validation=0.2, seed=3)
    clients = piebald.clients_from(table, client="hospital", target="ill", features=["dose"], split=split)
    parts = divided(table, split)
    for number, name in enumerate(clients.names):
        for part in SPLITS:
            own = parts[part][parts[part].hospital == name]
            assert clients.rows(number, part).x[:, 0].tolist() == own.dose.astype("float32").tolist()


def test_columns_that_divide_rows_are_no_features_unless_they_are_named() -> None:
    table = visits(date=np.arange(40), part="train")
    common = {"client": "hospital", "target": "ill", "split": {"order": "date", "group": "patient"}}
    assert piebald.clients_from(table.drop(columns="part"), **common).rows(0, "train").x.shape[1] == 1
    named = piebald.clients_from(table, **common, features=["dose", "date"])
    assert named.rows(0, "train").x.shape[1] == 2


def test_folds_in_order_are_the_time_series_splits_of_scikit_learn() -> None:
    """At each hospital by itself, whatever the order of the rows in the table."""
    table = visits(20, day=np.random.default_rng(3).permutation(80)).assign(row=np.arange(80))
    for fold in range(3):
        parts = divided(table, {"folds": 3, "fold": fold, "order": "day"})
        for name in ("north", "south"):
            days = table[table.hospital == name].sort_values("day").day.to_numpy()
            train, test = list(TimeSeriesSplit(3).split(days))[fold]
            for part, places in (("train", train), ("test", test)):
                rows = parts[part]
                assert sorted(rows[rows.hospital == name].day) == days[places].tolist()
        assert not len(parts["validation"])
    last = divided(table, {"folds": 3, "fold": 2, "order": "day", "validation": 0.1})
    assert len(last["validation"]) == 8  # a tenth of all rows, the last ones before those for testing
    assert last["train"].groupby("hospital").day.max().lt(last["validation"].groupby("hospital").day.min()).all()
    grouped = [divided(table, {"folds": 3, "fold": fold, "order": "day", "group": "patient"}) for fold in range(3)]
    assert [part["test"].patient.nunique() for part in grouped] == [4, 4, 4]  # of 13 and 7 patients: 3 + 1 each
    assert not {*grouped[0]["test"].patient} & {*grouped[0]["train"].patient}
    few = divided(table.iloc[[0, 1, 20]], {"folds": 3, "fold": 0, "order": "day"})
    assert [len(few[name]) for name in SPLITS] == [3, 0, 0]


def test_a_data_set_is_divided_by_its_owners_and_by_folds() -> None:
    dataset = data.DataSet(
        "walks", piebald.data.digits().x[:120], piebald.data.digits().y[:120], classes=list("0123456789"),
        owners={"subject": list(np.arange(120) // 6)},
    )  # fmt: skip
    for scatters in (
        piebald.partition.Dirichlet(clients=3, alpha=1.0),
        piebald.partition.ByOwner(owner="subject", clients=3),
    ):
        seen: list[int] = []
        for fold in range(3):
            clients = scatters.split(dataset, SplitSettings(group="subject", folds=3, fold=fold))
            test, train = clients.lists("test").values, clients.lists("train").values
            assert not {*(test // 6)} & {*(train // 6)}
            seen += test.tolist()
        assert sorted(seen) == list(range(120))


def test_held_out_clients_have_test_rows_alone() -> None:
    table = visits(30)
    for setting in ("hold_out", "test_only"):
        clients = piebald.clients_from(
            table, client="hospital", target="ill", features=["dose"], split={setting: ["south"]}
        )
        sizes = {name: [clients.size(number, part) for part in SPLITS] for number, name in enumerate(clients.names)}
        assert sizes["south"] == [0, 0, 40]
        assert sizes["north"] == ([80, 0, 0] if setting == "hold_out" else [64, 0, 16])


def test_cross_validation_has_clients_for_each_fold_and_each_held_out_client() -> None:
    asked = {"client": "hospital", "target": "ill", "features": ["dose"]}
    folds = data.cross_validation(visits(12), {"folds": 3, "group": "patient"}, **asked)
    assert [clients.division.title for clients in folds] == ["fold 1 of 3", "fold 2 of 3", "fold 3 of 3"]
    each = data.cross_validation(visits(12), {"hold_out": "each"}, **asked)
    assert [clients.division.title for clients in each] == ["without north", "without south"]
    with pytest.raises(SettingError, match="cross_validation needs folds"):
        data.cross_validation(visits(12), {"test": 0.5}, **asked)


@pytest.mark.parametrize(
    ("split", "message"),
    [
        ({"group": "patent"}, r"no column \(split\) 'patent': did you mean 'patient'"),
        ({"grup": "patient"}, "did you mean 'group'"),
        (
            {"test": 1.5},
            "test must be a share of a client's rows, at least 0 and below 1, or a number of rows, got 1.5",
        ),
        ({"test": -1}, "or a number of rows, got -1"),
        ({"test": 0.6, "validation": 0.4}, "leave no rows to train on"),
        ({"folds": 1}, "folds must be at least 2"),
        ({"folds": 1001}, "folds must be at most 1000"),
        ({"folds": 3, "fold": 3}, "fold must be below folds, got 3 of 3"),
        ({"folds": 3, "test": 0.2}, "folds and test both say which rows are for testing"),
        ({"folds": 3}, "folds of split asks for several runs"),
        ({"hold_out": "each"}, "hold_out of split asks for several runs"),
        ({"hold_out": ["east"]}, r"no client \(split, hold_out\) 'east'"),
        ({"hold_out": ["north", "south"]}, "holds out or only tests all 2 clients"),
        ({"order": "when"}, "'yesterday' in row 3 and in 9 more, which is no date or number to sort by"),
        ({"order": "odd"}, "may be read as day/month/year or month/day/year"),
        ({"group": "gap"}, "column 'gap' divides the rows and has no value in row 2 and in 1 more"),
        ({"column": "ill"}, "column 'ill' must say train, validation or test in each row, got '(yes|no)' in row 1"),
        ({"column": "part", "group": "patient"}, "says train in row 2 and test in row 3, which are one group"),
        ({"column": "part", "group": ["hospital", "pair"]}, "one group by 'hospital, pair': correct it, or leave"),
        (7, "split must be a SplitSettings or a table or text, got 7"),
    ],
)
def test_what_cannot_be_meant_is_one_sentence(split: Any, message: str) -> None:
    table = visits(
        when=["2024-01-01", "2024-01-02", "yesterday", "2024-01-03"] * 10, odd=["01/02/2024", "03/04/2024"] * 20
    )
    table = table.assign(gap=["a", None, None, *"b" * 37])
    table = table.assign(pair=np.arange(40) // 4, part=["train", "train", "test", "test"] * 10)
    with pytest.raises(SettingError, match=message) as raised:
        piebald.clients_from(table, client="hospital", target="ill", features=["dose"], split=split)
    assert "\n" not in str(raised.value)


def test_a_split_is_said_in_one_place() -> None:
    with pytest.raises(SettingError, match="test belongs into split"):
        piebald.clients_from(visits(), client="hospital", target="ill", features=["dose"], test=0.3, split={})
    with pytest.raises(SettingError, match="names the column 'patient', and these rows are in no table"):
        piebald.clients_from([(np.ones((4, 2)), [0, 1, 0, 1])], split={"group": "patient"})
    parts = {"a": {"train": (np.ones((4, 2)), [0, 1, 0, 1])}}
    with pytest.raises(SettingError, match="these clients come with parts of their own"):
        piebald.clients_from(parts, split={"folds": 2, "fold": 0})
    partition = piebald.partition.Iid(clients=2, test=0.3)
    with pytest.raises(SettingError, match="test is set in split: leave it out here"):
        partition.split(data.digits(), SplitSettings())


def test_a_client_alone_divides_its_rows_as_among_others() -> None:
    table = visits(30)
    keys = RowKeys.of_table(list(table.columns), table.__getitem__, SplitSettings(group="patient"), "hospital")
    names = ["north", "south"]
    number = np.array([names.index(name) for name in table.hospital])
    together = three_ways(Lists.of(number, 2), None, SplitSettings(group="patient"), keys, names=names)
    for place in range(2):
        own = np.flatnonzero(number == place)
        alone = three_ways(
            Lists(np.arange(len(own)), np.array([0, len(own)])),
            None,
            SplitSettings(group="patient"),
            keys.at(own),
            first=place,
        )
        for part in SPLITS:
            assert own[alone[part][0]].tolist() == together[part][place].tolist()
