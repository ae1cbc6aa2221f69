from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas
import pytest
import torch
from torch.utils.data import Dataset, Subset, TensorDataset

import piebald
from piebald.core.errors import SettingError
from piebald.data import train_validation_test_split
from piebald.data.clients.data_source import DataSource
from piebald.data.clients.sources import clients_of
from piebald.data.partition import clients_from
from piebald.runtimes import Simulator

pd = pytest.importorskip("pandas")


def everything(clients, client: int):
    parts = [clients.rows(client, split) for split in ("train", "validation", "test")]
    return torch.cat([part.x for part in parts]), torch.cat([part.y for part in parts])


def test_arrays_become_float32_and_classes() -> None:
    clients = clients_from([(np.ones((4, 2)), [0, 1, 2, 0]), (np.zeros((1, 2)), [1])], test=0.25)
    assert clients.x.dtype == torch.float32
    assert clients.y.dtype == torch.int64
    assert list(clients.classes) == ["0", "1", "2"]
    assert clients.size(0, "train") == 3
    assert clients.size(0, "test") == 1
    assert clients.size(1, "train") == 1  # its only row
    assert len(clients.common) == 1


def test_real_targets_are_numbers_to_predict() -> None:
    clients = clients_from([(torch.ones(4, 2), torch.rand(4, dtype=torch.float64))])
    assert clients.y.dtype == torch.float32
    assert clients.classes is None
    assert clients.counts(0, "train") is None


def test_text_targets_are_sorted_over_all_clients_and_names_kept() -> None:
    pairs = {"north": (np.ones((2, 1)), ["wolf", "bear"]), "south": (np.ones((1, 1)), np.array(["cat"], dtype=object))}
    clients = clients_from(pairs, test=0.0)
    assert list(clients.names) == ["north", "south"]
    assert list(clients.classes) == ["bear", "cat", "wolf"]
    assert clients.rows(0, "train").y.tolist() == [2, 0]
    other = clients_from(pairs, test=0.0, classes=["wolf", "cat", "bear"], names=["n", "s"])
    assert other.rows(0, "train").y.tolist() == [0, 2]
    assert list(other.names) == ["n", "s"]


@pytest.mark.parametrize(
    "goal",
    [["no", None, "yes", "no", "yes"], ["no", "?", "yes", "no", "yes"], [0, None, 1, 0, 1], [0.5, np.nan, 1, 0.1, 2]],
)
def test_rows_without_a_target_are_left_out_and_said(goal: list, caplog: pytest.LogCaptureFixture) -> None:
    frame = pd.DataFrame({"site": list("aabbb"), "age": [1.0, 2.0, 3.0, 4.0, 5.0], "ill": goal})
    with caplog.at_level("WARNING", "piebald"):
        clients = clients_from(frame, client="site", target="ill", test=0.0)
    assert "column 'ill' has no value in 1 of 5 rows (row 2): these rows are left out" in caplog.text
    expected = clients_from(frame.drop(index=1).infer_objects(), client="site", target="ill", test=0.0)
    assert clients.classes == expected.classes
    for client in (0, 1):
        for found, wanted in zip(everything(clients, client), everything(expected, client), strict=True):
            assert torch.equal(found, wanted)
    with pytest.raises(SettingError, match="column 'ill' has no value in any row"):
        clients_from(frame.assign(ill=None), client="site", target="ill")


def test_rows_without_a_client_are_left_out_and_said(caplog: pytest.LogCaptureFixture) -> None:
    frame = pd.DataFrame({"site": ["a", None, "b", "b", "a"], "age": np.arange(5.0), "ill": [0, 1, 1, 0, 1]})
    with caplog.at_level("WARNING", "piebald"):
        clients = clients_from(frame, client="site", target="ill", test=0.0)
    assert "clients: column 'site' has no value in 1 of 5 rows (row 2): these rows are left out" in caplog.text
    assert list(clients.names) == ["a", "b"]
    assert [clients.rows(client, "train").x[:, 0].tolist() for client in (0, 1)] == [[0.0, 4.0], [2.0, 3.0]]
    parts = train_validation_test_split(frame, {"test": 0.5, "stratify": False}, client="site", target="ill")
    assert sorted(row for part in parts.values() for row in part.index) == [0, 2, 3, 4]


