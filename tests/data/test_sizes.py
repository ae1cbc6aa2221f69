"""Sizes and class patterns: sums, shapes and what cannot be."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from piebald import data
from piebald.contracts.component import build
from piebald.core.errors import SettingError
from piebald.data import DataSet
from piebald.data.partition import (
    ByEmbedding,
    Dirichlet,
    Disjoint,
    Explicit,
    Iid,
    NonIid,
    PowerLaw,
    Quantity,
    Shards,
    Sizes,
    Skewed,
    Uniform,
    collect,
    measure,
)

KINDS = [
    Uniform(),
    Skewed(),
    Skewed(ratio=100),
    PowerLaw(),
    PowerLaw(exponent=20),
    Quantity(alpha=0.01),
    Quantity(alpha=5),
]
RNG = np.random.default_rng


def even(count: int = 1000, classes: int = 10) -> DataSet:
    y = torch.arange(count) % classes
    return DataSet("even", torch.arange(count, dtype=torch.float32)[:, None], y, [str(k) for k in range(classes)])


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.kind)
@settings(max_examples=40, deadline=None)
@given(clients=st.integers(1, 40), more=st.integers(0, 3000), seed=st.integers(0, 99))
def test_sizes_add_up_and_fall(kind: Sizes, clients: int, more: int, seed: int) -> None:
    rows = clients * (clients + 1) // 2 + more
    counts = kind.counts(clients, rows, RNG(seed))
    assert counts.sum() == rows
    assert counts.min() >= 1
    assert (np.diff(counts) <= 0).all()
    if isinstance(kind, Skewed):
        assert len(set(counts.tolist())) == clients
    assert build("sizes", kind.table()) == kind


def test_shapes_of_sizes() -> None:
    assert PowerLaw().counts(10, 50_000, RNG(0))[:3].tolist() == [25058, 8860, 4823]  # rank ** -1.5 over their sum
    skewed = Skewed(ratio=8).counts(10, 50_000, RNG(0))
    assert skewed[0] / skewed[-1] == pytest.approx(8, rel=0.01)
    assert skewed.mean() > np.median(skewed)
    assert np.ptp(Uniform().counts(7, 100, RNG(0))) == 1
    assert np.ptp(Quantity(alpha=1e6).counts(10, 1000, RNG(0))) <= 2
    assert Quantity(alpha=1e-3).counts(10, 1000, RNG(0))[0] > 950


def test_sizes_are_conserved_in_the_deal() -> None:
    wanted = PowerLaw().counts(10, 1000, RNG(0)).tolist()
    for kind in (
        Iid(clients=10, sizes=PowerLaw(), test=0.0),
        Dirichlet(clients=10, alpha=0.3, sizes=PowerLaw(), test=0.0),
        NonIid(clients=10, classes_each="8x1,4x1,3x8", sizes=PowerLaw(), test=0.0),
    ):
        assert kind.split(even()).table("train").sum(1).tolist() == wanted


@pytest.mark.parametrize("seed", range(5))
def test_head_clients_hold_more_classes_as_in_metis(seed: int) -> None:
    clients = NonIid(clients=10, classes_each="8x1,4x1,3x8", sizes=PowerLaw(), test=0.0, seed=seed).split(even(50_000))
    table = clients.table("train")
    assert (table > 0).sum(1).tolist() == [8, 4, 3, 3, 3, 3, 3, 3, 3, 3]
    assert table.sum(0).tolist() == [5000] * 10


@pytest.mark.full
@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 6), min_size=3, max_size=12), st.integers(0, 99))
def test_any_pattern_holds_or_is_refused_in_a_sentence(each: list[int], seed: int) -> None:
    assume(sum(each) >= 6)
    kind = NonIid(clients=len(each), classes_each=each, sizes=Skewed(ratio=2), test=0.0, seed=seed)
    try:
        clients = kind.split(even(600, 6))
    except SettingError as error:
        said = str(error)
        clients = None
    if clients is None:
        changes = re.findall(r"(\d+) instead of (\d+) for client number (\d+)", said)
        assume(", and " not in said)
        assert changes
        assert all(each[int(client)] == int(old) for _, old, client in changes)
        for new, _, client in changes:
            each[int(client)] = int(new)
        clients = kind.model_copy(update={"classes_each": tuple(each)}).split(even(600, 6))
    assert (clients.table("train") > 0).sum(1).tolist() == each
    assert clients.table("train").sum(0).tolist() == [100] * 6


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("classes", "sizes"), [(5, Uniform()), (3, Skewed()), (5, Skewed())])
def test_a_pattern_that_exists_is_found(classes: int, sizes: Uniform | Skewed, seed: int) -> None:
    """Metis' cells on digits, whose classes are of unequal size: before, the greedy choice of classes was refused."""
    kind = NonIid(clients=10, classes_each=classes, sizes=sizes, test=0.0, seed=seed)
    table = kind.split(data.digits()).table("train")
    assert ((table > 0).sum(1) == classes).all()
    assert table.sum() == 1797


