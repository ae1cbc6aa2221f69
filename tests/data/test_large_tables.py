"""Tables that are read in chunks and lie in files: the same clients, to the bit, as of tables in memory."""

from __future__ import annotations

import errno
import logging
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from piebald import clients_from
from piebald.core import tensor_store
from piebald.core.tensor_store import large_array
from piebald.data.clients.client_tables import read_table, train_validation_test_split
from piebald.data.preparation.columns import words_of

ROWS = 90


def table() -> pd.DataFrame:
    """Return rows whose first chunks do not tell what their columns are."""
    rng, late = np.random.default_rng(0), np.arange(ROWS) > 70
    return pd.DataFrame({
        "site": rng.choice(["north", "south", "7"], ROWS),
        "patient": rng.integers(0, 30, ROWS),
        "age": np.where(rng.random(ROWS) < 0.2, np.nan, rng.normal(60, 9, ROWS).round(1)),
        "visits": np.where(late, rng.integers(0, 9, ROWS), np.nan),  # no value at first
        "dose": np.where(late, 0.5, 2.0),
        "ward": np.where(late, "late", rng.choice(["a ", "b", "1.50", "2"], ROWS)),
        "code": ["1.0" if number < 45 else "x" for number in range(ROWS)],  # numbers until words come
        "smoker": np.where(rng.random(ROWS) < 0.1, "", rng.choice(["True", "False"], ROWS)),
        "seen": pd.date_range("2024-01-28", periods=ROWS).strftime("%d.%m.%Y"),
        "price": [f"{number}.234,5" for number in range(1, ROWS + 1)],
        "nothing": "",
        "ill": rng.choice(["yes", "no "], ROWS),
    })  # fmt: skip


def as_csv(frame: pd.DataFrame, folder: Path) -> Path:
    frame.to_csv(path := folder / "rows.csv", index=False)
    return path


def as_parquet(frame: pd.DataFrame, folder: Path) -> Path:
    typed = pd.read_csv(as_csv(frame, folder), skipinitialspace=True)
    typed["seen"] = pd.to_datetime(typed.seen, format="%d.%m.%Y")
    typed["kind"] = typed.ward.astype("category")
    typed["whole"], typed["real"] = typed.patient.astype("Int64"), typed.visits.astype("Float64")
    typed.to_parquet(path := folder / "rows.parquet", row_group_size=11)
    return path


def as_query(frame: pd.DataFrame, folder: Path) -> Path:
    with closing(sqlite3.connect(folder / "rows.db")) as database, database:
        frame.to_sql("rows", database, index=False)
    (path := folder / "rows.sql").write_text("-- sqlite:///rows.db\nSELECT * FROM rows")
    return path


def as_files(frame: pd.DataFrame, folder: Path) -> Path:
    for part in range(3):
        frame.iloc[part::3].to_csv(folder / f"part-{part}.csv", index=False)
    return folder / "part-*.csv"


