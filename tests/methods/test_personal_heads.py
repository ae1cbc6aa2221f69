"""FedRep and FedBABU, whose heads are private, against their papers' algorithms."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import piebald
from piebald import recipes
from piebald.core.errors import PiebaldError, SettingError
from piebald.data.partition import clients_from
from tests.regressions import (
    LR,
    ROUNDS,
    START,
    Pair,
    Train,
    federation,
    mean,
    parts,
    runner,
    same,
    slope,
)  # fmt: skip


@pytest.fixture
def run(tmp_path: Path) -> Train:
    return runner(tmp_path)


def fedrep(tau: int, steps: int) -> list[Pair]:
    """Collins et al. 2021, algorithm 1, in which all clients take part: each client's body and head."""
    body, heads = START[0], [START[1]] * 3
    for _ in range(ROUNDS):
        bodies = []
        for k, rows in enumerate(federation()):
            for _ in range(tau):
                heads[k] = heads[k] - LR * slope(body, heads[k], rows)[1]
            own = body
            for _ in range(steps):
                own = own - LR * slope(own, heads[k], rows)[0]
            bodies.append(own)
        body = mean(bodies)
    return [(body, head) for head in heads]


def fedbabu(steps: int, tuned: int) -> list[Pair]:
    """Oh et al. 2022, algorithm 1, and fine-tuning of the whole model."""
    body, head = START
    for _ in range(ROUNDS):
        bodies = []
        for rows in federation():
            own = body
            for _ in range(steps):
                own = own - LR * slope(own, head, rows)[0]
            bodies.append(own)
        body = mean(bodies)
    ends = []
    for rows in federation():
        own, mine = body, head
        for _ in range(tuned):
            first, second = slope(own, mine, rows)
            own, mine = own - LR * first, mine - LR * second
        ends.append((own, mine))
    return ends


BY_HAND: dict[str, tuple[str, dict[str, Any], Callable[[], list[Pair]]]] = {
    "FedRep": ("fedrep", {"head_epochs": 3, "epochs": 2}, lambda: fedrep(3, 2)),
    "FedBABU": ("fedbabu", {"tune_epochs": 2, "epochs": 2}, lambda: fedbabu(2, 2)),
}


@pytest.mark.parametrize("engine", ["sequential", "batched"])
@pytest.mark.parametrize("case", BY_HAND)
def test_models_are_those_of_the_papers_algorithm(run: Train, case: str, engine: str) -> None:
    name, settings, by_hand = BY_HAND[case]
    ended = run(name, engine, **settings)
    for client, expected in enumerate(by_hand()):
        for mine, theirs in zip(parts(ended.model(client)), expected, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=2e-6)


def test_heads_that_nobody_has_leave_fedavg(run: Train) -> None:
    more = {"batch": 3, "epochs": 2}
    assert same(run("fedrep", private=(), **more), run("fedavg", **more))
    assert same(run("fedbabu", private=(), tune_epochs=2, **more), run("fine_tuned", tune_epochs=2, **more))


def test_without_epochs_for_heads_fedrep_is_fedbabu_before_it_is_tuned(run: Train) -> None:
    more = {"batch": 3, "epochs": 2}
    assert same(run("fedrep", head_epochs=0, **more), run("fedbabu", tune_epochs=0, **more))


def test_the_head_of_fedbabu_stays_what_it_was_and_that_of_fedrep_does_not(run: Train) -> None:
    for optimizer in ("sgd", "adamw"):  # whose decay would move a head that has no gradient
        body, head = parts(run("fedbabu", tune_epochs=0, lr=0.05, weight_decay=0.1, optimizer=optimizer).model(0))
        assert torch.equal(head, START[1])
        assert not torch.equal(body, START[0])
    assert not torch.equal(parts(run("fedrep").model(0))[1], START[1])


@pytest.mark.parametrize(("tune", "moved"), [("shared", (True, False)), ("private", (False, True))])
def test_fedbabu_tunes_only_what_it_is_told(run: Train, tune: str, moved: tuple[bool, bool]) -> None:
    before, after = (run("fedbabu", tune=tune, tune_epochs=epochs) for epochs in (0, 2))
    pairs = zip(parts(before.model(1)), parts(after.model(1)), strict=True)
    assert tuple(not torch.equal(one, other) for one, other in pairs) == moved


def test_clipping_sees_only_the_gradient_of_what_is_trained(run: Train) -> None:
    """The body's gradient is shorter than the limit and the head's is longer: nothing is clipped."""
    lengths = [[float(part.norm()) for part in slope(*START, rows)] for rows in federation()]
    limit = max(body for body, _ in lengths) * 1.01
    assert min(head for _, head in lengths) > 0
    assert any((body**2 + head**2) ** 0.5 > limit for body, head in lengths)
    clipped, plain = (run("fedbabu", rounds=1, tune_epochs=0, clip=clip) for clip in (limit, None))
    torch.testing.assert_close(parts(clipped.model(0))[0], parts(plain.model(0))[0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("fedrep", {"keep_momentum": True, "momentum": 0.5}, "keep_momentum cannot be used with private_first"),
        ("fedrep", {"optimizer": "adamw", "optimizer_state": "kept"}, "optimizer_state must be 'fresh'"),
        ("fedrep", {"head_epochs": -1}, "head_epochs must be greater than or equal to 0"),
        ("fedbabu", {"tune": "head"}, "tune must be"),
        (
            "fedrod",
            {"parameter_groups": [{"layers": "*", "lr": 0.1}]},
            "parameter_groups cannot be used with two_heads",
        ),
    ],
)
def test_settings_that_cannot_work(name: str, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingError, match=message):
        recipes.make(name, **settings)


@pytest.mark.parametrize(
    ("name", "settings", "model", "message"),
    [
        ("fedrep", {}, nn.Sequential(nn.Flatten(), nn.Conv1d(2, 1, 1)), "it has none: name other layers"),
        ("fedrep", {"private": "*"}, nn.Linear(2, 1), "needs shared layers to train"),
        ("fedbabu", {"private": "*"}, nn.Linear(2, 1), "needs shared layers to train"),
        ("fedbabu", {"private": (), "tune": "private"}, nn.Linear(2, 1), "tune = 'private' needs private layers"),
    ],
)
def test_models_that_cannot_work(name: str, settings: dict[str, Any], model: nn.Module, message: str) -> None:
    with pytest.raises(PiebaldError, match=message):
        piebald.run(recipes.make(name, **settings), clients_from(federation(), test=0.0), model, rounds=1)
