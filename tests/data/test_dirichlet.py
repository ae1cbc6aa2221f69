"""Dirichlet partitions by client and by class, beside the algorithm of NIID-Bench, PFLlib and flwr-datasets."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from piebald import partition
from piebald.contracts.component import build
from piebald.core.errors import SettingError
from piebald.data import DataSet
from piebald.data.partition import Dirichlet

CLIENTS, CLASSES, ROWS, REPEATS = 20, 10, 4000, 60


def balanced(rows: int = ROWS, classes: int = CLASSES, seed: int = 0) -> DataSet:
    y = np.random.default_rng(seed).permutation(np.arange(rows) % classes)
    names = [str(number) for number in range(classes)]
    return DataSet("balanced", torch.zeros(rows, 1), torch.from_numpy(y), names)


def published(y: np.ndarray, clients: int, alpha: float, least: int, balance: bool, seed: int) -> np.ndarray:
    """Counts [clients, classes] by the published algorithm, written anew with lists, class by class and row by row."""
    rng = np.random.default_rng(seed)
    average = len(y) / clients
    while True:
        held: list[list[int]] = [[] for _ in range(clients)]
        for number in range(int(y.max()) + 1):
            wanted = rng.dirichlet([alpha] * clients)
            if balance:
                wanted = np.array([0.0 if len(own) > average else p for p, own in zip(wanted, held, strict=True)])
                wanted = wanted / wanted.sum()
            members = np.flatnonzero(y == number).tolist()
            ends = [int(end * len(members)) for end in np.cumsum(wanted)]
            ends[-1] = len(members)
            begin = 0
            for own, end in zip(held, ends, strict=True):
                own.extend(members[begin:end])
                begin = end
        if min(map(len, held)) >= least:
            return np.array([np.bincount(y[own], minlength=int(y.max()) + 1) for own in held])


def traits(table: np.ndarray) -> tuple[float, float, float]:
    """Mean entropy of clients' labels (nats), deviation of their sizes relative to the mean, and classes held."""
    share = table / table.sum(1, keepdims=True)
    entropy = -(share * np.log(np.where(share > 0, share, 1))).sum(1).mean()
    sizes = table.sum(1)
    return float(entropy), float(sizes.std() / sizes.mean()), float((table > 0).sum(1).mean())


def drawn(make) -> np.ndarray:
    return np.array([traits(make(seed)) for seed in range(REPEATS)])


@pytest.mark.full
@pytest.mark.parametrize(("alpha", "balance"), [(0.1, True), (0.5, True), (0.5, False)])
def test_by_class_draws_as_the_published_programs_do(alpha: float, balance: bool) -> None:
    """Before, labels' mean entropy at alpha 0.1 was a quarter above theirs, and all clients had equal sizes."""
    rows = balanced()
    mine = drawn(
        lambda seed: (
            Dirichlet(clients=CLIENTS, alpha=alpha, by="class", min_size=5, balance=balance, test=0.0, seed=seed)
            .split(rows)
            .table("train")
        )
    )
    theirs = drawn(lambda seed: published(rows.y.numpy(), CLIENTS, alpha, 5, balance, seed))
    error = np.sqrt(mine.var(0) / REPEATS + theirs.var(0) / REPEATS)
    assert (np.abs(mine.mean(0) - theirs.mean(0)) < 4 * error).all()
    assert mine[:, 1].mean() > 0.2  # sizes differ
    by_client = drawn(
        lambda seed: Dirichlet(clients=CLIENTS, alpha=alpha, test=0.0, seed=seed).split(rows).table("train")
    )
    if balance:  # at the same alpha clients hold fewer classes by class than by client
        assert by_client[:, 0].mean() > mine[:, 0].mean() + 4 * mine[:, 0].std() / np.sqrt(REPEATS)


