"""Copies of a large model that are in memory at once, counted: numbers that the machine's load does not change."""

from __future__ import annotations

import gc
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import piebald
from piebald import recipes
from piebald.cohort_matrix import divided, weighted_sum
from piebald.runtimes.engines.sequential import SequentialEngine
from piebald.runtimes.engines.sgd_step import SgdRun

HERE = piebald.Simulator(engine="sequential", workers=0, onednn=False)


def copies(numbers: int) -> float:
    """Copies of a model of so many numbers that live tensors hold, each storage counted once, float64 as two."""
    found = {}
    for one in gc.get_objects():
        if type(one) in (Tensor, nn.Parameter):
            with suppress(NotImplementedError):  # a traceback of another test may hold vmap's, which have no storage
                storage = one.untyped_storage()
                if storage.nbytes() >= numbers:
                    found[storage.data_ptr()] = storage.nbytes()
    return sum(found.values()) / (4 * numbers)


@pytest.mark.full
def test_what_lies_in_memory_while_a_client_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    """The user's model, the run's module and first numbers, the engine's, the global model, and the sum (two)."""
    draw = torch.Generator().manual_seed(0)
    held = {who: (torch.randn(8, 300, generator=draw), torch.arange(8) % 4) for who in "abc"}
    model = nn.Sequential(nn.Linear(300, 400), nn.ReLU(), nn.Linear(400, 300))
    numbers, seen = sum(one.numel() for one in model.parameters()), list[float]()
    gc.collect()
    trains, there = SequentialEngine.run_sgd, copies(numbers)

    def counted(self: SequentialEngine, run: SgdRun) -> Any:
        gc.collect()
        seen.append(copies(numbers) - there)
        return trains(self, run)

    monkeypatch.setattr(SequentialEngine, "run_sgd", counted)
    clients = piebald.clients_from(held, test=0, classes=[str(one) for one in range(300)])
    piebald.run(recipes.fedavg(lr=0.1), clients, model, rounds=2, evaluate_every=0, runtime=HERE)
    # the user's model was there before; the global model is the run's first numbers until the first step
    assert [round(one) for one in seen] == [3, 5, 5, 4, 6, 6]


@pytest.mark.parametrize("rows", [1, 3])
def test_sums_and_quotients_by_blocks_have_the_bits_of_whole_ones(rows: int) -> None:
    draw = torch.Generator().manual_seed(rows)
    matrix, weights = torch.randn(rows, 700_001, generator=draw), [0.1, 2.3, 3.0][:rows]
    total = weighted_sum(matrix, weights)
    whole = sum(weight * row.double() for weight, row in zip(weights, matrix, strict=True))
    torch.testing.assert_close(total, whole, rtol=1e-15, atol=1e-15)
    assert torch.equal(divided(total.view(-1, 1), 0.7), (total / 0.7).float().view(-1, 1))
