"""Hugging Face data sets, made in memory."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from piebald.errors import SettingError
from piebald.partition import clients_from

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
        ({"x": [[1.0], [2.0], [4.0]]}, {}, "column 'x' holds arrays, so it must be the only input"),
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
