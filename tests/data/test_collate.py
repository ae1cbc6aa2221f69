"""Rows of unequal length: the rule "pad" fills them up and makes masks, and changes no loss."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

import piebald
from piebald.core import pytree
from piebald.core.errors import SettingError
from piebald.data.clients.data_source import RunRows
from piebald.data.partition import LazyClients, Sites, TorchClients, clients_from
from piebald.federation.site.site_rows import SiteSource, own_rows

TEXTS = {
    "a": [[1, 2, 3], [4, 5], [6]],
    "b": [[1, 2, 3, 4, 5], [2, 3]],
}


def labelled(texts: list[list[int]]) -> tuple[list[list[int]], list[int]]:
    return texts, [len(text) % 2 for text in texts]


def test_sequences_are_filled_up_to_the_longest_of_all_clients_with_a_mask() -> None:
    made = clients_from({name: labelled(texts) for name, texts in TEXTS.items()}, test=0, collate="pad")
    rows = made.rows(0, "train")
    assert isinstance(rows.x, dict)
    assert rows.x["input_ids"].tolist() == [[1, 2, 3, 0, 0], [4, 5, 0, 0, 0], [6, 0, 0, 0, 0]]
    assert rows.x["attention_mask"].sum(1).tolist() == [3, 2, 1]
    assert isinstance(rows.y, Tensor)
    longer = clients_from({name: labelled(texts) for name, texts in TEXTS.items()}, test=0, collate="pad", length=9)
    assert longer.rows(0, "train").x["input_ids"].shape == (3, 9)  # type: ignore[call-overload, index]


def test_masks_and_targets_follow_the_names_of_hugging_face() -> None:
    x = {
        "input_ids": [[1, 2], [3]],
        "token_type_ids": [[0, 1], [0]],
        "decoder_input_ids": [[7], [8, 9, 10]],
        "features": np.ones((2, 4)),
        "labels": [[5], [6, 7]],
    }
    made = clients_from({"a": (x, [[5], [6, 7]])}, test=0, collate="pad").rows(0, "train")
    assert list(made.x) == [*x, "attention_mask", "decoder_attention_mask"]  # type: ignore[arg-type]
    assert made.x["decoder_attention_mask"].tolist() == [[1, 0, 0], [1, 1, 1]]  # type: ignore[call-overload, index]
    assert made.x["labels"].tolist() == [[5, -100], [6, 7]]  # type: ignore[call-overload, index]
    assert made.x["features"].dtype == torch.float32  # type: ignore[call-overload, index]
    assert made.y.tolist() == [[5, -100], [6, 7]]  # type: ignore[union-attr]
    given = {"input_ids": [[1, 2], [3]], "attention_mask": [[1, 0], [1]]}  # a mask of the user's own stays
    kept = clients_from({"a": (given, [0, 1])}, test=0, collate="pad").rows(0, "train")
    assert kept.x["attention_mask"].tolist() == [[1, 0], [1, 0]]  # type: ignore[call-overload, index]
    heard = clients_from({"a": ([np.ones((2, 3)), np.ones((4, 3))], [0, 1])}, test=0, collate="pad").rows(0, "train")
    assert heard.x["input_values"].shape == (2, 4, 3)  # type: ignore[call-overload, index]


class Masked(nn.Module):
    """Scores of a text: the mean of its words', and the next word's from the one before."""

    def __init__(self, tokens: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens, self.words, self.head = tokens, nn.Embedding(12, 4), nn.Linear(4, 12 if tokens else 2)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        found, mask = self.words(input_ids), attention_mask.unsqueeze(2)
        scores: Tensor = self.head(found if self.tokens else (found * mask).sum(1) / mask.sum(1))
        return scores


@pytest.mark.parametrize("loss", ["classification", "language_modelling"])
def test_padding_changes_no_loss_and_no_model(loss: str) -> None:
    runs = []
    for length in (5, 11):
        sequential = loss == "language_modelling"
        given = {name: (texts, texts) if sequential else labelled(texts) for name, texts in TEXTS.items()}
        made = clients_from(given, test=0.4, collate="pad", length=length)
        runtime = {"kind": "simulator", "engine": "sequential", "workers": 0}
        runs.append(piebald.run("fedavg", made, Masked(sequential), rounds=2, loss=loss, runtime=runtime))
    torch.testing.assert_close(*(run.work.layout.flatten(run.model()) for run in runs))
    for one, two in zip(runs[0].scores, runs[1].scores, strict=True):
        assert one["value"] == (None if two["value"] is None else pytest.approx(two["value"], rel=1e-5))


class Items(Dataset[Any]):
    def __init__(self, items: list[Any]) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, place: int) -> Any:
        return self.items[place]


def test_items_of_a_torch_data_set_may_be_dicts_of_unequal_length() -> None:
    items = [({"input_ids": torch.tensor(text)}, len(text) % 2) for text in TEXTS["a"]]
    made = clients_from({"a": Items(items)}, test=0, collate="pad").rows(0, "train")
    expected = clients_from({"a": labelled(TEXTS["a"])}, test=0, collate="pad").rows(0, "train")
    assert torch.equal(made.x["input_ids"], expected.x["input_ids"])  # type: ignore[call-overload, index]
    assert torch.equal(made.x["attention_mask"], expected.x["attention_mask"])  # type: ignore[call-overload, index]


def test_clients_that_are_loaded_one_by_one_agree_by_their_length() -> None:
    lazy = LazyClients(2, lambda client: labelled(TEXTS["ab"[client]]), test=0.0, collate="pad", length=6)
    shapes = {lazy.rows(client, "train").x["input_ids"].shape[1] for client in range(2)}  # type: ignore[call-overload, index]
    assert shapes == {6}


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: clients_from({"a": labelled(TEXTS["a"])}), "ragged rows: stack or pad the rows"),
        (lambda: clients_from({"a": labelled(TEXTS["a"])}, collate="fold"), "collate"),
        (lambda: clients_from({"a": labelled(TEXTS["a"])}, length=4), "leave it out, or set collate = 'pad'"),
        (lambda: clients_from({"a": labelled(TEXTS["a"])}, collate="pad", length=2), "of at most length = 2, got one"),
        (
            lambda: clients_from({"a": ((TEXTS["a"], [[1.0]] * 3), [0, 1, 0])}, collate="pad"),
            "give a dict, not a tuple",
        ),
        (
            lambda: clients_from({"a": ([np.ones((2, 3)), np.ones((2, 4))], [0, 1])}, collate="pad"),
            "must be alike in all but their length",
        ),
        (lambda: LazyClients(1, lambda _: TEXTS, collate="pad"), "give both, or none"),
    ],
)
def test_what_cannot_be_padded_is_refused_in_one_sentence(make: Any, words: str) -> None:
    with pytest.raises(SettingError, match=words) as refused:
        make()
    assert "\n" not in str(refused.value)


def test_sites_agree_on_named_inputs_before_they_load_their_rows(tmp_path: Path) -> None:
    shapes = {"input_ids": [6], "attention_mask": [6]}
    agreed = Sites(
        clients=["a"], inputs=shapes, tokens=list(shapes), classes=[str(n) for n in range(12)], places=6
    ).clients_elsewhere()
    (tmp_path / "mine.py").write_text(f"def load():\n    return {TEXTS['a']}, {TEXTS['a']}\n")
    source = SiteSource(source="mine.py:load", collate="pad", length=6)
    rows = own_rows(source, tmp_path, "a", RunRows(agreed.classes), ["a"]).rows(0, "train")
    blank = agreed.rows(0, "train")
    assert pytree.kinds(rows.x) == pytree.kinds(blank.x)
    assert pytree.kinds(rows.y) == pytree.kinds(blank.y)
    with pytest.raises(SettingError, match="tokens must be among the inputs input_ids, attention_mask, got 'ids'"):
        Sites(clients=["a"], inputs=shapes, tokens=["ids"])
    with pytest.raises(SettingError, match="tokens must be a list of names where inputs have names"):
        Sites(clients=["a"], inputs=shapes, tokens=True)


def test_array_columns_of_a_hugging_face_data_set_are_inputs_by_name() -> None:
    datasets = pytest.importorskip("datasets")
    table = {"who": ["a", "a", "b"], "input_ids": [[1, 2], [3, 4], [5, 6]], "age": [1.0, 2.0, 3.0], "label": [0, 1, 0]}
    made = clients_from(datasets.Dataset.from_dict(table), client="who", target="label", test=0)
    rows = made.rows(0, "train")
    assert pytree.kinds(rows.x) == [("input_ids", (2,), torch.int64), ("age", (), torch.float32)]


class Counting(Dataset[Any]):
    """Items that note that they were read."""

    def __init__(self, count: int) -> None:
        self.count, self.read = count, set[int]()

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, place: int) -> tuple[Tensor, int]:
        if not 0 <= place < self.count:
            raise IndexError(place)
        self.read.add(place)
        return torch.full((3,), float(place)), place % 2


def test_items_of_torch_data_sets_are_read_only_when_they_are_needed() -> None:
    datasets = {name: Counting(20) for name in ("a", "b", "c", "d")}
    clients = TorchClients(datasets, classes=["even", "odd"], test=0.25, validation=0.25)
    assert [clients.size(0, split) for split in ("train", "validation", "test")] == [10, 5, 5]
    assert not any(one.read for one in datasets.values())
    runtime = {"kind": "simulator", "engine": "sequential", "workers": 0}
    run = piebald.run(
        piebald.recipes.fedavg(cohort=1), clients, nn.Linear(3, 2), rounds=1, evaluate_every=0, runtime=runtime
    )
    trained = {row["client"] for row in run.results}
    for number, (name, dataset) in enumerate(datasets.items()):
        # the first client's training rows tell the form of all
        expected = clients.size(number, "train") if number in trained or name == "a" else 0
        assert len(dataset.read) == expected
    seen = [set(clients.rows(0, split).x[:, 0].tolist()) for split in ("train", "validation", "test")]  # type: ignore[call-overload, index, union-attr]
    assert len(set.union(*seen)) == 20
    with pytest.raises(SettingError, match="must have a map-style torch data set of one item or more, got list"):
        TorchClients([[1, 2]])


def test_an_empty_part_is_kept_in_the_cache_as_every_other() -> None:
    """Its form is read from the first item, once."""
    dataset = Counting(4)
    clients = TorchClients({"a": dataset}, classes=["even", "odd"], test=0)
    assert len(clients.rows(0, "test")) == 0
    dataset.read.clear()
    assert clients.rows(0, "test").x.shape == (0, 3)  # type: ignore[union-attr]
    assert not dataset.read
