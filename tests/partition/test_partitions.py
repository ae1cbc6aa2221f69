"""What every partition promises, and what each kind adds."""

from __future__ import annotations

import hashlib
import os

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from piebald import data
from piebald.data import DataSet, Owners
from piebald.errors import SettingError
from piebald.partition import (
    ByEmbedding,
    ByOwner,
    Dirichlet,
    Disjoint,
    Iid,
    NonIid,
    Partition,
    PooledClients,
    PowerLaw,
    Quantity,
    Shards,
    Skewed,
)
from piebald.parts import build

SPLITS = ("train", "validation", "test")
prepared = pytest.mark.skipif(
    "PIEBALD_DATA" not in os.environ, reason="PIEBALD_DATA is not set: set it to the folder of prepared data sets"
)


def rows(count: int = 240, classes: int = 6, published: int = 0, seed: int = 0, together: int = 0) -> DataSet:
    """A data set whose inputs are the row numbers; 8 owners; the last `published` rows are the test part."""
    dice = np.random.default_rng(seed)
    y = dice.permutation(np.arange(count) % classes)
    return DataSet(
        name="rows",
        x=torch.arange(count, dtype=torch.float32)[:, None],
        y=torch.from_numpy(y),
        classes=[f"class {number}" for number in range(classes)],
        owners={"person": Owners.of(dice.integers(0, 8, count))},
        train=np.arange(count - published) if published else None,
        test=np.arange(count - published, count) if published else None,
        together=np.arange(count) // together if together else None,
    )


KINDS = [
    Iid(clients=7),
    ByOwner(owner="person"),
    ByOwner(owner="person", clients=3),
    Disjoint(clients=6, classes_each=2, shared_by=2),
    NonIid(clients=9, classes_each=2),
    Dirichlet(clients=8, alpha=0.3),
    Iid(clients=7, sizes=PowerLaw()),
    Dirichlet(clients=8, alpha=0.3, sizes=Quantity(alpha=0.5)),
    NonIid(clients=5, classes_each="5x1,3x2,2x2", sizes=Skewed(ratio=3)),
    NonIid(clients=6, classes_each=(3, 3, 4, 4, 5, 6)),
    Shards(clients=8),
    ByEmbedding(clients=3, components=1, shuffle=0.3),
]


def of_each(clients: PooledClients, split: str) -> list[np.ndarray]:
    return [clients.indices(client, split) for client in range(len(clients))]


def check(clients: PooledClients, every: np.ndarray) -> None:
    """No row twice, none lost, nobody without training rows, no training row in a test."""
    held = np.concatenate([row for split in SPLITS for row in of_each(clients, split)])
    assert len(np.unique(held)) == len(held)
    common = clients.common.x[:, 0].numpy().astype(int)
    assert set(held) | set(common) == set(every)
    assert all(len(own) for own in of_each(clients, "train"))
    learned = np.concatenate(of_each(clients, "train") + of_each(clients, "validation"))
    assert not set(learned) & set(common)
    assert set(np.concatenate(of_each(clients, "test"))) <= set(common) or not len(common)


@pytest.mark.parametrize("published", [0, 60])
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.kind)
@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 1000), validation=st.sampled_from([0.0, 0.1, 0.3]), pool=st.booleans())
def test_nothing_is_lost_doubled_or_leaked(
    kind: Partition, published: int, seed: int, validation: float, pool: bool
) -> None:
    asked = kind.model_copy(update={"seed": seed, "validation": validation, "pool": pool})
    everything = rows(published=published, seed=seed)
    clients = asked.split(everything)
    check(clients, np.arange(240))
    again = asked.split(everything)
    for split in SPLITS:
        assert (clients.lists(split).values == again.lists(split).values).all()
        assert (clients.lists(split).starts == again.lists(split).starts).all()


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.kind)
@pytest.mark.parametrize("published", [0, 60])
def test_rows_that_belong_together_are_on_one_side(kind: Partition, published: int) -> None:
    everything = rows(together=4, published=published)
    clients = kind.split(everything)
    check(clients, np.arange(240))
    group = everything.together
    if kind.kind != "by_owner":
        learned = np.concatenate(of_each(clients, "train") + of_each(clients, "validation"))
        tested = np.concatenate(of_each(clients, "test"))
        assert not set(group[learned]) & set(group[tested])
    for client in range(len(clients)):
        assert not set(group[clients.indices(client, "train")]) & set(group[clients.indices(client, "test")])


@pytest.mark.parametrize("published", [0, 60])
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.kind)
def test_limit(kind: Partition, published: int) -> None:
    clients = kind.model_copy(update={"limit": 120}).split(rows(published=published))
    every = np.concatenate([row for split in SPLITS for row in of_each(clients, split)])
    assert len(every) == 120
    assert np.ptp(np.bincount(clients.y.numpy()[every], minlength=6)) <= (30 if kind.kind == "by_owner" else 2)
    assert sum(clients.size(client, "test") for client in range(len(clients))) == pytest.approx(
        30 if published else 24, abs=4
    )


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.kind)
def test_rebuilt_from_its_table(kind: Partition) -> None:
    assert build("partition", kind.table()) == kind


