"""The portfolio of settings, learned greedily from the truth: written to piebald/advice/portfolio.json."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
from grid import WITHOUT_ROUNDS
from known import Known, known_federations, tuned

COMMAND = "python benchmarks/advise/run.py portfolio"
COUNT = 24  # settings: the race takes twenty, and what cannot be trained somewhere is replaced
MOST = 20.0  # points of regret that count: a method that fails altogether is no worse than a bad one
ALL = 1e-3  # weight of the mean regret, which orders settings that add the same to the best


def learned(known: Sequence[Known], count: int = COUNT) -> list[dict[str, Any]]:
    """Return settings in the order in which each adds most to the best of those before it.

    The truth of a setting is its accuracy on validation and test rows together, the mean over seeds and clients.
    """
    labels = [entry.label for entry in tuned(known[0].entries) if entry.recipe not in WITHOUT_ROUNDS]
    regrets = np.array([_regrets(one, labels) for one in known])
    reached, order = np.full(len(known), MOST), list[int]()
    for _ in range(count):
        sums = np.minimum(reached[:, None], regrets).sum(0) + ALL * regrets.sum(0)
        sums[order] = np.inf
        order.append(int(sums.argmin()))
        reached = np.minimum(reached, regrets[:, order[-1]])
    settings = {entry.label: {"recipe": entry.recipe, **entry.settings} for entry in known[0].entries}
    return [settings[labels[place]] for place in order]


def without(known: Sequence[Known], data_set: str) -> list[Known]:
    """The federations that were made of other data sets."""
    return [one for one in known if one.federation.data_set != data_set]


def _regrets(known: Known, labels: Sequence[str]) -> np.ndarray:
    rows = {split: sum(counts) for split, counts in known.rows.items()}
    entries = {entry.label: entry for entry in known.entries}
    truth = np.array([
        (entries[label].validation[:, -1].mean() * rows["validation"] + entries[label].truth * rows["test"])
        / (rows["validation"] + rows["test"]) for label in labels
    ])  # fmt: skip
    return np.minimum(truth.max() - truth, MOST)


def write(folder: Path) -> str:
    """Learn from all federations and write the file."""
    settings: list[Mapping[str, Any]] = list(learned(known_federations(folder)))
    rows = ",\n".join("  " + json.dumps(point) for point in settings)
    path = Path(str(files("piebald.advice").joinpath("portfolio.json")))
    path.write_text(f'{{\n "command": "{COMMAND}",\n "settings": [\n{rows}\n ]\n}}\n', encoding="utf-8")
    return path.read_text("utf-8")
