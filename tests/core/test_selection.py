"""Who is asked: seeded, without repetition, the same for every recipe of a comparison."""

from __future__ import annotations

import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from piebald.controller import Asynchronous, Synchronous
from piebald.controller.pace import cohort_size, select
from piebald.errors import SettingError
from piebald.parts import View

from .fakes import few


def view(clients: Any, version: int = 0, busy: Any = (), waiting: int = 0, failed: int = 0) -> View:
    return View(version, 0.0, 0.0, clients, set(busy), waiting, failed)


@few
@given(st.sets(st.integers(0, 500)).map(sorted), st.integers(0, 40), st.integers(0, 5), st.integers(0, 5))
def test_a_choice_is_an_increasing_subset_that_repeats(clients: list[int], count: int, seed: int, version: int) -> None:
    chosen = select(clients, count, seed, version)
    assert len(chosen) == min(count, len(clients))
    assert chosen == sorted(set(chosen))
    assert set(chosen) <= set(clients)
    assert chosen == select(list(clients), count, seed, version)


def test_choices_differ_over_versions_and_seeds() -> None:
    choices = [tuple(select(range(100), 10, seed, version)) for seed in range(5) for version in range(20)]
    assert len(set(choices)) == len(choices)


def test_everybody_has_the_same_chance() -> None:
    """2000 draws of 5 out of 20: each count is binomial(2000, 1/4), of standard deviation 19.4; five of those."""
    counts = [0] * 20
    for version in range(2000):
        for client in select(range(20), 5, 11, version):
            counts[client] += 1
    assert max(abs(count - 500) for count in counts) < 5 * 19.4


@few
@given(st.integers(1, 1000), st.integers(1, 2000))
def test_a_whole_number_counts_clients(cohort: int, known: int) -> None:
    assert cohort_size(cohort, known) == min(cohort, known)
    assert len(Synchronous(cohort=cohort).ask(view(range(known)), 0)) == min(cohort, known)


@few
@given(st.floats(0.001, 1.0), st.integers(1, 2000))
def test_a_fraction_is_a_share_of_those_that_are_there(share: float, known: int) -> None:
    size = cohort_size(share, known)
    assert 1 <= size <= known
    assert abs(size - share * known) <= 0.5 or size == 1
    assert len(Synchronous(cohort=share).ask(view(range(known)), 0)) == size


def test_one_client_is_not_all_of_them() -> None:
    assert len(Synchronous(cohort=1).ask(view(range(9)), 0)) == 1
    assert len(Synchronous(cohort=1.0).ask(view(range(9)), 0)) == 9
    assert len(Synchronous(cohort=5.0).ask(view(range(9)), 0)) == 5


@pytest.mark.parametrize("cohort", [0, -1, 0.0, -0.5, 1.5, float("nan"), float("inf"), "many", None])
def test_sizes_that_make_no_sense(cohort: Any) -> None:
    with pytest.raises(SettingError, match="cohort"):
        Synchronous(cohort=cohort)


def test_nobody_is_there() -> None:
    for pace in (Synchronous(cohort=0.5), Synchronous(cohort=3), Asynchronous()):
        assert list(pace.ask(view([]), 0)) == []


def test_synchronous_waits_for_all_of_a_cohort() -> None:
    pace = Synchronous(cohort=3)
    assert not pace.ask(view(range(9), busy=[1]), 0)
    assert not pace.ask(view(range(9), waiting=1), 0)
    assert not pace.ready(view(range(9), busy=[1], waiting=2))
    assert pace.ready(view(range(9), waiting=2))
    assert pace.ready(view(range(9), failed=3))
    assert not pace.ready(view(range(9)))


@few
@given(st.integers(1, 30), st.integers(1, 30), st.data())
def test_asynchronous_keeps_a_number_of_clients_at_work(known: int, cohort: int, data: st.DataObject) -> None:
    busy = data.draw(st.sets(st.integers(0, known - 1), max_size=min(cohort, known)))
    asked = Asynchronous(cohort=cohort).ask(view(range(known), busy=busy), 0)
    assert len(busy) + len(asked) == min(cohort, known)
    assert not busy & set(asked)


def test_a_million_clients_are_cheap() -> None:
    """Time and memory go with the cohort: 20 rounds cost less than listing the federation 20 times would."""
    everybody = range(1_000_000)
    began = time.process_time()
    for version in range(20):
        assert len(Synchronous(cohort=100).ask(view(everybody, version), 0)) == 100
    chosen = time.process_time() - began
    began = time.process_time()
    for _ in range(20):
        list(everybody)
    assert chosen < time.process_time() - began