def test_published_rows_follow_the_clients_own_mixture() -> None:
    everything = rows(count=6000, published=2000)
    clients = Dirichlet(clients=10, alpha=0.5).split(everything)
    train, test = clients.table("train"), clients.table("test")
    assert test.sum() == 2000
    ratio = np.bincount(everything.y[everything.test]) / np.bincount(everything.y[everything.train])
    assert np.abs(test - train * ratio).max() <= 1
    assert len(clients.common) == 2000


def test_iid_is_even() -> None:
    clients = Iid(clients=7, test=0.0).split(rows())
    assert {clients.size(client, "train") for client in range(7)} == {34, 35}
    assert clients.common is None


def test_disjoint_shares_no_class_between_groups() -> None:
    clients = Disjoint(clients=4, classes_each=2, shared_by=2).split(rows())
    held = [frozenset(np.flatnonzero(counts)) for counts in clients.table("train")]
    assert held[0] == held[1]
    assert held[2] == held[3]
    assert len(held[0]) == len(held[2]) == 2
    assert not held[0] & held[2]
    assert len(np.unique(clients.common.y)) == 4  # two classes are nobody's


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 40), st.integers(1, 6), st.integers(0, 50))
def test_non_iid_gives_every_client_its_classes(clients: int, each: int, seed: int) -> None:
    if clients * each < 6:
        clients = 6
    split = NonIid(clients=clients, classes_each=each, test=0.0, seed=seed).split(rows(count=600))
    held = split.table("train") > 0
    assert (held.sum(1) == each).all()
    assert np.ptp(held.sum(0)) <= 1


def test_dirichlet_alpha_goes_from_one_class_to_all_alike() -> None:
    everything = rows(count=6000)
    largest = []
    for alpha in (0.01, 0.5, 1000):
        clients = Dirichlet(clients=100, alpha=alpha, test=0.0).split(everything)
        table = clients.table("train")
        assert (table.sum(1) == 60).all()
        assert (table.sum(0) == 1000).all()
        largest.append(float((table.max(1) / 60).mean()))
    assert largest[0] > 0.75
    assert 0.3 < largest[1] < 0.8
    assert largest[2] < 0.25


@pytest.mark.parametrize("alpha", [1e-6, 1e6])
def test_dirichlet_at_the_ends_of_alpha(alpha: float) -> None:
    clients = Dirichlet(clients=30, alpha=alpha, test=0.0).split(rows())
    assert {clients.size(client, "train") for client in range(30)} == {8}


def test_dirichlet_with_a_class_that_has_no_row() -> None:
    y = torch.tensor([0, 2] * 20)
    clients = Dirichlet(clients=4, alpha=1.0, test=0.0).split(DataSet("gap", torch.zeros(40, 1), y, ["a", "b", "c"]))
    assert clients.table("train").sum(0).tolist() == [20, 0, 20]


def test_whole_owners_are_put_together_evenly() -> None:
    everything = rows(count=4000)
    clients = ByOwner(owner="person", clients=4, test=0.0).split(everything)
    codes = everything.owners["person"].codes
    of = [set(codes[own]) for own in of_each(clients, "train")]
    assert sum(len(own) for own in of) == len(set.union(*of)) == 8
    sizes = [clients.size(client, "train") for client in range(4)]
    assert max(sizes) < 1.1 * min(sizes)


def test_owners_in_both_published_parts_keep_their_test_rows() -> None:
    everything = rows(published=60)
    clients = ByOwner(owner="person").split(everything)
    codes = everything.owners["person"].codes
    for client in range(8):
        assert set(clients.indices(client, "test")) == set(np.flatnonzero(codes[180:] == client) + 180)
    assert clients.names == [str(number) for number in range(8)]


@prepared
def test_writers() -> None:
    mnist = data.mnist_writers()
    clients = ByOwner(owner="writer", test=0.1, validation=0.1).split(mnist)
    assert len(clients) == 539
    assert len(clients.common) == 10_000  # other writers: nobody trained on them
    held = np.concatenate([row for split in SPLITS for row in of_each(clients, split)])
    assert sorted(held) == list(range(60_000))
    writer = mnist.owners["writer"]
    for client in (0, 100, 538):
        own = np.concatenate([clients.indices(client, split) for split in SPLITS])
        assert {writer.names[code] for code in writer.codes[own]} == {clients.names[client]}
    assert len(ByOwner(owner="writer", pool=True).split(mnist)) == 836
    some = clients.rows(3, "test")
    assert some.x.dtype == torch.float32
    assert 0.9 < float(some.x.max()) <= 1


@prepared
def test_sessions_of_traffic_do_not_leak() -> None:
    traffic = data.traffic()
    for kind in (Dirichlet(clients=20, alpha=0.5, validation=0.1), ByOwner(owner="capture", validation=0.1)):
        clients = kind.split(traffic)
        tested = set(traffic.together[np.concatenate(of_each(clients, "test"))])
        learned = set(traffic.together[np.concatenate(of_each(clients, "train"))])
        assert not tested & learned
        assert 0.18 < len(clients.common) / len(traffic) < 0.22