def _can_be_dealt(each: Sequence[int], sizes: Sequence[int], stock: Sequence[int]) -> bool:
    """Whether rows of some choice of classes fit, by going through all choices (Gale and Ryser's condition on cuts)."""
    choices = [itertools.combinations(range(len(stock)), number) for number in each]
    for chosen in itertools.product(*choices):
        holders = [sum(number in classes for classes in chosen) for number in range(len(stock))]
        left = [count - more for count, more in zip(stock, holders, strict=True)]
        need = [size - len(classes) for size, classes in zip(sizes, chosen, strict=True)]
        groups = itertools.chain.from_iterable(
            itertools.combinations(range(len(each)), number) for number in range(1, len(each) + 1)
        )
        if min(*left, *need) >= 0 and all(
            sum(need[client] for client in group)
            <= sum(left[number] for number in {number for client in group for number in chosen[client]})
            for group in groups
        ):
            return True
    return False


@pytest.mark.full
@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 5), min_size=2, max_size=4), st.data())
def test_a_pattern_is_refused_if_and_only_if_no_choice_exists(stock: list[int], draw: st.DataObject) -> None:
    """Against all choices of classes; the change that a refusal names makes it possible, and no smaller one does."""
    count, kinds = draw.draw(st.integers(2, 3)), range(1, len(stock) + 1)
    each = draw.draw(st.lists(st.sampled_from(kinds), min_size=count, max_size=count))
    rows = draw.draw(st.lists(st.integers(1, 8), min_size=count, max_size=count))
    assume(sum(each) >= len(stock))
    assume(sum(rows) <= sum(stock))
    y = torch.arange(len(stock)).repeat_interleave(torch.tensor(stock))
    table = DataSet("small", torch.zeros(len(y), 1), y, [str(number) for number in range(len(stock))])
    kind = NonIid(clients=count, classes_each=tuple(each), sizes=Explicit(rows=tuple(rows)), test=0.0)
    if _can_be_dealt(each, rows, stock):
        dealt = kind.split(table).table("train")
        assert (dealt > 0).sum(1).tolist() == each
        assert dealt.sum(1).tolist() == rows
        return
    with pytest.raises(SettingError, match="the smallest change that makes it possible is") as error:
        kind.split(table)
    changed = list(each)
    for new, old, client in re.findall(r"(\d+) instead of (\d+) for client number (\d+)", str(error.value)):
        assert each[int(client)] == int(old)
        changed[int(client)] = int(new)
    assert _can_be_dealt(changed, rows, stock)
    distance = sum(abs(new - old) for new, old in zip(changed, each, strict=True))
    nearer = (
        other for other in itertools.product(kinds, repeat=count)
        if sum(abs(new - old) for new, old in zip(other, each, strict=True)) < distance
    )  # fmt: skip
    assert not any(_can_be_dealt(other, rows, stock) for other in nearer)


def test_what_is_impossible_is_told_with_the_smallest_change() -> None:
    """A client of 70 rows needs 4 of 5 classes of 20; nobody else must change."""
    kind = NonIid(clients=4, classes_each=2, sizes=Explicit(rows=(70, 10, 10, 10)), test=0.0)
    with pytest.raises(SettingError, match=r"possible is 4 instead of 2 for client number 0$"):
        kind.split(even(100, 5))
    with pytest.raises(SettingError, match=r"possible is 1 instead of 3 for client number 1$"):
        NonIid(clients=2, classes_each=3, sizes=Explicit(rows=(60, 1)), test=0.0).split(even(100, 5))


def test_explicit_sizes_leave_the_rest_to_nobody() -> None:
    for kind in (
        Iid(clients=3, sizes=Explicit(rows=(5, 3, 40)), test=0.0),
        Dirichlet(clients=3, alpha=0.5, sizes={"kind": "explicit", "rows": [5, 3, 40]}, test=0.0),
        NonIid(clients=3, classes_each=[2, 2, 9], sizes=Explicit(rows=(5, 3, 40)), test=0.0),
    ):
        assert kind.split(even()).table("train").sum(1).tolist() == [5, 3, 40]


