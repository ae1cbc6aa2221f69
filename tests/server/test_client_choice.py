"""Clients chosen by size, by loss and by utility, beside chance."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import piebald
from piebald import recipes
from piebald.contracts import Result, Task, Update
from piebald.core.errors import SettingError
from piebald.data.partition import FastSlow
from piebald.server.client_pool import ClientRecords
from tests.fakes import seeded

draw = np.random.default_rng(6)
ROWS = {f"c{n}": (draw.normal(size=(4 + 4 * n, 3)).astype(np.float32), np.arange(4 + 4 * n) % 2) for n in range(6)}


def noted(*losses: float, rows: int = 10, seconds: float = 1.0) -> ClientRecords:
    """Records of clients with these last losses."""
    records = ClientRecords()
    for client, loss in enumerate(losses):
        update = Update({}, examples=rows, steps=1, metrics={"loss": loss})
        records.note(Result(Task(client, client, 0, {}), update, sent=0.0, time=seconds), 1)
    return records


def test_by_size_has_the_chances_of_draws_by_rows() -> None:
    """The first of two draws without replacement has the share of its rows; the second that of those left."""
    records = ClientRecords({0: 1, 1: 2, 2: 7}.__getitem__)
    firsts = Counter(records.by_size(range(3), 1, "seed", n)[0] for n in range(4000))
    assert [firsts[client] / 4000 for client in range(3)] == pytest.approx([0.1, 0.2, 0.7], abs=0.03)
    pairs = Counter(tuple(records.by_size(range(3), 2, "seed", n)) for n in range(4000))
    assert pairs[2, 1] / 4000 == pytest.approx(0.7 * 2 / 3, abs=0.03)
    assert records.by_size(range(3), 2, "x") == records.by_size(range(3), 2, "x")


def test_power_of_choice_takes_the_largest_losses_of_its_candidates() -> None:
    records = noted(0.5, 2.0, 1.0, 3.0)
    assert records.by_loss(range(4), 2, 10.0, "x") == [1, 3]  # all are candidates
    assert records.by_loss(range(6), 2, 10.0, "x") == [4, 5]  # those that have not trained come first
    drawn = Counter(tuple(records.by_loss(range(4), 1, 2.0, n)) for n in range(3000))
    # of two uniform candidates the best: client 3 wins where it is drawn, in half of all pairs
    assert drawn[(3,)] / 3000 == pytest.approx(1 / 2, abs=0.03)
    assert drawn[(1,)] / 3000 == pytest.approx(2 / 6, abs=0.03)
    assert (0,) not in drawn


def test_a_loss_that_is_not_finite_is_no_reason_to_be_asked() -> None:
    assert noted(math.nan, 1.0, math.inf).by_loss(range(3), 1, 10.0, "x") == [1]


def test_utility_prefers_loss_and_speed_and_explores_less_and_less() -> None:
    equal = noted(1.0, 5.0, 1.0, 1.0)
    assert equal.by_utility(range(4), 1, 200, "x") == [1]
    slow = noted(5.0, 4.9, 5.0, 5.0)
    update = Update({}, examples=10, steps=1, metrics={"loss": 5.0})
    for client in (0, 2, 3):
        slow.note(Result(Task(client, client, 0, {}), update, sent=0.0, time=1.0 if client else 50.0), 1)
    assert all(0 not in slow.by_utility(range(4), 2, 200, n) for n in range(50))
    fresh = [len({*equal.by_utility(range(24), 10, version, "x")} - {0, 1, 2, 3}) for version in (0, 30, 300)]
    assert fresh[0] == 9
    assert fresh[1] < fresh[0]
    assert fresh[2] == 6  # nobody else is known
    many = noted(*[1.0] * 20)
    assert len({*many.by_utility(range(30), 10, 1000, "x")} - {*range(20)}) == 2  # a fifth at least


def run(choose: str, rounds: int = 6, **options: Any) -> piebald.Run:
    scheduling = {"kind": options.pop("kind", "synchronous"), "cohort": 2, "choose": choose}
    where = piebald.Simulator(engine="sequential", workers=0, fleet=options.pop("fleet", None))
    recipe = recipes.fedavg(lr=0.2).with_(scheduling=scheduling)
    return piebald.run(recipe, ROWS, seeded(lambda: nn.Linear(3, 2)), rounds=rounds, runtime=where, **options)


@pytest.mark.parametrize("choose", ["loss", "speed", "size"])
@pytest.mark.parametrize("kind", ["synchronous", "buffered"])
def test_runs_choose_as_they_say_and_resume_to_the_bit(choose: str, kind: str, tmp_path: Path) -> None:
    whole = run(choose, kind=kind, fleet=FastSlow(fast=1.0, slow_factor=3.0, share_slow=0.5))
    assert [row["status"] for row in whole.results].count("ok") >= 12
    fleet = FastSlow(fast=1.0, slow_factor=3.0, share_slow=0.5)
    run(choose, 3, kind=kind, fleet=fleet, out=tmp_path / "run", checkpoint_every=1).close()
    resumed = piebald.resume(tmp_path / "run", ROWS, seeded(lambda: nn.Linear(3, 2)), rounds=6)
    asked = [[(row["version"], row["client"]) for row in made.results] for made in (whole, resumed)]
    assert asked[0] == asked[1]
    assert torch.equal(resumed.start(), whole.start())


def test_all_are_asked_before_anybody_is_asked_twice_by_loss() -> None:
    asked = [row["client"] for row in run("loss", 3).results]
    assert len(asked) == 6
    assert sorted(asked)[0] < sorted(asked)[-1]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: recipes.fedavg().with_(
                scheduling={"kind": "synchronous", "choose": "loss"},
                transforms=[{"kind": "gaussian", "clip": 1.0}],
                aggregation="equal_weighted",
            ),
            "gaussian hides that or counts on clients that are drawn by chance",
        ),
        (
            lambda: recipes.dp_sgd().with_(scheduling={"kind": "synchronous", "choose": "size"}),
            "hides that or counts on clients",
        ),
        (
            lambda: recipes.fedavg().with_(
                scheduling={"kind": "synchronous", "choose": "speed"}, transforms=["secure_aggregation"]
            ),
            "secure_aggregation hides that",
        ),
        (
            lambda: recipes.fedavg().with_(
                scheduling={"kind": "synchronous", "choose": "size", "sampling": "poisson", "cohort": 0.5}
            ),
            "both say who is asked",
        ),
        (
            lambda: recipes.fedavg().with_(scheduling={"kind": "synchronous", "choose": "size", "candidates": 3.0}),
            "candidates would have no effect",
        ),
        (lambda: recipes.fedavg().with_(scheduling={"kind": "synchronous", "choose": "looks"}), "choose"),
    ],
)
def test_what_does_not_fit_is_refused(make: Any, message: str) -> None:
    with pytest.raises(SettingError) as caught:
        make()
    assert message in str(caught.value)
