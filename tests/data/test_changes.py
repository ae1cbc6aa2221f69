"""Poisoned and corrupted clients: exactly those, exactly so, and nobody's tests."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from piebald import data
from piebald.contracts.component import build
from piebald.core.errors import SettingError
from piebald.data import DataSet
from piebald.data.partition import (
    Blur,
    Contrast,
    DataChange,
    FlipPairs,
    FlipRandom,
    FlipTo,
    Iid,
    Noise,
    PooledClients,
    Sensor,
)

PAIRS = ((0, 4), (1, 5), (2, 6), (3, 7))
LABELS = [
    FlipPairs(share=0.4, pairs=PAIRS),
    FlipRandom(share=0.4, fraction=0.5),
    FlipTo(share=0.4, target=9, source=(1,)),
]
INPUTS = [Noise(share=0.4), Contrast(share=0.4), Sensor(share=0.4), Blur(share=0.4)]


def dealt(*changes: DataChange, **fields: object) -> PooledClients:
    return Iid(clients=5, validation=0.1, changes=changes or None, **fields).split(data.digits())


@pytest.mark.parametrize("change", LABELS + INPUTS, ids=lambda change: change.kind)
def test_only_the_chosen_clients_change_and_never_what_all_are_tested_on(change: DataChange) -> None:
    clean, after, again = dealt(), dealt(change), dealt(change)
    chosen = change.chosen(5).tolist()
    assert len(chosen) == 2
    for client in range(5):
        for split in ("train", "validation", "test"):
            before, now = clean.rows(client, split), after.rows(client, split)
            assert torch.equal(now.x, again.rows(client, split).x)
            assert torch.equal(now.y, again.rows(client, split).y)
            if client not in chosen or split == "test":
                assert torch.equal(before.y, now.y)
            if client not in chosen or change.of_labels:
                assert torch.equal(before.x, now.x)
        if client in chosen:
            before, now = clean.rows(client, "train"), after.rows(client, "train")
            assert not (torch.equal(before.x, now.x) and torch.equal(before.y, now.y))
            assert 0 <= float(now.x.min()) <= float(now.x.max()) <= 1
    assert torch.equal(clean.common.x, after.common.x)
    assert torch.equal(clean.common.y, after.common.y)
    assert build("change", change.table()) == change


def test_pairs_are_swapped() -> None:
    clean, after = dealt(), dealt(FlipPairs(pairs=PAIRS))
    y, flipped = clean.rows(0, "train").y, after.rows(0, "train").y
    expected = torch.where(y < 4, y + 4, torch.where(y < 8, y - 4, y))
    assert torch.equal(flipped, expected)
    assert after.counts(0, "train")[0] == clean.counts(0, "train")[4]


def test_random_flips_never_keep_the_label_and_targets_are_hit() -> None:
    y = np.repeat(np.arange(10), 200)
    flipped = FlipRandom(fraction=0.5).labels(y, 10, 0)
    assert (flipped != y).mean() == pytest.approx(0.5, abs=0.03)
    assert np.ptp(np.bincount(FlipRandom().labels(y, 10, 0), minlength=10)) < 100
    assert (FlipTo(target=3).labels(y, 10, 0) == 3).all()
    some = FlipTo(target=3, source=(1, 2)).labels(y, 10, 0)
    assert np.bincount(some, minlength=10).tolist() == [200, 0, 0, 600, 200, 200, 200, 200, 200, 200]


def test_changes_are_carried_out_in_order() -> None:
    after = dealt(FlipPairs(pairs=((0, 1),)), FlipTo(target=5, source=(1,)))
    counts, clean = after.counts(0, "train"), dealt().counts(0, "train")
    assert counts[0] == clean[1]
    assert counts[1] == 0
    assert counts[5] == clean[5] + clean[0]


def test_from_a_table_and_by_number() -> None:
    table = {"kind": "iid", "clients": 4, "changes": [{"kind": "noise", "clients": [2], "sigma": 0.3}]}
    kind = build("partition", table)
    assert list(kind.table()["changes"]) == [Noise(clients=(2,), sigma=0.3).table()]
    assert build("partition", kind.table()) == kind


def test_images_in_bytes_stay_bytes_and_signals_have_no_range() -> None:
    rng = np.random.default_rng(0)
    images = torch.from_numpy(rng.integers(0, 256, (40, 3, 8, 8)).astype(np.uint8))
    y = torch.arange(40) % 2
    clean = Iid(clients=2).split(DataSet("images", images, y, ["a", "b"]))
    after = Iid(clients=2, changes=(Contrast(factor=0.5),)).split(DataSet("images", images, y, ["a", "b"]))
    assert after.x.std() == pytest.approx(float(clean.x.std()) / 2, rel=0.1)
    assert images.dtype == torch.uint8
    signals = torch.from_numpy(rng.normal(size=(40, 2, 30)).astype(np.float32))
    smooth = Iid(clients=2, changes=(Blur(sigma=2),)).split(DataSet("signals", signals, y, ["a", "b"]))
    assert smooth.x.std() < 0.6 * signals.std()
    assert smooth.x.mean() == pytest.approx(float(signals.mean()), abs=0.05)
    shifted = Iid(clients=2, changes=(Sensor(gain=0, bias=5),)).split(DataSet("signals", signals, y, ["a", "b"]))
    gap = (
        shifted.rows(0, "train").x - Iid(clients=2).split(DataSet("signals", signals, y, ["a", "b"])).rows(0, "train").x
    )
    assert gap.std((0, 2)).max() < 1e-5  # one bias a channel


def test_noise_has_the_stated_strength() -> None:
    x = torch.zeros(50, 1, 20)
    assert Noise(sigma=0.3).inputs(x, 1).std() == pytest.approx(0.3, rel=0.1)
    assert not torch.equal(Noise().inputs(x, 1), Noise().inputs(x, 2))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda: FlipPairs(pairs=((0, 1), (1, 2))), "pairs must name each class once"),
        (lambda: dealt(FlipPairs(pairs=((0, 10),))), "classes must be in 0..9, got 10"),
        (lambda: dealt(FlipTo(target=12)), "classes must be in 0..9, got 12"),
        (lambda: dealt(Noise(clients=(7,))), "clients must be in 0..4, got 7"),
        (lambda: Noise(share=1.5), "share must be less than or equal to 1, got 1.5"),
        (
            lambda: Iid(clients=2, changes=(FlipRandom(),)).split(DataSet("real", torch.zeros(9, 1), torch.zeros(9))),
            "labels cannot be flipped",
        ),
        (
            lambda: Iid(clients=2, changes=(Blur(),)).split(DataSet("real", torch.zeros(9, 1), torch.zeros(9))),
            "inputs must be images or signals",
        ),
    ],
)
def test_what_cannot_be_is_one_sentence(wrong, message: str) -> None:
    with pytest.raises(SettingError, match=message):
        wrong()
