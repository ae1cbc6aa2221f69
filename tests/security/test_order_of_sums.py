"""Sums of updates come out the same whoever adds them: simulator, worker processes, a federation's server."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import piebald
from piebald import recipes
from piebald.contracts import Cohort, ServerContext, Update
from piebald.core.cohort_matrix import weighted_sum
from piebald.methods.aggregation import ExampleWeighted
from tests.fakes import classified


class OneByOne(ExampleWeighted):
    """By training rows, from single updates that arrive at the server, as in a federation."""

    def aggregate(self, cohort: Cohort, context: ServerContext) -> tuple[Tensor, list[float]]:
        assert cohort.updates[0].partial_sum is None
        return super().aggregate(cohort, context)


class EqualOneByOne(OneByOne):
    """The same with equal weights."""

    def weight(self, update: Update, staleness: int = 0) -> float:
        return 1.0


def test_the_order_of_the_rows_does_not_show_after_rounding() -> None:
    """Before, float32 sums in another order differed by 1e-7 of the largest number, and training amplified that."""
    draw = np.random.default_rng(0)
    matrix = torch.from_numpy((draw.normal(size=(40, 5000)) * 10.0 ** draw.integers(-3, 3, (40, 1))).astype(np.float32))
    weights = draw.uniform(1, 500, 40)
    sums = []
    for _ in range(4):
        order = draw.permutation(40)
        sums.append((weighted_sum(matrix[order], weights[order].tolist()) / weights.sum()).float())
    assert all(one.equal(sums[0]) for one in sums)
    exact = (torch.tensor(weights) @ matrix.double() / weights.sum()).float()
    assert sums[0].equal(exact)


def ends(name: str, rounds: int, **more: Any) -> list[Tensor]:
    """The global model of one recipe, summed early, in worker processes, and from single updates."""
    clients = classified(31, 7, 12, 25, 40, 18, features=6)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 20), nn.Tanh(), nn.Linear(20, 2))
    made = recipes.make(name, lr=0.3, batch=5, epochs=2, **more)
    alone = EqualOneByOne() if made.aggregation.kind == "equal_weighted" else OneByOne()
    found = []
    for recipe, workers in ((made, 0), (made, 3), (made.with_(aggregation=alone), 0)):
        run = piebald.run(
            recipe, clients, model, rounds=rounds, evaluate_every=0,
            runtime=piebald.Simulator(engine="sequential", workers=workers),
        )  # fmt: skip
        found.append(run.start())
    return found


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("hdafl", {"momentum": 0.9, "keep_momentum": True, "private": ["2*"]}),
        pytest.param("fedavg", {"momentum": 0.9}, marks=pytest.mark.full),
        pytest.param("scaffold", {}, marks=pytest.mark.full),
    ],
)
def test_simulator_and_server_agree_after_many_rounds(name: str, more: dict[str, Any]) -> None:
    """Before, 25 rounds of HDAFL with momentum drifted apart by 1e-3 and more.  Rounding of one step: 6e-8."""
    first, *others = ends(name, 25, **more)
    for other in others:
        assert float((first - other).abs().max()) <= 1e-6
