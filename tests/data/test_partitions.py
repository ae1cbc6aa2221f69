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
from piebald.contracts.component import build
from piebald.core.errors import SettingError
from piebald.data import DataSet
from piebald.data.partition import (
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
from piebald.testing.data_set import check_rows
from piebald.testing.data_set import numbered_rows as rows

SPLITS = ("train", "validation", "test")
prepared = pytest.mark.skipif(
    "PIEBALD_DATA" not in os.environ, reason="PIEBALD_DATA is not set: set it to the folder of prepared data sets"
)


KINDS = [
    Iid(clients=7),
    ByOwner(owner="person"),
    ByOwner(owner="person", clients=3),
    ByOwner(owner="person", clients_each=2),
    Disjoint(clients=6, classes_each=2, shared_by=2),
    NonIid(clients=9, classes_each=2),
    Dirichlet(clients=8, alpha=0.3),
    Dirichlet(clients=8, alpha=0.3, by="class", min_size=4),
    Dirichlet(clients=5, alpha=0.5, by="class", balance=False),
    Iid(clients=7, sizes=PowerLaw()),
    Dirichlet(clients=8, alpha=0.3, sizes=Quantity(alpha=0.5)),
    NonIid(clients=5, classes_each="5x1,3x2,2x2", sizes=Skewed(ratio=3)),
    NonIid(clients=6, classes_each=(3, 3, 4, 4, 5, 6)),
    Shards(clients=8),
    ByEmbedding(clients=3, components=1, shuffle=0.3),
    ByEmbedding(clients=3, components=1, test_first=True),
]


def of_each(clients: PooledClients, split: str) -> list[np.ndarray]:
    return [clients.indices(client, split) for client in range(len(clients))]


@pytest.mark.parametrize("published", [0, 60])
@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=pytest.mark.full if isinstance(kind, ByEmbedding) else (), id=kind.kind)
        for kind in KINDS
    ],
)
@settings(max_examples=8, deadline=None)
@given(seed=st.integers(0, 1000), validation=st.sampled_from([0.0, 0.1, 0.3]), pool=st.booleans())
def test_nothing_is_lost_doubled_or_leaked(
    kind: Partition, published: int, seed: int, validation: float, pool: bool
) -> None:
    asked = kind.model_copy(update={"seed": seed, "validation": validation, "pool": pool})
    everything = rows(published=published, seed=seed)
    clients = asked.split(everything)
    check_rows(kind, clients, np.arange(240))
    again = asked.split(everything)
    for split in SPLITS:
        assert (clients.lists(split).values == again.lists(split).values).all()
        assert (clients.lists(split).starts == again.lists(split).starts).all()


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.kind)
@pytest.mark.parametrize("published", [0, 60])
def test_rows_that_belong_together_are_on_one_side(kind: Partition, published: int) -> None:
    everything = rows(together=4, published=published)
    clients = kind.split(everything)
    check_rows(kind, clients, np.arange(240))
    group = everything.groups
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


@pytest.mark.parametrize("published", [0, 400])
@pytest.mark.parametrize("shuffle", [0.0, 0.3])
def test_regions_are_fitted_on_training_rows_only(published: int, shuffle: float) -> None:
    """Before, without a published test part, other inputs in test rows always gave training rows to other clients."""
    source = data.digits()
    count = len(source)
    train, test = (np.arange(count - published), np.arange(count - published, count)) if published else (None, None)
    kind = ByEmbedding(clients=4, shuffle=shuffle, validation=0.1, test_first=not published)

    def split(x: torch.Tensor) -> PooledClients:
        return kind.split(DataSet("digits", x, source.y, source.classes, train=train, test=test))

    clients = split(source.x)
    x = source.x.clone()
    tested = np.concatenate(of_each(clients, "test"))
    assert len(tested) > 300
    x[tested] = 100 * torch.rand(x[tested].shape, generator=torch.Generator().manual_seed(0))
    changed = split(x)
    for part in ("train", "validation"):
        for mine, same in zip(of_each(clients, part), of_each(changed, part), strict=True):
            assert mine.tolist() == same.tolist()


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


