from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from piebald.core.errors import SettingError
from piebald.data.clients.lists import Lists, Numbered
from piebald.data.partition.leakage import three_ways
from piebald.data.partition.split import SplitSettings, hold_out, mixed, places, thin

sizes_of = st.lists(st.integers(0, 30), min_size=1, max_size=12)


def test_mixed_depends_on_every_column_and_the_key() -> None:
    a, b = np.arange(1000), np.zeros(1000, dtype=np.int64)
    assert len(np.unique(mixed(1, a, b))) == 1000
    assert not (mixed(1, a, b) == mixed(1, b, a))[1:].any()
    assert not (mixed(1, a) == mixed(2, a)).any()
    assert abs(np.mean(mixed(3, a) / 2**64) - 0.5) < 0.03


def test_places() -> None:
    assert places(np.array([4, 4, 7, 9, 9, 9])).tolist() == [0, 1, 0, 0, 1, 2]
    assert places(np.zeros(0, dtype=np.int64)).tolist() == []


@given(sizes_of, st.floats(0, 0.99), st.integers(0, 5))
def test_each_client_holds_out_its_share_and_never_all(sizes: list[int], share: float, key: int) -> None:
    client = np.repeat(np.arange(len(sizes)), sizes)
    out = hold_out(client, share, key, label=np.arange(len(client)) % 3)
    for number, size in enumerate(sizes):
        held = int(out[client == number].sum())
        assert held == min(int(np.floor(size * share + 0.5)), max(size - 1, 0))


@given(st.integers(1, 40), st.integers(1, 40), st.integers(0, 99))
def test_each_class_gives_its_share(few: int, many: int, key: int) -> None:
    label = np.repeat([0, 1], [few, many])
    out = hold_out(np.zeros(few + many, dtype=np.int64), 0.25, key, label)
    for number, size in enumerate((few, many)):
        assert abs(int(out[label == number].sum()) - size * 0.25) < 1.5


@given(sizes_of, st.integers(0, 9))
def test_what_a_client_holds_out_depends_on_no_other(sizes: list[int], key: int) -> None:
    client = np.repeat(np.arange(len(sizes)), sizes)
    out = hold_out(client, 0.3, key)
    for number in range(len(sizes)):
        own = client[client == number]
        assert (hold_out(own, 0.3, key) == out[client == number]).all()


@given(st.lists(st.integers(0, 6), min_size=1, max_size=60), st.integers(0, 9))
def test_groups_stay_together(group: list[int], key: int) -> None:
    groups = np.array(group)
    client = np.sort(np.arange(len(group)) % 3)
    out = hold_out(client, 0.4, key, group=groups)
    for number in range(3):
        mine = client == number
        for one in np.unique(groups[mine]):
            assert len(np.unique(out[mine & (groups == one)])) == 1
        assert not mine.any() or not out[mine].all()


@given(st.lists(st.integers(0, 4), min_size=1, max_size=80), st.data(), st.integers(0, 9))
def test_thin_keeps_strata_in_proportion(stratum: list[int], data: st.DataObject, key: int) -> None:
    strata = np.array(stratum)
    keep = data.draw(st.integers(0, len(strata)))
    chosen = thin(strata, keep, key)
    assert chosen.sum() == keep
    for one in np.unique(strata):
        mine = strata == one
        assert abs(chosen[mine].sum() - keep * mine.mean()) < 1


@given(sizes_of, st.floats(0, 0.5), st.floats(0, 0.49), st.integers(0, 9))
def test_three_ways_loses_nothing(sizes: list[int], test: float, validation: float, seed: int) -> None:
    lists = Lists.of(np.repeat(np.arange(len(sizes)), sizes), len(sizes))
    parts = three_ways(lists, None, SplitSettings(validation=validation, test=test, seed=seed))
    for client, size in enumerate(sizes):
        rows = np.concatenate([parts[split][client] for split in ("train", "validation", "test")])
        assert sorted(rows) == sorted(lists[client])
        assert size == 0 or len(parts["train"][client]) > 0


def test_shares_leave_something() -> None:
    with pytest.raises(SettingError, match=r"validation = 0.5 and test = 0.5 leave no rows to train on"):
        SplitSettings(validation=0.5, test=0.5)
    with pytest.raises(SettingError, match=r"test must be a share of a client's rows, .* got 1.5"):
        SplitSettings(test=1.5)


def test_lists_and_names() -> None:
    lists = Lists.of(np.array([2, -1, 0, 2]), 4, values=np.array([10, 11, 12, 13]))
    assert [lists[client].tolist() for client in range(4)] == [[12], [], [10, 13], []]
    assert lists.clients.tolist() == [0, 2, 2]
    kept = lists.where(np.array([True, False, True]))
    assert [kept[client].tolist() for client in range(4)] == [[12], [], [13], []]
    for client in (-1, 4):
        with pytest.raises(IndexError, match="numbered from 0 to 3"):
            lists[client]
    names = Numbered(1_000_000)
    assert names[7] == "7"
    assert names[-1] == "999999"
    assert names[2:4] == ["2", "3"]
