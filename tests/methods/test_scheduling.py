"""Which clients are selected: seeded, without repetition, the same for every recipe of a comparison."""

from __future__ import annotations

import tracemalloc
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from piebald.contracts import Task
from piebald.core.errors import SettingError
from piebald.core.randomness import select
from piebald.methods.scheduling import Asynchronous, Buffered, Deadline, Synchronous
from piebald.methods.scheduling.base import ServerView, cohort_size
from piebald.server.client_pool import ClientPool
from tests.fakes import few

NO: st.SearchStrategy[list[int]] = st.just([])


def view(available: int, busy: int = 0, waiting: int = 0, failed: int = 0) -> ServerView:
    """Before the first step, so all tasks under way were sent since the last one."""
    requested = busy + waiting + failed
    return ServerView(0, 0.0, 0.0, available, available - busy, busy, requested, busy, waiting, failed)


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


def test_all_clients_have_the_same_chance() -> None:
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
    assert Synchronous(cohort=cohort).num_to_request(view(known)) == min(cohort, known)


@few
@given(st.floats(0.001, 1.0), st.integers(1, 2000))
def test_a_fraction_is_a_share_of_the_available_clients(share: float, known: int) -> None:
    size = cohort_size(share, known)
    assert 1 <= size <= known
    assert abs(size - share * known) <= 0.5 or size == 1
    assert Synchronous(cohort=share).num_to_request(view(known)) == size


def test_one_client_differs_from_a_share_of_one() -> None:
    assert Synchronous(cohort=1).num_to_request(view(9)) == 1
    assert Synchronous(cohort=1.0).num_to_request(view(9)) == 9
    assert Synchronous(cohort=2.0).num_to_request(view(9)) == 2


@pytest.mark.parametrize("cohort", [0, -1, 0.0, -0.5, 1.5, float("nan"), float("inf"), "many", None])
def test_bad_sizes_are_refused(cohort: Any) -> None:
    with pytest.raises(SettingError, match="cohort"):
        Synchronous(cohort=cohort)


def test_nobody_is_available() -> None:
    for scheduling in (Synchronous(cohort=0.5), Synchronous(cohort=3), Asynchronous()):
        assert scheduling.num_to_request(view(0)) == 0


def test_synchronous_waits_for_all_of_a_cohort() -> None:
    scheduling = Synchronous(cohort=3)
    assert not scheduling.num_to_request(view(9, busy=1))
    assert not scheduling.num_to_request(view(9, waiting=1))
    assert not scheduling.should_step(view(9, busy=1, waiting=2))
    assert scheduling.should_step(view(9, waiting=2))
    assert scheduling.should_step(view(9, failed=3))
    assert not scheduling.should_step(view(9))


@few
@given(st.integers(1, 30), st.integers(1, 30), st.data())
def test_asynchronous_keeps_a_number_of_clients_busy(known: int, cohort: int, data: st.DataObject) -> None:
    busy = data.draw(st.integers(0, min(cohort, known)))
    assert busy + Asynchronous(cohort=cohort).num_to_request(view(known, busy=busy)) == min(cohort, known)


def test_failures_alone_make_a_step_once_there_are_as_many_as_clients() -> None:
    """And not where updates are waiting: of `Buffered` they would be used too early."""
    for known in (0, 1, 3):
        enough = max(1, known)
        assert Asynchronous().should_step(view(known, failed=enough))
        assert not Asynchronous().should_step(view(known, failed=enough - 1))
    buffered = Buffered(buffer_size=2)
    assert buffered.should_step(view(3, failed=3))
    assert not buffered.should_step(view(3, failed=2))
    assert not buffered.should_step(view(3, waiting=1, failed=3))
    assert buffered.should_step(view(3, waiting=2))


def test_a_step_expects_a_cohort_where_it_waits_for_all() -> None:
    assert Synchronous(cohort=3).expected_updates(10) == 3
    assert Synchronous(cohort=0.4).expected_updates(10) == 4
    assert Synchronous(cohort=3, over_selection=1.5).expected_updates(10) is None
    for cohort, known, chance in ((3, 10, 0.3), (0.4, 10, 0.4), (10, 10, 1.0), (11, 10, 1.0)):
        poisson = Synchronous(cohort=cohort, sampling="poisson")
        assert poisson.inclusion(known) == pytest.approx(chance)
        assert poisson.expected_updates(known) == pytest.approx(chance * known)
    assert Synchronous(cohort=3).inclusion(10) is None
    assert Asynchronous().expected_updates(10) is None


