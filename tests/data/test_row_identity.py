"""A row is known by what it holds, in whatever form it comes, and whoever reads it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from piebald.contracts import Rows
from piebald.data import DataSet
from piebald.data.clients.owner import read_owners, records_of
from piebald.data.clients.row_identity import UNKNOWN, fingerprint, row_digests
from piebald.data.partition import clients_from

RNG = np.random.default_rng(5)
X = RNG.normal(size=(12, 3)).round(3)
ILL = RNG.choice(["yes", "no"], 12)
IMAGES = RNG.integers(0, 256, (12, 1, 4, 4), dtype=np.uint8)


class Items(torch.utils.data.Dataset[Any]):
    """A map-style data set whose inputs may be moved at random whenever they are read."""

    def __init__(self, moved: float = 0.0) -> None:
        self.moved = moved

    def __len__(self) -> int:
        return len(X)

    def __getitem__(self, row: int) -> tuple[torch.Tensor, int]:
        return torch.from_numpy(X[row]) + self.moved * torch.rand(3), int(ILL[row] == "yes")


def records(source: Any, site: str = "north", kind: str | None = None) -> list[int]:
    return records_of(read_owners(source, pair=True, parts=True), site, kind).tolist()  # type: ignore[no-any-return]


FRAME = pd.DataFrame(X, columns=["a", "b", "c"]).assign(ill=ILL)
NUMBERS = (ILL == "yes").astype(np.int64)
SAME: dict[str, list[Any]] = {
    "text": [
        FRAME, FRAME.iloc[::-1], FRAME[["ill", "c", "a", "b"]], FRAME.rename(columns={"a": "age"}),
        FRAME.astype({"ill": object}), FRAME.astype({"ill": "category"}), FRAME.astype({"a": object}),
        (X, ILL), (X, ILL.astype(object)), (X.astype(object), ILL), (X.tolist(), ILL.tolist()), [X, ILL],
        (FRAME[["a", "b", "c"]], FRAME.ill),
        (torch.from_numpy(X), ILL), {"north": (X, ILL), "south": (X + 1, ILL)},
        (np.concatenate([X, X + 1]), np.concatenate([ILL, ILL]), ["north"] * 12 + ["south"] * 12),
        {"train": (X[:8], ILL[:8]), "test": FRAME[8:]},
    ],
    "numbers": [
        (X, NUMBERS), (X, NUMBERS.astype(bool)), (X, NUMBERS.astype(float)), (X, NUMBERS.astype(object)),
        Rows(torch.from_numpy(X), torch.from_numpy(NUMBERS)), Items(),
        torch.utils.data.TensorDataset(torch.from_numpy(X), torch.from_numpy(NUMBERS)),
        DataSet("d", torch.from_numpy(X), torch.from_numpy(NUMBERS), classes=["no", "yes"]),
        DataSet("d", torch.from_numpy(X), torch.from_numpy(NUMBERS), classes=["a", "b"]),
    ],
    "images": [(IMAGES, ILL), (IMAGES.astype(np.float32), ILL), (torch.from_numpy(IMAGES), ILL)],
}  # fmt: skip


@pytest.mark.parametrize(("form", "place"), [(form, place) for form in SAME for place in range(len(SAME[form]))])
def test_rows_are_the_same_in_every_form(form: str, place: int) -> None:
    known = records(SAME[form][0])
    assert len(known) == 12
    assert records(SAME[form][place]) == known


@pytest.mark.parametrize("column", ["a", "b", "c", "ill"])
def test_each_value_of_a_row_counts(column: str) -> None:
    changed = FRAME.copy()
    changed.loc[3, column] = "other" if column == "ill" else 9.0
    assert len({*records(changed)} - {*records(FRAME)}) == 1


@pytest.mark.parametrize("odd", ["unknown", "?", None])
def test_a_word_or_a_gap_in_one_row_leaves_all_others_as_they_were(odd: str | None, tmp_path: Path) -> None:
    """A file is read column by column, and a word makes text of the numbers of all rows."""
    frame = pd.DataFrame(
        {"dose": range(5), "weight": [61.5, 70.0, 82.25, 90.0, 55.0], "ill": [True, False, True, False, True]}
    )
    frame.to_csv(tmp_path / "before.csv", index=False)
    for column in frame:
        more = pd.concat([frame.astype(object), pd.DataFrame([frame.loc[0].to_dict() | {column: odd}])])
        more.to_csv(tmp_path / "after.csv", index=False)
        before, after = ({*records(tmp_path / f"{name}.csv")} for name in ("before", "after"))
        assert before < after


def test_gaps_are_alike_however_they_are_written() -> None:
    gaps = [
        pd.Series([1.0, gap, 3.0], dtype=dtype) for gap, dtype in ((np.nan, float), (None, object), (pd.NA, "Int64"))
    ]
    assert len({tuple(row_digests([column]).tolist()) for column in gaps}) == 1
    words = [pd.Series(["a", gap], dtype=dtype) for gap, dtype in ((None, object), (np.nan, object), (pd.NA, "string"))]
    assert len({tuple(row_digests([column]).tolist()) for column in words}) == 1


def test_rows_without_an_identity_are_said_to_have_none() -> None:
    """Objects whose text is an address, and items that are other ones whenever they are read."""
    assert records((X, np.array([object() for _ in X], dtype=object))) == UNKNOWN.tolist()
    assert records(Items(moved=0.5)) == UNKNOWN.tolist()


def test_rows_of_clients_are_those_of_the_site_alone() -> None:
    clients = clients_from({"north": (X, NUMBERS), "south": (X + 1, NUMBERS)}, test=0.25)
    assert records(clients) == records((X.astype(np.float32), NUMBERS))


def test_a_table_of_many_owners_has_the_rows_of_the_named_one() -> None:
    both = pd.concat([FRAME.assign(ward="north"), (FRAME.assign(a=0.0, ward="south"))])
    assert records(both, kind="ward") == records(FRAME.assign(ward="north"))
    assert len(records(both)) == 24


def test_a_fingerprint_has_names_order_and_how_often_a_row_occurs() -> None:
    def of(frame: pd.DataFrame) -> str:
        return fingerprint([(str(name), column) for name, column in frame.items()])

    others = [FRAME.iloc[::-1], FRAME.rename(columns={"a": "age"}), pd.concat([FRAME, FRAME[:1]]), FRAME[:-1]]
    assert len({of(FRAME), *map(of, others)}) == 5
    assert of(FRAME) == of(FRAME.copy())


def test_the_digest_of_a_text_is_its_own_however_many_are_made_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["a", "7", "9" * 20, None, "2024-02-03", "2024-02-31", "1.5", "True", "9" * 20, "b", "2024-02-03 10:00Z"]
    column = pd.Series(words, dtype=object)
    whole = row_digests([column])
    for size in (1, 2, 3):
        monkeypatch.setattr("piebald.data.clients.row_identity._TEXTS", size)
        assert row_digests([column]).tolist() == whole.tolist()