def test_tables_are_divided_as_clients_are_where_targets_are_missing() -> None:
    rng = np.random.default_rng(0)
    frame = pd.DataFrame({"site": list("ab") * 50, "age": rng.normal(size=100), "ill": rng.integers(0, 2, 100) * 1.0})
    frame.loc[rng.random(100) < 0.2, "ill"] = np.nan
    clients = clients_from(frame, client="site", target="ill", test=0.3, validation=0.1)
    parts = train_validation_test_split(frame, {"test": 0.3, "validation": 0.1}, client="site", target="ill")
    for name, part in parts.items():
        for client, site in enumerate("ab"):
            ages = sorted(clients.rows(client, name).x[:, 0].tolist())
            assert ages == pytest.approx(sorted(part[part["site"] == site]["age"]))


@pytest.mark.parametrize("shape", [(2, 3, 5), (2, 1, 3, 5), (2, 3, 3, 5)])
def test_images_get_channels_and_are_scaled(shape: tuple[int, ...]) -> None:
    images = np.full(shape, 255, dtype=np.uint8)
    x = clients_from([(images, [0, 1])], test=0.0).rows(0, "train").x
    assert x.shape == (2, 3 if len(shape) == 4 and shape[1] == 3 else 1, 3, 5)
    assert float(x.max()) == 1.0


@pytest.mark.parametrize("shape", [(2, 1, 4, 3, 5), (2, 3, 4, 3, 5), (2, 1, 2, 4, 3, 5)])
@pytest.mark.parametrize("several", [True, False])
def test_bytes_of_volumes_and_films_are_scaled(shape: tuple[int, ...], several: bool) -> None:
    scans = np.full(shape, 255, dtype=np.uint8)
    x = clients_from([({"scan": scans} if several else scans, [0, 1])], test=0.0).rows(0, "train").x
    x = x["scan"] if several else x
    assert (x.shape, float(x.max()), x.dtype) == (shape, 1.0, torch.float32)


def test_small_integers_that_are_no_images_are_not_scaled(caplog: pytest.LogCaptureFixture) -> None:
    clients = clients_from([(np.array([[0, 100]], dtype=np.uint8), [0])])
    assert clients.rows(0, "train").x.tolist() == [[0, 100]]
    assert "divide them" not in caplog.text
    clients = clients_from([(np.array([[0, 200]], dtype=np.uint8), [0])])
    assert clients.rows(0, "train").x.tolist() == [[0, 200]]
    assert "divide them by 255" in caplog.text


class Items(Dataset):
    def __len__(self) -> int:
        return 5

    def __getitem__(self, place: int):
        return torch.full((1, 2, 2), float(place)), place % 2


def test_torch_data_sets() -> None:
    clients = clients_from(
        [Items(), Subset(Items(), [1, 3]), TensorDataset(torch.ones(2, 1, 2, 2), torch.ones(2).long())]
    )
    assert len(clients) == 3
    x, y = everything(clients, 1)
    assert sorted(x[:, 0, 0, 0].tolist()) == [1, 3]
    assert y.tolist() == [1, 1]


def test_common_test_set_of_ones_own() -> None:
    pair = (np.ones((4, 2)), ["a", "b", "a", "b"])
    clients = clients_from([pair], common=(np.zeros((3, 2)), ["b", "b", "a"]))
    assert clients.common.y.tolist() == [1, 1, 0]
    with pytest.raises(SettingError, match="common must look like the clients' rows"):
        clients_from([pair], common=(np.zeros((3, 5)), ["b", "b", "a"]))
    with pytest.raises(SettingError, match="common: target 'c' is not one of the 2 classes"):
        clients_from([pair], common=(np.zeros((1, 2)), ["c"]))


