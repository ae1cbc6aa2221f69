"""A small federation, networks that are hard on engines, and the outcome by which two runs are compared."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor, nn

from piebald.contracts import Rows
from piebald.core.randomness import torch_seed
from piebald.data.partition import Lists, PooledClients
from piebald.methods.recipe import Recipe
from piebald.methods.training.adapter_ranks import AdapterRanks
from piebald.methods.training.base import Trainer
from piebald.models import GatedUnit
from piebald.runs.finished_run import Run

SIZES = (7, 40, 21, 12, 33)  # uneven; with batch 10 most last batches are short, and 21 leaves a lone row
_TEST, _VALIDATION = 8, 6  # rows of each client


def uneven_clients(order: Sequence[int] = tuple(range(len(SIZES)))) -> PooledClients:
    """Five uneven clients whose data differ: 6 inputs, 4 classes, test and validation rows.

    Args:
        order: renumbers the clients; their names and rows go along.
    """
    draw = np.random.default_rng(5)
    xs, ys, parts = [], [], []
    start, held = 0, sum(SIZES) + _TEST * len(SIZES)  # validation rows lie behind all others
    for client, size in enumerate(SIZES):
        labels = draw.integers(0, 4, size + _TEST)
        xs.append((draw.normal(size=(size + _TEST, 6)) + labels[:, None] * 0.5 + client).astype(np.float32))
        ys.append(labels)
        end = start + size
        parts.append((np.arange(start, end), np.arange(end, end + _TEST), held + np.arange(_VALIDATION)))
        start, held = end + _TEST, held + _VALIDATION
    for client in range(len(SIZES)):
        labels = draw.integers(0, 4, _VALIDATION)
        xs.append((draw.normal(size=(_VALIDATION, 6)) + labels[:, None] * 0.5 + client).astype(np.float32))
        ys.append(labels)
    lists = {}
    for index, split in enumerate(("train", "test", "validation")):
        rows_of_split = [parts[client][index] for client in order]
        lists[split] = Lists(np.concatenate(rows_of_split), np.cumsum([0, *map(len, rows_of_split)]))
    x, y = torch.from_numpy(np.concatenate(xs)), torch.from_numpy(np.concatenate(ys))
    names = [f"site {client}" for client in order]
    settings: dict[str, Any] = {"names": names, "classes": list("abcd"), "common": np.arange(7, 15)}
    return PooledClients(x, y, lists, public_rows=_public_rows(), **settings)  # type: ignore[arg-type]


def _public_rows() -> Rows:
    """Rows of nobody's, drawn apart."""
    draw = np.random.default_rng(6)
    labels = draw.integers(0, 4, 15)
    x = (draw.normal(size=(15, 6)) + labels[:, None] * 0.5 + 2).astype(np.float32)
    return Rows(torch.from_numpy(x), torch.from_numpy(labels))


def mixing_network(seed: int = 0) -> nn.Module:
    """Everything that is hard on engines: batch norm, dropout, integer buffers, two linear layers, conditioning."""
    with torch_seed(seed):
        return nn.Sequential(
            nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3), GatedUnit(8, 8), nn.Linear(8, 4)
        )


def narrowable_network(seed: int = 0) -> nn.Module:
    """A network whose channels can be left out one by one, with batch norm and dropout."""
    with torch_seed(seed):
        return nn.Sequential(
            nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 7), nn.ReLU(), nn.Linear(7, 4)
        )


class _Adapted(nn.Module):
    """A frozen linear layer with an adapter, and dropout in front of it."""

    def __init__(self, inputs: int, outputs: int, rank: int) -> None:
        super().__init__()
        self.own = nn.Linear(inputs, outputs).requires_grad_(False)
        self.drop = nn.Dropout(0.2)
        self.lora_A, self.lora_B = nn.Linear(inputs, rank, bias=False), nn.Linear(rank, outputs, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.own(x) + self.lora_B(self.lora_A(self.drop(x)))
        return output


def adapted_network(seed: int = 0) -> nn.Module:
    """Two layers with adapters of rank 4, batch norm, and a head of its own."""
    with torch_seed(seed):
        return nn.Sequential(_Adapted(6, 8, 4), nn.BatchNorm1d(8), nn.ReLU(), _Adapted(8, 7, 4), nn.Linear(7, 4))


def hardest_network(recipe: Recipe) -> Callable[[int], nn.Module]:
    """The hardest of these networks that a recipe can take."""
    if recipe.training.row_privacy() is not None:
        return plain_network
    if isinstance(recipe.training, AdapterRanks):
        return adapted_network
    return narrowable_network if recipe.training.overrides(Trainer.own_models) else mixing_network


def plain_network(seed: int = 0) -> nn.Module:
    """A network whose rows do not mix, so that short batches are padded and masked."""
    with torch_seed(seed):
        return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 4))


class Outcome(NamedTuple):
    """The global model of a run, all scores, and all results of clients."""

    model: Tensor
    scores: Sequence[Mapping[str, Any]]
    results: Sequence[Mapping[str, Any]]

    @classmethod
    def of(cls, run: Run) -> Self:
        """The outcome of a finished run."""
        return cls(run.work.layout.flatten(run.model()), run.scores, run.results)


def assert_same(first: Run | Outcome, second: Run | Outcome, atol: float = 1e-5) -> None:
    """Check that two runs came to the same: the global model, every score, every loss, every byte.

    Args:
        first, second: the runs, or their outcomes.
        atol: how far numbers of the model may be apart; ten times as far for those in tables.

    Raises:
        AssertionError: they differ; the message names the first difference.
    """
    outcome, other_outcome = (run if isinstance(run, Outcome) else Outcome.of(run) for run in (first, second))
    torch.testing.assert_close(outcome.model, other_outcome.model, atol=atol, rtol=1e-4)
    for rows, theirs in ((outcome.scores, other_outcome.scores), (outcome.results, other_outcome.results)):
        assert len(rows) == len(theirs), f"{len(rows)} and {len(theirs)} rows"
        for a, b in zip(rows, theirs, strict=True):
            for name, value in a.items():
                alike = _close(value, b[name], 10 * atol) if isinstance(value, float) else value == b[name]
                assert alike, f"{name}: {value!r} and {b[name]!r}, in {a} and {b}"


def _close(first: float, second: Any, atol: float) -> bool:
    return isinstance(second, float | int) and math.isclose(first, second, rel_tol=1e-3, abs_tol=atol)