def test_rows_of_each_owner_are_divided_evenly() -> None:
    everything = rows(count=4000)
    clients = ByOwner(owner="person", clients_each=3, test=0.0).split(everything)
    codes = everything.owners["person"].codes
    assert clients.names[:4] == ["0 1", "0 2", "0 3", "1 1"]
    held = of_each(clients, "train")
    assert [set(codes[own]) for own in held] == [{client // 3} for client in range(24)]
    sizes = np.array([len(own) for own in held]).reshape(8, 3)
    assert sizes.sum() == 4000
    assert (np.ptp(sizes, axis=1) <= 1).all()


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
        tested = set(traffic.groups[np.concatenate(of_each(clients, "test"))])
        learned = set(traffic.groups[np.concatenate(of_each(clients, "train"))])
        assert not tested & learned
        assert 0.18 < len(clients.common) / len(traffic) < 0.22


def halves(signals: torch.Tensor) -> set[bytes]:
    """First and second half of each window, bit for bit: what two overlapping windows have in common."""
    return {window[:, half].numpy().tobytes() for window in signals for half in (slice(0, 64), slice(64, 128))}


@pytest.mark.full
@prepared
@pytest.mark.parametrize(
    "kind",
    [
        Iid(clients=10, validation=0.1),
        Iid(clients=10, validation=0.1, pool=True),
        Dirichlet(clients=10, alpha=0.5, pool=True),
        NonIid(clients=10, classes_each=3, pool=True),
        NonIid(clients=4, classes_each="6x1,4x2,2x1", sizes=PowerLaw(), pool=True),
        ByOwner(owner="subject", pool=True, validation=0.1),
        ByOwner(owner="subject"),
    ],
    ids=lambda kind: f"{kind.kind} {'pool' if kind.pool else ''}",
)
def test_no_sample_of_har_is_on_both_sides(kind: Partition) -> None:
    """Windows overlap by half; whether they do is asked of the signals, not of what the data set says of itself."""
    clients = kind.split(data.har())
    learned = np.unique(np.concatenate(of_each(clients, "train") + of_each(clients, "validation")))
    tested = np.concatenate(of_each(clients, "test"))
    assert len(tested) > 300
    assert not halves(clients.x[learned]) & halves(clients.x[tested])
    assert not halves(clients.x[learned]) & halves(clients.common.x)
    for client in range(len(clients)):  # a client's validation rows are not what it trained on, either
        own = [halves(clients.rows(client, split).x) for split in ("train", "validation")]
        assert not own[0] & own[1]


@prepared
def test_a_random_split_of_har_would_leak() -> None:
    """So that the test above is known to see it."""
    har = data.har()
    bare = DataSet("bare", har.x, har.y, har.classes)
    clients = Iid(clients=10).split(bare)
    learned, tested = (np.concatenate(of_each(clients, split)) for split in ("train", "test"))
    assert len(halves(clients.x[learned]) & halves(clients.x[tested])) > 1000


@pytest.mark.long
@prepared
def test_tests_on_cifar10_say_which_pixels_they_have() -> None:
    """The default test part is of exact pixels; the compressed one must be asked for and is named in the source."""
    exact = data.cifar10()
    assert len(exact.test) == 1000
    assert "exact pixels" in exact.source
    assert "after JPEG compression" in data.cifar10(test="jpeg").source
    clients = Iid(clients=5).split(exact)
    assert set(np.concatenate(of_each(clients, "test"))) <= set(exact.test)
    assert not set(np.concatenate(of_each(clients, "train"))) & set(exact.test)


@prepared
def test_no_writer_of_mnist_is_on_both_sides() -> None:
    mnist = data.mnist_writers()
    writer = mnist.owners["writer"].codes
    for kind in (Iid(clients=5), ByOwner(owner="writer", clients=20)):
        clients = kind.split(mnist)
        learned = np.concatenate(of_each(clients, "train"))
        assert not set(writer[learned]) & set(writer[mnist.test])
        assert len(clients.common) == 10_000


@pytest.mark.full
@prepared
def test_subjects_of_har() -> None:
    clients = ByOwner(owner="subject").split(data.har())
    assert len(clients) == 21
    assert len(clients.common) == 2947
    assert len(ByOwner(owner="subject", pool=True).split(data.har())) == 30


@pytest.mark.full
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
        (lambda: Iid(clients=0), "partition 'iid': clients must be at least 1, got 0"),
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
        (lambda: Dirichlet(clients=5, alpha=0), "alpha must be above 0, got 0"),
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


DIGITS = {
    "iid": {"kind": "iid"},
    "disjoint": {"kind": "disjoint", "classes_each": 2, "shared_by": 2},
    "non_iid": {"kind": "non_iid", "classes_each": 3},
    "dirichlet": {"kind": "dirichlet", "alpha": 0.5},
    "dirichlet, by class": {"kind": "dirichlet", "alpha": 0.5, "by": "class"},
    "shards": {"kind": "shards"},
    "iid, power law": {"kind": "iid", "sizes": {"kind": "power_law"}},
    "iid, skewed": {"kind": "iid", "sizes": {"kind": "skewed"}},
    "iid, drawn": {"kind": "iid", "sizes": {"kind": "quantity", "alpha": 0.7}},
    "iid, listed": {"kind": "iid", "sizes": {"kind": "explicit", "rows": [300, 200, 100, 50, 40, 30, 20, 10]}},
    "dirichlet, power law": {"kind": "dirichlet", "alpha": 0.5, "sizes": {"kind": "power_law"}},
    "non_iid, groups": {"kind": "non_iid", "classes_each": "8x1,4x1,3x6", "sizes": {"kind": "power_law"}},
    "non_iid, as listed": {"kind": "non_iid", "held": [[n, n + 1, n + 2] for n in range(8)]},
    "by_embedding": {"kind": "by_embedding", "shuffle": 0.2},
}
GOLDEN = {
    "iid": "80c91d23082410e9",
    "disjoint": "16db67d2dc466b0a",
    "non_iid": "ab44c50f07b1db3b",
    "dirichlet": "48b310b95e7aa45f",
    "dirichlet, by class": "a11284ac129f53f6",
    "shards": "43e39ed2025653d1",
    "iid, power law": "100b7edd9e8c6011",
    "iid, skewed": "5570e90e6e385e0e",
    "iid, drawn": "10ef341cd4e99bef",
    "iid, listed": "5b6fc78abc14c989",
    "dirichlet, power law": "b916719d3ce1ff8f",
    "non_iid, groups": "eb3ea4b027194e6d",
    "non_iid, as listed": "9f5a795a0054c9ec",
    "by_embedding": "245633465e9e03a1",
}


@pytest.mark.parametrize("kind", DIGITS)
def test_golden(kind: str) -> None:
    """Old runs must be repeatable: a change of these is a change of what a seed means."""
    table = {"clients": 8, "seed": 3, "validation": 0.1} | DIGITS[kind]
    assert fingerprint(build("partition", table).split(data.digits())) == GOLDEN[kind]


def test_golden_of_owners() -> None:
    table = {"kind": "by_owner", "owner": "person", "clients": 3, "seed": 3, "validation": 0.1}
    assert fingerprint(build("partition", table).split(rows(count=1000))) == "2319525ea5e09d6a"


PRINTED = ((0, 1, 2, 3, 4, 5, 6, 7), (8, 9, 0, 1), (2, 3, 4), (5, 6, 7), (8, 9, 0), (1, 2, 3))


def test_a_printed_pattern_is_dealt_as_it_stands() -> None:
    kind = NonIid(clients=6, held=PRINTED, sizes=PowerLaw(), test=0.0)
    table = kind.split(data.digits()).table("train")
    assert [tuple(np.flatnonzero(row)) for row in table] == [tuple(sorted(own)) for own in PRINTED]
    assert table.sum() == 1797
    assert (np.diff(table.sum(1)) < 0).all()
    some = NonIid(clients=2, held=((0, 1), (1, 2)), test=0.0).split(data.digits())
    assert some.table("train").sum(0).tolist()[3:] == [0] * 7  # classes that nobody is said to hold are nobody's
    assert np.ptp(some.table("train").sum(1)) <= 1


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "either classes_each or held must be given, and not both"),
        ({"classes_each": 2, "held": ((0,), (1,))}, "and not both"),
        ({"held": ((0,),)}, "held says how many classes for 1 clients but clients is 2: give one list for each client"),
        ({"held": ((0, 0), (1,))}, "held must list different classes, numbered from 0, got"),
        ({"held": ((), (1,))}, "held must give each client at least 1 class, got 0"),
        ({"held": ((0,), (10,))}, "held must name classes in 0..9, got 10"),
        ({"held": ((0,), (0, 1)), "sizes": {"kind": "explicit", "rows": (300, 10)}}, "give the largest clients more"),
    ],
)
def test_patterns_that_cannot_be_are_one_sentence(settings, message: str) -> None:
    with pytest.raises(SettingError, match=message):
        NonIid(clients=2, **settings).split(data.digits())
