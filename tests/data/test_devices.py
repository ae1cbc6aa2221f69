from __future__ import annotations

import math
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from piebald.contracts import Device, Fleet, Task
from piebald.contracts.component import build
from piebald.core.errors import SettingError
from piebald.core.randomness import select
from piebald.data.partition import Devices, FastSlow, Homogeneous, LogNormal, Trace
from piebald.data.partition.devices import Present
from piebald.server.client_pool import ClientPool

KINDS = [Homogeneous(seconds_per_step=2.0, dropout=0.1), FastSlow(latency=0.5), LogNormal(down=1e6, up=1e5, seed=2)]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.kind)
def test_every_fleet(kind: Devices) -> None:
    fleet: Fleet = kind
    assert fleet.available(1_000_000, 5.0) == range(1_000_000)
    assert isinstance(fleet.available(10, 0.0), range)  # not a list of a million
    assert [fleet.device(client) for client in (3, 1)] == [fleet.device(client) for client in (1, 3)][::-1]
    assert fleet.device(0).dropout == kind.dropout
    assert fleet.device(0).latency == kind.latency
    assert build("fleet", kind.table()) == kind


def test_the_default_is_instant_and_always_there() -> None:
    assert Homogeneous().device(5) == Device()


def test_intervals() -> None:
    fleet = build("fleet", tomllib.loads("kind = 'homogeneous'\non = [[0, 10], [20, 30]]"))
    assert [len(fleet.available(4, now)) for now in (0, 9.9, 10, 25, 30)] == [4, 4, 0, 4, 0]
    assert fleet.device(0).on == ((0, 10), (20, 30))


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.7, 1.0])
@pytest.mark.parametrize("seed", range(5))
def test_as_many_slow_ones_as_asked(share: float, seed: int) -> None:
    fleet = FastSlow(fast=2.0, slow_factor=3.0, share_slow=share, seed=seed)
    times = [fleet.device(client).seconds_per_step for client in range(10)]
    assert sorted(times) == [2.0] * (10 - round(10 * share)) + [6.0] * round(10 * share)


def test_log_normal_has_the_asked_median_and_spread() -> None:
    fleet = LogNormal(seconds_per_step=2.0, sigma=0.5, down=1000.0, bandwidth_sigma=1.0)
    devices = [fleet.device(client) for client in range(1500)]
    speeds = np.log([device.seconds_per_step for device in devices])
    assert math.isclose(np.exp(np.median(speeds)), 2.0, rel_tol=0.06)
    assert math.isclose(speeds.std(), 0.5, rel_tol=0.06)
    assert math.isclose(np.std(np.log([device.down for device in devices])), 1.0, rel_tol=0.06)
    assert devices[0].up == math.inf
    assert fleet.device(3) != LogNormal(seconds_per_step=2.0, seed=1, down=1000.0, bandwidth_sigma=1.0).device(3)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (lambda: Homogeneous(dropout=1.5), "fleet 'homogeneous': dropout must be at most 1, got 1.5"),
        (lambda: Homogeneous(on=((3, 2),)), r"on must hold intervals \(start, stop\) with 0 <= start < stop"),
        (lambda: FastSlow(slow_factor=0.5), "slow_factor must be at least 1, got 0.5"),
        (lambda: FastSlow(share_slow=-1), "share_slow must be"),
        (lambda: LogNormal(sigma=float("nan")), "sigma must be"),
        (lambda: LogNormal(down=0), "down must be above 0, got 0"),
        (lambda: build("fleet", {"kind": "fastslow"}), "there is no fleet 'fastslow': did you mean 'fast_slow'"),
    ],
)
def test_bad_settings_are_one_sentence(kind, message: str) -> None:
    with pytest.raises(SettingError, match=message):
        kind()


def test_fast_and_slow_take_turns_as_in_metis() -> None:
    for first, expected in (("fast", [False, True] * 5), ("slow", [True, False] * 5)):
        assert [FastSlow(first=first).is_slow(client) for client in range(10)] == expected
    assert [FastSlow(first="slow", share_slow=0.1).is_slow(client) for client in range(3)] == [True, False, False]
    assert FastSlow(first="slow", share_slow=0.0).is_slow(0) is False


def test_a_trace_is_read_from_a_table(tmp_path) -> None:
    file = tmp_path / "phones.csv"
    file.write_text("seconds_per_step,up,down,on\n0.5,1000,,0-10;20-30\n2,,5e6,\n")
    fleet = build("fleet", {"kind": "trace", "file": str(file), "latency": 0.1})
    assert fleet.device(0) == Device(0.5, math.inf, 1000.0, 0.1, 0.0, ((0.0, 10.0), (20.0, 30.0)))
    assert fleet.device(1) == Device(2.0, 5e6, math.inf, 0.1, 0.0, None)
    assert fleet.device(2) == fleet.device(0)  # more clients than lines: from the top again
    assert [list(fleet.available(5, now)) for now in (5, 15, 25)] == [[0, 1, 2, 3, 4], [1, 3], [0, 1, 2, 3, 4]]
    assert build("fleet", fleet.table()) == fleet


