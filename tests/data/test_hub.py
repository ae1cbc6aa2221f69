"""Hugging Face data sets, made in memory."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from piebald.core.errors import SettingError
from piebald.data.partition import clients_from

datasets = pytest.importorskip("datasets")

COLUMNS = {"who": ["b", "a", "b"], "x": [1.0, 2.0, 3.0], "z": [4, 5, 6], "y": [1, 0, 1]}


def test_numeric_columns() -> None:
    clients = clients_from(datasets.Dataset.from_dict(COLUMNS), client="who", target="y", test=0.0)
    assert list(clients.names) == ["a", "b"]
    assert clients.rows(1, "train").x.tolist() == [[1, 4], [3, 6]]
    assert clients.rows(1, "train").y.tolist() == [1, 1]


def test_class_labels_keep_their_names() -> None:
    features = datasets.Features(
        {
            "who": datasets.Value("int32"),
            "x": datasets.List(datasets.Value("float32"), length=2),
            "y": datasets.ClassLabel(names=["no", "yes", "maybe"]),
        }
    )
    rows = {"who": [7, 3, 7], "x": [[1, 2], [3, 4], [5, 6]], "y": ["yes", "no", "yes"]}
    clients = clients_from(datasets.Dataset.from_dict(rows, features), client="who", target="y", test=0.0)
    assert list(clients.classes) == ["no", "yes", "maybe"]
    assert list(clients.names) == ["3", "7"]
    assert clients.rows(1, "train").x.tolist() == [[1, 2], [5, 6]]


@pytest.mark.parametrize("colours", [1, 3])
def test_images(colours: int) -> None:
    pytest.importorskip("PIL")
    image = np.zeros((6, 5, 3), dtype=np.uint8)
    image[0, 0] = 255
    features = datasets.Features(
        {"image": datasets.Image(), "who": datasets.Value("string"), "y": datasets.Value("int64")}
    )
    pictures = [image if colours == 3 else image[..., 0]] * 2
    rows = datasets.Dataset.from_dict({"image": pictures, "who": ["a", "b"], "y": [0, 1]}, features)
    x = clients_from(rows, client="who", target="y").rows(0, "train").x
    assert x.shape == (1, colours, 6, 5)
    assert x.dtype == torch.float32
    assert x[0, :, 0, 0].tolist() == [1.0] * colours
    assert x.sum() == colours


def test_arrays_of_small_integers_are_images() -> None:
    features = datasets.Features(
        {"x": datasets.Array2D((2, 2), "uint8"), "who": datasets.Value("string"), "y": datasets.Value("int64")}
    )
    rows = datasets.Dataset.from_dict({"x": [[[0, 255], [51, 0]]] * 2, "who": ["a", "b"], "y": [0, 1]}, features)
    x = clients_from(rows, client="who", target="y").rows(0, "train").x
    assert torch.equal(x, torch.tensor([[[[0, 1], [0.2, 0]]]]))


@pytest.mark.parametrize(
    ("columns", "asked", "message"),
    [
        ({}, {"client": "whom"}, "no column 'whom': did you mean 'who'"),
        ({"x": ["p", "q", "r"]}, {}, "column 'x' must hold numbers or arrays of one shape, got .*string"),
        ({"x": [[1.0], [2.0, 3.0], [4.0]]}, {}, "column 'x'"),
        ({"x": [1.0, None, 3.0]}, {}, "must be finite|must hold numbers"),
        ({"who": ["a", None, "b"]}, {}, "column 'who' has no value in 1 of 3 rows"),
        ({"y": ["a", None, "b"]}, {}, "column 'y' has no value in 1 of 3 rows"),
    ],
)
def test_bad_columns_are_one_sentence(columns, asked, message: str) -> None:
    with pytest.raises(SettingError, match=message) as caught:
        clients_from(datasets.Dataset.from_dict(COLUMNS | columns), **({"client": "who", "target": "y"} | asked))
    assert "\n" not in str(caught.value)


def test_all_splits_and_streams_are_refused() -> None:
    one = datasets.Dataset.from_dict(COLUMNS)
    with pytest.raises(SettingError, match=r"pass one split of the data set, like dataset\['test'\]"):
        clients_from(datasets.DatasetDict({"test": one}), client="who", target="y")
    with pytest.raises(SettingError, match=r"a streamed data set .* load it without streaming=True"):
        clients_from(one.to_iterable_dataset(), client="who", target="y")


class Partitioner:
    """What Piebald uses of a flwr-datasets partitioner: a number of partitions, and each as a data set."""

    def __init__(self, parts: list, ids: dict[int, str] | None = None) -> None:
        self.parts, self.partition_id_to_natural_id = parts, ids

    @property
    def num_partitions(self) -> int:
        return len(self.parts)

    def load_partition(self, number: int):
        return self.parts[number]


Partitioner.__module__ = "flwr_datasets.partitioner"  # by which it is known, without an import


def test_partitions_of_flwr_datasets_become_clients() -> None:
    first = datasets.Dataset.from_dict({"x": [[1.0, 2.0], [3.0, 4.0]], "y": [0, 1]})
    none, last = first.select([]), datasets.Dataset.from_dict({"x": [[5.0, 6.0]], "y": [1]})
    clients = clients_from(Partitioner([first, none, last]), target="y", test=0.0)
    assert clients.names == ["0", "2"]
    assert clients.rows(0, "train").x.tolist() == [[1, 2], [3, 4]]
    assert clients.rows(1, "train").y.tolist() == [1]
    named = clients_from(Partitioner([first, last], {0: "ann", 1: "bob"}), target="y", test=0.0)
    assert named.names == ["ann", "bob"]
    for source, more, message in (
        (Partitioner([none]), {"target": "y"}, "must have at least one row, got none"),
        (Partitioner([first]), {}, "a table needs target='...'"),
        (Partitioner([first]), {"target": "y", "client": "x"}, "the partitioner assigns rows to clients"),
    ):
        with pytest.raises(SettingError, match=message):
            clients_from(source, **more)


def test_the_real_partitioners() -> None:
    real = pytest.importorskip("flwr_datasets.partitioner", reason="flwr-datasets is not installed")
    rng = np.random.default_rng(0)
    columns = {"x": rng.random((60, 3)).tolist(), "y": [n % 3 for n in range(60)], "who": list("abc") * 20}
    rows = datasets.Dataset.from_dict(columns)
    for partitioner, count in (
        (real.IidPartitioner(5), 5),
        (real.DirichletPartitioner(4, "y", alpha=0.5, min_partition_size=1), 4),
        (real.NaturalIdPartitioner("who"), 3),
    ):
        with pytest.raises(SettingError, match="has no data set yet"):
            clients_from(partitioner, target="y", features=["x"])
        partitioner.dataset = rows
        clients = clients_from(partitioner, target="y", features=["x"], test=0.0)
        assert len(clients) == count
        assert sorted(clients.x[:, 0].tolist()) == pytest.approx(sorted(row[0] for row in columns["x"]))
        for client in range(count):
            assert clients.size(client, "train") == len(partitioner.load_partition(client))
    assert clients.names == ["a", "b", "c"]
