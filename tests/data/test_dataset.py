from __future__ import annotations

import os

import numpy as np
import pandas
import pytest
import torch

from piebald import data, partition
from piebald.core.errors import SettingError
from piebald.data.sets.dataset import DataSet, Owners
from piebald.data.sets.traffic import scale_sizes

prepared = pytest.mark.skipif(
    "PIEBALD_DATA" not in os.environ, reason="PIEBALD_DATA is not set: set it to the folder of prepared data sets"
)


def test_digits_are_always_there() -> None:
    digits = data.load("digits")
    assert digits.x.shape == (1797, 1, 8, 8)
    assert digits.x.dtype == torch.float32
    assert float(digits.x.min()) == 0
    assert float(digits.x.max()) == 1
    assert digits.y.dtype == torch.int64
    assert np.bincount(digits.y).tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]
    assert digits.input_shape == (1, 8, 8)


def test_breast_cancer_is_always_there_and_standardised() -> None:
    table = data.load("breast_cancer")
    assert table.x.shape == (569, 30)
    assert table.features is not None
    assert len(set(table.features)) == 30
    assert np.bincount(table.y).tolist() == [357, 212]
    np.testing.assert_allclose(table.x.mean(0), 0, atol=1e-5)
    np.testing.assert_allclose(table.x.std(0, correction=0), 1, atol=1e-5)


def test_names_and_nearest_name() -> None:
    assert data.names() == sorted(data.names())
    assert {"digits", "har", "cifar10", "census"} <= set(data.names())
    with pytest.raises(SettingError, match="there is no data set 'digit': did you mean 'digits'"):
        data.load("digit")