def test_a_trace_runs_in_the_simulator(tmp_path) -> None:
    import torch

    import piebald
    from piebald import data
    from piebald.data.partition import Iid

    file = tmp_path / "phones.csv"
    file.write_text("seconds_per_step,on\n1,\n4,0-5\n")
    clients = Iid(clients=4, limit=200).split(data.digits())
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))
    simulator = piebald.Simulator(fleet=Trace(file=str(file)))
    run = piebald.run(
        piebald.recipes.fedavg(cohort=2), clients, model, rounds=2, out=tmp_path / "run", runtime=simulator
    )
    assert run is not None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "cannot be read as CSV"),
        ("seconds\n1\n", "must have a column 'seconds_per_step', got seconds"),
        ("seconds_per_step,upp\n1,2\n", "there is no column of a trace called 'upp': did you mean 'up'"),
        ("seconds_per_step\n", "must have a line for at least one client"),
        ("seconds_per_step\n-1\n", r"line 2: seconds_per_step must be at least 0, got -1"),
        ("seconds_per_step,up\n1,0\n", r"line 2: up must be above 0, got 0"),
        ("seconds_per_step\nfast\n", r"line 2: seconds_per_step must be a number, got 'fast'"),
        ("seconds_per_step,on\n1,9-3\n", r"line 2: on must be intervals like 0-3600;7200-9000, got '9-3'"),
    ],
)
def test_a_wrong_trace_is_one_sentence(tmp_path, text: str, message: str) -> None:
    file = tmp_path / "phones.csv"
    file.write_text(text)
    with pytest.raises(SettingError, match=message):
        Trace(file=str(file)).device(0)


def test_a_trace_that_is_not_there() -> None:
    with pytest.raises(SettingError, match=r"there is no file nowhere.csv"):
        Trace(file="nowhere.csv").available(3, 0.0)


@pytest.mark.parametrize("clients", [3, 7, 40])
def test_who_is_on_is_what_every_line_says_at_whatever_time(tmp_path: Path, clients: int) -> None:
    """Times go forth and back, as they do where a run is resumed; intervals overlap and touch."""
    rng = np.random.default_rng(clients)
    intervals: list[list[tuple[float, float]]] = [[]]  # always on
    for _ in range(6):
        ends = zip(rng.integers(0, 50, 3).tolist(), rng.integers(1, 9, 3).tolist(), strict=True)
        intervals.append([(float(start), float(start + length)) for start, length in ends])
    text = [";".join(f"{start:g}-{stop:g}" for start, stop in pairs) for pairs in intervals]
    file = tmp_path / "trace.csv"
    file.write_text("seconds_per_step,on\n" + "".join(f"1,{line}\n" for line in text))
    fleet = Trace(file=str(file))
    for now in (*np.arange(0, 60, 0.5), 3.0, 57.0, 3.0):
        here = fleet.available(clients, float(now))
        lines = [not pairs or any(start <= now < stop for start, stop in pairs) for pairs in intervals]
        wanted = [client for client in range(clients) if lines[client % len(lines)]]
        assert list(here) == wanted
        assert len(here) == len(wanted)
        assert [client for client in range(-1, clients + 1) if client in here] == wanted
        assert np.array_equal(np.asarray(here, dtype=np.int64), wanted)


@pytest.mark.parametrize("kind", [list, lambda clients: Present(np.isin(np.arange(40), clients), 40)])
def test_clients_are_counted_and_chosen_without_a_list_of_all(kind: Callable[[list[int]], Sequence[int]]) -> None:
    """As by looking at each of them."""
    rng = np.random.default_rng(1)
    for round in range(50):
        here = sorted(rng.choice(40, int(rng.integers(0, 40)), replace=False).tolist())
        pool = ClientPool()
        for client in rng.choice(40, 6, replace=False).tolist():
            pool.exclude(client, "for a test")
        for client in rng.choice(40, 6, replace=False).tolist():
            pool.take(Task(0, client, 0, {}))
        clients = kind(here)
        offered = [client for client in here if client not in pool.excluded]
        idle = [client for client in offered if client not in pool.busy]
        assert pool.count(clients) == (len(offered), len(idle))
        chosen = pool.choose(clients, 3, "test", round)
        assert chosen == select(idle, 3, "test", round)
        assert all(type(client) is int for client in chosen)