def test_only_a_deadline_that_uses_no_late_update_has_rounds() -> None:
    kinds = [Deadline(seconds=1.0, max_staleness=limit).round_kind() for limit in (None, 0, 1)]
    assert kinds == [None, "partial", None]


@pytest.mark.parametrize("limit", [0, 2])
def test_staleness_at_the_limit_is_allowed_and_above_it_is_not(limit: int) -> None:
    more: Any
    for kind, more in ((Asynchronous, {}), (Buffered, {}), (Deadline, {"seconds": 1.0})):
        scheduling = kind(max_staleness=limit, **more)
        assert scheduling.reject_reason(limit) is None
        assert f"missed {limit + 1} server steps" in scheduling.reject_reason(limit + 1)


class TestClientPool:
    """Idle clients, by a slow definition and by the pool's fast one."""

    @few
    @given(st.integers(1, 40), st.data())
    def test_a_choice_is_among_the_idle(self, known: int, data: st.DataObject) -> None:
        client_pool, clients = ClientPool(), range(known)
        for version in range(12):  # clients become busy, come back, and are excluded
            idle = [c for c in clients if c not in client_pool.busy and c not in client_pool.excluded]
            assert (
                client_pool.count(clients)
                == client_pool.count(list(clients))
                == (known - len(client_pool.excluded), len(idle))
            )
            chosen = client_pool.choose(clients, data.draw(st.integers(0, len(idle))), 3, version)
            assert chosen == sorted(set(chosen))
            assert set(chosen) <= set(idle)
            for client in chosen:
                client_pool.take(Task(version, client, version, {}))
            for client in data.draw(
                st.lists(st.sampled_from(sorted(client_pool.busy)), unique=True) if client_pool.busy else NO
            ):
                client_pool.release(client)
                if data.draw(st.integers(0, 9)) == 0:
                    client_pool.exclude(client, "not finite")

    def test_a_client_that_is_busy_and_excluded_counts_once(self) -> None:
        client_pool = ClientPool()
        for client in (1, 2):
            client_pool.take(Task(client, client, 0, {}))
        client_pool.exclude(2, "not finite")
        assert client_pool.count(range(5)) == client_pool.count([*range(5)]) == (4, 3)

    def test_all_idle_clients_have_the_same_chance(self) -> None:
        """2000 draws of 1 among 15 of 20: binomial(2000, 1/15), of standard deviation 11.2; five of those."""
        client_pool = ClientPool()
        for client in range(0, 20, 4):
            client_pool.take(Task(client, client, 0, {}))
        counts = [0] * 20
        for version in range(2000):
            counts[client_pool.choose(range(20), 1, 5, version)[0]] += 1
        idle = [count for client, count in enumerate(counts) if client % 4]
        assert sum(counts) == sum(idle)
        assert max(abs(count - 2000 / 15) for count in idle) < 5 * 11.2

    def test_a_million_clients_are_cheap(self) -> None:
        """A choice holds the cohort, never a list of all clients, which would take eight megabytes."""
        clients, client_pool = range(1_000_000), ClientPool()
        for client in range(0, 500, 5):
            client_pool.take(Task(client, client, 0, {}))
        tracemalloc.start()
        try:
            for version in range(20):
                assert len(client_pool.choose(clients, 100, 0, version)) == 100
                assert client_pool.count(clients) == (1_000_000, 999_900)
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert peak < 500_000


def test_a_late_result_alone_makes_no_round() -> None:
    """All other clients are still busy with the round before, so none could be asked."""
    scheduling = Synchronous(cohort=2, over_selection=1.5)
    alone = view(3)._replace(version=1, idle=0, busy=2, failed=1)
    assert not scheduling.should_step(alone)
    assert scheduling.should_step(alone._replace(requested=1))