def test_splits_are_stratified_and_seeded() -> None:
    pair = (np.arange(100.0)[:, None], np.repeat([0, 1], [80, 20]))
    clients = clients_from([pair, pair], test=0.2, validation=0.1, seed=1)
    assert clients.counts(0, "test") in ([16, 4], [15, 5], [17, 3])
    assert clients.size(0, "validation") == 10
    assert not np.array_equal(clients.indices(0, "test") + 100, clients.indices(1, "test"))
    again = clients_from([pair, pair], test=0.2, validation=0.1, seed=1)
    assert np.array_equal(clients.indices(1, "test"), again.indices(1, "test"))
    other = clients_from([pair, pair], test=0.2, validation=0.1, seed=2)
    assert not np.array_equal(clients.indices(1, "test"), other.indices(1, "test"))


def frame():
    return pd.DataFrame(
        {
            "hospital": ["b", "a", "b", "a", "b", "a"],
            "age": [1, 2, 3, 4, 5, 6],
            "dose": [0.5, 1, 1.5, 2, 2.5, 3],
            "ill": ["no", "yes", "no", "yes", "no", "yes"],
            "job": ["x", "y", "x", "y", "x", "y"],
        }
    )


def test_frames() -> None:
    clients = clients_from(frame(), client="hospital", target="ill", features=["dose", "age"], test=0.0)
    assert list(clients.names) == ["a", "b"]
    assert clients.rows(0, "train").x.tolist() == [[1, 2], [2, 4], [3, 6]]
    assert clients.rows(0, "train").y.tolist() == [1, 1, 1]
    assert list(clients.classes) == ["no", "yes"]
    numbers = (
        clients_from(frame().drop(columns="job"), client="age", target="dose", features=["age_"], test=0.0)
        if 0
        else None
    )
    assert numbers is None


@pytest.mark.parametrize("dtype", ["int64", "Int64", "bool", "boolean", "category", "string", "float32", "Float64"])
def test_target_columns_of_every_type(dtype: str) -> None:
    table = frame()[["hospital", "age"]]
    table["goal"] = (
        pd.Series([0, 1, 0, 1, 0, 1]).astype("bool" if dtype in ("bool", "boolean") else "int64").astype(dtype)
    )
    clients = clients_from(table, client="hospital", target="goal", test=0.0)
    assert clients.rows(0, "train").y.tolist() == [1, 1, 1]
    assert clients.y.dtype == torch.int64  # a gap elsewhere makes floats of classes in other programs


def test_numbered_clients_are_in_order_of_their_numbers() -> None:
    table = pd.DataFrame({"who": [10, 9, 10], "x": [1.0, 2, 3], "y": [0, 1, 0]})
    assert list(clients_from(table, client="who", target="y").names) == ["9", "10"]


@pytest.mark.parametrize(
    ("change", "asked", "message"),
    [
        (
            None,
            {"target": "ill"},
            "a table needs client='...', the column that names the client of each row: it has hosp",
        ),
        (None, {"client": "hospital"}, "a table needs target='...', the column that is to be predicted"),
        (None, {"client": "hospitl", "target": "ill"}, "no column 'hospitl': did you mean 'hospital'"),
        (None, {"client": "hospital", "target": "ill", "features": ["agee"]}, "did you mean 'age'"),
        (None, {"client": "hospital", "target": "ill", "features": "age"}, r"write features=\['age'\]"),
        (None, {"client": "hospital", "target": "ill", "features": []}, "there is no column to predict from"),
        (
            None,
            {"client": "hospital", "target": "ill", "features": ["ill"]},
            "must not include the target",
        ),
        (
            None,
            {"client": "hospital", "target": "ill"},
            r"column 'job' must hold numbers, got .* like 'x': set prepare = 'federated' .an argument of cli",
        ),
        ({"age": ["1", "2", "old", "4", "5", "6"]}, {}, "column 'age' has numbers, and 'old' in row 3: leave"),
        ({"age": [1, None, 3, 4, 5, 6]}, {}, "column 'age' has no value in 1 of 6 rows .row 2.: set prepare = 'fed"),
        ({"hospital": [None] * 6}, {}, "column 'hospital' has no value in any row"),
        ({"age": [1, np.inf, 3, 4, 5, 6]}, {}, "column .age. is infinite in row 2"),
        (
            {"age": [1, 1e300, 3, 4, 5, 6]},
            {},
            "must be finite float32 numbers",
        ),
        ({"age": pd.date_range("2020", periods=6)}, {}, "column 'age' must hold numbers, got datetime64"),
        ({"age": pd.Categorical([1, 2] * 3)}, {}, "column 'age' must hold numbers, got category"),
    ],
)
def test_bad_tables_are_one_sentence(change, asked, message: str) -> None:
    table = frame() if change is None else frame().drop(columns="job").assign(**change)
    asked = asked or {"client": "hospital", "target": "ill"}
    with pytest.raises(SettingError, match=message) as caught:
        clients_from(table, **asked)
    assert "\n" not in str(caught.value)


