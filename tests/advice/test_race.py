"""The race, on runs whose scores are made up: who goes on, who is repeated, what it costs, and that it goes on."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from piebald import recipes
from piebald.advice.race import KEPT, REPEATED, Entrant, Race, Runner, methods_of
from piebald.advice.tuning import Budget
from piebald.advice.tuning.trial_runs import TRIALS, TrialRuns
from piebald.core.errors import RunFolderError, SettingError
from piebald.report.paired import Scores

NAMES = ["a", "b"]


class FakeRuns:
    """Runs that reach a level that the recipe's rate names, the same after each rung, and never train."""

    rungs, metric, higher_is_better = (4, 8, 16), "accuracy", True
    names = choosing = NAMES
    at_rung = TrialRuns.at_rung

    def __init__(self, levels: Mapping[float, Sequence[float]]) -> None:
        self.levels, self.trained = levels, list[tuple[str, float, int, int]]()

    def train(self, recipe: Any, folder: Path, label: str, seed: int, rounds: int) -> Any:
        rate = recipe.training.lr
        if np.isnan(self.levels[rate][0]):
            raise SettingError("it cannot be trained")
        self.trained.append((label, rate, seed, rounds))
        final = {"rounds": rounds, "bytes_down": 0, "bytes_up": 10 * rounds, "wall": 60.0, "seconds": 0.0}
        level = self.levels[rate][min(seed, len(self.levels[rate]) - 1)] / (2 if label == "fedavg" else 1)
        made = SimpleNamespace(level=level, seed=seed, final=final, results=[], close=lambda: None)
        return nullcontext(made)

    def shared_rounds(self, recipe: Any, label: str) -> None:
        return None

    def scores(self, runs: Sequence[Any], version: int) -> Scores:
        return self.table(np.array([[run.level] * 2 for run in runs]), [run.seed for run in runs])

    def table(self, values: Any, seeds: Sequence[int]) -> Scores:
        return Scores(values, NAMES, seeds)


def entrant(recipe: str, rate: float, late: bool = False) -> Entrant:
    return Entrant(recipe, recipes.make(recipe, lr=rate), recipe, {"lr": rate}, late)


# Local, and ten settings of Ditto of which 0.1 is the best
LEVELS = {0.01: [0.5], 0.1: [0.9], **{round(0.1 + number / 100, 2): [0.9 - number / 50] for number in range(1, 10)}}
FIELD = [entrant("local", 0.01), *(entrant("ditto", rate) for rate in LEVELS if rate != 0.01)]
SEEDS = (0, 1, 2)


def raced(
    levels: Mapping[float, Sequence[float]],
    field: Sequence[Entrant],
    folder: Path,
    budget: Any = 400,
    seeds: Any = SEEDS,
) -> tuple[Any, list[Runner], Mapping[str, str], Any]:
    runs: Any = FakeRuns(levels)
    runners, left_out, spent = Race(runs, seeds, folder, Budget.of(budget), lambda line: None).run(field)
    return runs, runners, left_out, spent


def test_the_best_eight_and_six_go_on_and_local_with_them(tmp_path: Path) -> None:
    _, runners, _, spent = raced(LEVELS, FIELD, tmp_path)
    reached = [sum(runner.reached >= rung for runner in runners) for rung in (4, 8, 16)]
    assert reached == [len(FIELD), KEPT[0] + 1, KEPT[1] + 1]
    finished = {runner.name for runner in runners if runner.state == "finished"}
    assert finished == {"local lr 0.01", *(f"ditto lr {rate:g}" for rate in (0.1, 0.11, 0.12, 0.13, 0.14, 0.15))}
    assert "0.18 behind ditto lr 0.1" in {runner.why for runner in runners}
    # a run that goes on is not paid for twice
    assert spent.rounds == 4 * 11 + 4 * 9 + 8 * 7 + 16 * 2 * (REPEATED + 1)


def test_local_and_the_two_best_have_a_second_seed_before_anybody_has_a_third(tmp_path: Path) -> None:
    runs, runners, _, _ = raced(LEVELS, FIELD, tmp_path)
    repeated = [(rate, seed) for _, rate, seed, _ in runs.trained if seed]
    assert repeated == [(0.1, 1), (0.11, 1), (0.01, 1), (0.1, 2), (0.11, 2), (0.01, 2)]
    assert {len(runner.folders) for runner in runners if runner.state == "finished"} == {1, 3}


