"""The ensemble of what a race has trained: how members are selected, what it scores, and runs to predict with."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from piebald import models, partition
from piebald.advice import Advice, advise
from piebald.advice.ensemble import Refit, _with_all_rows
from piebald.advice.tuning.space import Cost
from piebald.advice.tuning.trial_runs import without_test_rows
from piebald.contracts import Clients, Split
from piebald.core.errors import RuntimeFault
from piebald.models.prediction import mean_outputs
from piebald.report.tables import History
from piebald.runs.run import opened


def test_probabilities_and_numbers_are_averaged_as_what_they_are() -> None:
    drawn = torch.randn(2, 5, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for kind, link in (("classes", lambda z: z.softmax(-1)), ("labels", torch.sigmoid), ("values", lambda z: z)):
        torch.testing.assert_close(link(mean_outputs(list(drawn), kind)), link(drawn).mean(0))  # type: ignore[arg-type]


CLIENTS, ROWS = 6, 60
SPLITS: tuple[Split, ...] = ("train", "validation", "test")


@dataclass(frozen=True)
class SimpleMember:
    """A member without a run."""

    name: str
    count: int


@pytest.fixture(scope="module")
def answer(tmp_path_factory: pytest.TempPathFactory) -> tuple[Advice, Clients, nn.Module, Path]:
    """An answer on clients of which half have another rule, so that several models are better than one."""
    rng, out = np.random.default_rng(0), tmp_path_factory.mktemp("search") / "advice"
    x = rng.normal(size=(CLIENTS, ROWS, 4)).astype("float32")
    y = x[..., 0] + np.where(np.arange(CLIENTS) % 2, 1, -1)[:, None] * x[..., 1] + rng.normal(size=x.shape[:2]) > 0
    clients = partition.clients_from(
        {f"s{n}": (x[n], y[n].astype(int)) for n in range(CLIENTS)}, validation=0.4, test=0.2
    )
    model = models.build_model("mlp", (4,), 2, hidden=(4,))
    found = advise(clients, model, rounds=4, families=["ditto", "hdafl"], seeds=(0,), training={"batch": 8},
                   more_data=False, out=out)  # fmt: skip
    return found, clients, model, out


def shares_of(folder: Path, clients: Clients, model: nn.Module, split: Split) -> np.ndarray[Any, Any]:
    """The probabilities [clients, rows, 2] of a run's models."""
    with opened(folder, without_test_rows(clients), model) as run, torch.no_grad():
        return np.stack([
            run.model(client)(clients.rows(client, split).x).softmax(1).numpy() for client in range(CLIENTS)
        ])  # fmt: skip


def accuracy(shares: np.ndarray[Any, Any], clients: Clients, split: Split) -> float:
    truth = np.stack([clients.rows(client, split).y.numpy() for client in range(CLIENTS)])
    return float((shares.argmax(2) == truth).mean())


def test_members_are_added_while_the_mean_is_better_on_validation_rows_and_tested_once(
    answer: tuple[Advice, Clients, nn.Module, Path],
) -> None:
    found, clients, model, _ = answer
    assert found.ensemble is not None
    members, total = found.ensemble.members, sum(member.count for member in found.ensemble.members)
    raced = [member for member in members if not member.on_all_rows]
    assert len(raced) > 1
    mean = sum(member.count * shares_of(member.folder, clients, model, "validation") for member in raced)
    mean /= sum(member.count for member in raced)
    best = max(row["score"] for row in found.tried if row["rounds"] == 4)
    assert accuracy(mean, clients, "validation") > best
    tested = sum(member.count * shares_of(member.folder, clients, model, "test") for member in members) / total
    assert found.ensemble.rows == "test"
    assert found.ensemble.score == pytest.approx(accuracy(tested, clients, "test"))
    own = next(checked.scores.mean for checked in found.tested if checked.label == found.recommended)
    assert (found.ensemble.gain.mean, found.ensemble.gain.noise) == (pytest.approx(found.ensemble.score - own), "rows")
    assert found.plain()["ensemble"]["members"] == [
        {"name": x.name, "count": x.count, "on_all_rows": x.on_all_rows} for x in members
    ]
    said = " ".join(found.text().split())
    assert re.search(r"the mean of \d+ models has [\d.]+% on test rows, one seed; against .* \(95 %: ", said)


def examples(folder: Path, version: int = 1) -> int:
    """The rows that the first step of a run has trained on."""
    with History(folder) as history:
        return sum(row["examples"] for row in history.results if row["kind"] == "train" and row["version"] == version)


def test_members_are_trained_once_more_on_the_rows_that_they_were_chosen_by_and_never_on_test_rows(
    answer: tuple[Advice, Clients, nn.Module, Path],
) -> None:
    found, clients, _, _ = answer
    assert found.ensemble is not None
    again = [member for member in found.ensemble.members if member.on_all_rows]
    assert again
    rows = {split: sum(clients.size(client, split) or 0 for client in range(CLIENTS)) for split in SPLITS}
    raced = {member.runner.name: member for member in found.ensemble.members if not member.on_all_rows}
    for member in again:
        assert examples(member.folder) == rows["train"] + rows["validation"]
        assert examples(raced[member.runner.name].folder) == rows["train"]
    # each method has the share that it was chosen with, whether the budget was enough to train it again or not
    assert all(2 * raced[x.runner.name].count == raced[x.runner.name].count + x.count for x in again)


def test_what_cannot_be_trained_again_keeps_its_share() -> None:
    members: list[Any] = [SimpleMember("a", 3), SimpleMember("b", 1)]
    of_b = SimpleMember("b on all rows", 1)
    joined = _with_all_rows(members, lambda member: of_b if member.name == "b" else None)  # type: ignore[arg-type]
    assert joined == [SimpleMember("a", 6), members[1], of_b]
    assert _with_all_rows(members, lambda member: None) == members


def test_a_member_whose_steps_have_no_bounds_on_all_rows_is_not_trained_again(tmp_path: Path) -> None:
    def diverge(*_: Any) -> Any:
        raise RuntimeFault("training failed on 2 of 3 clients in round 7")

    runs: Any = SimpleNamespace(train=diverge, rungs=(1,))
    runs.on_all_rows = lambda: runs
    runner = SimpleNamespace(name="fedavg", label="fedavg", recipe=None, last=SimpleNamespace(seeds=[0]))
    said, budget = list[str](), SimpleNamespace(has_room=lambda *_: True)
    refit = Refit(runs, tmp_path, budget, Cost(), said.append)  # type: ignore[arg-type]
    assert refit(SimpleNamespace(runner=runner)) is None  # type: ignore[arg-type]
    assert said == ["fedavg on all rows: training failed on 2 of 3 clients in round 7"]


def test_it_is_saved_as_runs_of_which_each_is_there_as_often_as_it_counts(
    answer: tuple[Advice, Clients, nn.Module, Path],
) -> None:
    found, clients, model, out = answer
    assert found.ensemble is not None
    copies = sorted(path.parent for path in (out / "ensemble").rglob("run.db"))
    assert len(copies) == sum(member.count for member in found.ensemble.members)
    mean = np.mean([shares_of(copy, clients, model, "test") for copy in copies], axis=0)
    assert accuracy(mean, clients, "test") == pytest.approx(found.ensemble.score)
