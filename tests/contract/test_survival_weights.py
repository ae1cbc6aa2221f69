"""Losses by event are averaged by events: of training, of evaluations, and where the best version is chosen."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from piebald import recipes
from piebald.core.metrics import count_events, survival_loss
from piebald.server.evaluation import validation_loss
from tests.fakes import seeded, simulate

EVENTS = {"many": 12, "few": 2, "none": 0}


def lives() -> dict[str, Any]:
    """Three clients of 16 rows with unlike shares of events; the times of one are longer."""
    rng, clients = np.random.default_rng(1), {}
    for place, (name, events) in enumerate(EVENTS.items()):
        x = rng.normal(size=(16, 3)).astype(np.float32)
        y = np.stack([rng.exponential(1 + place, 16), np.arange(16) < events], 1).astype(np.float32)
        clients[name] = {"train": (x, y), "validation": (x, y), "test": (x, y)}
    return clients


@pytest.mark.parametrize("engine", ["sequential", "batched", "vmapped", "reference"])
def test_evaluations_count_events(engine: str) -> None:
    model = seeded(lambda: nn.Linear(3, 1))
    options: dict[str, Any] = {"loss": "survival", "rounds": 2, "keep": "best", "metrics": ["concordance"]}
    run = simulate(recipes.fedavg(lr=0.1), lives(), model, simulator={"engine": engine}, **options)
    rows = [row for row in run.scores if row["metric"] == "loss" and row["client"] is not None]
    assert {(run.names[row["client"]], row["examples"]) for row in rows} == {("many", 12), ("few", 2)}
    assert run.unscored == ["none"]
    assert run.reasons(["none"], "evaluate") == {"none": "none of its test rows counts in the loss (round 2)"}
    last = [row for row in rows if row["version"] == 2 and row["split"] == "validation"]
    held, parts = run.model(), []
    for name in ("many", "few"):
        x, y = (torch.from_numpy(part) for part in lives()[name]["validation"])
        parts.append((EVENTS[name], survival_loss(held(x), y).item()))
    weighted = sum(count * loss for count, loss in parts) / 14
    assert validation_loss(last) == pytest.approx(weighted, rel=1e-5)
    assert weighted != pytest.approx(sum(loss for _, loss in parts) / 2, rel=1e-3)


def test_unknown_rows_are_no_events() -> None:
    nan = float("nan")
    targets = torch.tensor([[2.0, 1.0], [nan, 1.0], [3.0, -100.0], [3.0, nan], [4.0, 0.0], [1.0, 1.0]])
    assert count_events(targets) == 2