def test_empty_and_oddly_named_tables() -> None:
    with pytest.raises(SettingError, match="must have at least one row"):
        clients_from(frame()[:0], client="hospital", target="ill", features=["age"])
    with pytest.raises(SettingError, match="column names must be text, got 0"):
        clients_from(pd.DataFrame(np.ones((2, 3))), client="0", target="1")
    twice = pd.DataFrame([["a", 1.0, 2.0, 0]], columns=["who", "x", "x", "y"])
    with pytest.raises(SettingError, match="column 'x' occurs twice"):
        clients_from(twice, client="who", target="y")


good = (np.ones((2, 3)), [0, 1])


class NoLength(Dataset):
    def __getitem__(self, place: int):
        return torch.ones(1), 0


class Pictures(Items):
    def __getitem__(self, place: int):
        return object(), 0


class Ragged(Items):
    def __getitem__(self, place: int):
        return torch.ones(place + 1), 0


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ([], "there must be at least one client, got an empty list"),
        ({}, "there must be at least one client, got an empty dict"),
        (None, "clients must come from a list or dict of .*, got NoneType"),
        ("digits", "clients must come from a list or dict of .*, got str"),
        (np.ones((3, 2)), "clients must come from .*, got ndarray"),
        ([np.ones((3, 2))], r"client '0' must be a pair \(x, y\) or a torch data set of such pairs, got a ndarray"),
        ([(1, 2, 3)], "client '0' must be a pair .*, got 3 values"),
        ([good, (np.ones((2, 3)), [0])], "client '1' has 2 inputs but 1 targets: give each row one of both"),
        ([good, (np.ones((0, 3)), np.zeros(0, dtype=int))], "client '1' has no rows: leave it out"),
        (
            [good, (np.ones((2, 4)), [0, 1])],
            r"float32 rows \[3\] from client '0' and float32 rows \[4\]",
        ),
        ([good, (np.ones((2, 3)), [0.5, 1])], "all clients need targets of one kind, got int64 .* and float32"),
        ([good, (np.ones((2, 3)), ["a", "b"])], "all clients need targets of one kind"),
        (
            [(np.array([[1.0, np.nan]]), [0])],
            "client '0': inputs must be finite float32 numbers, .* in row 1",
        ),
        ([(np.ones((2, 3)), [0.0, np.nan])], "client '0': targets must be finite float32 numbers, .* in row 2"),
        ([(np.array([["a", "b"]]), [0])], "client '0': inputs must be numbers, got text like 'a'"),
        ([(np.array([[1, None]]), [0])], "inputs must be one array of numbers with rows of one shape, got"),
        (
            [([[1.0, 2.0], [3.0]], [0, 1])],
            "inputs must be one array of numbers .* got ragged rows",
        ),
        ([(np.ones(3), [0, 1, 0])], r"inputs must be \[n, features\] or larger, got \[3\]: reshape them to \[3, 1\]"),
        ([(1.0, [0])], "must have one row for each example"),
        ([(np.ones((1, 1), dtype=complex), [0])], "must be one array of numbers .* got complex128"),
        ([(np.ones((2, 3)), [-1, 1])], "client '0': class numbers must be at least 0, got -1"),
        ([(np.zeros((2, 8, 8, 3), dtype=np.uint8), [0, 1])], r"images must be \[n, channels, height, width\]"),
        ([(np.zeros((2, 9, 8, 8, 1), dtype=np.uint8), [0, 1])], r"images must be \[n, channels, \.\.\.\]"),
        ([NoLength()], "client '0' is a NoLength without a length"),
        ([Pictures()], "inputs must be tensors or arrays, got object: give the data set a transform"),
        ([Ragged()], "got ragged rows: .*, or set collate = 'pad'"),
        ([Subset(Items(), [])], "client '0' has no rows: leave it out"),
    ],
)
def test_bad_clients_are_one_sentence(source, message: str) -> None:
    with pytest.raises(SettingError, match=message) as caught:
        clients_from(source)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"client": "who"}, "client names columns of a table, and these rows are arrays: leave client out"),
        ({"features": ["a"]}, "features names columns of a table"),
        ({"test": 1}, "test must be a finite number of at least 0 and below 1"),
        ({"validation": -0.1}, "validation must be a finite number of at least 0"),
        ({"names": ["a", "b"]}, "names must give one name to each of the 1 clients, got 2"),
        ({"classes": ["a"]}, "class numbers must be below 1, got 1: name every class"),
    ],
)
def test_bad_settings(settings, message: str) -> None:
    with pytest.raises(SettingError, match=message):
        clients_from([good], **settings)