def test_what_was_lucky_once_makes_room_for_the_next_best(tmp_path: Path) -> None:
    """0.1 was lucky with the first seed, so the third of the first race has its second seed, too."""
    levels = {**LEVELS, 0.1: [0.9, 0.2]}
    _, runners, _, _ = raced(levels, FIELD, tmp_path, seeds=(0, 1))
    repeated = {runner.recipe.training.lr for runner in runners if len(runner.folders) > 1}  # type: ignore[attr-defined]
    assert repeated == {0.01, 0.1, 0.11, 0.12}
    best = methods_of(runners, True)
    assert [(one.label, one.recipe.training.lr) for one in best] == [("local", 0.01), ("ditto", 0.11)]  # type: ignore[attr-defined]
    assert best[1].tried == 10
    assert best[1].mean == pytest.approx(levels[0.11][0])


@pytest.mark.parametrize("budget", [1, 60, 120, 200, {"bytes": 1000}, {"minutes": 5}])
def test_a_budget_is_kept_but_for_local_and_one_other(budget: Any, tmp_path: Path) -> None:
    _, runners, _, spent = raced(LEVELS, FIELD, tmp_path, budget)
    limit = Budget.of(budget)
    last_run = {"rounds": 0, "bytes": 160, "minutes": 1}[limit.unit]  # whose cost is not known before
    assert getattr(spent, limit.unit) <= max(limit.amount + last_run, 2 * 16)
    assert {runner.label for runner in runners if runner.state == "finished"} == {"local", "ditto"}


def test_fedavg_is_trained_late_with_the_rate_of_the_best(tmp_path: Path) -> None:
    field = [*FIELD, entrant("fedavg", 0.5, late=True)]
    runs, _, _, _ = raced(LEVELS, field, tmp_path)
    assert [row for row in runs.trained if row[0] == "fedavg"] == [("fedavg", 0.1, 0, 16)]
    assert runs.trained.index(("fedavg", 0.1, 0, 16)) < runs.trained.index(("ditto", 0.1, 1, 16))
    (little := tmp_path / "little").mkdir()
    _, _, left_out, _ = raced(LEVELS, field, little, 60)
    assert left_out == {"fedavg": "the budget was used up"}


def test_what_cannot_be_trained_is_left_out_with_its_reason(tmp_path: Path) -> None:
    broken = {**LEVELS, 0.5: [np.nan]}
    _, runners, left_out, _ = raced(broken, [*FIELD, entrant("fedprox", 0.5)], tmp_path)
    assert left_out == {"fedprox": "it cannot be trained"}
    assert "fedprox" not in {runner.label for runner in runners}


def test_a_race_goes_on_from_its_record_without_training_anything_twice(tmp_path: Path) -> None:
    first, runners, _, spent = raced(LEVELS, FIELD, tmp_path)
    record = tmp_path / TRIALS
    kept = json.loads(record.read_text("utf-8"))
    again, same, _, cost = raced(LEVELS, FIELD, tmp_path)
    assert again.trained == []
    assert [(runner.name, runner.reached, runner.mean) for runner in same] == [
        (runner.name, runner.reached, runner.mean) for runner in runners
    ]
    assert cost == spent
    record.write_text(json.dumps(dict(list(kept.items())[:20])), encoding="utf-8")
    rest, _, _, cost = raced(LEVELS, FIELD, tmp_path)
    assert rest.trained == first.trained[20:]
    assert cost == spent


@pytest.mark.parametrize(
    "text", ["[1]", "{", '{"0/0/4": {"scores": [["x"]], "cost": {}}}', '{"0/0/4": {"scores": [[1]]}}']
)
def test_a_record_of_something_else_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / TRIALS).write_text(text, encoding="utf-8")
    with pytest.raises(RunFolderError, match=f"{TRIALS} cannot be read: remove it, or choose another folder"):
        raced(LEVELS, FIELD, tmp_path)


def test_a_record_that_is_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("{}", encoding="utf-8")
    (tmp_path / TRIALS).symlink_to(tmp_path / "precious")
    with pytest.raises(RunFolderError, match="is a link"):
        raced(LEVELS, FIELD, tmp_path)
    assert (tmp_path / "precious").read_text("utf-8") == "{}"