@pytest.mark.parametrize("name", ["office_caltech10", "traffic"])
def test_unset_variable_says_what_to_do(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PIEBALD_DATA", raising=False)
    with pytest.raises(SettingError, match="needs PIEBALD_DATA, which is not set: put the file in a folder"):
        data.load(name)


def test_missing_file_says_where_to_put_it(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIEBALD_DATA", str(tmp_path))
    with pytest.raises(SettingError, match=r"there is no file .*fgnet_traffic.npz: put fgnet_traffic.npz there"):
        data.traffic()


@pytest.mark.parametrize("content", [b"", b"not a zip", b"PK\x03\x04 cut off"])
def test_damaged_file_is_one_sentence(content: bytes, tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIEBALD_DATA", str(tmp_path))
    (tmp_path / "har").mkdir()
    (tmp_path / "har" / "har_inertial.npz").write_bytes(content)
    with pytest.raises(SettingError, match="cannot be read as npz, it may be damaged: replace it"):
        data.har()


def test_single_array_instead_of_npz(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIEBALD_DATA", str(tmp_path))
    (tmp_path / "har").mkdir()
    with (tmp_path / "har" / "har_inertial.npz").open("wb") as file:
        np.save(file, np.zeros(3))
    with pytest.raises(SettingError, match="cannot be read as npz"):
        data.har()


def test_file_without_an_array_and_pickled_arrays_are_refused(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIEBALD_DATA", str(tmp_path))
    (tmp_path / "har").mkdir()
    path = tmp_path / "har" / "har_inertial.npz"
    np.savez(path, X=np.zeros((2, 9, 128)))
    with pytest.raises(SettingError, match="must hold an array 'y', got X: replace the file"):
        data.har()
    names = ("X", "y", "subject", "segment", "official_test", "activities")
    np.savez(path, **{name: np.array([{"an": "object"}], dtype=object) for name in names})
    with pytest.raises(SettingError, match="cannot be read as npz"):
        data.har()


@prepared
def test_mnist_writers_as_published() -> None:
    mnist = data.mnist_writers()
    assert mnist.x.shape == (70_000, 1, 28, 28)
    assert mnist.x.dtype == torch.uint8
    assert mnist.y[:10].tolist() == [5, 0, 4, 1, 9, 2, 1, 3, 1, 4]
    assert mnist.y[mnist.test][:10].tolist() == [7, 2, 1, 0, 4, 1, 4, 9, 5, 9]
    counts = [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]
    assert np.bincount(mnist.y[mnist.train]).tolist() == counts
    writer = mnist.owners["writer"].codes
    assert len(np.unique(writer[mnist.train])) == 539
    assert len(np.unique(writer[mnist.test])) == 297
    assert not set(writer[mnist.train]) & set(writer[mnist.test])
    population = mnist.owners["population"]
    assert population.names == ["census employees", "high-school students"]
    assert np.bincount(population.codes[mnist.train]).tolist() == [30_950, 29_050]


@prepared
def test_traffic_as_published() -> None:
    traffic = data.traffic()
    assert traffic.x.shape == (52_356, 1, 30)
    assert traffic.x.dtype == torch.float32
    assert len(traffic.classes) == 53
    assert traffic.owners["capture"].names == ["D1", "D2"]
    assert np.bincount(traffic.owners["capture"].codes).tolist() == [26_239, 26_117]
    assert len(traffic.owners["version"].names) == 74
    traces = len(traffic.owners["trace"].names)
    crossed = np.unique(traffic.owners["trace"].codes * 2 + traffic.owners["capture"].codes)
    assert len(crossed) == traces  # a session is in one capture


@prepared
def test_har_as_published() -> None:
    har = data.har()
    assert har.x.shape == (10_299, 9, 128)
    assert np.bincount(har.y[har.train]).tolist() == [1226, 1073, 986, 1286, 1374, 1407]
    assert np.bincount(har.y[har.test]).tolist() == [496, 471, 420, 491, 532, 537]
    subjects = har.owners["subject"]
    tested = [subjects.names[code] for code in np.unique(subjects.codes[har.test])]
    assert tested == ["2", "4", "9", "10", "12", "13", "18", "20", "24"]
    assert len(har.owners["segment"].names) == 857


def test_scaled_sizes() -> None:
    sizes = scale_sizes(np.array([0, 1500, -1500, 32_000, -1], dtype=np.int16))
    assert sizes.dtype == np.float32
    np.testing.assert_allclose(sizes, [0, 1, -1, np.log(32_001) / np.log(1501), -np.log(2) / np.log(1501)], rtol=1e-6)


def test_owners_are_numbered_in_order() -> None:
    owners = Owners.of(np.array([7, 3, 7]), {3: "c", 7: "g"})
    assert owners.codes.tolist() == [1, 0, 1]
    assert owners.names == ["c", "g"]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"y": torch.zeros(3, dtype=torch.int64)}, "y must have one entry for each of the 4 rows, got 3"),
        ({"owners": {"who": Owners.of(np.zeros(5))}}, "who must have one entry for each of the 4 rows, got 5"),
        ({"groups": np.zeros(2, dtype=np.int64)}, "groups must have one entry"),
        ({"y": torch.tensor([0, 1, 2, 0])}, "class numbers must be in 0..1, got 0..2"),
        ({"test": np.array([1])}, "a test part needs a train part"),
        ({"train": np.array([0, 1]), "test": np.array([1])}, "train and test must be different rows"),
        ({"train": np.array([0, 4])}, "train and test must be different rows out of 0..3"),
        ({"train": np.array(3)}, "train and test must be row numbers"),
        ({"train": np.array([0, 1]), "test": np.array([[2], [3]])}, "train and test must be row numbers"),
        ({"x": ()}, "x and y must hold tensors, got an empty tuple"),
    ],
)
def test_data_sets_that_do_not_fit_together(fields, message: str) -> None:
    sound = {"name": "own", "x": torch.zeros(4, 1), "y": torch.zeros(4, dtype=torch.int64), "classes": ["a", "b"]}
    with pytest.raises(SettingError, match=message):
        DataSet(**(sound | fields))


@pytest.mark.parametrize(
    ("given", "names"),
    [
        (["b", "a", "b", "a"], ["a", "b"]),
        (("b", "a", "b", "a"), ["a", "b"]),
        (np.array(["b", "a"] * 2, dtype=object), ["a", "b"]),
        (torch.tensor([10, 9, 10, 9]), ["9", "10"]),
        ([np.int64(10), 9, 10, 9], ["9", "10"]),
        ([True, False] * 2, ["False", "True"]),
        (pandas.Series(["b", "a"] * 2, dtype="category"), ["a", "b"]),
        (Owners(np.array([1, 0, 1, 0]), ["x", "y"]), ["x", "y"]),
    ],
)
def test_owners_of_rows_are_names_or_numbers(given, names: list[str]) -> None:
    made = DataSet("own", torch.zeros(4, 1), torch.zeros(4), owners={"ward": given})
    assert made.owners["ward"].names == names
    assert made.owners["ward"].codes.tolist() == [1, 0, 1, 0]
    clients = partition.ByOwner(owner="ward").split(made)
    assert list(clients.names) == names


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([1.5, 2.0, 1.5, 2.0], "owners 'ward' must be Owners, or the name or number of each row's owner"),
        (["a", float("nan"), "a", "b"], "owners 'ward' must be Owners, .* nan, "),
        (["a", None, "a", "b"], "owners 'ward' must be Owners"),
        (["a", 1, "a", 1], "owners 'ward' must be Owners"),
        ([["a"], ["a", "b"], [], []], "owners 'ward' must be Owners"),
        (np.zeros((4, 2), dtype=np.int64), "owners 'ward' must be Owners"),
        (np.zeros(4, dtype="datetime64[D]"), "owners 'ward' must be Owners"),
        ("abab", "owners 'ward' must be Owners, .* got 'abab'"),
        (None, "owners 'ward' must be Owners, .* got None"),
        (["a", "b"], "ward must have one entry for each of the 4 rows, got 2"),
    ],
)
def test_other_owners_are_refused_in_a_sentence(given, message: str) -> None:
    with pytest.raises(SettingError, match=message) as raised:
        DataSet("own", torch.zeros(4, 1), torch.zeros(4), owners={"ward": given})
    assert "\n" not in str(raised.value)
    with pytest.raises(SettingError, match="owners must be a mapping from kinds to the owner of each row, like"):
        DataSet("own", torch.zeros(4, 1), torch.zeros(4), owners=given)
    with pytest.raises(SettingError, match=r"codes of owners must be in 0\.\.1, since there are 2 names, got 0\.\.2"):
        Owners(np.array([0, 2]), ["a", "b"])