@pytest.mark.full
def test_heavy_packages_are_not_imported() -> None:
    code = (
        "import sys, piebald.data.partition, piebald.data, piebald.models, numpy\n"
        "piebald.data.partition.clients_from([(numpy.ones((2, 1)), [0, 1])])\n"
        "print([name for name in ('sklearn', 'pandas', 'datasets', 'scipy') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("name", ["table.csv", "table.csv.gz", "table.tsv", "table.parquet"])
def test_tables_in_files(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    if name.endswith("parquet"):
        pytest.importorskip("pyarrow")
        frame().to_parquet(path)
    else:
        frame().to_csv(path, sep="\t" if "tsv" in name else ",", index=False)
    asked = {"client": "hospital", "target": "ill", "features": ["dose", "age"], "test": 0.0}
    for source in (path, str(path)):
        clients, expected = clients_from(source, prepare="none", **asked), clients_from(frame(), **asked)
        assert list(clients.names) == ["a", "b"]
        assert torch.equal(clients.x, expected.x)
        assert torch.equal(clients.y, expected.y)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("gone.csv", None, "there is no file .*gone.csv: give the path of a CSV or Parquet file"),
        ("empty.csv", b"", "has no first line with the names of its columns"),
        ("cut.csv.gz", b"\x1f\x8b\x08", "cannot be read as a table"),
        ("cut.parquet", b"PAR1 and no more", "cannot be read as a table"),
        ("no.csv", b"a,b\n1,2\n", "no column 'who'"),
    ],
)
def test_bad_files_are_one_sentence(tmp_path: Path, name: str, content: bytes | None, message: str) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(SettingError, match=message) as caught:
        clients_from(tmp_path / name, client="who", target="b")
    assert "\n" not in str(caught.value)


def test_parquet_without_pyarrow_names_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "t.parquet").write_bytes(b"PAR1")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(SettingError, match="needs pyarrow: pip install pyarrow"):
        clients_from(tmp_path / "t.parquet", client="a", target="b")


@pytest.mark.full
def test_tokens_stay_whole_numbers_and_can_be_embedded() -> None:
    rng = np.random.default_rng(0)
    texts = [(rng.integers(0, 50, (12, 7)), rng.integers(0, 2, 12)) for _ in range(3)]
    clients = clients_from(texts, tokens=True, common=(texts[0][0], texts[0][1]))
    assert clients.rows(0, "train").x.dtype == torch.int64
    assert clients.common.x.dtype == torch.int64
    model = torch.nn.Sequential(torch.nn.Embedding(50, 4), torch.nn.Flatten(), torch.nn.Linear(28, 2))
    losses = []
    for engine in ("reference", "sequential", "vmapped"):
        run = piebald.run("fedavg", clients, model, rounds=2, runtime=Simulator(engine=engine))
        losses.append([row["loss"] for row in run.rounds])
    np.testing.assert_allclose(losses[1:], [losses[0]] * 2, rtol=1e-4)
    lazy = piebald.LazyClients(3, lambda client: texts[client], classes=["0", "1"], tokens=True)
    assert lazy.rows(1, "train").x.dtype == torch.int64
    table = pd.DataFrame({"who": ["a", "b"], "w1": [3, 1], "w2": [0, 2], "y": [0, 1]})
    rows = clients_from(table, client="who", target="y", tokens=True, test=0.0).rows(0, "train")
    assert (rows.x.dtype, rows.x.tolist()) == (torch.int64, [[3, 0]])


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (np.ones((2, 3)), "tokens must be whole numbers of at least 0, got float64 numbers: number tokens from 0"),
        (np.array([[0, -1]]), "client '0': tokens must be whole numbers of at least 0, got -1"),
    ],
)
def test_what_is_no_token_is_refused(x, message: str) -> None:
    with pytest.raises(SettingError, match=message):
        clients_from([(x, [0] * len(x))], tokens=True)