@pytest.fixture
def in_chunks(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Return a function, after whose call tables are read in chunks of a few rows, and all arrays are in files."""

    def begin() -> None:
        monkeypatch.setattr(tensor_store, "CELLS", 40)
        monkeypatch.setattr(tensor_store, "MOST_IN_MEMORY", 8)
        monkeypatch.setattr("piebald.core.reading._BATCH", 3)
        monkeypatch.setattr("piebald.data.clients.query_files._ROWS", 4)
        monkeypatch.setattr("piebald.data.clients.query_files._FETCHED", 2)
        monkeypatch.setattr("piebald.data.clients.stored_table._ROWS", 5)
        monkeypatch.setattr(tensor_store, "BLOCK", 40)
        monkeypatch.setattr("piebald.data.partition.split.BLOCK", 7)

    return begin


WRITERS = [as_csv, as_parquet, as_query, as_files]


@pytest.mark.full
@pytest.mark.parametrize("write", WRITERS)
def test_clients_of_a_table_in_chunks_are_those_of_the_table_as_a_whole(
    write: Callable[..., Path], in_chunks: Callable[[], None], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = write(table(), tmp_path)

    def clients(split: Any, **given: Any) -> Any:
        caplog.clear()
        with caplog.at_level(logging.WARNING, "piebald"):
            made = clients_from(str(path), client="site", split=split, **given)
        return made, [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]

    arguments: list[dict[str, Any]] = [
        {"target": "ill", "split": {"test": 0.3, "validation": 0.1}},
        {"target": "price", "split": {"test": 0.3}, "prepare": {"scale": {"age": "rank", "dose": "log"}}},
    ]
    whole = [clients(**given) for given in arguments]
    in_chunks()
    for given, (expected, warnings) in zip(arguments, whole, strict=True):
        made, told = clients(**given)
        assert made.preparation == expected.preparation
        assert (made.names, made.classes, told) == (expected.names, expected.classes, warnings)
        for client in range(3):
            for split in ("train", "validation", "test"):
                rows, like = made.rows(client, split), expected.rows(client, split)
                assert torch.equal(rows.x, like.x)
                assert torch.equal(rows.y, like.y)


@pytest.mark.parametrize("write", WRITERS)
def test_values_of_a_table_in_chunks_are_those_of_the_table_as_a_whole(
    write: Callable[..., Path], in_chunks: Callable[[], None], tmp_path: Path
) -> None:
    path = write(table(), tmp_path)
    whole = read_table(path, "site")
    in_chunks()
    chunked = read_table(path, "site")
    assert chunked.attrs == whole.attrs
    assert chunked.ward.dtype == "category"
    for name in whole:
        if whole[name].dtype.kind in "iufM":
            if whole[name].dtype.kind == "M":
                pd.testing.assert_series_equal(chunked[name], whole[name])
            else:
                numbers = [frame[name].to_numpy(np.float64, na_value=np.nan) for frame in (chunked, whole)]
                np.testing.assert_array_equal(*numbers)
            assert chunked[name].dtype.kind in "iufM"
        else:
            assert words_of(chunked[name]).tolist() == words_of(whole[name]).tolist()


def test_padded_numbers_in_a_late_chunk_make_text_of_their_column(
    in_chunks: Callable[[], None], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    frame = pd.DataFrame({"site": "a", "code": [str(number) for number in range(50)] + ["007"], "x": range(51)})
    path = as_csv(frame, tmp_path)
    in_chunks()
    assert read_table(path)["code"].tolist() == frame["code"].tolist()
    assert "column 'code' has values like '007' in row 52" in caplog.text


@pytest.mark.parametrize("write", WRITERS)
@pytest.mark.parametrize(
    "settings",
    [
        {"test": 0.3, "validation": 0.1},
        {"group": "patient", "test": 0.3},
        {"group": ["site", "ward"], "test": 0.3},
        {"order": "seen", "test": 0.3},
        {"stratify": "ward", "test": 0.3},
        {"hold_out": ["7"]},
    ],
    ids=lambda settings: next(iter(settings)),
)
def test_parts_of_a_table_in_chunks_are_those_of_the_table_as_a_whole(
    write: Callable[..., Path], settings: Any, in_chunks: Callable[[], None], tmp_path: Path
) -> None:
    path = str(write(table(), tmp_path))
    whole = train_validation_test_split(path, settings, client="site", target="ill")
    in_chunks()
    chunked = train_validation_test_split(path, settings, client="site", target="ill")
    assert len(whole["test"]) > 10
    assert {part: rows.index.tolist() for part, rows in chunked.items()} == {
        part: rows.index.tolist() for part, rows in whole.items()
    }


def test_a_large_array_has_no_name_and_keeps_its_values(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(tensor_store, "MOST_IN_MEMORY", 8)
    values = large_array((3, 2), np.int64)
    values[:] = np.arange(6).reshape(3, 2)
    assert isinstance(values.base, np.memmap)
    assert [*tmp_path.iterdir()] == []
    assert values.sum() == 15
    assert not isinstance(large_array((1, 1), np.int64).base, np.memmap)


def test_a_disk_without_room_is_refused_before_anything_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(handle: int, start: int, size: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.posix_fallocate", full, raising=False)
    with pytest.raises(tensor_store.SettingError, match=r"needs 1\.0 GB of temporary files.*set TMPDIR"):
        large_array((1 << 27,), np.float64)


def test_a_file_system_that_reserves_nothing_will_do(monkeypatch: pytest.MonkeyPatch) -> None:
    def unable(handle: int, start: int, size: int) -> None:
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    monkeypatch.setattr("os.posix_fallocate", unable, raising=False)
    monkeypatch.setattr(tensor_store, "MOST_IN_MEMORY", 8)
    values = large_array((2,), np.int64)
    values[:] = 3
    assert values.tolist() == [3, 3]
