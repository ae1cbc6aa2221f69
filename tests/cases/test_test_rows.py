"""Test rows choose nothing: whatever ends a run or chooses a model is the same where the labels of test rows are others
(case 26).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import piebald
from piebald import recipes
from piebald.core.errors import SettingError
from piebald.server.stopping import RunTotals, StoppingCriteria
from tests.fakes import seeded


def clinics(permuted: bool, validation: int = 20) -> piebald.data.partition.PooledClients:
    rng, parts = np.random.default_rng(1), {}
    for name in "abc":
        x = rng.normal(size=(100, 6)).astype(np.float32)
        y = (x[:, 0] + rng.normal(size=100) > 0).astype(np.int64)
        test = np.random.default_rng(5).permutation(y[80:]) if permuted else y[80:]
        held = slice(80 - validation, 80)
        parts[name] = {"train": (x[:60], y[:60]), "validation": (x[held], y[held]), "test": (x[80:], test)}
    return piebald.clients_from(parts)


def trained(permuted: bool, recipe: Any = None, **options: Any) -> piebald.Run:
    model = seeded(lambda: torch.nn.Sequential(torch.nn.Linear(6, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2)))
    runtime = piebald.Simulator(engine="sequential", workers=0)
    options = {"rounds": 60, **options}
    return piebald.run(recipe or recipes.fedavg(lr=0.2), clinics(permuted), model, runtime=runtime, **options)


CHOOSING: dict[str, dict[str, Any]] = {
    "patience": {"stop": {"patience": 3}},
    "target": {"stop": {"target": 0.68}},
    "patience of personal models": {"stop": {"patience": 3}, "recipe": recipes.ditto(lr=0.2)},
    "the best version": {"keep": "best", "rounds": 12},
    "patience and the best version": {"stop": {"patience": 4}, "keep": "best"},
    "the best model for each": {"keep": "best_for_each", "rounds": 4},
    "neighbours": {"keep": "knn_per", "rounds": 4},
    "validation weights": {"recipe": recipes.sync_dvw(lr=0.2), "rounds": 5},
    "votes on clusters": {"recipe": recipes.ifca(lr=0.2, k=2), "rounds": 5},
}


@pytest.mark.parametrize("name", CHOOSING)
def test_what_chooses_does_not_see_test_rows(name: str, tmp_path: Path) -> None:
    plain, permuted = (trained(labels, out=tmp_path / str(labels), **CHOOSING[name]) for labels in (False, True))
    assert len(plain.rounds) == len(permuted.rounds)
    chosen = [[(row["chosen"], row["why"], row["candidates"]) for row in run.choices] for run in (plain, permuted)]
    assert chosen[0] == chosen[1]
    for client in range(3):
        for tensor, theirs in zip(plain.model(client).parameters(), permuted.model(client).parameters(), strict=True):
            assert torch.equal(tensor, theirs)
    tested = [[row["value"] for row in run.scores if row["split"] == "test"] for run in (plain, permuted)]
    assert tested[0] != tested[1]  # which are told as they are


@pytest.mark.parametrize("stop", [{"patience": 3}, {"target": 0.6}])
def test_without_validation_rows_no_score_ends_a_run(stop: dict[str, float]) -> None:
    with pytest.raises(SettingError, match=r"target and patience of stop need validation rows.*validation = 0\.1"):
        piebald.run("fedavg", clinics(False, validation=0), torch.nn.Linear(6, 2), rounds=2, stop=stop)


def test_the_score_that_ends_a_run_is_that_of_validation_rows() -> None:
    run = trained(False, stop={"target": 0.68})
    means: dict[int, list[float]] = {}
    for row in run.scores:
        if (row["split"], row["metric"]) == ("validation", "accuracy"):
            means.setdefault(row["version"], []).append(row["value"])
    reached = [float(np.mean(means[version])) >= 0.68 for version in sorted(means)]
    assert reached == [False] * (len(reached) - 1) + [True]
    assert len(run.rounds) < 60


def test_that_nobody_scores_validation_rows_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    """As in a federation whose sites turn out to have none: after the first evaluation, not after each."""
    stop, totals = StoppingCriteria(patience=1), RunTotals()
    for updates in (0, 3, 6):
        totals.updates = updates
        stop.note_means(totals, {}, "accuracy", True)
    assert caplog.text.count("no client scores its model on validation rows") == 1
    assert not totals.reached
