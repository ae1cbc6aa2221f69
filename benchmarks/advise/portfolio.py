"""The portfolio of settings, learned greedily from the truth: written to piebald/advice/portfolio.json."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
from federations import BY_NAME, FEDERATIONS, Federation
from grid import WITHOUT_ROUNDS
from known import Known, known_federations, tuned

from piebald.advice.unlikeness import KINDS, unlikeness
from piebald.contracts import Fleet
from piebald.data.partition import FastSlow, LogNormal

REFERENCES = "python benchmarks/advise/run.py references"
FLEETS: dict[str, Fleet] = {  # of ten clients that are alike
    "devices within a factor of 1.3": LogNormal(sigma=0.25),
    "devices within a factor of 2.7": LogNormal(sigma=1.0),
    "one device in ten five times as slow": FastSlow(share_slow=0.1, slow_factor=5.0),
    "one device in ten twenty times as slow": FastSlow(share_slow=0.1, slow_factor=20.0),
}


def write_references() -> str:
    """Measure all federations and write the file."""
    path = Path(str(files("piebald.advice").joinpath("references.json")))
    found = [*(_row(federation) for federation in FEDERATIONS), *(_fleet(*item) for item in FLEETS.items())]
    rows = ",\n".join("    " + json.dumps(row) for row in found)
    path.write_text(f'{{\n  "command": "{REFERENCES}",\n  "federations": [\n{rows}\n  ]\n}}\n', encoding="utf-8")
    return path.read_text("utf-8")


def _row(federation: Federation) -> dict[str, Any]:
    """A federation's name and values; 0 where chance explains the number, None where it is not known."""
    found = {one.kind: one for one in unlikeness(federation.clients(), federation.fleet())}
    values = {kind: None if found[kind].value is None else 0.0 if found[kind].word == "none"
              else round(found[kind].value, 3) for kind in KINDS}  # fmt: skip
    return {"name": federation.words, **values}


def _fleet(name: str, fleet: Fleet) -> dict[str, Any]:
    """A reference for speeds alone."""
    speed = unlikeness(BY_NAME["digits-iid"].clients(), fleet)[-1]
    return {"name": name, **dict.fromkeys(KINDS), "speed": round(speed.value or 0.0, 3)}


PORTFOLIO = "python benchmarks/advise/run.py portfolio"
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


def write_portfolio(folder: Path) -> str:
    """Learn from all federations and write the file."""
    settings: list[Mapping[str, Any]] = list(learned(known_federations(folder)))
    rows = ",\n".join("  " + json.dumps(point) for point in settings)
    path = Path(str(files("piebald.advice").joinpath("portfolio.json")))
    path.write_text(f'{{\n "command": "{PORTFOLIO}",\n "settings": [\n{rows}\n ]\n}}\n', encoding="utf-8")
    return path.read_text("utf-8")
