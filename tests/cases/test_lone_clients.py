"""Case 06: what one client cannot do stops nobody.  `tests/contract/test_awkward_clients.py` has all runtimes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import piebald
from piebald import recipes
from piebald.core.errors import SettingError
from piebald.methods.aggregation.linear import FixedShares
from piebald.methods.transforms.gaussian import Gaussian
from piebald.privacy.secure_aggregation.transform import SecureAggregation
from tests.fakes import seeded, simulate

REASON = "cannot train on a batch of one row with batch norm"


def rows(count: int, seed: int = 0) -> tuple[Any, Any]:
    draw = np.random.default_rng([count, seed])
    x = draw.normal(size=(count, 4)).astype(np.float32)
    return x, (x[:, 0] > 0).astype(np.int64)


def clinics(count: int, **others: Any) -> dict[str, Any]:
    return {f"clinic {k}": {"train": rows(30, k), "test": rows(10, k)} for k in range(count)} | others


def network() -> nn.Module:
    return seeded(lambda: nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2)))


def done(run: piebald.Run) -> dict[tuple[str, str], str]:
    return {(row["name"], row["kind"]): row["reason"] for row in run.failures}


def test_forty_clinics_one_of_which_has_a_single_row(tmp_path: Path) -> None:
    held = clinics(40) | {"clinic 17": {"train": rows(1), "test": rows(10)}}
    run = simulate(recipes.fedavg(lr=0.1, cohort=3), held, network(), rounds=40, seed=2, out=tmp_path, evaluate_every=0)
    assert run.final["status"] == "finished"
    assert done(run)["clinic 17", "train"].startswith(REASON)
    run.close()
    assert piebald.resume(tmp_path, held, network(), rounds=41).final["rounds"] == 41


@pytest.mark.parametrize("name", ["scaffold", "ditto", "ifca", "fedbuff", "fine_tuned", "fedproto", "pfedme"])
def test_with_other_methods_the_others_train_and_are_scored(name: str) -> None:
    held = clinics(5, lone={"train": rows(1), "test": rows(4)})
    run = simulate(recipes.make(name, lr=0.1), held, network(), rounds=2, seed=1)
    assert done(run)["lone", "train"].startswith(REASON)
    assert {run.names[client] for client in run.trained} == {f"clinic {k}" for k in range(5)}
    assert len(run.per_client) >= 5
    assert all(row["rounds"] == sorted({*row["rounds"]}) for row in run.failures)


def test_batches_of_one_row_are_told_before_training(caplog: pytest.LogCaptureFixture) -> None:
    one = recipes.fedavg(lr=0.1, clients={"clinic 1": {"batch": 1}})
    run = simulate(one, clinics(3), network(), rounds=1)
    assert "clients with batches of one row, which train nothing" in caplog.text
    assert list(done(run)) == [("clinic 1", "train")]
    with pytest.raises(SettingError, match="batch norm cannot train on a single row: give clients two rows or more"):
        simulate(recipes.fedavg(batch=1), clinics(3), network(), rounds=1)


WEIGHINGS: dict[str, Any] = {
    "equal": recipes.fedavg().with_(aggregation="equal_weighted"),
    "shares": recipes.fedavg().with_(aggregation=FixedShares(shares={"*": 1.0})),
    "parts": recipes.fedavg().with_(aggregation={"kind": "held_average", "weights": "equal"}),
    "median": recipes.fedavg().with_(aggregation="median"),
    "trimmed": recipes.fedavg().with_(aggregation={"kind": "trimmed_mean", "attackers": 1}),
    "krum": recipes.fedavg().with_(aggregation={"kind": "multi_krum", "attackers": 1}),
    "middle": recipes.fedavg().with_(aggregation="geometric_median"),
    "irls": recipes.fedavg().with_(aggregation="irls"),
    "credit": recipes.fedavg().with_(aggregation="credit"),
    "q": recipes.qfedavg(q=0.0),
    "afl": recipes.afl(lambda_lr=0.0),
    "adam": recipes.fedadam().with_(aggregation="equal_weighted"),
    "distfl": recipes.distfl(),
}


@pytest.mark.parametrize("name", WEIGHINGS)
def test_who_has_no_training_rows_has_no_say_however_updates_are_weighed(name: str) -> None:
    """Each of 4 visitors would pull the model to where it was, and a median might be theirs."""
    visitors = {f"visitor {k}": {"test": rows(5, k)} for k in range(4)}
    runs = [simulate(WEIGHINGS[name], clinics(5) | others, network(), rounds=2, seed=3) for others in ({}, visitors)]
    alone, together = runs
    assert (alone.start() - alone.work.initial).abs().max() > 1e-3
    torch.testing.assert_close(together.start(), alone.start(), rtol=0, atol=1e-6)


def test_who_has_no_training_rows_weighs_nothing_under_masks() -> None:
    """Unless noise on the mean hides who has some: its length goes by the number of those who take part."""
    masks = SecureAggregation(bits=64)
    hidden = recipes.fedavg().with_(aggregation="equal_weighted", transforms=[masks])
    visitors = {f"visitor {k}": {"test": rows(5, k)} for k in range(4)}
    runs = [simulate(hidden, clinics(5) | others, network(), rounds=2, seed=3) for others in ({}, visitors)]
    torch.testing.assert_close(runs[1].start(), runs[0].start(), rtol=0, atol=1e-6)
    noisy = hidden.with_(transforms=[Gaussian(clip=100.0, noise=1e-9), masks])
    model = simulate(noisy, clinics(5) | visitors, seeded(lambda: nn.Linear(4, 2)), rounds=1, seed=3)
    plain = simulate(hidden, clinics(5), seeded(lambda: nn.Linear(4, 2)), rounds=1, seed=3)
    torch.testing.assert_close(
        9 * (model.start() - model.work.initial), 5 * (plain.start() - plain.work.initial), atol=1e-4, rtol=0
    )


@pytest.mark.parametrize("empty", [True, False])
def test_who_has_no_training_rows_is_scored_and_who_has_no_test_rows_trains(empty: bool) -> None:
    none = rows(9)[0][:0], rows(9)[1][:0]
    visitor = {"test": rows(5)} | ({"train": none} if empty else {})
    quiet = {"train": rows(9)} | ({"test": none} if empty else {})
    run = simulate("fedavg", clinics(3, visitor=visitor, quiet=quiet), network(), rounds=2)
    alone = simulate("fedavg", clinics(3, quiet=quiet), network(), rounds=2)
    assert run.failures == []
    assert run.unscored == ["quiet"]
    assert (run.start() - alone.start()).abs().max() < 1e-6  # by rows: the visitor has no say
    assert run.per_client[3] is not None


def test_who_has_no_rows_at_all_is_told() -> None:
    with pytest.raises(SettingError, match="client 'nobody' has no rows: leave it out"):
        piebald.clients_from(clinics(2, nobody={"train": (np.zeros((0, 4)), np.zeros(0, int))}))


def test_a_step_that_is_too_long_is_left_out_and_its_client_asked_again() -> None:
    far = rows(30)[0] * 100, rows(30)[1]
    held = clinics(3, far={"train": far, "test": rows(5)})
    run = simulate(recipes.fedavg(lr=0.1), held, seeded(lambda: nn.Linear(4, 2)), rounds=3, longest_step=2.0)
    (row,) = run.failures
    assert (row["name"], row["rounds"]) == ("far", [1, 2, 3])
    assert row["reason"] == "the step is longer than longest_step allows"
