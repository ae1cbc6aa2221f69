"""The one look at test rows, after the choice: for the recommendation, Local and FedAvg only."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from piebald.advice.race import Runner
from piebald.advice.tuning.study import folder_name
from piebald.advice.tuning.trial_runs import TrialRuns
from piebald.report.paired import Scores
from piebald.report.tables import History
from piebald.runs.run import resume
from piebald.storage.store import RunStore


@dataclass(frozen=True, eq=False)
class Checked:
    """A method's scores on test rows.

    Attributes:
        label: of the method.
        scores: of each seed and client.
        folders: of its runs, by seed, as tables and `Run.model` read them.
    """

    label: str
    scores: Scores
    folders: Mapping[int, Path]


def check(runners: Sequence[Runner], runs: TrialRuns, folder: Path) -> list[Checked]:
    """Score finished methods on test rows; nothing is trained, and the runs of the race stay as they are.

    Each run is copied and evaluated once more at its last version, now on the rows that the race has not seen.

    Args:
        runners: the recommendation, Local and FedAvg.
        runs: how they were trained.
        folder: for the copies.
    """
    if not any(runs.clients.size(client, "test") != 0 for client in range(len(runs.clients))):
        return []
    found = []
    for one in runners:
        folders = {seed: folder / folder_name(one.label) / f"seed-{seed}" for seed in one.folders}
        rows = [_tested(one, seed, folders[seed], runs) for seed in folders]
        found.append(Checked(one.label, Scores(np.array(rows), runs.names, list(folders)), folders))
    return found


def _tested(one: Runner, seed: int, copy: Path, runs: TrialRuns) -> list[float]:
    """The metric of each client on its test rows, NaN where it has none."""
    if not copy.exists():
        partial = copy.with_name(f"{copy.name}.part")
        shutil.rmtree(partial, ignore_errors=True)
        shutil.copytree(one.folders[seed], partial)
        with RunStore.open(partial) as store:
            every, count, _ = store.meta["evaluate"]
            store.set_meta(evaluate=[every, count, "test"], status="running")
        partial.rename(copy)
    given: dict[str, Any] = {name: runs.options[name] for name in ("loss", "metrics") if name in runs.options}
    resume(copy, runs.choosing.opened(), runs.model_of(one.label), recipe=one.recipe, **given).close()
    with History(copy) as history:
        return [history.per_client.get(client, float("nan")) for client in range(len(runs.clients))]