def test_types_of_clients_share_their_classes() -> None:
    """DistFL's types are disjoint groups: same classes inside a type, none in common between types."""
    table = Disjoint(clients=6, classes_each=5, shared_by=3, test=0.0).split(even()).table("train") > 0
    assert (table[:3] == table[0]).all()
    assert (table[3:] == ~table[0]).all()


def test_shards_hold_few_classes_and_equal_sizes() -> None:
    table = Shards(clients=100, test=0.0).split(even(6000)).table("train")
    assert set(table.sum(1).tolist()) == {60}
    assert (table > 0).sum(1).max() <= 2  # 20 pieces fit in a class exactly
    assert table.sum(0).tolist() == [600] * 10


def test_distance_falls_as_shuffling_rises() -> None:
    """The shape of CGAU's table 1, on real digits."""
    digits, seen = data.digits(), []
    for shuffle in (0.0, 0.25, 0.5, 0.75, 1.0):
        clients = ByEmbedding(clients=5, shuffle=shuffle).split(digits)
        assert (clients.table("train") > 0).all()
        seen.append(measure(collect(clients, embed=lambda x: x.flatten(1))).federation["frechet"])
    assert seen == sorted(seen, reverse=True)
    assert seen[0] > 5 * seen[-1]


@pytest.mark.full
@pytest.mark.skipif("PIEBALD_DATA" not in os.environ, reason="PIEBALD_DATA is not set")
def test_distance_falls_on_embeddings_of_photographs() -> None:
    office, seen = data.office_caltech10("squeezenet"), []
    for shuffle in (0.0, 0.5, 1.0):
        clients = ByEmbedding(clients=4, shuffle=shuffle).split(office)
        seen.append(measure(collect(clients, embed=lambda x: x)).federation["frechet"])
    assert seen == sorted(seen, reverse=True)
    assert seen[0] > 1.5 * seen[-1]


@pytest.mark.full
@pytest.mark.skipif("PIEBALD_DATA" not in os.environ, reason="PIEBALD_DATA is not set")
def test_published_test_rows_go_to_the_nearest_region() -> None:
    clients = ByEmbedding(clients=4, limit=3000).split(data.mnist_writers())
    train, test = clients.table("train"), clients.table("test")
    assert test.sum() == len(clients.common)
    share = np.abs(train / train.sum(0) - test / np.maximum(test.sum(0), 1)).mean()
    assert share < 0.1


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda: Skewed(ratio=1), "ratio must be above 1"),
        (lambda: Explicit(rows=(3, 0)), "rows.1 must be at least 1, got 0"),
        (lambda: Iid(clients=2, sizes=Explicit(rows=(3, 1, 1))).split(even()), "each of the 2 clients, got 3"),
        (
            lambda: Iid(clients=2, sizes=Explicit(rows=(900, 200))).split(even()),
            "rows add up to 1100, and there are 1000",
        ),
        (
            lambda: Iid(clients=50, sizes=Skewed()).split(even()),
            "50 clients of different sizes need 1275 rows, got 1000",
        ),
        (lambda: Iid(clients=2, sizes={"kind": "powerlaw"}), "there is no sizes 'powerlaw': did you mean 'power_law'"),
        (lambda: NonIid(clients=3, classes_each="2x1;3x2"), "groups like '8x1,4x1,3x8', got '2x1;3x2'"),
        (lambda: NonIid(clients=3, classes_each="2x1,3x1"), "for 2 clients but clients is 3"),
        (lambda: NonIid(clients=2, classes_each=(0, 3)), "classes_each must give each client at least 1 class, got 0"),
        (
            lambda: NonIid(clients=3, classes_each=(1, 9, 9), sizes=PowerLaw()).split(even()),
            "7 instead of 1 for client",
        ),
        (lambda: Dirichlet(clients=9, alpha=1, least=50, sizes=PowerLaw()).split(even()), "below least = 50"),
        (lambda: Shards(clients=600).split(even()), "600 clients of 2 shards need more than the 1000 rows: lower"),
        (lambda: ByEmbedding(clients=2).split(even()), "components must be at most 1"),
        (
            lambda: ByEmbedding(clients=2, extractor="nothing").split(data.digits()),
            "no extractor 'nothing': choose one of",
        ),
    ],
)
def test_what_cannot_be_is_one_sentence(wrong, message: str) -> None:
    with pytest.raises(SettingError, match=message) as caught:
        wrong()
    assert "\n" not in str(caught.value)
