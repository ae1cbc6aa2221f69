"""The identity of rows, and the fingerprint of all of them, at the edges of what tables and arrays hold."""

from __future__ import annotations

import datetime
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from piebald.data.clients.owner import Owner, read_owners, records_of
from piebald.data.clients.row_identity import Digests, row_digests

FIRST = datetime.datetime(2024, 5, 31, 12, 30)
FRAME = pd.DataFrame(
    {
        "number": [1, 2, 3, 4],
        "account": [2**53 + 1, 2**53 + 2, 2**60, 7],
        "dose": [0.1, 0.1 + 0.2, -0.0, 1e17],
        "smoker": [True, False, True, True],
        "ward": ["a", "b", "b", "007"],
        "seen": [FIRST + datetime.timedelta(hours=hours) for hours in (0, 1, 24, 2000)],
        "born": pd.to_datetime(["1950-01-02", "1600-03-04", "2000-02-29", "1999-12-31"]),
    }
)
EDGES: dict[str, Callable[[], Any]] = {
    "plain": lambda: FRAME["dose"],
    "zones": lambda: FRAME["seen"].dt.tz_localize("Europe/Berlin"),
    "categories": lambda: FRAME["ward"].astype("category"),
    "codes": lambda: FRAME["number"].astype("category"),
    "nullable": lambda: pd.Series([1, None, 2**60, 4], dtype="Int64"),
    "truths": lambda: pd.Series([True, None, False, True], dtype="boolean"),
    "gaps": lambda: pd.Series([1.0, np.nan, None, "x"], dtype=object),
    "mixed": lambda: pd.Series([1, "a", 2.5, b"bytes"], dtype=object),
    "lists": lambda: pd.Series([[1, 2], [3], np.array([4.0]), []], dtype=object),
    "mappings": lambda: pd.Series([{"a": 1}, {"a": 2, "b": {"c"}}, {"x", "y"}, None], dtype=object),
    "sparse": lambda: pd.Series(pd.arrays.SparseArray([0.0, 1.0, 0.0, np.nan])),
    "sparse text": lambda: pd.Series(pd.arrays.SparseArray(["a", "b", "a", "a"])),
    "spans": lambda: pd.Series(pd.to_timedelta([1, 2, 3, 4], unit="h")),
    "moments": lambda: FRAME["seen"].to_numpy(),
    "months": lambda: pd.Series(pd.period_range("2024-01", periods=4, freq="M")),
    "complex": lambda: pd.Series([1 + 2j, 2, 3, 4]),
    "arrow": lambda: pd.Series([1.5, None, 3.0, 4.0], dtype="double[pyarrow]"),
    "images": lambda: np.arange(64.0).reshape(4, 1, 4, 4),
    "wide": lambda: np.arange(8).reshape(4, 2),
}


def digests(owner: Owner) -> Digests:
    return owner.digests("north")


def owner_of(column: Any) -> Owner:
    """An owner of a column, beside one that tells the rows apart."""
    if isinstance(column, pd.Series):
        return Owner(None, pd.DataFrame({"row": range(len(column)), "column": column}))
    return Owner(None, (column, np.arange(len(column))))


def written(folder: Path, form: str) -> Any:
    """The same rows in a file, or as they are."""
    if form == "frame":
        return FRAME
    if form == "objects":
        return FRAME.astype(object)
    if form == "pair":
        return FRAME.drop(columns="ward"), FRAME["ward"]
    path = folder / f"rows.{form}"
    if form == "parquet":
        FRAME.to_parquet(path)
    elif form == "sql":
        # as a database has them that knows no dates
        texts = FRAME.assign(seen=FRAME["seen"].astype(str), born=FRAME["born"].astype(str))
        with sqlite3.connect(folder / "rows.db") as database:
            texts.to_sql("rows", database, index=False)
        path.write_text("-- sqlite:///rows.db\nSELECT * FROM rows")
    else:
        FRAME.to_csv(path, index=False, sep="\t" if form == "tsv" else ",")
    return path


@pytest.mark.parametrize("form", ["objects", "pair", "csv", "tsv", "parquet", "sql"])
def test_rows_are_the_same_wherever_they_come_from(tmp_path: Path, form: str) -> None:
    expected = records_of(read_owners(FRAME), "north")
    assert len(expected) == len(FRAME)
    owners = read_owners(written(tmp_path, form), "ward" if form in ("csv", "tsv", "sql") else None, pair=True)
    assert records_of(owners, "north").tolist() == expected.tolist()


@pytest.mark.parametrize("kind", EDGES)
def test_each_row_is_known_and_is_the_same_when_it_is_read_again(kind: str) -> None:
    known = digests(owner_of(EDGES[kind]()))
    assert len(np.unique(known)) == 4
    assert np.array_equal(digests(owner_of(EDGES[kind]())), known)
    backwards = EDGES[kind]()[::-1]
    assert np.array_equal(row_digests([EDGES[kind]()])[::-1], row_digests([backwards]))


