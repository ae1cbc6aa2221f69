from __future__ import annotations

import math
import tomllib

import numpy as np
import pytest

from piebald.contracts import Device, Fleet
from piebald.errors import SettingError
from piebald.partition import Devices, FastSlow, Homogeneous, LogNormal
from piebald.parts import build

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
        (lambda: Homogeneous(dropout=1.5), "fleet 'homogeneous': dropout must be less than or equal to 1, got 1.5"),
        (lambda: Homogeneous(on=((3, 2),)), r"on must hold intervals \(start, stop\) with 0 <= start < stop"),
        (lambda: FastSlow(slow_factor=0.5), "slow_factor must be greater than or equal to 1, got 0.5"),
        (lambda: FastSlow(share_slow=-1), "share_slow must be"),
        (lambda: LogNormal(sigma=float("nan")), "sigma must be"),
        (lambda: LogNormal(down=0), "down must be greater than 0, got 0"),
        (lambda: build("fleet", {"kind": "fastslow"}), "there is no fleet 'fastslow': did you mean 'fast_slow'"),
    ],
)
def test_bad_settings_are_one_sentence(kind, message: str) -> None:
    with pytest.raises(SettingError, match=message):
        kind()