@pytest.mark.full
@pytest.mark.parametrize("balance", [True, False])
def test_by_class_beside_flwr_datasets(balance: bool) -> None:
    real = pytest.importorskip("flwr_datasets.partitioner", reason="flwr-datasets is not installed")
    datasets = pytest.importorskip("datasets")
    rows = balanced()
    table = datasets.Dataset.from_dict({"y": rows.y.tolist()})

    def theirs(seed: int) -> np.ndarray:
        partitioner = real.DirichletPartitioner(
            CLIENTS, "y", alpha=0.3, min_partition_size=5, self_balancing=balance, seed=seed
        )
        partitioner.dataset = table
        held = [partitioner.load_partition(client)["y"] for client in range(CLIENTS)]
        return np.array([np.bincount(own, minlength=CLASSES) for own in held])

    def ours(seed: int) -> np.ndarray:
        kind = Dirichlet(clients=CLIENTS, alpha=0.3, by="class", min_size=5, balance=balance, test=0.0, seed=seed)
        return kind.split(rows).table("train")

    mine, other = drawn(ours), drawn(theirs)
    error = np.sqrt(mine.var(0) / REPEATS + other.var(0) / REPEATS)
    assert (np.abs(mine.mean(0) - other.mean(0)) < 4 * error).all()


@settings(max_examples=40, deadline=None)
@given(
    clients=st.integers(1, 12),
    least=st.integers(1, 8),
    alpha=st.floats(0.3, 1e6),
    classes=st.integers(1, 7),
    balance=st.booleans(),
    seed=st.integers(0, 99),
)
def test_every_row_has_one_holder_and_every_client_min_size(
    clients: int, least: int, alpha: float, classes: int, balance: bool, seed: int
) -> None:
    rows = balanced(400, classes, seed)
    kind = Dirichlet(clients=clients, alpha=alpha, by="class", min_size=least, balance=balance, test=0.0, seed=seed)
    table = kind.split(rows).table("train")
    assert table.sum(0).tolist() == np.bincount(rows.y, minlength=classes).tolist()
    assert table.sum(1).min() >= least


def test_no_client_of_more_than_average_size_takes_another_class() -> None:
    rows = balanced(1000, 5)
    for seed in range(20):
        table = Dirichlet(clients=8, alpha=0.2, by="class", min_size=1, test=0.0, seed=seed).split(rows).table("train")
        before = np.cumsum(table, axis=1)[:, :-1]
        assert not table[:, 1:][before > 1000 / 8].any()


def test_min_size_is_ten_if_left_out() -> None:
    rows = balanced(300, 3)
    for seed in range(20):
        table = Dirichlet(clients=6, alpha=0.3, by="class", test=0.0, seed=seed).split(rows).table("train")
        assert table.sum(1).min() >= 10


def test_by_class_with_a_class_that_has_no_row_and_at_the_ends_of_alpha() -> None:
    y = torch.tensor([0, 2] * 20)
    gap = DataSet("gap", torch.zeros(40, 1), y, ["a", "b", "c"])
    table = Dirichlet(clients=4, alpha=1.0, by="class", min_size=1, test=0.0).split(gap).table("train")
    assert table.sum(0).tolist() == [20, 0, 20]
    even = Dirichlet(clients=4, alpha=1e6, by="class", test=0.0).split(balanced(400, 4)).table("train")
    assert np.abs(even - 25).max() <= 2
    one_each = Dirichlet(clients=3, alpha=1e-6, by="class", min_size=1, test=0.0).split(balanced(300, 10))
    assert (np.count_nonzero(one_each.table("train"), axis=0) == 1).all()


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"by": "klass"}, "by must be"),
        ({"min_size": 5}, "min_size = 5 needs by = 'class': with by = 'client' use least"),
        ({"balance": False}, "balance = false needs by = 'class'"),
        ({"by": "class", "least": 3}, "least = 3 needs by = 'client': with by = 'class' use min_size"),
        ({"by": "class", "sizes": {"kind": "power_law"}}, "sizes need by = 'client'"),
        ({"by": "class", "min_size": 0}, "min_size must be greater than or equal to 1, got 0"),
        ({"by": "class", "min_size": 101}, "need more than the 400 rows: lower clients or min_size"),
        ({"by": "class", "alpha": 1e-6, "balance": False}, "1000 draws did not give each of 4 clients min_size = 10"),
    ],
)
def test_what_cannot_be_is_one_sentence(more: dict[str, object], message: str) -> None:
    with pytest.raises(SettingError, match=re.escape(message)) as caught:
        build("partition", {"kind": "dirichlet", "clients": 4, "alpha": 0.5} | more).split(balanced(400, 1))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["Dirichlet", "NonIid"])
def test_docstrings_credit_the_paper_that_says_it(name: str) -> None:
    """Before, NonIid credited HDAFL, whose text has no Non-IID(x)."""
    text = getattr(partition, name).__doc__
    assert "HDAFL" not in text
    assert {"Dirichlet": "Yurochkin", "NonIid": "Metis"}[name] in text
