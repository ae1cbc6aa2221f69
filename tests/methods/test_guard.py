"""The guard against choosing by luck: the one standard error rule on the same rows."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from piebald.methods.choice import FEWEST_ROWS, judge

ROWS, CLIENTS = 40, 4000


def federation(gap: float, kinds: int = 2, correlated: float = 1.0) -> torch.Tensor:
    """Losses [clients, models, rows]: rows are easy or hard for all models; all but the first are better by `gap`."""
    random = np.random.default_rng(7)
    hard = correlated * random.exponential(1.0, (CLIENTS, 1, ROWS))
    own = random.normal(0.0, 0.5, (CLIENTS, kinds, ROWS))
    return torch.from_numpy(hard + own - gap * (np.arange(kinds) > 0)[None, :, None])


def left(losses: torch.Tensor, errors: float = 1.0) -> float:
    """The share of clients that leave the shared model, which is the first one."""
    return float(np.mean([judge(one, 1, errors).chosen != 0 for one in losses]))


@pytest.mark.full
def test_of_two_equally_good_models_luck_is_as_rare_as_its_definition() -> None:
    one, two = (0.5 * math.erfc(errors / math.sqrt(2)) for errors in (1, 2))  # 15.9 and 2.3 %
    noise = 3 * math.sqrt(one * (1 - one) / CLIENTS)
    assert left(federation(0.0)) == pytest.approx(one, abs=noise + 0.01)  # t with 39 degrees of freedom: 0.5 % more
    assert left(federation(0.0), errors=2) == pytest.approx(two, abs=0.015)
    assert left(federation(0.0), errors=0) == pytest.approx(0.5, abs=0.03)  # without a guard


def test_the_same_model_twice_is_never_left() -> None:
    losses = federation(0.0)
    assert left(torch.stack([losses[:, 0], losses[:, 0]], 1)) == 0.0


def test_a_clearly_better_model_is_always_taken() -> None:
    assert left(federation(0.8)) == 1.0
    assert left(federation(0.8, kinds=5)) == 1.0


def test_rows_are_paired() -> None:
    """What makes a row hard for both is no noise: ten times as much of it changes no choice."""
    quiet, loud = federation(0.1), federation(0.1, correlated=10.0)
    assert [judge(one, 1).chosen for one in quiet] == [judge(one, 1).chosen for one in loud]


def test_ties_go_to_the_most_widely_shared_of_the_shared() -> None:
    rows = torch.rand(FEWEST_ROWS, generator=torch.Generator().manual_seed(1))
    assert judge(torch.stack([rows, rows, rows]), 2).chosen == 0
    worse = torch.stack([rows + 1.0 + rows, rows, rows])
    assert judge(worse, 2).chosen == 1  # its cluster's model, before its own
    assert judge(torch.stack([rows + 1.0, rows + 1.0, rows]), 2).chosen == 2  # the same for each row: no luck


@pytest.mark.full
def test_luck_does_not_take_a_client_from_the_model_that_it_has_alone() -> None:
    """Where no shared model is good, one of several equally good models of its own is left as rarely as a shared one,
    and a model that is better beyond luck is taken.
    """
    losses = federation(0.0, kinds=3) + torch.tensor([2.0, 0.0, 0.0])[None, :, None]  # the first one is shared, and bad
    share = float(np.mean([judge(one, 1, alone=2).chosen != 2 for one in losses]))
    assert share == pytest.approx(0.5 * math.erfc(1 / math.sqrt(2)), abs=0.03)
    assert float(np.mean([judge(one, 1).chosen != 2 for one in losses])) == pytest.approx(0.5, abs=0.03)
    clear = losses - torch.tensor([0.0, 0.8, 0.0])[None, :, None]
    assert {judge(one, 1, alone=2).chosen for one in clear} == {1}
    shared = (
        losses - torch.tensor([2.5, 0.0, 0.0])[None, :, None]
    )  # the model that most share is still the first choice
    assert {judge(one, 1, alone=2).chosen for one in shared} == {0}


def test_a_model_alone_that_diverged_is_not_kept() -> None:
    losses = torch.ones(3, 20) + torch.rand(3, 20)
    losses[0] += 5.0
    losses[2, 3] = math.nan
    assert judge(losses, 1, alone=2).chosen == 1


def test_few_rows_fall_back_to_the_shared_model_that_fits_best() -> None:
    few = torch.stack([torch.full((FEWEST_ROWS - 1,), 9.0), torch.full((FEWEST_ROWS - 1,), 5.0), torch.zeros(9)])
    for losses in (few, few[:, :1], few[:, :0]):
        verdict = judge(losses, 2)
        assert verdict.chosen == verdict.best == 1
        assert math.isnan(verdict.difference)
    assert judge(few[:, :1], 0).chosen == 2  # nothing is shared, so nothing is guarded


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_models_that_diverged_are_not_chosen(bad: float) -> None:
    losses = torch.ones(3, 20)
    losses[2, 3] = bad
    losses[0] += torch.rand(20) + 1.0
    assert judge(losses, 1).chosen == 1
    losses[0, 5] = bad
    assert judge(losses, 1).chosen == 1  # away from a shared model that diverged
    losses[:] = bad
    assert judge(losses, 1).chosen == 0