@prepared
def test_subjects_of_har() -> None:
    clients = ByOwner(owner="subject").split(data.har())
    assert len(clients) == 21
    assert len(clients.common) == 2947
    assert len(ByOwner(owner="subject", pool=True).split(data.har())) == 30


def test_a_hundred_thousand_clients() -> None:
    count = 1_000_000
    y = torch.from_numpy(np.random.default_rng(0).integers(0, 10, count))
    big = DataSet("big", torch.zeros(count, 1), y, [str(digit) for digit in range(10)])
    clients = Dirichlet(clients=100_000, alpha=0.3).split(big)
    assert len(clients) == 100_000
    assert clients.lists("train").sizes.sum() + clients.lists("test").sizes.sum() == count
    assert clients.counts(99_999, "train") == clients.table("train")[99_999].tolist()


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (lambda: Iid(clients=0), "partition 'iid': clients must be greater than or equal to 1, got 0"),
        (lambda: Iid(clients=3, limt=5), "no setting of partition 'iid' called 'limt': did you mean 'limit'"),
        (lambda: Iid(), "partition 'iid' needs a value for clients"),
        (lambda: Iid(clients=3, test=0.6, validation=0.4), "leave no rows to train on: their sum must be below 1"),
        (lambda: Iid(clients=241).split(rows()), "241 clients of at least one row need more than the 240 rows"),
        (lambda: Iid(clients=61, limit=60).split(rows()), "need more than the 60 rows: lower clients, or raise limit"),
        (lambda: ByOwner(owner="persn").split(rows()), "no owner in rows called 'persn': did you mean 'person'"),
        (lambda: ByOwner(owner="person", clients=9).split(rows()), "9 clients need as many of the 8 persons of rows"),
        (lambda: Disjoint(clients=5, classes_each=1, shared_by=2).split(rows()), "got 5: use 6 clients"),
        (
            lambda: Disjoint(clients=4, classes_each=2).split(rows()),
            "4 groups of 2 classes need 8 classes but",
        ),
        (lambda: Disjoint(clients=100, classes_each=1, shared_by=50).split(rows()), "would hold no row"),
        (lambda: NonIid(clients=2, classes_each=7).split(rows()), "classes_each must be at most the 6 classes of rows"),
        (lambda: NonIid(clients=2, classes_each=2).split(rows()), "2 clients of 2 classes cannot hold the 6 classes"),
        (lambda: NonIid(clients=200, classes_each=2).split(rows()), "has 40 rows for its 6[67] holders: lower clients"),
        (lambda: Dirichlet(clients=5, alpha=0), "alpha must be greater than 0, got 0"),
        (lambda: Dirichlet(clients=50, alpha=1, least=5).split(rows()), "lower clients or least"),
        (
            lambda: build("partition", {"kind": "dirichlt"}),
            "no partition 'dirichlt': did you mean",
        ),
        (
            lambda: NonIid(clients=2, classes_each=2).split(DataSet("real", torch.zeros(4, 1), torch.zeros(4))),
            "real has no class for each row to divide by: use iid or by_owner",
        ),
    ],
)
def test_what_cannot_be_is_one_sentence(kind, message: str) -> None:
    with pytest.raises(SettingError, match=message) as caught:
        kind()
    assert "\n" not in str(caught.value)


def test_numbers_to_predict_can_be_dealt() -> None:
    clients = Iid(clients=3).split(DataSet("real", torch.zeros(30, 1), torch.rand(30)))
    assert clients.classes is None
    assert clients.counts(0, "train") is None
    assert [clients.size(client, "test") for client in range(3)] == [2, 2, 2]


def fingerprint(clients: PooledClients) -> str:
    digest = hashlib.sha256()
    for split in SPLITS:
        digest.update(clients.lists(split).values.tobytes() + clients.lists(split).starts.tobytes())
    return digest.hexdigest()[:16]


GOLDEN = {
    "iid": "80c91d23082410e9",
    "disjoint": "16db67d2dc466b0a",
    "non_iid": "ab44c50f07b1db3b",
    "dirichlet": "48b310b95e7aa45f",
    "by_owner": "2319525ea5e09d6a",
    "shards": "43e39ed2025653d1",
}


@pytest.mark.parametrize("kind", GOLDEN)
def test_golden(kind: str) -> None:
    """Old runs must be repeatable: a change of these is a change of what a seed means."""
    fields = {"iid": {}, "disjoint": {"classes_each": 2, "shared_by": 2}, "non_iid": {"classes_each": 3}}
    fields |= {"dirichlet": {"alpha": 0.5}, "by_owner": {"owner": "person"}, "shards": {}}
    table = {"kind": kind, "clients": 8, "seed": 3, "validation": 0.1, **fields[kind]}
    source = rows(count=1000) if kind == "by_owner" else data.digits()
    if kind == "by_owner":
        table["clients"] = 3
    assert fingerprint(build("partition", table).split(source)) == GOLDEN[kind]