@pytest.mark.parametrize("kind", EDGES)
def test_every_cell_that_changes_makes_another_fingerprint_and_another_row(kind: str) -> None:
    known, fingerprints = owner_of(EDGES[kind]()), set[str]()
    for row in range(4):
        column = EDGES[kind]()
        if isinstance(column, pd.Series):
            column = column.astype(object)
            column.iloc[row] = "another value"
            others = [owner_of(column)]
        else:
            others = []
            for cell in np.ndindex(column.shape[1:]):
                changed = column.copy()
                changed[(row, *cell)] = 99
                others.append(owner_of(changed))
        for other in others:
            assert np.flatnonzero(digests(other) != digests(known)).tolist() == [row]
            fingerprints.add(other.fingerprint())
    assert known.fingerprint() == owner_of(EDGES[kind]()).fingerprint()
    assert known.fingerprint() not in fingerprints
    assert len(fingerprints) == (4 if isinstance(EDGES[kind](), pd.Series) else EDGES[kind]().size)


@pytest.mark.parametrize("column", FRAME.columns)
def test_the_smallest_change_of_a_cell_is_seen(column: str) -> None:
    smallest: dict[str, Any] = {
        "number": 5, "account": 2**53 + 3, "dose": np.nextafter(0.1, 1), "smoker": False, "ward": "A",
        "seen": FIRST + datetime.timedelta(microseconds=1), "born": pd.Timestamp("1950-01-03"),
    }  # fmt: skip
    changed = FRAME.copy()
    changed.loc[0, column] = smallest[column]
    assert Owner(None, changed).fingerprint() != Owner(None, FRAME).fingerprint()
    assert np.flatnonzero(digests(Owner(None, changed)) != digests(Owner(None, FRAME))).tolist() == [0]


def test_a_fingerprint_has_the_order_of_all_cells() -> None:
    """Two numbers that change places in a row, and two rows that do, hold the same numbers."""
    x, y = np.arange(8.0).reshape(4, 2), np.arange(4)
    turned, sorted_back = x.copy(), x[::-1]
    turned[2] = turned[2, ::-1]
    owners = [Owner(None, (inputs, y)) for inputs in (x, turned, sorted_back)]
    owners += [Owner(None, (x, y), owners=["a", "b", "b", "a"]), Owner(None, (x, y), owners=["b", "b", "b", "a"])]
    owners += [
        Owner(None, FRAME),
        Owner(None, FRAME[[*FRAME.columns[::-1]]]),
        Owner(None, FRAME.rename(columns=str.upper)),
    ]
    assert len({owner.fingerprint() for owner in owners}) == len(owners)
    assert owners[0].fingerprint() == Owner(None, (x.tolist(), y.tolist())).fingerprint()


def test_moments_are_the_same_in_every_zone_and_form() -> None:
    moments = [
        "2024-05-31", datetime.date(2024, 5, 31), pd.Timestamp("2024-05-31"), "2024-05-31T00:00Z",
        "2024-05-31 02:00:00+02:00", np.datetime64("2024-05-31"), pd.Timestamp("2024-05-31 02:00", tz="Europe/Berlin"),
    ]  # fmt: skip
    assert len({*row_digests([pd.Series(moments, dtype=object)]).tolist()}) == 1
    assert len({*row_digests([pd.Series(["2024-02-30", "2024-02-31"])]).tolist()}) == 2  # which are no dates


def test_values_that_readers_may_take_for_one_another_are_one() -> None:
    for alike in (
        [1, 1.0, "1", True, "True", np.int8(1), " 1 "],
        [None, np.nan, pd.NA, pd.NaT, "", "NA"],
        [-0.0, 0, "0"],
    ):
        assert len({*row_digests([pd.Series(alike, dtype=object)]).tolist()}) == 1
    assert len({*row_digests([pd.Series([np.float32(0.1), 0.1], dtype=object)]).tolist()}) == 2


def test_few_rows_and_columns_of_one_name() -> None:
    assert not len(digests(Owner(None, FRAME[:0])))
    assert not len(digests(Owner(None, pd.DataFrame(index=range(3)))))
    assert digests(Owner(None, FRAME[:1])).tolist() == digests(Owner(None, FRAME))[:1].tolist()
    twice = pd.concat([FRAME[["dose"]], FRAME[["number"]].set_axis(["dose"], axis=1)], axis=1)
    changed = twice.copy()
    changed.iloc[2, 1] = 9
    assert np.flatnonzero(digests(Owner(None, twice)) != digests(Owner(None, changed))).tolist() == [2]
    assert Owner(None, twice).fingerprint() != Owner(None, changed).fingerprint()
    same_rows = pd.concat([FRAME, FRAME[:2]])
    assert len(records_of([Owner(None, same_rows)], "north")) == 4
    assert Owner(None, same_rows).fingerprint() != Owner(None, FRAME).fingerprint()


def test_columns_that_are_called_by_numbers() -> None:
    frame = FRAME[["ward", "dose"]].set_axis([0, 1], axis=1)
    assert Owner(None, frame).columns == ["0", "1"]
    assert len(Owner(None, frame).digests("b", kind="0")) == 2
    assert len(Owner(None, frame).digests("b", key="1")) == 4