def test_names_that_are_alike_are_refused() -> None:
    for source, names in (([good, good], ["a", "a"]), ({1: good, "1": good}, None)):
        with pytest.raises(SettingError, match=r"clients must have different names, got '[a1]' twice: rename one"):
            clients_from(source, names=names)


@pytest.mark.parametrize("make", [np.asarray, torch.tensor])
def test_a_single_pair_is_told_from_a_list_of_clients(make) -> None:
    for pair in ((make([[1.0], [2.0]]), make([0, 1])), [make([[1.0], [2.0]]), make([0, 1])]):
        with pytest.raises(SettingError, match=r"got one pair \(x, y\).*pass a list of pairs, like \[\(x, y\)\]"):
            clients_from(pair)


def test_several_files_are_one_table(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    table = pd.DataFrame({"who": ["a", "b"] * 6, "age": range(12), "ill": [0, 1, 1, 0] * 3})
    for number, part in enumerate((table[:4], table[4:])):
        columns = ["ill", "who", "age"] if number else ["who", "age", "ill"]
        part[columns].to_csv(tmp_path / f"rows-{number}.csv", index=False)
    table.to_csv(tmp_path / "whole.csv", index=False)
    one, several = (
        clients_from(tmp_path / name, client="who", target="ill", prepare="none")
        for name in ("whole.csv", "rows-*.csv")
    )
    assert torch.equal(one.rows(1, "train").x, several.rows(1, "train").x)  # type: ignore[arg-type]
    table.rename(columns={"age": "years"}).to_csv(tmp_path / "rows-2.csv", index=False)
    clients_from(tmp_path / "rows-*.csv", client="who", target="ill")
    for file, column in (("rows-0.csv", "years"), ("rows-1.csv", "years"), ("rows-2.csv", "age")):
        assert f"{tmp_path / file} has no column {column!r}, which others have: its rows count as gaps" in caplog.text
    with pytest.raises(SettingError, match="no file is called like"):
        clients_from(tmp_path / "none-*.csv", client="who", target="ill")


def test_files_of_one_folder_and_of_several_kinds_are_clients(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Each hospital sends a file of its own name, one of them from a spreadsheet that is still open."""
    pytest.importorskip("openpyxl")
    table = pd.DataFrame({"age": range(12), "ill": [0, 1, 1, 0] * 3})
    table[:4].to_csv(tmp_path / "graz.csv", index=False)
    table[4:8].to_csv(tmp_path / "lyon.tsv.gz", sep="\t", index=False)
    table[8:].to_excel(tmp_path / "oslo.xlsx", index=False)
    for other in ("~$oslo.xlsx", ".graz.csv", "readme.txt"):
        (tmp_path / other).write_bytes(b"\0")
    asked = {"target": "ill", "prepare": "none"}
    found = clients_from(tmp_path / "*.*", client="site", **asked)
    assert found.names == ["graz", "lyon", "oslo"]
    assert [sorted(everything(found, client)[0].flatten().tolist()) for client in range(3)] == [
        [0.0, 1.0, 2.0, 3.0], [4.0, 5.0, 6.0, 7.0], [8.0, 9.0, 10.0, 11.0],
    ]  # fmt: skip
    assert "no file has a column 'site': each file is one of its own, by its name" in caplog.text
    assert "files that are no tables are left out: readme.txt" in caplog.text
    table.assign(clinical=1).to_csv(tmp_path / "graz.csv", index=False)
    table.assign(clinical=2).to_csv(tmp_path / "wien.csv", index=False)
    assert "wien" in clients_from(tmp_path / "*.csv", client="clinic", **asked).names
    table[:4].to_csv(tmp_path / "graz.csv", index=False)
    table.assign(hospital="x").to_csv(tmp_path / "wien.csv", index=False)
    with pytest.raises(SettingError, match=r"no column 'hospitals': did you mean 'hospital'\?"):
        clients_from(tmp_path / "*.csv", client="hospitals", **asked)
    with pytest.raises(SettingError, match=r"have a column 'hospital' and graz\.csv has none"):
        clients_from(tmp_path / "*.csv", client="hospital", **asked)
    (tmp_path / "wien.csv").unlink()
    table.to_csv(tmp_path / "oslo.csv", index=False)
    with pytest.raises(SettingError, match=r"oslo\.csv and oslo\.xlsx are both of 'oslo'"):
        clients_from(tmp_path / "oslo.*", client="site", **asked)


def test_no_client_has_the_name_of_a_hidden_folder_or_of_a_file_beside_folders(tmp_path: Path) -> None:
    table, asked = pd.DataFrame({"age": range(4), "ill": [0, 1, 1, 0]}), {"target": "ill", "prepare": "none"}
    for folder in ("graz", "lyon", ".ipynb_checkpoints"):
        (tmp_path / folder).mkdir()
        table = table.rename(columns={"age": "sites"})  # no slip of the folders' word
        table.to_csv(tmp_path / folder / "rows.csv", index=False)
    for pattern in ("*/rows.csv", "*/*.*", "**/rows.csv"):
        assert clients_from(tmp_path / pattern, client="site", **asked).names == ["graz", "lyon"]
    table.to_csv(tmp_path / "rows.csv", index=False)
    with pytest.raises(SettingError, match=r"rows\.csv is in no folder, and others of .* are"):
        clients_from(tmp_path / "**" / "rows.csv", client="site", **asked)


def test_a_file_whose_name_ends_as_a_pattern_does_is_no_table(tmp_path: Path) -> None:
    (tmp_path / "rows.*").write_text("age,ill\n1,0\n")
    with pytest.raises(SettingError, match="a table must be a"):
        clients_from(tmp_path / "rows.*", target="ill")


def test_one_class_stands_against_the_rest() -> None:
    """Two classes, as in CGAU's first experiment; the rows are the same."""
    whole, two = DataSource(name="digits").load(), DataSource(name="digits", positive="3").load()
    assert list(two.classes) == ["not 3", "3"]
    assert two.y.tolist() == [int(label == 3) for label in whole.y.tolist()]
    assert torch.equal(two.x, whole.x)


def test_clients_and_a_mapping_of_tables_are_read_as_a_table_of_all_is() -> None:
    """A function of an experiment file may give each client's rows apart."""
    table = pandas.DataFrame({"a": np.arange(12.0), "ill": ["x", "y", "z"] * 4, "ward": ["n", "s"] * 6})
    apart = {name: rows.drop(columns="ward") for name, rows in table.groupby("ward")}
    pairs = {name: (rows[["a"]].to_numpy(), rows.ill.tolist()) for name, rows in apart.items()}
    for value, more in ((apart, {"target": "ill"}), (pairs, {})):
        found = clients_of(DataSource(source="my_data.py:load", positive="y", **more).rows_of(value))
        assert found.classes == ["not y", "y"]
        assert found.names == ["n", "s"]
        held = [found.rows(client, split) for client in range(2) for split in ("train", "test")]
        got = {x: y for rows in held for x, y in zip(rows.x[:, 0].tolist(), rows.y.tolist(), strict=True)}
        assert got == {x: int(word == "y") for x, word in zip(table.a, table.ill, strict=True)}


@pytest.mark.parametrize(
    ("source", "value", "message"),
    [
        ({"name": "digits", "positive": "ten"}, None, "there is no class 'ten'"),
        ({"source": "rows.npz", "positive": "a"}, (np.ones((3, 2)), np.array([0.5, 1.5, 2.5])), "remove positive"),
    ],
)
def test_a_class_that_is_not_there_stands_against_nothing(source: dict, value: object, message: str) -> None:
    made = DataSource(**source)
    with pytest.raises(SettingError, match=message):
        made.load() if value is None else made.rows_of(value)
